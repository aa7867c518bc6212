"""An Entry holds the facts about a rollout that are available without reading its trace: one line of a run's index.

entry = entry_of(trace, offset, line)             # for a trace that is being written
entry = glance(block, start, stop, offset)        # for a line of a file, decoding little of it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from treetune.chat.message import text_of
from treetune.core.trace import Failure, Trace

_ANSWER = 120
"""The maximum number of characters of an answer in an entry."""
_TOKENS, _NO_TOKENS = b'"tokens":{"sequences":[', b',"tokens":null}\n'
"""How the last field of a line begins, and how a line without one ends. Text never contains these, because quotes in it
are written as \\". The first mark has no digit and no comma, so it can be found without checking each position."""
_TIMING = 600
"""The maximum size in bytes of the field before the tokens. If that field is missing, Treetune did not write the
line."""


Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
"""Integers that a column can hold. Anyone may have written them."""


class Entry(msgspec.Struct, array_like=True, gc=False):
    """The facts about a rollout that are available without reading its trace."""

    offset: Size
    length: Annotated[int, msgspec.Meta(ge=1, le=1 << 62)]
    """The bytes of its line, including the newline."""
    text_length: Size
    """The bytes of the line without its tokens, which come last."""
    idx: Whole
    uid: str
    occurrence: Size
    rollout: Whole
    attempt: Whole
    step: Whole | None
    source: str
    outcome: str
    reward: float | None
    success: bool | None
    turns: Whole
    prompt_tokens: Whole
    completion_tokens: Whole
    began: float | None
    """When the rollout began, in seconds since 1970."""
    seconds: float
    policy: float
    """How many of these seconds the policy took."""
    environment: float
    retries: Whole
    """How often calls of the policy or of judges were retried."""
    answer: str | None
    """The beginning of its answer; without an answer, the end of its last message."""
    failure: str | None
    """The type of the failure and where it was raised: `ZeroDivisionError (environment) at tasks.py:12`."""
    metrics: Mapping[str, float | None]
    tokens: bool
    """Whether the trace contains the tokens themselves."""
    agent_calls: Whole | None = None
    """How often an agent called its model; None if no agent played it."""

    @property
    def end(self) -> int:
        return self.offset + self.length


# The parts of a trace that an entry is built from; other fields of a line are skipped.


class _TaskPart(msgspec.Struct):
    idx: Whole = -1
    data_source: str = ""


class _UsagePart(msgspec.Struct):
    prompt_tokens: Whole = 0
    completion_tokens: Whole = 0


class _FailurePart(msgspec.Struct):
    type: str = ""
    phase: str = ""
    place: str = ""


class _TimingPart(msgspec.Struct):
    policy: float = 0.0
    environment: float = 0.0
    total: float = 0.0
    began: float | None = None


class _JudgementPart(msgspec.Struct):
    retries: Whole = 0


class _TurnPart(msgspec.Struct):
    message: msgspec.Raw = msgspec.Raw(b"null")


class _AgentPart(msgspec.Struct):
    calls: list[_TurnPart] = []


class _TraceParts(msgspec.Struct):
    task: _TaskPart
    uid: str
    occurrence: Size = 0
    attempt: Whole = 0
    rollout: Whole = 0
    step: Whole | None = None
    outcome: str = "completed"
    reward: float | None = None
    success: bool | None = None
    turns: list[_TurnPart] = []
    usage: _UsagePart = msgspec.field(default_factory=_UsagePart)
    timing: _TimingPart = msgspec.field(default_factory=_TimingPart)
    answer: str | None = None
    failure: _FailurePart | None = None
    metrics: dict[str, float | None] = {}
    judgements: list[_JudgementPart] = []
    retries: Whole = 0
    agent: _AgentPart | None = None


_decode = msgspec.json.Decoder(_TraceParts).decode


def entry_of(trace: Trace, offset: int, line: bytes) -> Entry:
    """Builds the entry of a trace whose line begins at this offset."""
    return _make(trace, offset, len(line), text_length(line, 0, len(line)))


def glance(block: bytes | bytearray, start: int, stop: int, offset: int) -> Entry:
    """Builds the entry of the line from `start` to `stop`, which any program may have written; `offset` is its position
    in the file. Raises `msgspec.MsgspecError` if it is damaged."""
    end = start + text_length(block, start, stop)
    if end < stop and _ends_with_tokens(block, end, start):
        return _make(_decode(block[start:end] + b"}"), offset, stop - start, end - start)
    return _make(_decode(block[start:stop]), offset, stop - start, end - start)


def text_length(block: bytes | bytearray, start: int, stop: int) -> int:
    """The length of the line from `start` to `stop` without its tokens."""
    if block.endswith(_NO_TOKENS, start, stop):
        return stop - start - len(_NO_TOKENS)
    tokens = block.rfind(_TOKENS, start, stop)
    return (tokens - 1 if tokens > start else stop) - start


def pread_line(file: int, entry: Entry, tokens: bool = True) -> bytes:
    """Reads the line of an entry from its file, optionally without the tokens, which are the last field."""
    if not tokens and entry.text_length < entry.length:
        line = os.pread(file, entry.text_length, entry.offset)
        if _ends_with_tokens(line, entry.text_length):
            return line + b"}"
    return os.pread(file, entry.length, entry.offset)


def _ends_with_tokens(block: bytes | bytearray, end: int, start: int = 0) -> bool:
    """Whether the tokens follow at `end` as the last field of a line; the field before them must end there."""
    return block.rfind(b'"timing":{', max(start, end - _TIMING), end) > 0


def _make(trace: Trace | _TraceParts, offset: int, length: int, text: int) -> Entry:
    # This runs for each rollout of an evaluation, so repeated lookups and calls would add to its cost.
    task, usage, timing, failure, retries = trace.task, trace.usage, trace.timing, trace.failure, trace.retries
    if trace.judgements:
        retries += sum(judgement.retries for judgement in trace.judgements)
    return Entry(
        offset,
        length,
        text,
        task.idx,
        trace.uid,
        trace.occurrence,
        trace.rollout,
        trace.attempt,
        trace.step,
        task.data_source,
        trace.outcome,
        trace.reward,
        trace.success,
        len(trace.turns),
        usage.prompt_tokens,
        usage.completion_tokens,
        timing.began,
        timing.total,
        timing.policy,
        timing.environment,
        retries,
        _last_said(trace) if trace.answer is None else trace.answer[:_ANSWER],
        None if failure is None else _describe(failure),
        trace.metrics,
        length - text > len(_NO_TOKENS),
        None if trace.agent is None else len(trace.agent.calls),
    )


def _describe(failure: Failure | _FailurePart) -> str:
    return f"{failure.type} ({failure.phase})" + (f" at {failure.place}" if failure.place else "")


def _last_said(trace: Trace | _TraceParts) -> str | None:
    message: Any = trace.turns[-1].message if trace.turns else None
    if isinstance(message, msgspec.Raw):
        message = msgspec.json.decode(message)
    text = text_of(message.get("content")) if isinstance(message, dict) else None
    return text[-_ANSWER:] if text else None
