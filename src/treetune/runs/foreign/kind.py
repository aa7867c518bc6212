"""A Kind is a program that writes runs, and how a trace is made of each rollout in its files.

    files = kind.files(Path("outputs/rollout_data"))      # in their order; none where it is no run of this kind
    for found in kind.read(files[0], after=0):
        found.trace, found.position                       # where to go on when the file has grown

What a program does not tell is left out. Which task, which group and which rollout a trace is, is numbered by
`kept.py`: the rollouts of the same prompt in the same step are a group.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from treetune.trace import Trace

Stamp = tuple[int, int]
"""Of a file: its size and when it was changed. While it stays the same, so does the file."""


class Found(msgspec.Struct):
    """A rollout that another program recorded, or what was wrong with it."""

    trace: Trace | None
    position: int
    """In the file, behind it: what `read` goes on from."""
    rollout: int | None = None
    """Which of the rollouts of its task, where the program says so."""
    group: str = ""
    """The program's name for the rollouts of one prompt: by it, equal prompts of one step are told apart."""
    fault: str = ""
    """Why there is no trace."""


class Kind:
    name: str
    """As `Run.kind` has it."""

    def files(self, path: Path) -> list[Path]:
        """Those of the run at a path, a file or a folder; none where it is no run of this kind."""
        raise NotImplementedError

    def read(self, file: Path, after: int) -> Iterator[Found]:
        """The rollouts of a file, from a position on."""
        raise NotImplementedError

    def stamp(self, file: Path) -> Stamp:
        told = file.stat()
        return told.st_size, told.st_mtime_ns

    def mark(self, file: Path, position: int) -> str:
        """Of what stands before a position: the same mark means that a file has only grown. "" where that is not told,
        and a file that changed is read anew."""
        return ""

    def repeats(self, file: Path, before: Path) -> bool:
        """Whether a file only says again what the one before it said."""
        return False

    def describe(self, files: list[Path]) -> dict[str, Any]:
        """What is known of the run as a whole, as a config: `model`, `taskset`."""
        return {}


class Row(NamedTuple):
    """A line of JSON."""

    values: dict[str, Any] | None
    """None where it is damaged."""
    position: int
    fault: str


def read_rows(file: Path, after: int = 0) -> Iterator[Row]:
    """The lines of a file of JSON lines. A last one that is not complete is being written, and comes another time."""
    with open(file, "rb") as lines:
        lines.seek(after)
        for line in lines:
            begins, after = after, after + len(line)
            if not line.strip():
                continue
            try:
                values, fault = decode(line), ""
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                values, fault = None, f"{file.name}, at byte {begins}: {error}"
            if values is not None and not isinstance(values, dict):
                values, fault = None, f"{file.name}, at byte {begins}: no JSON object"
            yield Row(values, after, fault)


def first_row(file: Path) -> dict[str, Any]:
    """The first line of a file that can be read; empty where there is none among the first few."""
    try:
        for _, row in zip(range(3), read_rows(file), strict=False):
            if row.values is not None:
                return row.values
    except OSError:
        pass
    return {}


def decode(text: bytes) -> Any:
    """JSON, also with the NaN and Infinity that Python writes. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return json.loads(text)


def files_in(folder: Path) -> list[str]:
    """The names in a folder; none where it is none."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def number_of(value: Any) -> float | None:
    """A value as a number; None where it is none, or not a finite one."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None


def time_of(text: Any) -> float | None:
    """A time in ISO 8601 as seconds since 1970; None where it is none."""
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def numbers_in(values: Mapping[str, Any], without: tuple[str, ...] = ()) -> dict[str, float]:
    """Those of the values that are numbers: the metrics of a trace."""
    found = {name: number_of(value) for name, value in values.items() if name not in without}
    return {name: value for name, value in found.items() if value is not None}


def prune(value: Any) -> Any:
    """Values without the keys that are null: a table gives each row the keys of all."""
    if isinstance(value, dict):
        return {key: prune(item) for key, item in value.items() if item is not None}
    return [prune(item) for item in value] if isinstance(value, list) else value
