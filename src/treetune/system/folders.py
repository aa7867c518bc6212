"""The folders of the package and the user's cache, the installed version, and atomic file writes."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

FOLDER = Path(__file__).parent.parent
"""The folder of the package."""


def default_cache_dir(argument: str | Path | None = None) -> Path:
    """The argument, else TREETUNE_TASK_CACHE_DIR, else `~/.cache/treetune/tasks`."""
    chosen = argument or os.environ.get("TREETUNE_TASK_CACHE_DIR") or "~/.cache/treetune/tasks"
    # Absolute, because the paths are passed to trainers that may run in another folder.
    return Path(chosen).expanduser().absolute()


def aside(path: Path) -> Path:
    """A temporary path next to a file."""
    return path.with_name(f".{path.stem}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically: readers see the old or the new content. Concurrent writers do not conflict."""
    temporary = aside(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def measure_kept(folder: Path, pattern: str) -> tuple[int, int]:
    """The number of files or folders in a cache that match a pattern, and their size in bytes."""
    sizes = [size for _, size, _ in _list_kept(folder, pattern)]
    return len(sizes), sum(sizes)


def prune_kept(folder: Path, pattern: str, older_than_days: float | None = None) -> tuple[int, int]:
    """Remove what `measure_kept` counts, or only what is older than `older_than_days`; return its number and size."""
    import shutil  # here, because every command imports this module

    latest = None if older_than_days is None else time.time() - older_than_days * 86400
    number = freed = 0
    for path, size, written in _list_kept(folder, pattern):
        if latest is None or written < latest:
            with suppress(OSError):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                number, freed = number + 1, freed + size
    return number, freed


def _list_kept(folder: Path, pattern: str) -> list[tuple[Path, int, float]]:
    """Each path with its size and the time of its last change."""
    found = []
    for path in folder.glob(pattern):
        with suppress(OSError):  # another process removed it
            states = [file.stat() for file in (path, *path.rglob("*")) if not file.is_dir()]
            found.append((path, sum(one.st_size for one in states), max((one.st_mtime for one in states), default=0.0)))
    return found


def read_version() -> str:
    """The installed version, which comes from the release tag."""
    from importlib.metadata import PackageNotFoundError, version  # takes 40 ms, and is rarely needed

    try:
        return version("treetune")
    except PackageNotFoundError:  # running from a source folder
        return "0+source"
