"""What other tools call our keys: `max_new_tokens` is `sampling.max_tokens` here.

    suggest_key("max_new_tokens", ["temperature", "max_tokens"])      # "; did you mean 'max_tokens'?"

This is only used in error messages. Other names do not work as keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from treetune.errors import did_you_mean, join_names

_FURTHER = (
    "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "stop_token_ids", "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
"""Request fields that are not keys here."""
OTHER_NAMES = {
    "num_tasks": "limit num_examples num_samples max_samples max_examples num_problems n",
    "num_rollouts": "epochs rollouts_per_example num_generations num_return_sequences group_size n_samples_per_prompt "
    "samples_per_task num_trials repeats rollouts n k",
    "max_concurrent": "batch_size concurrency max_connections max_workers workers num_workers parallel num_proc "
    "max_tasks max_samples",
    "model": "model_name model_id model_path pretrained",
    "pass_threshold": "threshold",
    "sampling.temperature": "temp",
    "sampling.top_p": "nucleus",
    "sampling.max_tokens": "max_new_tokens max_completion_tokens max_output_tokens max_gen_toks max_gen_tokens "
    "response_length max_response_length max_completion_length max_length",
    "sampling.stop": "stop_sequences stop_words stop_strs stop_seqs until",
    "sampling.seed": "random_seed random_state",
    "sampling.logprobs": "log_probs return_logprobs top_logprobs",
    "sampling.extra": "sampling_args extra_body generation_config gen_kwargs generation_kwargs",
    **{f"sampling.extra.{field}": "" for field in _FURTHER},
    "limits.max_turns": "max_steps max_iterations max_iters num_turns message_limit",
    "limits.timeout": "time_limit max_time deadline max_seconds",
    "limits.max_tool_calls": "tool_call_limit",
    "endpoint.base_url": "url api_base base api_url model_base_url openai_api_base server_url host port address",
    "endpoint.api_key_env": "api_key key api_key_var openai_api_key",
    "endpoint.timeout": "request_timeout",
    "endpoint.max_retries": "retries num_retries",
    "taskset.shuffle.seed": "random_seed random_state",
    "taskset": "task tasks env environment env_id dataset",
    "level": "difficulty",
    "id": "name taskset env env_id",
    "weight": "ratio share proportion probability prob mix",
    "loading_params": "path dataset data_files files hub load dataset_path",
    "prompt_template": "prompt template query question input prompt_key",
    "system_prompt": "system system_message",
    "ground_truth": "answer target label gold solution answer_column answer_key ground_truth_column reward_spec",
    "max_rows": "limit max_samples num_examples num_rows max_examples num_samples",
    "scorer": "reward reward_fn reward_function reward_func metric verifier rubric grader",
    "images": "image image_column image_key",
    "choices": "options",
    "column": "field key",
    "env_class": "env environment",
}
"""Our keys, with their names in other tools. Keys are dotted from the top of a file if they are always in the same
place. The last part of a key also counts as its name: `temperature` at the top means `sampling.temperature`."""


def keys_meant(name: str) -> list[str]:
    """The keys that a name from another tool may mean, in table order."""
    word = name.casefold().replace("-", "_")
    return [key for key, others in OTHER_NAMES.items() if word in (key.rpartition(".")[2], *others.split())]


def suggest_key(name: str, known: Iterable[str], path: str = "") -> str:
    """`; did you mean 'x'?` with known keys of the same meaning or a similar spelling. If `path` is one of our
    sections, keys elsewhere in the file are suggested too. Empty if no key is similar."""
    known = list(known)
    meant = keys_meant(name)
    same = [key for key in known if key.rpartition(".")[2] in {name, *(each.rpartition(".")[2] for each in meant)}]
    inside = f"{path}." if path else ""
    relative = [key.removeprefix(inside) for key in meant if key.startswith(inside) and key.count(".") > 1]
    same += [key for key in relative if key.partition(".")[0] in known]
    if same:
        return f"; did you mean {join_names(_nearest(same))}?"
    if near := did_you_mean(name, known):
        return near
    elsewhere = [key for key in meant if "." in key or key.startswith("num_")]
    at_home = path.partition(".")[0] in ("taskset", "sampling", "limits", "endpoint")
    return f"; did you mean {join_names(elsewhere)}, at the top of the file?" if at_home and elsewhere else ""


def _nearest(keys: Collection[str]) -> list[str]:
    """The keys with the fewest dots."""
    least = min(key.count(".") for key in keys)
    return [key for key in keys if key.count(".") == least]
