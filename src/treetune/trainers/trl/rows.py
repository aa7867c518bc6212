"""TRL: the reward of rows that `treetune build --format trl` made.

    dataset = load_dataset("parquet", data_files=path, split="train")
    GRPOTrainer(model, args=args, train_dataset=dataset, reward_funcs=score_rows)

TRL samples one answer to each prompt, and each row's own task scores it. Episodes of several turns are played by
`treetune.trainers.trl.TrlTasks`.
"""

from __future__ import annotations

from typing import Any

from treetune.rows.layouts import FORMATS
from treetune.trainers.one_answer import play_row, scorer_in

_OF_TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""What reward functions are given beside the dataset's columns."""


def score_rows(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float]:
    """The reward of each completion; a reward function of a `GRPOTrainer`."""
    named = {name: values for name, values in columns.items() if name not in _OF_TRL}
    return [
        _score({"prompt": prompts[number], **{name: values[number] for name, values in named.items()}}, completion)
        for number, completion in enumerate(completions)
    ]


def _score(row: dict[str, Any], completion: Any) -> float:
    scorer = scorer_in(row.get("extra_info"), row.get("data_source"))
    text = completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
    reward: float = play_row(scorer, FORMATS["trl"].task_of({**row, "prompt": _prompt(row)}, whole=False), text).reward
    return reward


def _prompt(row: dict[str, Any]) -> Any:
    prompt = row["prompt"]
    return [dict(message) for message in prompt] if isinstance(prompt, list) else prompt
