"""The folders of the package and the user's cache, the installed version, and atomic file writes."""

from __future__ import annotations

import os
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


def read_version() -> str:
    """The installed version, which comes from the release tag."""
    from importlib.metadata import PackageNotFoundError, version  # takes 40 ms, and is rarely needed

    try:
        return version("treetune")
    except PackageNotFoundError:  # running from a source folder
        return "0+source"
