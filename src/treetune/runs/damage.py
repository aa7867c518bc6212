"""What is wrong with the lines of a file of records: lines that cannot be read, and rollouts that stand there twice.

    damage = Damage()
    for line, trace in TRACES.lines(folder, damage): ...
    damage.describe("traces.jsonl")            # warnings, or none

A kill may cut the last line short, and only the last: that is no damage. Everything that reads records counts by this,
so a summary, an index and a resumed run leave out the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from operator import attrgetter

from treetune.core.trace import Trace
from treetune.errors import plural
from treetune.runs.entry import Entry

LONGEST_LINE = 256 << 20
"""Bytes of a line. What is longer is no record."""


class Damage:
    def __init__(self) -> None:
        self.line = 0
        """The number of the line that was read last."""
        self.left_out = self.doubled = 0
        self._first = ""
        self._seen: set[int] = set()
        """Hashes: a run may have a million rollouts."""

    def leave_out(self, error: object) -> None:
        """Notes that the last line cannot be read."""
        self.left_out += 1
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        self._first = self._first or f"line {self.line}: {why}"

    def is_doubled(self, key: Hashable) -> bool:
        """Whether a record with this key was there before; notes it."""
        number = len(self._seen)
        self._seen.add(hash(key))
        self.doubled += (found := len(self._seen) == number)
        return found

    def once(self, entries: list[Entry]) -> list[Entry]:
        """The entries that were not there before."""
        keys = set(map(hash, map(key_of_entry, entries)))
        if len(keys) == len(entries) and self._seen.isdisjoint(keys):
            self._seen |= keys
            return entries
        return [entry for entry in entries if not self.is_doubled(key_of_entry(entry))]

    def describe(self, file: str) -> list[str]:
        """A warning for each kind of damage."""
        found = []
        if self.left_out:
            are = "is" if self.left_out == 1 else "are"
            found.append(f"{plural(self.left_out, 'line')} of {file} cannot be read and {are} left out ({self._first})")
        if self.doubled:
            are = "is" if self.doubled == 1 else "are"
            found.append(f"{plural(self.doubled, 'line')} of {file} {are} there twice: each rollout counts once")
        return found


_KNOWN = "uid", "occurrence", "rollout", "attempt", "step", "reward"
key_of_trace: Callable[[Trace], Hashable] = attrgetter(*_KNOWN, "timing.began", "timing.total")
"""What distinguishes a rollout from all others. A trainer may ask for the same one again, but at another time."""
key_of_entry: Callable[[Entry], Hashable] = attrgetter(*_KNOWN, "began", "seconds")
"""The same of an entry."""
