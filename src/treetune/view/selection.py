"""Exports the rollouts that a query selects as a file: traces as JSON lines, a table in parquet, or an Inspect log.

    for part in Selection(run, query, "jsonl").parts(): ...

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


class Selection:
    def __init__(self, run: Run, query: str, format: str) -> None:
        self._run = run
        rows = np.flatnonzero(run.fits(query))
        self._folder, self._format = run.folder, format
        self._places = [run.columns.places(name)[rows].tolist() for name in ("offset", "length")]
        self._metrics = run.columns.metrics
        self._file = os.open(run.folder / TRACES.file, os.O_RDONLY)

    def close(self) -> None:
        os.close(self._file)

    def parts(self) -> Generator[bytes]:
        """The content of the file, part by part."""
        if self._format == "jsonl":
            gathered, size = [], 0
            for line in self._lines():
                gathered.append(line)
                size += len(line)
                if size >= _PART:
                    yield b"".join(gathered)
                    gathered, size = [], 0
            yield b"".join(gathered)
            return
        with tempfile.TemporaryDirectory(prefix="treetune-view-") as folder:
            file = Path(folder) / "selected"
            if self._format == "eval":
                write_eval_log(self._run, file, traces=self._traces())
            else:
                write_rollouts(self._traces(), self._metrics, file)
            with open(file, "rb") as made:
                while part := made.read(_PART):
                    yield part

    def _lines(self) -> Iterator[bytes]:
        """The traces with their images embedded, so that the file needs nothing else."""
        for offset, length in zip(*self._places, strict=True):
            yield bring_back(os.pread(self._file, length, offset), self._folder)

    def _traces(self) -> Iterator[Trace]:
        """The readable traces."""
        for line in self._lines():
            with suppress(msgspec.MsgspecError):
                yield decode_trace(line)
