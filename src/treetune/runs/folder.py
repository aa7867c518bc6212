"""A run on disk: `config.yaml` (can be run again), records that are appended as they arrive, `summary.json`, and
`fingerprint.json`, which describes how the run began and is checked when it is resumed. Images are files in `images/`,
and `index.jsonl` has a short entry for each trace.

    with RunFolder.create(Path("runs/x"), TRACES, evaluation) as run:
        run.append(trace)

All records are complete lines at every moment, except perhaps the last, so a killed run can be resumed.
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from filelock import FileLock, Timeout

from treetune.config.structs import dump_yaml
from treetune.config.trust import CONFIG, FINGERPRINT, SUMMARY, TRACE_LINES
from treetune.core.fingerprint import Fingerprint, config_differences, taskset_fingerprint
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace, decode_trace, encode_trace
from treetune.errors import ResumeError, UsageError, writing
from treetune.runs.entry import Entry
from treetune.runs.index import INDEX, LONGEST_LINE, Damage, IndexWriter, key_of_trace, mend_index
from treetune.runs.plain_files import UNREADABLE, bring_back, move_images, move_out, open_to_append, read_regular
from treetune.system.folders import write_atomically

SUPERSEDED = "superseded.jsonl"
"""Records that a resumed run replaced: errors that were retried."""
HARMLESS = ("max_concurrent:", "endpoint.", "max_judge_tokens:", "max_tokens_total:")
"""Prefixes of differences that cannot change a result; a run can be resumed in spite of them."""
GROWING = ("num_tasks", "num_rollouts")
"""The keys that may grow when a run is resumed."""

_BLOCK = 1 << 16
_writing = partial(
    writing, remedy="free some space or pass another -o; what was written is kept, and --resume continues it"
)

R = TypeVar("R")


class Described(Protocol):
    """A taskset, and the config that runs it again."""

    taskset: Taskset[Any, Any]

    def resolved(self) -> dict[str, Any]: ...


class RunBeginning(msgspec.Struct):
    """The config and the taskset that a run began with."""

    config: dict[str, Any]
    taskset: Fingerprint


class Records(msgspec.Struct, Generic[R], frozen=True):
    """A kind of record and the file that stores it."""

    file: str
    encode: Callable[[R], bytes]
    decode: Callable[[bytes], R]
    key: Callable[[R], Hashable]
    """Identifies a record, to find duplicates."""
    indexed: bool = False
    """Whether the records have an index."""

    def read(self, folder: Path, damage: Damage | None = None) -> Iterator[R]:
        """Yields the readable records, each once; `damage` counts the other lines."""
        return (record for _, record in self.lines(folder, damage or Damage()) if record is not None)

    def lines(self, folder: Path, damage: Damage) -> Iterator[tuple[bytes, R | None]]:
        """Yields each complete line with its record: None if the line is damaged or a duplicate. A kill can cut off
        only the last line, which is then left out."""
        path = folder / self.file
        if not path.exists():
            return
        decode, key = self.decode, self.key
        with open(path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, LONGEST_LINE), b""), 1):
                if not line.endswith(b"\n"):
                    if len(line) == LONGEST_LINE:
                        problem = f"{path}, line {number} has more than {LONGEST_LINE >> 20} MB"
                        raise ResumeError(problem, remedy="remove that line")
                    return
                try:
                    record: R | None = decode(bring_back(line, folder))
                except UNREADABLE as error:
                    if line.isspace():
                        continue
                    damage.line, record = number, None
                    damage.leave_out(error)
                yield line, None if record is None or damage.is_doubled(key(record)) else record


TRACES: Records[Trace] = Records(TRACE_LINES, encode_trace, decode_trace, key_of_trace, indexed=True)


def read_traces(folder: Path, taskset: Taskset[Any, Any], damage: Damage | None = None) -> Iterator[Trace]:
    """Yields the traces of a run, with tasks of the taskset's own types. Faulty lines are counted in `damage`, or
    reported as a warning."""
    counted = damage or Damage()
    typed = msgspec.structs.replace(TRACES, decode=lambda line: decode_trace(line, taskset.type_of))
    yield from typed.read(folder, counted)
    for problem in counted.warnings_of(TRACES.file) if damage is None else ():
        warnings.warn(f"{folder}: {problem}", stacklevel=2)


class RunFolder(Generic[R]):
    def __init__(self, path: Path, records: Records[R]) -> None:
        """Locks the folder, which is created if it is missing."""
        self.path = path
        self.records = records
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)
            (path / ".lock").touch()  # without this, the lock would report a forbidden folder as in use
        self._lock = FileLock(str(path / ".lock"), thread_local=False)  # it may be released by another thread
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise UsageError(f"another process is writing to {path}", remedy="wait for it, or pass -o") from None
        self._open_file()

    @classmethod
    def create(cls, path: Path, records: Records[R], what: Described) -> Self:
        """Creates a run folder; refuses one that already holds a run. A kill just after the start leaves no run."""
        if (path / CONFIG).exists() or next(records.lines(path, Damage()), None) is not None:
            raise UsageError(f"{path} already contains a run", remedy="pass --resume to continue it, or another -o")
        beginning = RunBeginning(what.resolved(), taskset_fingerprint(what.taskset))
        run = cls(path, records)
        run._write_beginning(beginning)
        return run

    @classmethod
    def resume(
        cls, path: Path, records: Records[R], what: Described, *, changed: bool = False, remedy: str = ""
    ) -> Self:
        """Opens an existing run folder. Refused if the config differs from the original one in anything that could
        change a result, except that it may request more; or if the taskset changed, unless `changed` allows that.
        `remedy` begins the advice for a changed taskset."""
        if not (path / FINGERPRINT).exists():
            raise ResumeError(f"{path} contains no run to resume", remedy="leave out --resume, or correct -o")
        try:
            began = msgspec.json.decode(read_regular(path / FINGERPRINT), type=RunBeginning)
        except (OSError, *UNREADABLE) as error:
            problem = f"{path / FINGERPRINT} cannot be read: {error}"
            raise ResumeError(problem, remedy="start a new run with another -o") from None
        config = what.resolved()
        grown = {key: config[key] for key in GROWING if _is_more(began.config.get(key), config.get(key))}
        changes = config_differences({**began.config, **grown}, config)
        if refused := [change for change in changes if not change.startswith(HARMLESS)]:
            problem = "\n  ".join([f"the config of {path} differs from the one the run began with:", *refused])
            remedy = "run it with its original config, or start a new run with another -o"
            raise ResumeError(problem, remedy=remedy)
        for change in changes:
            if change.startswith("endpoint.base_url:"):
                warnings.warn(f"the run continues at another address: {change}", stacklevel=2)
        if differences := began.taskset.differences(taskset_fingerprint(what.taskset)):
            message = f"the taskset changed since the run in {path} began: {'; '.join(differences)}"
            if not changed:
                other = "use the original taskset, or start a new run with another -o"
                raise ResumeError(message, remedy=f"{remedy}{other}")
            warnings.warn(message, stacklevel=2)
        run = cls(path, records)
        if grown:
            run._write_beginning(RunBeginning({**began.config, **grown}, began.taskset))
        return run

    def _write_beginning(self, beginning: RunBeginning) -> None:
        with _writing(self.path):
            write_atomically(self.path / FINGERPRINT, msgspec.json.encode(beginning))
            write_atomically(self.path / CONFIG, dump_yaml(beginning.config).encode())

    def read(self) -> Iterator[R]:
        return self.records.read(self.path)

    def keep(self, wanted: Callable[[R], bool]) -> None:
        """Moves unwanted records, damaged lines and duplicates aside, and drops an incomplete last line."""
        temporary = self.path / f".{self.records.file}.kept"
        damage = Damage()
        with _writing(self.path):
            with open(temporary, "wb") as kept, open(open_to_append(self.path / SUPERSEDED), "ab") as superseded:
                for line, record in self.records.lines(self.path, damage):
                    (kept if record is not None and wanted(record) else superseded).write(line)
            self._replace_records(temporary)
            self._mend_index()
            if not (self.path / SUPERSEDED).stat().st_size:
                (self.path / SUPERSEDED).unlink()
        for problem in damage.warnings_of(self.records.file):
            warnings.warn(f"{self.path}: {problem}; moved to {SUPERSEDED}", stacklevel=2)

    def replace(self, other: RunFolder[R]) -> None:
        """Replaces the records, the config and the fingerprint with those of another run; the old records are moved
        aside."""
        with _writing(self.path):
            with open(open_to_append(self.path / SUPERSEDED), "ab") as superseded:
                superseded.writelines(line for line, _ in self.records.lines(self.path, Damage()))
            move_images(other.path, self.path)
            self._replace_records(other.path / other.records.file)
            self._mend_index()
            for file in (FINGERPRINT, CONFIG):
                os.replace(other.path / file, self.path / file)

    def _replace_records(self, file: Path) -> None:
        self._close_files()
        with suppress(FileNotFoundError):  # its offsets are no longer valid
            os.unlink(self.path / INDEX)
        os.replace(file, self.path / self.records.file)
        self._open_file()

    def _open_file(self) -> None:
        with _writing(self.path):
            self._file = open_to_append(self.path / self.records.file)
            self._index = IndexWriter(self.path) if self.records.indexed else None
        self.size = os.fstat(self._file).st_size
        """The size of the records in bytes. No other process writes to them, because the folder is locked."""

    def _close_files(self) -> None:
        os.close(self._file)
        if self._index is not None:
            self._index.close()

    def append(self, record: R) -> None:
        with _writing(self.path):
            line = move_out(self.records.encode(record), self.path) + b"\n"
        self._append(line)
        if self._index is not None and isinstance(record, Trace):
            self._index.add(record, self.size - len(line), line)

    def append_lines(self, lines: bytes) -> list[Entry]:
        """Appends encoded records; returns their entries."""
        self._append(lines)
        return self._index.add_lines(lines, self.size - len(lines)) if self._index is not None else []

    def _mend_index(self) -> None:
        if self._index is not None:
            self._index.flush()
            mend_index(self.path)

    def _append(self, lines: bytes) -> None:
        """Appends all lines, or none if the disk is full."""
        with _writing(self.path):
            written = 0
            try:
                while written < len(lines):  # usually one write; on a nearly full disk the second write raises
                    written += os.write(self._file, lines[written:])
            except OSError:
                with suppress(OSError):
                    os.ftruncate(self._file, self.size)
                self.size = os.fstat(self._file).st_size
                raise
        self.size += written

    def drop_cut_line(self) -> None:
        """Drops an incomplete last line, which a kill leaves, so that more can be appended."""
        with _writing(self.path), open(self.path / self.records.file, "rb") as file:
            at = self.size
            while at > 0:
                start = max(0, at - _BLOCK)
                file.seek(start)
                if (found := file.read(at - start).rfind(b"\n")) >= 0:
                    at = start + found + 1
                    break
                at = start
            os.ftruncate(self._file, at)
            self.size = at
            self._mend_index()

    def set_aside(self, folder: Path) -> None:
        """Moves the records into another run folder, replacing its records, and starts empty."""
        with _writing(folder):
            folder.mkdir(exist_ok=True)
            for file in (FINGERPRINT, CONFIG):
                write_atomically(folder / file, (self.path / file).read_bytes())
            self._close_files()
            for file in (self.records.file, *((INDEX,) if self.records.indexed else ())):
                os.replace(self.path / file, folder / file)
            self._open_file()

    def write_summary(self, summary: Any) -> None:
        with _writing(self.path):
            write_atomically(self.path / SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close_files()
        self._lock.release()


def _is_more(before: int | None, now: int | None) -> bool:
    """Compares two numbers; None means all."""
    return before is not None and (now is None or now > before)


def unused_path(path: Path) -> Path:
    """Returns `path`, or the first unused of `path-2`, `path-3`, ... if it exists."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(free for free in chain([path], others) if not free.exists())


def name_run(*parts: str) -> Path:
    """Returns an unused folder below `runs`, named after `parts` and the time."""
    return unused_path(Path("runs") / "--".join([*map(slug, parts), time.strftime("%Y%m%d-%H%M%S")]))


def slug(name: str) -> str:
    """Reduces a name to the characters that a folder name may have."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "-", name).strip("-")[-60:]
