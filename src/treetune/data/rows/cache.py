"""Caches built files. The key says what a file was built from, and a sidecar describes it.

    cache = Cache(default_cache_dir())
    key = f"{impl_hash(cls, DatasetTaskset, [], 1)}_{config_hash(config, {'a': content_hash(path, None)})}"
    sidecar, was_hit = cache.get_or_build(key, build)
    cache.path(key)

A file is complete once its sidecar exists, which is written last. A cache hit takes no lock, and writes and imports
little.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.core.finding import Flaw
from treetune.errors import StorageError, TreetuneError
from treetune.system.digest import canonical
from treetune.system.folders import aside, write_atomically

if TYPE_CHECKING:
    from io import BufferedReader

ARROW = ("rows", "kept")
"""Key prefixes of Arrow files, which belong to a `PromptDataset`. Other files are parquet."""

QUIET_WAIT = 5.0
"""Seconds to wait for another process's build before a warning."""

TOUCH_EVERY = 60.0
"""Seconds between two updates of the last-used time: thousands of workers may share a cache."""


class Sidecar(msgspec.Struct, frozen=True, kw_only=True):
    """A description of what a file was built from. The builder fills in what it knows; the cache adds `seconds` and the
    fields after it."""

    config: dict[str, Any]
    source: str
    """The name of the dataset, for people."""
    revision: str | None = None
    """The hub commit that was read."""
    rows: int
    dropped: dict[str, int] = {}
    """Dropped rows, by reason."""
    flaws: list[Flaw] = []
    """Problems with rows of the source."""
    fingerprint: str
    """A hash of the data."""
    schema: dict[str, Any] = {}
    versions: dict[str, str] = {}
    """Versions of the libraries that took part."""
    seconds: float = 0.0
    """How long the build took."""
    key: str = ""
    size: int = 0
    digest: str = ""
    mtime_ns: int = 0
    """Modification time of the file. While it is unchanged, the digest need not be computed again."""
    created: str = ""


class EntryState(enum.StrEnum):
    OK = "ok"
    """Built and unchanged."""
    DAMAGED = "damaged"
    """Changed, truncated or missing since it was written; the next use rebuilds it."""
    UNFINISHED = "unfinished"
    """Being built, or left behind by a killed build."""


class CacheEntry(msgspec.Struct, frozen=True):
    """One key of the cache, as `treetune cache list` shows it."""

    key: str
    state: EntryState
    fault: str | None
    """Why it is damaged."""
    size: int
    """Bytes on disk, including everything that belongs to the entry."""
    last_used: float
    """Seconds since 1970."""
    sidecar: Sidecar | None
    rows: int | None
    source: str
    created: str


