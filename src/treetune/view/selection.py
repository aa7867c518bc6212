"""What a query selects, as a file: the traces as JSON lines, a table of them in parquet, or a log of Inspect.

    for part in Selection(run, query, "jsonl").parts(): ...

What is read is fixed when it is made: a run that grows or is resumed meanwhile changes nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.core.trace import Trace, decode_trace
from treetune.evaluation import TRACES, Run
from treetune.runs.eval_log import write_eval_log
from treetune.runs.plain_files import bring_back

_BATCH = 1000
_PART = 1 << 20


class Selection:
    def __init__(self, run: Run, query: str, format: str) -> None:
        self._run = run
        self._rows = np.flatnonzero(run.fits(query))
        self._folder, self._format = run.folder, format
        self._places = [run.columns.places(name)[self._rows].tolist() for name in ("offset", "length")]
        self._table: dict[str, Any] = {}
        if format == "parquet":
            self._table = {name: self._chosen(values) for name, values in run.table().items()}
        self._file = os.open(run.folder / TRACES.file, os.O_RDONLY)

    def _chosen(self, values: Any) -> Any:
        """Of a column of numbers, or of a list of texts."""
        return values[self._rows] if isinstance(values, np.ndarray) else [values[at] for at in self._rows.tolist()]

    def __len__(self) -> int:
        return len(self._rows)

    def close(self) -> None:
        os.close(self._file)

    def parts(self) -> Generator[bytes]:
        """The file, part by part."""
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
                self._write_parquet(file)
            with open(file, "rb") as made:
                while part := made.read(_PART):
                    yield part

    def _lines(self) -> Iterator[bytes]:
        """The traces with their images in them, so that the file needs nothing else."""
        for offset, length in zip(*self._places, strict=True):
            yield bring_back(os.pread(self._file, length, offset), self._folder)

    def _traces(self) -> Iterator[Trace]:
        """Those that can be read."""
        for line in self._lines():
            with suppress(msgspec.MsgspecError):
                yield decode_trace(line)

    def _write_parquet(self, file: Path) -> None:
        """The columns of the run, and of each rollout its messages and the truth, as JSON."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns = {name: _array(values) for name, values in self._table.items()}
        writer: Any = None
        lines = self._lines()
        for start in range(0, len(self) or 1, _BATCH):
            part = {name: values[start : start + _BATCH] for name, values in columns.items()}
            texts: dict[str, list[str | None]] = {"messages": [], "ground_truth": []}
            for _ in range(len(self._rows[start : start + _BATCH])):
                try:
                    trace = decode_trace(next(lines))
                except msgspec.MsgspecError:
                    texts["messages"].append(None)
                    texts["ground_truth"].append(None)
                    continue
                texts["messages"].append(msgspec.json.encode(trace.messages, enc_hook=repr).decode())
                truth = trace.task.ground_truth
                texts["ground_truth"].append(None if truth is None else msgspec.json.encode(truth).decode())
            table = pa.table({**part, **{name: pa.array(values, pa.string()) for name, values in texts.items()}})
            writer = pq.ParquetWriter(file, table.schema) if writer is None else writer
            writer.write_table(table)
        writer.close()


def _array(values: Any) -> Any:
    """A column of numbers without NaN, or of texts."""
    import pyarrow as pa

    return pa.array(values, from_pandas=True) if isinstance(values, np.ndarray) else pa.array(values, pa.string())
