"""TRL's completions: `log_completions` of its trainers writes `completions_{step}.parquet` in the folder `completions`
of the output folder.

The columns are `step`, `prompt`, `completion`, one for each reward function, what these functions logged, and
`advantage`. The file does not say which columns are rewards. The first few columns are, and the advantage shows how
many: within a group, it rises with the reward and with nothing else. The weights of the rewards are not recorded
either.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from treetune.chat.message import Message
from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.data.arrow_values import drop_nulls
from treetune.runs.foreign.program import (
    ForeignRollout,
    Program,
    number_of,
    numbered_files,
    numbers_in,
    turns_of,
)
from treetune.runs.plain_files import open_regular

_FILE = re.compile(r"completions_(\d+)\.parquet")
_OWN = ("step", "prompt", "completion", "advantage")
_ALMOST = 1e-3
"""The rounding error of advantages, which have single precision."""


class Trl(Program):
    name = "trl"

    def files(self, path: Path) -> list[Path]:
        if _FILE.fullmatch(path.name):
            return [path] if path.is_file() else []
        return numbered_files(path, _FILE)

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        table = _read(file)
        rows = table.to_pylist()
        rewards, exact = _reward_columns(table.schema, rows)
        for at, row in enumerate(rows[after:], after):
            yield ForeignRollout(_trace(drop_nulls(row), rewards, exact), at + 1)

    def repeats(self, file: Path, before: Path) -> bool:
        """Completions that were sampled once are logged with each step that trains on them (`steps_per_generation`)."""
        try:
            one, other = (_read(each).drop_columns(["step"]) for each in (file, before))
        except (OSError, ValueError, KeyError):
            return False
        return bool(one.equals(other))


def _read(file: Path) -> Any:
    import pyarrow.parquet as pq

    with open_regular(file) as opened:
        return pq.ParquetFile(opened).read(use_threads=False)


def _trace(row: dict[str, Any], rewards: Sequence[str], exact: bool) -> Trace:
    prompt, completion = row.get("prompt"), row.get("completion")
    task = Task(prompt=prompt if isinstance(prompt, list) else str(prompt or ""))
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": str(completion or "")}]
    given = [value for value in (number_of(row.get(name)) for name in rewards) if value is not None]
    trace = Trace(task=task, uid="", step=row.get("step"), reward=sum(given) if given else None)
    trace.turns, trace.final = turns_of(task.messages, [_with_calls(message) for message in said])
    trace.turns[-1].reward = trace.reward or 0.0
    trace.metrics = numbers_in(row, without=("step",))
    trace.turns[-1].info = {name: row[name] for name in row if name not in _OWN and name not in trace.metrics}
    if len(given) > 1 and not exact:
        trace.warnings = [f"TRL does not write the weights of rewards: the reward is the sum of {', '.join(rewards)}"]
    return trace


def _with_calls(message: Message) -> Message:
    """Converts a call that is only a function to the form of OpenAI's API."""
    if not message.get("tool_calls"):
        return message
    calls = [call if "function" in call else {"function": call} for call in message["tool_calls"]]
    return {**message, "tool_calls": [{"type": "function", **call} for call in calls]}


def _reward_columns(schema: Any, rows: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """The names of the columns that are rewards, and whether the advantages were computed from their sum."""
    import pyarrow as pa

    further = [field for field in schema if field.name not in _OWN]
    columns = [field.name for field in takewhile(lambda field: pa.types.is_floating(field.type), further)]
    if "advantage" not in schema.names or not rows:
        return columns, False
    groups = [str(row.get("prompt")) for row in rows]
    advantage = np.array([_float(row["advantage"]) for row in rows])
    values = np.array([[_float(row[name]) for name in columns] for row in rows])
    totals = np.cumsum(np.nan_to_num(values), axis=1)
    for count in range(len(columns), 0, -1):
        if _rises(groups, totals[:, count - 1], advantage):
            return columns[:count], True
    return columns, False


def _float(value: Any) -> float:
    return math.nan if value is None else float(value)


def _rises(groups: list[str], rewards: Any, advantages: Any) -> bool:
    """Whether the advantages within each group are the shifted and scaled rewards."""
    _, group = np.unique(groups, return_inverse=True)
    count = np.bincount(group)

    def centred(values: Any) -> Any:
        return values - (np.bincount(group, values) / count)[group]

    one, other = centred(rewards), centred(advantages)
    along = np.bincount(group, one * other)
    lengths = np.sqrt(np.bincount(group, one * one) * np.bincount(group, other * other))
    zero = [np.sqrt(np.bincount(group, side * side)) < _ALMOST for side in (one, other)]
    fits = np.where(zero[0] | zero[1], zero[0] == zero[1], along >= (1 - _ALMOST) * lengths)
    return bool(fits.all())