class Cache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{'.arrow' if key.startswith(ARROW) else '.parquet'}"

    def hash_content(self, path: Path) -> str:
        """Return `content_hash`. The hashes of large files are remembered in the cache."""
        return content_hash(path, self.folder / ".content")

    def hit(self, key: str, *, quiet: bool = False) -> Sidecar | None:
        """Return the sidecar of an intact file, and record the use. A damaged file gives a warning, and None is
        returned."""
        sidecar, fault = self._check(key)
        if fault is not None:
            if not quiet:
                warnings.warn(f"{self.path(key)} is damaged ({fault}), building it again", stacklevel=2)
            return None
        # A cache of another user, or on a read-only mount, still serves hits.
        with contextlib.suppress(OSError):
            if time.time() - os.stat(self._sidecar(key)).st_mtime > TOUCH_EVERY:
                os.utime(self._sidecar(key))
        return sidecar

    def get_or_build(self, key: str, build: Callable[[Path], Sidecar], *, force: bool = False) -> tuple[Sidecar, bool]:
        """Return the sidecar and whether it was a hit. `build` writes the file to the path that it gets.

        If several processes ask for one key at once, only one builds it. `force` builds even if the file exists; the
        old file stays in place until the new one is complete.
        """
        # No warning yet: another process may be between its two renames. The lock below settles that.
        if not force and (found := self.hit(key, quiet=True)) is not None:
            return found, True
        with self._lock(key):
            if not force and (found := self.hit(key)) is not None:
                return found, True
            try:
                return self._build(key, build), False
            except OSError as error:
                raise self._write_error(error) from None

    def entries(self) -> list[CacheEntry]:
        """Return every entry, most recently used first. Files that no build wrote are left out."""
        import re

        key = rf"(?:[0-9a-f]{{8,}}|{'|'.join(ARROW)})_[0-9a-f]{{8,}}"
        name = re.compile(rf"\.?({key})\.(parquet|arrow|json|.*tmp.*)")
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        keys = {match[1] for match in map(name.fullmatch, names) if match}
        return sorted(filter(None, map(self._entry, keys)), key=lambda entry: (-entry.last_used, entry.key))

    def prune(self, *, older_than_days: float | None, all: bool, damaged: bool) -> list[CacheEntry]:
        """Remove the entries that any of the three criteria selects, and return them; `damaged` includes unfinished
        ones. Entries that another process is building are kept."""

        def selected(entry: CacheEntry) -> bool:
            old = older_than_days is not None and time.time() - entry.last_used > older_than_days * 86400
            return all or old or (damaged and entry.state is not EntryState.OK)

        removed = []
        for candidate in filter(selected, self.entries()):
            with self._lock(candidate.key, wait=False) as held:
                entry = self._entry(candidate.key) if held else None
                if entry is None or not selected(entry):  # the build has ended, or is still running
                    continue
                for file in [*self._files(entry.key), self.folder / f".{entry.key}.lock"]:
                    file.unlink(missing_ok=True)
                removed.append(entry)
        return removed

    def _check(self, key: str) -> tuple[Sidecar | None, str | None]:
        """Return the sidecar of a finished build, and what is wrong with its file now."""
        try:
            sidecar = msgspec.json.decode(self._sidecar(key).read_bytes(), type=Sidecar)
        except FileNotFoundError:
            return None, None
        except (OSError, ValueError, msgspec.MsgspecError):
            return None, "its sidecar cannot be read"
        if sidecar.key != key:
            return sidecar, "its sidecar belongs to another key"
        try:
            with open(self.path(key), "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size != sidecar.size:
                    return sidecar, f"{status.st_size} bytes instead of {sidecar.size}"
                if status.st_mtime_ns != sidecar.mtime_ns:
                    if file_hash(file) != sidecar.digest:
                        return sidecar, "its content changed"
                    sidecar = msgspec.structs.replace(sidecar, mtime_ns=status.st_mtime_ns)  # copied, or touched
                    with contextlib.suppress(OSError):
                        write_atomically(self._sidecar(key), _encode(sidecar))
        except FileNotFoundError:
            return sidecar, "the file is gone"
        except OSError as error:
            return sidecar, f"it cannot be read: {error.strerror}"
        return sidecar, None

    def _build(self, key: str, build: Callable[[Path], Sidecar]) -> Sidecar:
        self._remove_leftovers(key)
        temporary = aside(self.path(key))
        began = time.perf_counter()
        try:
            sidecar = build(temporary)
            seconds = time.perf_counter() - began
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
                status = os.fstat(file.fileno())
                sidecar = msgspec.structs.replace(
                    sidecar,
                    key=key,
                    size=status.st_size,
                    digest=file_hash(file),
                    mtime_ns=status.st_mtime_ns,
                    seconds=round(seconds, 3),
                    created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                )
            encoded = _encode(sidecar)
            os.replace(temporary, self.path(key))
        finally:
            self._remove_leftovers(key)
        write_atomically(self._sidecar(key), encoded)
        return sidecar

    def _entry(self, key: str) -> CacheEntry | None:
        sidecar, fault = self._check(key)
        state = EntryState.DAMAGED if fault else EntryState.OK if sidecar else EntryState.UNFINISHED
        statuses = []
        for file in self._files(key):
            with contextlib.suppress(OSError):
                statuses.append(file.stat())
        if not statuses:  # removed after it was listed
            return None
        size, last_used = sum(status.st_size for status in statuses), statuses[0].st_mtime  # a hit touches the sidecar
        known = (sidecar.rows, sidecar.source, sidecar.created) if sidecar else (None, "", "")
        return CacheEntry(key, state, fault, size, last_used, sidecar, *known)

    @contextlib.contextmanager
    def _lock(self, key: str, wait: bool = True) -> Iterator[bool]:
        """Hold the key's lock. Without `wait`, yield whether the lock was free."""
        from filelock import FileLock, Timeout

        lock = FileLock(str(self.folder / f".{key}.lock"))
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=QUIET_WAIT if wait else 0)
            except Timeout:
                if wait:
                    warnings.warn(f"another process is building {self.path(key)}, waiting for it", stacklevel=4)
                    lock.acquire()
        except OSError as error:
            raise self._write_error(error) from None
        try:
            yield lock.is_locked
        finally:
            lock.release()

    def _write_error(self, error: OSError) -> StorageError:
        folder = "pass --cache-dir, or set TREETUNE_TASK_CACHE_DIR, to a folder "
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        room = f"make room (`treetune cache prune --older-than 30`), or {folder}on another disk"
        reason = os.strerror(error.errno) if error.errno else str(error)
        return StorageError(
            f"cannot write to the cache folder {self.folder}: {reason}", remedy=room if full else f"{folder}of your own"
        )

    def _sidecar(self, key: str) -> Path:
        return self.folder / f"{key}.json"

    def _files(self, key: str) -> list[Path]:
        """Return everything that belongs to a key, its sidecar first."""
        return [self._sidecar(key), self.path(key), *self.folder.glob(f".{key}.*tmp*")]

    def _remove_leftovers(self, key: str) -> None:
        for file in self._files(key)[2:]:
            file.unlink(missing_ok=True)


