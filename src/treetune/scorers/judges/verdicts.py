"""Verdicts on disk, each under the hash of who was asked and what: what was paid for once is never paid again.

A file each, in the folder `verdicts` of the cache, so that processes and machines that share it need no lock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from treetune.core.policy import Usage
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically


class Said(msgspec.Struct, kw_only=True):
    """What a judge said that could be read."""

    judge: Any
    """Who, as in the key."""
    prompt: str
    answer: str
    usage: Usage


class KeptVerdicts:
    """All verdicts of a cache, whoever gave them."""

    def __init__(self, cache_dir: Path) -> None:
        self.folder = cache_dir / "verdicts"

    def measure(self) -> tuple[int, int]:
        """How many there are, and their bytes."""
        sizes = [size for _, size, _ in self._files()]
        return len(sizes), sum(sizes)

    def prune(self, older_than_days: float | None = None) -> tuple[int, int]:
        """Removes all of them, or those that were written so many days ago; how many, and their bytes."""
        latest = None if older_than_days is None else time.time() - older_than_days * 86400
        number = freed = 0
        for path, size, written in list(self._files()):
            if latest is None or written < latest:
                with suppress(OSError):
                    path.unlink()
                    number, freed = number + 1, freed + size
        for folder in self.folder.glob("*"):
            with suppress(OSError):  # which still has some
                folder.rmdir()
        return number, freed

    def _files(self) -> Iterator[tuple[Path, int, float]]:
        for path in self.folder.glob("*/*"):
            with suppress(OSError):  # another process removed it
                found = path.stat()
                yield path, found.st_size, found.st_mtime


class VerdictCache:
    def __init__(self, judge: Any) -> None:
        """`judge` is what makes its answers what they are, as plain values: model, address, sampling."""
        self._judge = judge
        self.folder = default_cache_dir() / "verdicts"

    def find(self, prompt: str) -> Said | None:
        with suppress(OSError, msgspec.MsgspecError):  # absent, or damaged: it is asked again
            return msgspec.json.decode(self._path(prompt).read_bytes(), type=Said)
        return None

    def keep(self, prompt: str, answer: str, usage: Usage) -> None:
        path = self._path(prompt)
        said = Said(judge=self._judge, prompt=prompt, answer=answer, usage=usage)
        with suppress(OSError):  # a full disk costs a second call, not this verdict
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(said))

    def _path(self, prompt: str) -> Path:
        key = digest([self._judge, prompt], 20)
        return self.folder / key[:2] / f"{key[2:]}.json"
