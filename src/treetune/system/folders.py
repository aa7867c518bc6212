"""Where the package and the user's cache are, the installed version, and writing a file in one piece."""

from __future__ import annotations

import os
from pathlib import Path

FOLDER = Path(__file__).parent.parent
"""The package."""


def default_cache_dir(argument: str | Path | None = None) -> Path:
    """The argument, else TREETUNE_TASK_CACHE_DIR, else `~/.cache/treetune/tasks`."""
    chosen = argument or os.environ.get("TREETUNE_TASK_CACHE_DIR") or "~/.cache/treetune/tasks"
    # Absolute, because the paths are handed to trainers that may run elsewhere.
    return Path(chosen).expanduser().absolute()


def aside(path: Path) -> Path:
    """A temporary name beside a file."""
    return path.with_name(f".{path.stem}.{os.getpid()}.{os.urandom(4).hex()}.tmp")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file: others see the old one or the new one, never a part. Two writers do not disturb each other."""
    temporary = aside(path)
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_version() -> str:
    """The installed version. It comes from the tag of a release."""
    from importlib.metadata import PackageNotFoundError, version  # 40 ms that few need

    try:
        return version("treetune")
    except PackageNotFoundError:  # a source folder on the path
        return "0+source"