def _encode(sidecar: Sidecar) -> bytes:
    return msgspec.json.format(msgspec.json.encode(sidecar), indent=2) + b"\n"


# Keys depend on bytes, not on names


def impl_hash(cls: type, stop: type, further_files: Sequence[Path], builder_version: str) -> str:
    """Hash the code that a build runs: the files of `cls` and of its bases (except `stop`, its bases and Treetune's
    own), any `further_files`, what all these import from their folders, and the builder's version. Moving a file, or
    loading it under another module name, does not change the hash."""
    from treetune.config.code_files import hash_files, source_of
    from treetune.system.folders import FOLDER

    files = []
    for base in cls.__mro__:
        if base in stop.__mro__ or base.__module__ in sys.builtin_module_names:  # `dict` changes only with Python
            continue
        if (file := source_of(base)) is None or not file.is_file():
            whose = f"{cls.__name__} has" if base is cls else f"{base.__name__}, a base of {cls.__name__}, has"
            raise TreetuneError(
                f"{whose} no source file, so a change to it could not be noticed",
                remedy="define the class in a .py file rather than in a notebook or a prompt",
            )
        if not file.is_relative_to(FOLDER.resolve()):
            files.append(file)
    try:
        hashes = [hash_files(part.expanduser().resolve() for part in some) for some in (files, further_files)]
    except OSError as error:
        raise TreetuneError(f"cannot read {error.filename}: {error.strerror}") from None
    return hashlib.sha256(canonical([*hashes, builder_version])).hexdigest()[:20]


def config_hash(config: Mapping[str, Any], contents: Mapping[str, str]) -> str:
    """Hash a config and the content of its local data, regardless of the order of keys."""
    try:
        encoded = canonical({"config": config, "contents": contents})
    except TypeError as error:
        raise TreetuneError(f"the config holds a value that cannot be part of a cache key: {error}") from None
    return hashlib.sha256(encoded).hexdigest()[:20]


def content_hash(path: Path, memory: Path | None) -> str:
    """Hash a file's bytes, or the names in a folder and their content.

    `memory` is a folder that stores the hashes of large files. They are valid as long as size, times and inode stay the
    same: reading gigabytes to find that nothing changed would cost more than a hit. None stores nothing.
    """
    if not path.is_dir():
        return _hash_once(path, memory)
    total = hashlib.blake2b(digest_size=20)
    for name in sorted(_list_files(path)):
        total.update(f"{name}\0{_hash_once(path / name, memory)}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def file_hash(file: BufferedReader) -> str:
    return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()


REMEMBERED_FROM = 1 << 20
"""File size in bytes from which hashes are remembered. Reading a smaller file is cheaper than remembering its hash."""

SETTLED_NS = 2_000_000_000
"""How long a file must be unchanged before its hash is remembered: two versions within one clock tick can have the same
time."""


def _hash_once(path: Path, memory: Path | None) -> str:
    now = time.time_ns()
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        if memory is None or status.st_size < REMEMBERED_FROM:
            return file_hash(file)
        note, state = memory / hashlib.blake2b(os.fsencode(path.absolute()), digest_size=16).hexdigest(), _state(file)
        with contextlib.suppress(OSError, ValueError):  # missing or damaged
            known, remembered = note.read_text().split()
            if known == state:
                return remembered
        found = file_hash(file)
        if now - max(status.st_mtime_ns, status.st_ctime_ns) >= SETTLED_NS and _state(file) == state:
            with contextlib.suppress(OSError):
                memory.mkdir(parents=True, exist_ok=True)
                write_atomically(note, f"{state} {found}".encode())
        return found


def _state(file: BufferedReader) -> str:
    status = os.fstat(file.fileno())
    return f"{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}"


def _list_files(folder: Path) -> Iterator[str]:
    """List the files below a folder by relative name. Hidden files are skipped, as in `load_dataset`."""
    seen = {os.path.realpath(folder)}
    for here, folders, names in os.walk(folder, followlinks=True):
        entered = []
        for name in sorted(folders):
            # Links can lead back to a parent folder, so each folder is entered once.
            target = os.path.realpath(os.path.join(here, name))
            if not name.startswith(".") and target not in seen:
                seen.add(target)
                entered.append(name)
        folders[:] = entered
        for name in names:
            if not name.startswith(".") and os.path.isfile(os.path.join(here, name)):
                yield os.path.relpath(os.path.join(here, name), folder)
