"""Rollouts and validations of verl: `trainer.rollout_data_dir` and `trainer.validation_data_dir`, with a file
`{step}.jsonl` for each step.

A line has `input`, `output`, `gts`, `score`, `step`, and whatever else the reward function returned. The v1 trainer
adds `uid`, which is `{prompt}_{rollout}_{part}`: if an agent loop returned several outputs, the parts of one rollout
are its turns. Texts are decoded by the tokenizer without special tokens, so roles are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treetune.chat.message import Message
from treetune.core.task import Task
from treetune.core.trace import Trace, Turn
from treetune.runs.foreign.program import (
    ForeignRollout,
    Keys,
    Program,
    number_of,
    numbered_files,
    numbers_in,
    read_grouped,
)

_FILE = re.compile(r"(\d+)\.jsonl")
_UID = re.compile(r"(.+)_(\d+)_(\d+)", re.DOTALL)
_ROLLOUTS = Keys("input", "output", "score")
_OWN = ("input", "output", "gts", "score", "step", "reward", "uid")


class Verl(Program):
    name = "verl"

    def files(self, path: Path) -> list[Path]:
        found = [path] if path.suffix == ".jsonl" else numbered_files(path, _FILE)
        return found if found and _ROLLOUTS.begin(found[0]) else []

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        return read_grouped(file, after, "output", _goes_on, _found)


def _goes_on(before: dict[str, Any], row: dict[str, Any]) -> bool:
    return (named := _rollout(row)) is not None and named == _rollout(before)


def _rollout(row: dict[str, Any]) -> tuple[str, int] | None:
    """The prompt and the rollout number that a line belongs to; None if the line is a complete rollout."""
    match = _UID.fullmatch(row["uid"]) if isinstance(row.get("uid"), str) else None
    return (match[1], int(match[2])) if match else None


def _found(parts: list[dict[str, Any]], position: int) -> ForeignRollout:
    first, last = parts[0], parts[-1]
    truth = first.get("gts")
    task = Task(
        prompt=str(first.get("input") or ""),
        data_source=str(first.get("data_source") or ""),
        ground_truth=truth,
    )
    reward, metrics = number_of(last.get("score")), numbers_in(last, without=_OWN)
    trace = Trace(task=task, uid="", reward=reward, metrics=metrics)
    trace.turns = [_turn(part) for part in parts]
    trace.turns[-1].reward = reward or 0.0
    trace.turns[-1].info = {name: last[name] for name in last if name not in _OWN and name not in metrics}
    step = first.get("step")
    trace.step = step if isinstance(step, int) else None
    named = _rollout(first)
    return ForeignRollout(trace, position, named[1] if named else None, named[0] if named else "")


def _turn(part: dict[str, Any]) -> Turn:
    observed: Message = {"role": "user", "content": str(part.get("input") or "")}
    return Turn(observed=[observed], message={"role": "assistant", "content": str(part["output"] or "")})
