"""The command line: one command, one file per verb.

Exit codes: 0 good, 1 faults found (also rollouts that errored), 2 wrong usage, 3 could not run, 130 interrupted.
"""

from __future__ import annotations

import sys
import warnings

import typer

from treetune.cli.output import CommandLineError, error_text, report_error, show_warning
from treetune.errors import TreetuneError

app = typer.Typer(
    name="treetune",
    help="One task, every trainer: declare an RL task once, look at it, check it, evaluate it.",
    epilog="A TARGET is a taskset's id, config.yaml, file.py:Name or module:Name. "
    "Any key of its config can be set: --taskset.shuffle.seed 0",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add_verbs() -> None:
    from treetune.cli import build, cache, demo, evaluate, init, listing, rescore, show, validate

    dotted = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("list")(listing.list_command)
    app.command("build", context_settings=dotted)(build.build_command)
    app.command("show", context_settings=dotted)(show.show_command)
    app.command("validate", context_settings=dotted)(validate.validate_command)
    app.command("eval", context_settings=dotted)(evaluate.eval_command)
    app.command("rescore")(rescore.rescore_command)
    app.add_typer(cache.cache_app, name="cache")
    app.command("init")(init.init_command)
    app.command("demo")(demo.demo_command)


def main(arguments: list[str] | None = None) -> None:
    """The console entry point."""
    _add_verbs()
    arguments = sys.argv[1:] if arguments is None else arguments
    warnings.showwarning = show_warning
    as_json = "--json" in arguments
    try:
        code = app(arguments, prog_name="treetune", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except CommandLineError as error:
        code = report_error(error_text(error), None, 2, as_json)
    except TreetuneError as error:
        code = report_error(error.message, error.remedy, error.exit_code, as_json)
    except BrokenPipeError:
        # The reader went away (`| head`): no fault of ours, and nothing more to say to it.
        sys.stderr.close()
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
