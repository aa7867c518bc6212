"""slime's parsers, with the options that a plan sets. In the real one Megatron has those of `OF_MEGATRON`."""

from argparse import ArgumentParser

OPTIONS = """prompt-data data-source-path custom-generate-function-path custom-rm-path hf-checkpoint num-rollout
rollout-batch-size n-samples-per-prompt global-batch-size rollout-max-response-len advantage-estimator save-interval
eval-interval eval-prompt-data n-samples-per-eval-prompt""".split()


def _pre_parse_mode():
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--debug-rollout-only", action="store_true", default=False)
    return parser.parse_known_args()[0]


def get_slime_extra_args_provider(add_custom_arguments=None):
    def add(parser):
        for name in OPTIONS:
            parser.add_argument(f"--{name}", default=None)
        parser.add_argument("--actor-num-gpus-per-node", type=int, default=8)
        parser.add_argument("--colocate", action="store_true", default=False)
        return parser

    return add
