"""Annotations of a run, stored next to it: marks and comments on rollouts, tags of the run.

    write_mark(run.path, entry, "bad", "paid for the format alone")
    read_marks(run.path)[key_of(entry)].comment

Marks are lines that are only appended; the last one for a rollout counts. So several people, and the process that
writes the run, can write at the same time.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from treetune.errors import UsageError, writing
from treetune.runs.entry import Entry
from treetune.runs.plain_files import UNREADABLE, open_to_append, read_regular
from treetune.system.folders import write_atomically

MARKS, TAGS = "marks.jsonl", "tags.json"
Word = Literal["good", "bad", "look"]
Key = tuple[str, int, int, int, int | None]
_REMEDY = "copy the run to a folder that you may write to"
_MOST_TAGS, _LONGEST_TAG, _LONGEST_COMMENT = 32, 60, 10_000


class Mark(msgspec.Struct):
    uid: str
    occurrence: int
    rollout: int
    attempt: int
    step: int | None
    mark: Word | None
    """None if the mark was removed."""
    comment: str = ""
    when: float = 0.0
    """Seconds since 1970."""

    @property
    def key(self) -> Key:
        return self.uid, self.occurrence, self.rollout, self.attempt, self.step


def key_of(entry: Entry) -> Key:
    """Identifies a rollout, even after its run was resumed or rescored."""
    return entry.uid, entry.occurrence, entry.rollout, entry.attempt, entry.step


def marks_stamp(run: Path) -> tuple[int, int]:
    """A value that changes when a mark is written."""
    try:
        state = os.stat(_beside(run, MARKS))
        return state.st_size, state.st_mtime_ns
    except OSError:
        return 0, 0


def read_marks(run: Path) -> dict[Key, Mark]:
    """Returns the last mark of each rollout. Unreadable lines are skipped."""
    marks: dict[Key, Mark] = {}
    with suppress(OSError):
        for line in read_regular(_beside(run, MARKS)).splitlines():
            with suppress(*UNREADABLE):
                mark = _decode(line)
                marks.pop(mark.key, None)
                if mark.mark is not None or mark.comment:
                    marks[mark.key] = mark
    return marks


_decode = msgspec.json.Decoder(Mark).decode


def write_mark(run: Path, entry: Entry, word: Word | None, comment: str = "") -> Mark:
    if len(comment) > _LONGEST_COMMENT:
        raise UsageError(f"a comment has at most {_LONGEST_COMMENT:,} characters")
    mark = Mark(*key_of(entry), word, comment, round(time.time(), 3))
    line = msgspec.json.encode(mark) + b"\n"
    with writing(path := _beside(run, MARKS), _REMEDY):
        file = open_to_append(path)
        try:
            os.write(file, line)
        finally:
            os.close(file)
    return mark


def read_tags(run: Path) -> list[str]:
    try:
        return msgspec.json.decode(read_regular(_beside(run, TAGS)), type=list[str])
    except (OSError, *UNREADABLE):
        return []


def write_tags(run: Path, tags: list[str]) -> list[str]:
    """Writes each tag once; empty tags are left out."""
    kept = list(dict.fromkeys(" ".join(tag.split()) for tag in tags if tag.strip()))
    if len(kept) > _MOST_TAGS or any(len(tag) > _LONGEST_TAG for tag in kept):
        raise UsageError(f"a run has at most {_MOST_TAGS} tags of {_LONGEST_TAG} characters")
    with writing(path := _beside(run, TAGS), _REMEDY):
        write_atomically(path, msgspec.json.encode(kept))
    return kept


def _beside(run: Path, name: str) -> Path:
    """A file in the run folder, or next to the run if the run is a single file."""
    return run / name if run.is_dir() else run.with_name(f"{run.name}.{name}")
