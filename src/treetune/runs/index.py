"""The index of a run: a short entry for each trace, so that a run can be sorted, filtered and grouped without reading
it.

    reader = IndexReader(Path("runs/x"))
    for entries in reader.read():                      # repeatedly while the run is being written
        entries[0].reward, entries[0].offset           # the position of its trace in traces.jsonl

The writer appends entries as it appends traces, several at a time. Missing entries (after a kill before they were
written, for an older run, or for a file from elsewhere) are made from the traces. The traces are authoritative; the
index only saves reading them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from pathlib import Path

import msgspec

from treetune.chat.message import without_surrogates
from treetune.config.trust import TRACE_LINES
from treetune.core.trace import Trace
from treetune.errors import plural
from treetune.runs.entry import Entry, entry_of, glance
from treetune.runs.plain_files import UNREADABLE, open_regular, open_to_append

INDEX = "index.jsonl"
LONGEST_LINE = 256 << 20
"""The maximum size of a line in bytes."""
_PART, _BLOCK = 1 << 19, 1 << 20
"""How many bytes of entries and of traces are read at once."""
_AT_ONCE = 64
"""How many entries are written at once."""

_decoder = msgspec.json.Decoder(Entry)
_encode_lines = msgspec.json.Encoder().encode_lines


_KNOWN = "uid", "occurrence", "rollout", "attempt", "step", "reward"
key_of_trace: Callable[[Trace], Hashable] = attrgetter(*_KNOWN, "timing.began", "timing.total")
"""Identifies a rollout. A trainer may request the same rollout again at another time."""
key_of_entry: Callable[[Entry], Hashable] = attrgetter(*_KNOWN, "began", "seconds")
"""The same key for an entry."""


class Damage:
    """The faults in the lines of a file of records: unreadable lines and duplicate rollouts.

        damage = Damage()
        for line, trace in TRACES.lines(folder, damage): ...
        damage.warnings_of("traces.jsonl")            # warnings, or none

    A kill may cut off the last line, and only the last, which is not damage. All code that reads records uses this
    class, so a summary, an index and a resumed run leave out the same lines.
    """

    def __init__(self) -> None:
        self.line = 0
        """The number of the last line that was read."""
        self.left_out = self.doubled = 0
        self._first = ""
        self._seen: set[int] = set()
        """Hashes instead of keys, because a run may have a million rollouts."""

    def leave_out(self, error: object) -> None:
        """Records that the last line cannot be read."""
        self.left_out += 1
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        self._first = self._first or f"line {self.line}: {why}"

    def is_doubled(self, key: Hashable) -> bool:
        """Returns whether a record with this key came before, and records it."""
        number = len(self._seen)
        self._seen.add(hash(key))
        self.doubled += (found := len(self._seen) == number)
        return found

    def once(self, entries: list[Entry]) -> list[Entry]:
        """Returns the entries that are not duplicates, and records the others."""
        keys = set(map(hash, map(key_of_entry, entries)))
        if len(keys) == len(entries) and self._seen.isdisjoint(keys):
            self._seen |= keys
            return entries
        return [entry for entry in entries if not self.is_doubled(key_of_entry(entry))]

    def warnings_of(self, file: str) -> list[str]:
        """A warning for each kind of damage."""
        found = []
        if self.left_out:
            are = "is" if self.left_out == 1 else "are"
            found.append(f"{plural(self.left_out, 'line')} of {file} cannot be read and {are} left out ({self._first})")
        if self.doubled:
            are = "is" if self.doubled == 1 else "are"
            found.append(f"{plural(self.doubled, 'line')} of {file} {are} repeated: each rollout counts once")
        return found


def encode(entries: Sequence[Entry]) -> bytes:
    """Encodes lines of the index. Surrogates, which UTF-8 cannot hold, are escaped as in the trace."""
    try:
        return _encode_lines(entries)
    except UnicodeEncodeError:
        return _encode_lines([without_surrogates(msgspec.to_builtins(entry)) for entry in entries])


class IndexWriter:
    """Writes entries to the index of a folder. If the disk is full, the rest is left out, because it can be rebuilt
    from the traces."""

    def __init__(self, folder: Path) -> None:
        self._file = open_to_append(folder / INDEX)
        self._waiting: list[Entry] = []

    def add(self, trace: Trace, offset: int, line: bytes) -> None:
        """Adds the entry of a trace whose line begins at this offset."""
        self._waiting.append(entry_of(trace, offset, line))
        if len(self._waiting) >= _AT_ONCE:
            self.flush()

    def add_lines(self, lines: bytes, offset: int) -> list[Entry]:
        entries = list(entries_in(lines, offset))
        self._waiting += entries
        self.flush()
        return entries

    def flush(self) -> None:
        with suppress(OSError):
            os.write(self._file, encode(self._waiting))
        self._waiting = []

    def close(self) -> None:
        self.flush()
        os.close(self._file)


class IndexReader:
    """Reads the entries of a run in order; each further `read` returns the new ones."""

    def __init__(self, folder: Path) -> None:
        self._index, self._records = folder / INDEX, folder / TRACE_LINES
        self.end = 0
        """The offset up to which the traces were read."""
        self._place: int | None = 0
        """The offset up to which the index was read; None if it does not match the traces."""
        self._file: tuple[int, int] | None = None
        self.damage = Damage()
        self._is_over = False
        """Whether nothing more can be read."""

    @property
    def replaced(self) -> bool:
        """Whether the file was replaced, so that everything must be read again."""
        try:
            state = os.stat(self._records)
        except FileNotFoundError:
            return self._file is not None
        return self._file is not None and ((state.st_dev, state.st_ino) != self._file or state.st_size < self.end)

    def read(self) -> Iterator[list[Entry]]:
        """Yields the entries of complete traces, a part at a time. A damaged trace has no entry and a duplicate has
        only one: `damage` counts both."""
        with suppress(FileNotFoundError), open(self._records, "rb", buffering=0) as traces:
            state = os.fstat(traces.fileno())
            self._file = state.st_dev, state.st_ino
            for entries in chain(self.read_index(traces.fileno()), self.read_traces(traces.fileno())):
                yield self.damage.once(entries)

    def read_index(self, traces: int) -> Iterator[list[Entry]]:
        """Yields the entries of the index as long as they are contiguous and match the traces."""
        size = os.fstat(traces).st_size
        if self._place is None or self.end == size:
            return
        with suppress(OSError), open_regular(self._index) as file:
            file.seek(self._place)
            rest = b""
            while part := file.read(_PART):
                lines, newline, rest = (rest + part).rpartition(b"\n")
                fitting: list[Entry] = []
                began = self.end
                try:
                    for entry in _decoder.decode_lines(lines + newline):
                        if entry.offset == self.end and entry.end <= size:
                            fitting.append(entry)
                            self.end = entry.end
                        elif entry.offset >= self.end or entry.end > self.end:  # otherwise it was read from the traces
                            self._place = None
                            break
                except UNREADABLE:
                    self._place = None
                if fitting and not _is_of(fitting[-1], traces):
                    self._place, self.end, fitting = None, began, []
                if fitting:
                    self.damage.line += len(fitting)
                    yield fitting
                if self._place is None or len(rest) > LONGEST_LINE:
                    return
                self._place += len(lines) + len(newline)

    def read_traces(self, file: int) -> Iterator[list[Entry]]:
        """The entries of the traces after those of the index."""
        block, held = bytearray(_BLOCK), 0  # one buffer for all: allocating gigabytes is expensive
        while not self._is_over:
            with memoryview(block) as view, view[held:] as free:
                if not (read := os.preadv(file, [free], self.end + held)):
                    return
            held += read
            whole = block.rfind(b"\n", 0, held) + 1
            if whole:
                found = list(entries_in(block, self.end, whole, self.damage))
                block[: held - whole] = block[whole:held]
                self.end, held = self.end + whole, held - whole
                if found:
                    yield found
            elif held >= LONGEST_LINE:
                self.damage.line += 1
                self.damage.leave_out(f"it has more than {LONGEST_LINE >> 20} MB, and nothing after it is read")
                self._is_over = True
            elif held == len(block):  # a longer line
                block.extend(bytes(held))


def _is_of(entry: Entry, traces: int) -> bool:
    """Whether an entry's position holds its trace. If an earlier line was cut, removed or duplicated, all later lines
    are at other positions than the index says."""
    if entry.length > LONGEST_LINE:
        return False
    line = os.pread(traces, entry.length, entry.offset)
    try:
        found = glance(line, 0, len(line), entry.offset)
    except UNREADABLE:
        return False
    return line.find(b"\n") == len(line) - 1 and key_of_entry(found) == key_of_entry(entry)


def entries_in(
    lines: bytes | bytearray, offset: int, stop: int | None = None, damage: Damage | None = None
) -> Iterator[Entry]:
    """Yields the entries of complete lines of traces, the first at `offset`. A damaged line has no entry."""
    start, stop = 0, len(lines) if stop is None else stop
    damage = damage or Damage()
    while start < stop:
        end = (lines.find(b"\n", start, stop) + 1) or stop
        damage.line += 1
        try:
            yield glance(lines, start, end, offset + start)
        except UNREADABLE as error:
            if not lines[start:end].isspace():
                damage.leave_out(error)
        start = end


def read_entries(folder: Path) -> Iterator[Entry]:
    """All entries of a run."""
    for entries in IndexReader(folder).read():
        yield from entries


def mend_index(folder: Path) -> None:
    """Drops entries without a trace and an incomplete last entry, and adds missing ones."""
    reader = IndexReader(folder)
    with open(folder / TRACE_LINES, "rb") as traces, open(open_to_append(folder / INDEX), "ab") as index:
        index.truncate(sum(len(encode(part)) for part in reader.read_index(traces.fileno())))
        index.writelines(map(encode, reader.read_traces(traces.fileno())))
