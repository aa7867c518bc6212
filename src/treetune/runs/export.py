"""Exports the rollouts that a query selects as a file: traces as JSON lines, a table in parquet, or an Inspect log.

    RunExport(run, "failed", "jsonl").write(Path("failed.jsonl"))
    for part in RunExport(run, query, "parquet").parts(): ...

The selection is fixed when it is created: a run that grows or is resumed in the meantime changes nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from treetune.core.trace import Trace, decode_trace
from treetune.runs.eval_log import write_eval_log
from treetune.runs.folder import TRACES
from treetune.runs.plain_files import bring_back
from treetune.runs.push import write_rollouts
from treetune.runs.run import Run

_PART = 1 << 20


class RunExport:
    def __init__(self, run: Run, query: str, format: str) -> None:
        self._run, self._format = run, format
        rows = np.flatnonzero(run.fits(query))
        self._places = [run.columns.places(name)[rows].tolist() for name in ("offset", "length")]
        self._metrics = run.columns.metrics
        self._file = os.open(run.folder / TRACES.file, os.O_RDONLY)

    def __len__(self) -> int:
        return len(self._places[0])

    def close(self) -> None:
        os.close(self._file)

    def write(self, path: Path) -> None:
        if self._format == "eval":
            write_eval_log(self._run, path, self._traces())
        elif self._format == "parquet":
            write_rollouts(self._traces(), self._metrics, path)
        else:
            with open(path, "wb") as file:
                file.writelines(self._lines())

    def parts(self) -> Generator[bytes]:
        """The content of the file, part by part."""
        with tempfile.TemporaryDirectory(prefix="treetune-selection-") as folder:
            self.write(Path(folder) / "selected")
            with open(Path(folder) / "selected", "rb") as made:
                while part := made.read(_PART):
                    yield part

    def _lines(self) -> Iterator[bytes]:
        """The traces with their images embedded, so that the file needs nothing else."""
        for offset, length in zip(*self._places, strict=True):
            yield bring_back(os.pread(self._file, length, offset), self._run.folder)

    def _traces(self) -> Iterator[Trace]:
        """The readable traces."""
        for line in self._lines():
            with suppress(msgspec.MsgspecError):
                yield decode_trace(line)
