"""A run of another program as a `Run`: the same columns, groups, queries and traces.

run = ForeignRun("outputs/rollout_data", Verl())
run.kind, run.path, run.follow()
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from treetune.errors import UsageError
from treetune.runs.foreign.kept import KeptRun
from treetune.runs.foreign.kind import Kind
from treetune.runs.run import Run


class ForeignRun(Run):
    def __init__(self, path: str | Path, kind: Kind, seconds: float | None = None, top: Path | None = None) -> None:
        """`seconds` is how long to read at first; `follow` goes on. No file outside of `top` is read."""
        self.path, self.kind = Path(path), kind.name
        self._kept = KeptRun(self.path, kind, top)
        self.folder = self._kept.folder
        self._source = self._kept.update(seconds)
        if not self._source.files:
            raise UsageError(f"{self.path} holds no run of {kind.name}", remedy="name a run that it has written")
        self._begin_anew()
        super().follow(seconds)

    def follow(self, seconds: float | None = None) -> int:
        """Takes up what the program has written since; gives how many rollouts there are more. Where it wrote what it
        had written before anew, all of them count."""
        times, self._source = self._source.times, self._kept.update(seconds)
        if self._source.times != times:
            self._begin_anew()
        return super().follow(seconds)

    @property
    def share_read(self) -> float:
        return min(self._source.share_read, super().share_read)

    @property
    def warnings(self) -> list[str]:
        return [*self._source.warnings, *super().warnings]

    @cached_property
    def config(self) -> dict[str, Any]:
        """What the program tells of itself, under the names that a config of ours has."""
        return self._source.config
