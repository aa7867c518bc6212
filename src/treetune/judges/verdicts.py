"""Verdicts on disk, each under the hash of who was asked and what: what was paid for once is never paid again.

A file each, in the folder `verdicts` of the cache, so that processes and machines that share it need no lock.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from treetune.cache_folder import default_cache_dir, write_atomically
from treetune.policy import Usage
from treetune.task import digest


class Said(msgspec.Struct, kw_only=True):
    """What a judge said that could be read."""

    judge: Any
    """Who, as in the key."""
    prompt: str
    answer: str
    usage: Usage


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
