"""Reads a run of another program and caches it as a run folder: each of its rollouts is converted to a trace once.

    kept = KeptRun(Path("outputs/rollout_data"), Verl())
    kept.update()                              # a separate process reads new data
    kept.folder                                # has traces.jsonl and its index

Traces are stored in the user's cache. So queries, the text search, groups and the viewer read them through the same
index as any run, and a file in another format is opened once. A training that continues writes more files, or appends
to the last one; only new data is read. If a file changed in any other way, everything from that file on is read again.

A hostile file can harm only the process that reads it (`main`), which has limits and stays for the next request. Only
one runs at a time, so several hostile runs take no more memory than one. The limits are multiples of a file's size, so
that a small file that unpacks to gigabytes is refused, and a large file is read.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from filelock import FileLock

from treetune.core.trace import Trace, decode_trace, encode_trace
from treetune.errors import UsageError, format_error
from treetune.runs.entry import Entry
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.foreign.program import ForeignRollout, Program, Stamp
from treetune.runs.index import read_entries
from treetune.runs.plain_files import below
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically

if TYPE_CHECKING:
    from treetune.system.processes import ProgramPool


_MEMORY, _MEMORY_RATIO = 320 << 20, 8
"""The memory limit in bytes: a base, and an amount for each byte of the largest file."""
_SECONDS, _SECONDS_PER_MEGABYTE, _NEXT_SECONDS = 10.0, 1.0, 5.0
"""The CPU time limit in seconds: a base, an amount per megabyte, and then an amount for each further file."""
_CLOCK_RATIO, _CLOCK_SECONDS = 4, 60
"""The limit of wall-clock time, after which the process is killed."""
_one = threading.Lock()


class ReadRequest(msgspec.Struct):
    """The run to read, and for how long."""

    path: str
    kind: str
    top: str
    """No file outside of this folder is read."""
    folder: str
    """Where its traces are stored."""
    seconds: float
    """About how long to read; another request continues."""


def ask_reader(asked: ReadRequest) -> None:
    """Returns when the run was read. Raises `UsageError` if the process failed or was killed."""
    with _one:
        replies = _workers().ask(msgspec.to_builtins(asked), 1)
    fault = replies[0] if replies else "reading it took more memory or time than a run of its size may"
    if fault:
        raise UsageError(f"{asked.path} cannot be read: {fault}", remedy="remove it, or read it where it was written")


@cache
def _workers() -> ProgramPool:
    from treetune.system.processes import ProgramPool

    return ProgramPool(
        "treetune.runs.foreign.cached_run", "the reader of runs", "reinstall Treetune", flags=("-P", "-m")
    )


# In the process


class TooLong(Exception):
    """The CPU time limit was reached."""


@contextmanager
def limited(total: int, largest: int) -> Iterator[None]:
    """Limits this process to the resources that files of `total` bytes, the largest of which has `largest`, may take.
    Beyond that, MemoryError or TooLong is raised, or the process ends; so only a process that does nothing else may use
    it."""
    memory, seconds = _MEMORY + _MEMORY_RATIO * largest, _SECONDS + _SECONDS_PER_MEGABYTE * (total >> 20)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    handler = signal.signal(signal.SIGPROF, _raise_too_long)
    resource.setrlimit(resource.RLIMIT_DATA, (memory if before[1] < 0 else min(memory, before[1]), before[1]))
    signal.setitimer(signal.ITIMER_PROF, seconds, _NEXT_SECONDS)
    signal.alarm(int(_CLOCK_RATIO * seconds) + _CLOCK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_DATA, before)
        signal.signal(signal.SIGPROF, handler)


def _raise_too_long(number: int, frame: Any) -> None:
    raise TooLong


def explain(error: BaseException) -> str:
    """The message for an error with a file, which names the limit that was reached."""
    if isinstance(error, MemoryError):
        return "it takes more memory than a file of its size may"
    if isinstance(error, TooLong):
        return "it takes more time than a file of its size may"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, zipfile.BadZipFile | OSError | ValueError) and str(error):
        return str(error)
    return format_error(error)


T = TypeVar("T")
_VERSION = 3
"""The version of the conversion. Increase it when a program module reads more."""
_SOURCE = "source.json"
_AT_ONCE_SECONDS = 5.0
"""How long one run is read before another one gets its turn."""
_MOST_KEPT, _MOST_RATIO = 256 << 20, 100
"""The maximum size in bytes of traces from one file, and their largest ratio to the size of the file."""
_LONGEST, _MOST_DESCRIBED = 64 << 20, 1 << 20
"""The maximum size in bytes of a trace, and of a run's description."""

_DEEPEST = 400
"""The recursion limit for decoding, lower than the limit where traces are read again, so that they are never too deep
there."""
_LARGE = 200 << 20
"""After this many bytes the reading process is not used again."""


class ReadFile(msgspec.Struct):
    """A file that was read."""

    name: str
    stamp: Stamp
    position: int
    mark: str
    end: int
    """The offset at which its traces end."""
    whole: bool = False
    """Whether the whole file was read."""
    faults: int = 0
    """How many of its records are unreadable."""
    fault: str = ""
    """The fault of the first unreadable record."""


