"""Copies of local files that the `datasets` library keeps in its own cache, as Arrow, to build from.

    place = copies_folder(cache_dir) / contents      # where `load_dataset` puts the copy of these bytes
    held = Hold(place)                               # nobody removes it meanwhile
    prune_copies(cache_dir, older_than_days=30, all=False)

The library never removes any. They are only needed while something is built, and can always be made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

try:
    import fcntl
except ImportError:  # not on every system
    fcntl = None  # type: ignore[assignment]


class Copy(msgspec.Struct, frozen=True):
    path: Path
    size: int
    last_used: float
    """Seconds since 1970."""


def copies_folder(cache_dir: Path) -> Path:
    """Where the copies lie from which a cache is built: in the library's own cache, found as the library does. It is
    not imported for this, which would take a second."""
    loaded: Any = sys.modules.get("datasets.config")
    if loaded is not None:
        place = Path(loaded.HF_DATASETS_CACHE)
    else:
        cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
        place = Path(os.environ.get("HF_DATASETS_CACHE", os.path.join(home, "datasets"))).expanduser()
    whose = hashlib.blake2b(os.fsencode(cache_dir), digest_size=6).hexdigest()
    return place / "treetune" / whose


class Hold:
    """Notes that a copy is used, and keeps it from being removed for as long as this lives."""

    def __init__(self, folder: Path) -> None:
        self._file: int | None = None
        # A full or read-only disk is told by whoever writes there.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            os.utime(folder)
            self._file = os.open(_lock_of(folder), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            if fcntl is not None:
                fcntl.flock(self._file, fcntl.LOCK_SH)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)


def copies(cache_dir: Path) -> list[Copy]:
    """Everything that is kept, last used first."""
    folder = copies_folder(cache_dir)
    found = [_measured(path) for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(found, key=lambda copy: -copy.last_used)


def prune_copies(cache_dir: Path, *, older_than_days: float | None, all: bool) -> list[Copy]:
    """Remove those that were not used for so long, or all; what is being built from stays."""
    removed = []
    for copy in copies(cache_dir):
        old = older_than_days is not None and time.time() - copy.last_used > older_than_days * 86400
        if not (all or old):
            continue
        with contextlib.suppress(OSError), open(_lock_of(copy.path), "wb") as lock:
            if fcntl is not None:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError where it is held
            shutil.rmtree(copy.path)
            _lock_of(copy.path).unlink(missing_ok=True)
            removed.append(copy)
    return removed


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _measured(folder: Path) -> Copy:
    size = 0
    for here, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # removed since it was listed
                size += os.lstat(os.path.join(here, name)).st_size
    return Copy(folder, size, folder.stat().st_mtime)
