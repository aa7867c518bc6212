"""A Judgement is one call of a judge: what it was asked, what it said, what that was read as.

    with recording(judgements):
        await scorer.score(answer, truth, task)     # each call of a judge is in the list afterwards

Whoever plays an episode keeps such a list, so every call is in the trace, whichever code of the task made it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from treetune.core.policy import Usage


class Judgement(msgspec.Struct, kw_only=True):
    model: str
    """Who was asked."""
    asked: str
    """What about: `grade`, the name of a criterion, which of two answers stood first."""
    prompt: str
    """What the judge was shown."""
    answer: str = ""
    """What it said."""
    verdict: dict[str, str] | None = None
    """What was decided, by what it is about; None where the answer could not be read."""
    failure: str | None = None
    """Why there is no verdict."""
    cached: bool = False
    """Nothing was paid: the same had been asked before, or was being asked at the time."""
    usage: Usage = msgspec.field(default_factory=Usage)
    """The judge's tokens, also those of a verdict that was paid for earlier."""
    seconds: float = 0.0
    """How long it took."""
    retries: int = 0
    """How often the call was repeated: 429, 5xx, a cut connection, no answer in time."""


_list: ContextVar[list[Judgement] | None] = ContextVar("judgements", default=None)


@contextmanager
def recording(judgements: list[Judgement]) -> Iterator[None]:
    """Within it the calls of judges in this context are added to the list."""
    token = _list.set(judgements)
    try:
        yield
    finally:
        _list.reset(token)


def record(judgements: Iterable[Judgement]) -> None:
    if (kept := _list.get()) is not None:
        kept.extend(judgements)
