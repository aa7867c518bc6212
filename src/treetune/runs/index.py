"""The index of a run: a short entry for each trace, by which a run is sorted, filtered and grouped without reading it.

    for entry in read_index(Path("runs/x")):
        entry.reward, entry.offset, entry.length       # where its trace stands in traces.jsonl

The writer appends an entry as it appends a trace. Where entries are missing (a kill between the two, an older run, a
file of somebody else's) they are made from the traces themselves: the traces are what counts, the index only saves
reading them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from treetune.task import text_of
from treetune.trace import Trace

INDEX = "index.jsonl"
_ANSWER = 120
"""How much of an answer an entry has."""
_TOKENS = b',"tokens":'
"""How the last field of a line begins. Text never holds it: quotes stand there as \\"."""
_FOLLOW = b'{"sequences":', b"null}"
_NO_TOKENS = len(b',"tokens":null}\n')
_PART = 1 << 22
"""Bytes of entries that are read at once."""


class Entry(msgspec.Struct, array_like=True):
    """What is known of a rollout without reading its trace."""

    offset: int
    length: int
    """Of its line, the end of the line included."""
    text_length: int
    """Of what stands before its tokens: whatever anybody has said."""
    idx: int
    uid: str
    occurrence: int
    rollout: int
    attempt: int
    step: int | None
    source: str
    outcome: str
    reward: float | None
    success: bool | None
    turns: int
    prompt_tokens: int
    completion_tokens: int
    began: float | None
    """When, in seconds since 1970."""
    seconds: float
    policy: float
    """Of these, those that the policy took."""
    environment: float
    retries: int
    """How often calls of the policy or of judges were repeated."""
    answer: str | None
    """What it gave as its answer, or the end of what it said last; the beginning of that."""
    failure: str | None
    """Its type and where it was raised: `ZeroDivisionError (environment) at tasks.py:12`."""
    metrics: dict[str, float | None]
    tokens: bool
    """Whether the trace has the tokens themselves."""

    @property
    def end(self) -> int:
        return self.offset + self.length


# The parts of a trace that an entry is made of; whatever else a line holds is passed over.


class _Task(msgspec.Struct):
    idx: int = -1
    data_source: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Failure(msgspec.Struct):
    type: str = ""
    phase: str = ""
    place: str = ""


class _Timing(msgspec.Struct):
    policy: float = 0.0
    environment: float = 0.0
    total: float = 0.0
    began: float | None = None


class _Judgement(msgspec.Struct):
    retries: int = 0


class _Turn(msgspec.Struct):
    message: msgspec.Raw = msgspec.Raw(b"null")


class _Glance(msgspec.Struct):
    task: _Task
    uid: str
    occurrence: int = 0
    attempt: int = 0
    rollout: int = 0
    step: int | None = None
    outcome: str = "completed"
    reward: float | None = None
    success: bool | None = None
    turns: list[_Turn] = []
    usage: _Usage = msgspec.field(default_factory=_Usage)
    timing: _Timing = msgspec.field(default_factory=_Timing)
    answer: str | None = None
    failure: _Failure | None = None
    metrics: dict[str, float | None] = {}
    judgements: list[_Judgement] = []
    retries: int = 0


_glance = msgspec.json.Decoder(_Glance).decode
_entries = msgspec.json.Decoder(Entry)


def entry_of(trace: Trace | _Glance, offset: int, line: bytes) -> Entry:
    """That of a trace whose line stands at this offset."""
    text_length = line.rfind(_TOKENS)
    if text_length < 0 or not line.startswith(_FOLLOW, text_length + len(_TOKENS)):
        text_length = len(line)  # somebody else's line
    failure, timing, retries = trace.failure, trace.timing, trace.retries
    for judgement in trace.judgements:
        retries += judgement.retries
    told = None
    if failure is not None:
        told = f"{failure.type} ({failure.phase})" + (f" at {failure.place}" if failure.place else "")
    return Entry(
        offset,
        len(line),
        text_length,
        trace.task.idx,
        trace.uid,
        trace.occurrence,
        trace.rollout,
        trace.attempt,
        trace.step,
        trace.task.data_source,
        str(trace.outcome),
        trace.reward,
        trace.success,
        len(trace.turns),
        trace.usage.prompt_tokens,
        trace.usage.completion_tokens,
        None if timing.began is None else round(timing.began, 3),
        round(timing.total, 6),
        round(timing.policy, 6),
        round(timing.environment, 6),
        retries,
        _answer(trace),
        told,
        dict(trace.metrics),
        text_length < len(line) - _NO_TOKENS,
    )


def _answer(trace: Trace | _Glance) -> str | None:
    """What it gave as its answer; where none was found, what it said last."""
    if trace.answer is not None:
        return trace.answer[:_ANSWER]
    message = trace.turns[-1].message if trace.turns else None
    if isinstance(message, msgspec.Raw):
        message = msgspec.json.decode(message)
    text = text_of(message.get("content")) if isinstance(message, dict) else None
    return text[-_ANSWER:] if text else None


def entries_in(lines: bytes, offset: int) -> Iterator[Entry]:
    """Those of whole lines of traces, the first of which stands at that offset; a damaged one has none."""
    for line in lines.splitlines(keepends=True):
        with suppress(msgspec.MsgspecError):
            yield entry_of(_glance(line), offset, line)
        offset += len(line)


def encode(entry: Entry) -> bytes:
    return msgspec.json.encode(entry) + b"\n"


def read_index(folder: Path, records: str = "traces.jsonl", after: int = 0) -> Iterator[Entry]:
    """The entries of the traces that are complete, in their order, from a place in the file on. One that is damaged is
    left out, with those that the index and the traces disagree about read from the traces."""
    path = folder / records
    with suppress(FileNotFoundError), open(path, "rb") as traces:
        size = os.fstat(traces.fileno()).st_size
        for entry in _known(folder, size) if not after else ():
            yield entry
            after = entry.end
        traces.seek(after)
        for line in traces:
            if not line.endswith(b"\n"):
                return  # it is being written
            yield from entries_in(line, after)
            after += len(line)


def _known(folder: Path, size: int) -> Iterator[Entry]:
    """The entries of the index, as far as they lie one behind the other within the traces."""
    end = 0
    with suppress(OSError), open(folder / INDEX, "rb") as file:
        rest = b""
        while part := file.read(_PART):
            lines, newline, rest = (rest + part).rpartition(b"\n")
            try:
                entries = _entries.decode_lines(lines + newline)
            except msgspec.MsgspecError:
                return
            for entry in entries:
                if entry.offset != end or entry.end > size:
                    return
                end = entry.end
                yield entry


def mend_index(folder: Path, records: str = "traces.jsonl") -> None:
    """Drops entries of what is not there, and what a kill has left of one; adds those that are missing."""
    with open(folder / INDEX, "ab") as index:
        known = list(_known(folder, (folder / records).stat().st_size))
        index.truncate(sum(len(encode(entry)) for entry in known))
        index.writelines(map(encode, read_index(folder, records, after=known[-1].end if known else 0)))
