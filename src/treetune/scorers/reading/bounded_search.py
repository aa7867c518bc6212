r"""Searches with regular expressions that users wrote, in bounded time.

    search(r"####\s*(-?\d+)", "so\n#### 42")      # ["42"]

If a pattern is known to be fast on a text of this length, it runs in this process, in microseconds. Otherwise it runs
in a separate process that is killed after a time limit, because Python's `re` cannot be interrupted.

`bound_of` computes an upper bound on the cost of a search from the pattern's parts, `ways * len(text) ** power`:

    bound_of(re.compile(r"####\s*(-?\d+)"))      # Bound(power=1, ways=1): linear
    bound_of(re.compile(r"(\d+)\s*$"))           # Bound(power=2, ways=1)
    bound_of(re.compile(r"(a+)+b"))              # None: exponential, or unknown

A repeated part is harmless if the part after it cannot begin with the same characters, because then the repetition can
end at only one place. The bound is never too low, but may be too high.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from treetune.system.time_limit import CLOCK_FACTOR

from re import _compiler, _parser  # type: ignore[attr-defined]  # isort: skip
from re import _constants as op  # type: ignore[attr-defined]  # isort: skip

if TYPE_CHECKING:
    from treetune.system.processes import ProgramPool

STEPS = 10_000_000
"""The maximum number of steps of a search in this process, about a tenth of a second."""
LONGEST = 2000
"""The maximum length of a pattern in characters."""
SECONDS = 2.0
"""The CPU time limit of a search in another process."""


def check_pattern(pattern: str, ignore_case: bool = False) -> re.Pattern[str]:
    """Compile a pattern, or raise a ValueError that says what is wrong with it."""
    if len(pattern) > LONGEST:
        raise ValueError(f"has more than {LONGEST} characters")
    try:
        return re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"not a regular expression: {error}") from None


def search(pattern: str, text: str, group: int | str | None = None, *, ignore_case: bool = False) -> list[str] | None:
    """The text of a group in each match; by default the first group, else the whole match. None if it takes too
    long."""
    compiled, bound = _with_bound(pattern, ignore_case)
    group = min(1, compiled.groups) if group is None else group
    if bound is not None and bound.steps(len(text)) <= STEPS:
        return [match[group] or "" for match in compiled.finditer(text)]
    replies = _workers().ask([pattern, compiled.flags, group, text, SECONDS, CLOCK_FACTOR * SECONDS], 1)
    return replies[0] if replies else None


@lru_cache(maxsize=1024)
def _with_bound(pattern: str, ignore_case: bool) -> tuple[re.Pattern[str], Bound | None]:
    compiled = check_pattern(pattern, ignore_case)
    return compiled, bound_of(compiled)


@cache
def _workers() -> ProgramPool:
    from treetune.system.processes import ProgramPool  # here, because few patterns need a process

    worker = Path(__file__).with_name("search_worker.py")
    return ProgramPool(str(worker), "the search", "check that Python starts: python -c 'import re'")


SMALL = 32
"""Up to this number, repetitions count as a constant."""


class Bound(NamedTuple):
    power: int
    ways: int
    """The number of ways to match the parts whose cost does not grow with the text."""

    def steps(self, length: int) -> int:
        return int(self.ways * length**self.power)


class Cost(NamedTuple):
    power: int
    """The exponent of the time that one attempt may take before it fails."""
    first: int
    """The characters that it can begin with, as bits."""
    fails: bool
    """Whether it can fail."""


class Unknown(Exception):
    """A construct whose cost cannot be computed."""


def bound_of(pattern: re.Pattern[str]) -> Bound | None:
    """The bound on the time of a search; None if no bound is known."""
    if not pattern.pattern.isascii() or _CODE.search(pattern.pattern):
        return None
    try:
        parsed = _parser.parse(pattern.pattern, pattern.flags)
        walk = _Walk(parsed.state)
        cost = walk.sequence(parsed, Cost(0, 0, False))
    except (Unknown, RecursionError):
        return None
    # If no attempt begins inside the text that another one matched, all attempts together pass over the text once.
    apart = not cost.first & walk.repeated
    return Bound(max(1, cost.power) if apart or cost.power == 0 else 1 + cost.power, walk.ways)


class _Walk:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.ways = 1
        self.repeated = 0
        """The characters of repeated parts that are followed by something that can fail."""

    def sequence(self, items: Iterable[Any], rest: Cost) -> Cost:
        """Compute the cost from the last part to the first, because a part's cost depends on what follows it."""
        for kind, value in reversed(list(items)):
            rest = self.part(kind, value, rest)
        return rest

    def part(self, kind: Any, value: Any, rest: Cost) -> Cost:
        if kind in _SINGLE:
            return Cost(rest.power, self.letters(kind, value), True)
        if kind is op.SUBPATTERN:
            return self.sequence(contents(value), rest)
        if kind is op.BRANCH:
            ways = [self.sequence(way, rest) for way in value[1]]
            first = 0
            for way in ways:
                self.ways *= 2 if first & way.first else 1
                first |= way.first
            return Cost(max(way.power for way in ways), first, any(way.fails for way in ways))
        if kind is op.AT:
            return Cost(rest.power, rest.first if rest.fails else 0, True)
        if kind in (op.ASSERT, op.ASSERT_NOT):
            self.fixed(value[1])
            return Cost(rest.power, EVERYTHING, True)
        if kind in (op.MAX_REPEAT, op.MIN_REPEAT):
            least, most, items = value
            return self.repeat(least, most, items, rest)
        raise Unknown(kind)

    def repeat(self, least: int, most: int, items: Any, rest: Cost) -> Cost:
        if most <= 1:
            inside = self.sequence(items, rest)
            self.ways *= 2 if inside.first & rest.first or not rest.first else 1
            first = inside.first | (rest.first if least == 0 else 0)
            return Cost(max(inside.power, rest.power), first, inside.fails and (least > 0 or rest.fails))
        alphabet = self.fixed(items)
        own = self.sequence(items, Cost(0, 0, False))
        first = own.first | (rest.first if least == 0 else 0)
        fails = least > 0 or rest.fails
        if most <= SMALL:
            self.ways *= most - least + 1 if own.first & rest.first else 1
            return Cost(rest.power, first, fails)
        if not rest.fails and least <= SMALL:
            return Cost(0, first, fails)
        self.repeated |= alphabet
        if not rest.fails:
            return Cost(1, first, fails)
        power = max(1, rest.power) if not own.first & rest.first else 1 + rest.power
        return Cost(power, first, fails)

    def fixed(self, items: Iterable[Any], times: int = 1) -> int:
        """The characters of a part. Raise unless it can be matched in only one way, with a small fixed length."""
        if times > SMALL:
            raise Unknown(times)
        found = 0
        for kind, value in items:
            if kind is op.SUBPATTERN:
                found |= self.fixed(contents(value), times)
            elif kind in (op.MAX_REPEAT, op.MIN_REPEAT) and value[0] == value[1]:
                found |= self.fixed(value[2], times * value[0])
            elif kind in _SINGLE:
                found |= self.letters(kind, value)
            else:
                raise Unknown(kind)
        return found

    def letters(self, kind: Any, value: Any) -> int:
        """The characters that a part can match, as bits: `re` itself says which."""
        part = _compiler.compile(_parser.SubPattern(self.state, [(kind, value)]))
        return sum(1 << bit for bit, letter in enumerate(_LETTERS) if part.match(letter))


def contents(group: Any) -> list[Any]:
    _, added, removed, items = group
    if added or removed:
        raise Unknown("it sets its own flags")
    return list(items)


_SINGLE = (op.LITERAL, op.NOT_LITERAL, op.ANY, op.IN)
_LETTERS = [*map(chr, range(128)), *"\u2003٣é—ıİſ\u212a"]
"""ASCII, and for the other characters a space, a digit, a letter, a sign, and the other cases of i, s and k. Patterns
that name another character have no bound."""
EVERYTHING = (1 << len(_LETTERS)) - 1
_CODE = re.compile(r"\\[xuUN\d]")