class KeptSource(msgspec.Struct):
    """The files from which the traces were made."""

    path: str
    kind: str
    version: int = _VERSION
    config: dict[str, Any] = {}
    files: list[ReadFile] = []
    times: int = 0
    """How often traces were removed that a reader may have seen."""

    bytes: int = 0
    """The total size of its files in bytes."""

    @property
    def share_read(self) -> float:
        read = sum(file.stamp[0] for file in self.files if file.whole)
        return read / self.bytes if self.bytes else 1.0

    @property
    def warnings(self) -> list[str]:
        faults = sum(file.faults for file in self.files)
        if not faults:
            return []
        first = next(file.fault for file in self.files if file.faults)
        return [f"{faults:,} of the records cannot be read, and are left out; the first: {first}"]


class RolloutNumbers:
    """Assigns each trace its task, the task's occurrence, and the number of its rollout."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._tasks: dict[str, int] = {}
        self._occurrences: dict[tuple[str, int | None, str], list[int]] = {}
        self._count: dict[str, int] = {}
        self._rollouts: dict[tuple[str, int], set[int]] = {}
        for entry in entries:
            self._tasks.setdefault(entry.uid, entry.idx)
            places = self._occurrences.setdefault((entry.uid, entry.step, ""), [])
            if entry.occurrence not in places:
                places.append(entry.occurrence)
            self._count[entry.uid] = max(self._count.get(entry.uid, 0), entry.occurrence + 1)
            self._rollouts.setdefault((entry.uid, entry.occurrence), set()).add(entry.rollout)

    def note(self, trace: Trace, found: ForeignRollout) -> None:
        """Equal prompts of one step are a group. A different step or name makes a different occurrence of the task."""
        uid = trace.uid or trace.task.uid
        places = self._occurrences.setdefault((uid, trace.step, found.group), [])
        free = (place for place in places if found.rollout not in self._rollouts[uid, place])
        occurrence = next(free, None)
        if occurrence is None:
            occurrence = self._count.get(uid, 0)
            self._count[uid] = occurrence + 1
            places.append(occurrence)
        rollouts = self._rollouts.setdefault((uid, occurrence), set())
        trace.uid, trace.occurrence = uid, occurrence
        trace.rollout = len(rollouts) if found.rollout is None else found.rollout
        rollouts.add(trace.rollout)
        if trace.task.idx < 0:
            trace.task = msgspec.structs.replace(trace.task, idx=self._tasks.setdefault(uid, len(self._tasks)))


class KeptRun:
    def __init__(self, path: Path, kind: Program, top: Path | None = None, folder: Path | None = None) -> None:
        """No file outside of `top` is read; it defaults to the run's own folder. `folder` is where the run is
        cached."""
        self.path, self.kind = path.absolute(), kind
        self.top = (top if top is not None else path if path.is_dir() else path.parent).absolute()
        self.folder = folder or _kept_runs() / digest([str(self.path), kind.name])

    def update(self, seconds: float | None = None) -> KeptSource:
        """Reads new data from the files of the run, for about `seconds` at most; returns what has been read so far.
        Raises `UsageError` if reading takes more than a run may take."""
        source = self._read()
        before: list[ReadFile] | None = None
        files, stamps = self._files()
        while not self._is_known(source, files, stamps) and source.files != before:
            before = source.files
            at_once = _AT_ONCE_SECONDS if seconds is None else seconds
            ask_reader(ReadRequest(str(self.path), self.kind.name, str(self.top), str(self.folder), at_once))
            source = self._read()
            if seconds is not None:
                break
        return source

    def _files(self) -> tuple[list[Path], list[Stamp]]:
        with below(self.top):
            files = self.kind.files(self.path)
            return files, [self.kind.stamp(file) for file in files]

    def _is_known(self, source: KeptSource, files: list[Path], stamps: list[Stamp]) -> bool:
        """If the files are gone, the cached traces remain."""
        known = [(file.name, file.stamp) for file in source.files if file.whole]
        return not files or known == [(str(file), stamp) for file, stamp in zip(files, stamps, strict=True)]

    def take(self, seconds: float) -> None:
        """Reads new data, in the process that `update` starts."""
        files, stamps = self._files()
        sizes = [size for size, _ in stamps]
        self.folder.mkdir(parents=True, exist_ok=True)
        with below(self.top), FileLock(str(self.folder / ".update")):
            source = self._read()
            if self._is_known(source, files, stamps):
                return  # another process was faster
            source.bytes = sum(sizes)
            with limited(source.bytes, max(sizes)):
                source.config = _without_fault({}, self._describe, files)
                self._take(source, files, stamps, time.monotonic() + seconds)

    def _describe(self, files: list[Path]) -> dict[str, Any]:
        """Describes the run. Empty if the files contain nothing, or too much."""
        found = self.kind.describe(files)
        return found if len(msgspec.json.encode(found)) <= _MOST_DESCRIBED else {}

    def _read(self) -> KeptSource:
        with suppress(OSError, msgspec.MsgspecError):
            source = msgspec.json.decode((self.folder / _SOURCE).read_bytes(), type=KeptSource)
            if source.version == _VERSION:
                return source
        return KeptSource(str(self.path), self.kind.name)

    def _take(self, source: KeptSource, files: list[Path], stamps: list[Stamp], until: float) -> None:
        older, known = source.files, list(zip(map(str, files), stamps, strict=True))
        same = 0
        while same < min(len(older), len(known)) and older[same].whole and _is(older[same], known[same]):
            same += 1
        source.files = older[:same]
        begun = older[same] if same < min(len(older), len(known)) and self._goes_on(older[same], *known[same]) else None
        end = begun.end if begun is not None else source.files[-1].end if source.files else 0
        with RunFolder(self.folder, TRACES) as out:
            if older and end < older[-1].end:
                source.times += 1
            if out.size != end:
                os.truncate(self.folder / TRACES.file, end)
                out.drop_cut_line()
            try:
                numbers = RolloutNumbers(read_entries(self.folder))
                for at in range(same, len(files)):
                    taken = begun or ReadFile(*known[at], 0, "", 0)
                    taken.stamp, begun = stamps[at], None
                    self._take_file(taken, files[at], files[at - 1] if at else None, numbers, out, until)
                    source.files.append(taken)
                    if time.monotonic() >= until:
                        break
            finally:
                write_atomically(self.folder / _SOURCE, msgspec.json.encode(source))

    def _goes_on(self, taken: ReadFile, name: str, stamp: Stamp) -> bool:
        """Whether the part of a file that was read is unchanged, so that only later data is new."""
        if taken.name != name or not taken.mark:
            return False
        return taken.stamp == stamp or taken.mark == self._mark(Path(name), taken.position)

    def _mark(self, file: Path, position: int) -> str:
        return _without_fault("", self.kind.mark, file, position)

    def _take_file(
        self,
        taken: ReadFile,
        file: Path,
        before: Path | None,
        numbers: RolloutNumbers,
        out: RunFolder[Trace],
        until: float,
    ) -> None:
        taken.whole = True
        if not taken.position and before is not None and _without_fault(False, self.kind.repeats, file, before):
            taken.end = out.size
            return
        most = out.size + _MOST_KEPT + _MOST_RATIO * taken.stamp[0]
        for found in self._found(file, taken.position):
            taken.position = found.position
            try:
                if found.trace is not None:
                    line = encode_trace(found.trace)
                    if len(line) > _LONGEST:
                        raise ValueError(f"a rollout has more than {_LONGEST >> 20} MB")
                    decode_trace(line)  # a value of the wrong type becomes the record's fault here
                    numbers.note(found.trace, found)
                    out.append(found.trace)
                    if out.size > most:
                        taken.faults, taken.fault = taken.faults + 1, taken.fault or _too_much(file, most)
                        break
                    if time.monotonic() >= until and self._mark(file, found.position):
                        taken.whole = False
                        break
                    continue
            except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:  # no trace can hold it
                found.fault = f"{file.name}: {error}"
            taken.fault = taken.fault or found.fault
            taken.faults += 1
        taken.mark = self._mark(file, taken.position)
        taken.end = out.size

    def _found(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        """Yields the rollouts of a file. An unreadable file is being written or is damaged: it counts as one record."""
        try:
            yield from self.kind.read(file, after)
        except Exception as error:  # the reader of a damaged file may raise anything
            yield ForeignRollout(None, after, fault=f"{file.name}: {explain(error)}")


def _without_fault(otherwise: T, ask: Callable[..., T], *about: Any) -> T:
    """Returns the answer about a file, or `otherwise` if the file is damaged: reading its rollouts then reports the
    fault."""
    try:
        return ask(*about)
    except Exception:
        return otherwise


def _too_much(file: Path, most: int) -> str:
    return f"{file.name}: it unpacks to more than {most >> 20:,} MB of rollouts; the rest is left out"


def _is(taken: ReadFile, known: tuple[str, Stamp]) -> bool:
    return (taken.name, taken.stamp) == known


def _kept_runs() -> Path:
    return default_cache_dir() / "runs"


def main() -> None:
    """Runs the process that reads other programs' runs: one `ReadRequest` per line, with a null or a fault as reply."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # other pools reserve more memory than the limit allows
    from treetune.runs.foreign import PROGRAMS

    sys.setrecursionlimit(_DEEPEST)
    kinds = {kind.name: kind for kind in PROGRAMS}
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        asked, fault = msgspec.json.decode(line, type=ReadRequest), None
        try:
            KeptRun(Path(asked.path), kinds[asked.kind], Path(asked.top), Path(asked.folder)).take(asked.seconds)
        except Exception as error:
            fault = explain(error)
        print(json.dumps(fault), file=replies, flush=True)
        if _peak_memory() > _LARGE:
            return  # its remaining memory may not suffice for the next request


def _peak_memory() -> int:
    """In bytes. The figure of `getrusage` would begin with that of the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


if __name__ == "__main__":
    main()
