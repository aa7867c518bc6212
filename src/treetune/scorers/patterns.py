r"""The scorer by a regular expression: `pattern`.

    pattern(r"####\s*(-?\d+)").score("so\n#### 42", "42").reward      # 1.0

A pattern that is known to be quick on a text of this length runs here, in microseconds. Any other runs in a process
that is ended after its time, whoever wrote the pattern or the reply.
"""

from __future__ import annotations

import re
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError
from treetune.scorers import pattern_worker
from treetune.scorers.backtracking import bound_of
from treetune.scorers.reading.answers import Found, one_of, placed, plain, same, strip_thinking
from treetune.scorers.scorer import Scorer, expected, require_truths
from treetune.system.processes import WorkerPool

STEPS = 10_000_000
"""The most steps of a search in this process: about a tenth of a second."""
LONGEST = 2000
"""The most characters of a pattern."""
SECONDS = 2.0
"""Processor time of a search in another process."""


class Pattern(Scorer, frozen=True, tag="pattern"):
    pattern: str
    """The regular expression that is searched for in the reply."""
    group: int | str | None = None
    """The group that is the answer, by number or name; the first one, or all of the match where there is none."""
    which: Literal["only", "first", "last"] = "only"
    """Which match counts where there are several; `only`: they must all say the same."""
    ignore_case: bool = False
    """Whether capitals and small letters are the same."""
    strip: bool = True
    """Whether numbers are compared as numbers, and texts without markdown, quotes and a full stop around them."""
    match_only: bool = False
    """Whether the match alone earns 1, whatever it says: for a format, as a part of others."""

    def __post_init__(self) -> None:
        if len(self.pattern) > LONGEST:
            raise ConfigError([("pattern", f"has more than {LONGEST} characters")])
        try:
            compiled = _compile(self.pattern, self.ignore_case)
        except (re.error, OverflowError, RecursionError) as error:
            raise ConfigError([("pattern", f"no regular expression: {error}")]) from None
        known = [*range(compiled.groups + 1), *compiled.groupindex]
        if self.group is not None and self.group not in known:
            raise ConfigError([("group", f"the pattern has no group {self.group!r}; there are {known}")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether what the pattern finds says what the ground truth says."""
        truths = [] if self.match_only else require_truths(truth, task)
        reply = strip_thinking(answer)
        if self.answer is not None:
            place = placed(reply, self.answer)
            if place.text is None:
                return Score(0.0, explanation=place.why)
            reply = place.text
        matches = self.search(reply)
        if matches is None:
            return Score(0.0, explanation=f"the search took more than {SECONDS:g} seconds")
        if self.match_only:
            return Score(float(bool(matches)), answer=matches[-1] if matches else None, explanation=self._say(matches))
        found = self._choose(matches)
        if found.text is None:
            return Score(0.0, explanation=found.why)
        right = any(self._is_same(found.text, str(one)) for one in truths)
        return Score(float(right), answer=found.text, explanation="right" if right else expected(truths))

    def search(self, text: str) -> list[str] | None:
        """What the group of each match holds; None where that takes too long."""
        compiled, group = _compile(self.pattern, self.ignore_case), self._group()
        bound = bound_of(compiled)
        if bound is not None and bound.steps(len(text)) <= STEPS:
            return [match[group] or "" for match in compiled.finditer(text)]
        replies = _workers().ask([self.pattern, compiled.flags, group, text, SECONDS], 1)
        return replies[0] if replies else None

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        """What the pattern finds the ground truth in, where a few usual ways of writing it do."""
        if self.match_only:
            return None
        text = str(require_truths(truth, task)[0])
        prefix = _literal_prefix(self.pattern)
        ways = [text, f"{prefix}{text}", f"{prefix} {text}", f"#### {text}", f"Answer: {text}", f"\\boxed{{{text}}}"]
        said = (self.say(way) for way in ways)
        return next((reply for reply in said if self.score(reply, truth, task).reward == 1), None)

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        return None if self.match_only else super().problem(truth, task)

    def _group(self) -> int | str:
        return self.group if self.group is not None else min(1, _compile(self.pattern, self.ignore_case).groups)

    def _choose(self, matches: list[str]) -> Found:
        if not matches:
            return Found(None, "the pattern matches nothing")
        if self.which != "only" or len(matches) == 1:
            said = matches[0 if self.which == "first" else -1]
            return Found(said) if said.strip() else Found(None, "the match is empty")
        return one_of(matches, lambda said: plain(said) or None, "")

    def _is_same(self, said: str, truth: str) -> bool:
        if self.ignore_case:
            said, truth = said.casefold(), truth.casefold()
        return same(said, truth) if self.strip else said == truth

    def _say(self, matches: list[str]) -> str:
        return "it matches" if matches else "the pattern matches nothing"


@lru_cache(maxsize=1024)
def _compile(pattern: str, ignore_case: bool) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE if ignore_case else 0)


def _literal_prefix(pattern: str) -> str:
    """The letters that a pattern begins with, as far as each stands for itself."""
    match = re.match(r"(?:\\[^\w\s]|[^\\.^$*+?{}\[\]|()])*(?![*+?{])", pattern)
    return re.sub(r"\\(.)", r"\1", match[0]) if match else ""


@cache
def _workers() -> WorkerPool:
    return WorkerPool(
        str(Path(pattern_worker.__file__)), "the search", "check that Python starts: python -c 'import re'"
    )
