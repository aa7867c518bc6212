"""Check files of rows against all rules: every fault with its rows, what is expected and how to fix it.

    report = validate(["train.parquet", "validation.parquet"])
    report.ok, report.findings

One chunk is in memory at a time, and 8 bytes for each prompt to find those that come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treetune.errors import TreetuneError
from treetune.formats.format import detect, named
from treetune.formats.sources import File, HubName, Kind, Sources, find
from treetune.formats.validation.chunks import Chunk, chunks_of
from treetune.formats.validation.prompts import key_of
from treetune.formats.validation.repeats import Repeats, is_validation
from treetune.formats.validation.report import Report
from treetune.formats.validation.row import RowCheck
from treetune.formats.validation.screen import Screened
from treetune.formats.validation.shape import (
    Feature,
    Shape,
    difference,
    report_shape,
    schema_feature,
    shape_of,
    unsupported,
)

if TYPE_CHECKING:
    from treetune.formats.validation.lengths import Lengths

OnRows = Callable[[int], None]


def validate(
    sources: Sources,
    *,
    validation: Sources = (),
    format: str | None = None,
    environments: Collection[str] = (),
    quick: bool = False,
    lengths: Lengths | None = None,
    on_rows: OnRows | None = None,
) -> Report:
    """Check files; those of `validation`, or whose name says so, must share no prompt with the others.

    `environments`: ids that are registered elsewhere. `quick`: only what needs no contents. `lengths`: also count each
    prompt's tokens.
    """
    report = Report(quick=quick)
    run = _Run(report, format, environments, quick, lengths, on_rows)
    training = list(find(sources))
    held_out = [source for source in find(validation) if source not in training]
    for source in (*training, *held_out):
        run.file(source)
    names = [_name(source) for source in held_out]
    run.finish([*names, *(name for name in map(_name, training) if is_validation(name))])
    return report


class _Run:
    def __init__(
        self,
        report: Report,
        format: str | None,
        environments: Collection[str],
        quick: bool,
        lengths: Lengths | None,
        on_rows: OnRows | None,
    ) -> None:
        self.report = report
        self.format = named(format).name if format is not None else None
        self.environments = environments
        self.quick = quick
        self.lengths = lengths
        self.on_rows = on_rows
        self.repeats = Repeats()
        self.features: dict[str, dict[str, Feature]] = {}

    def file(self, source: File | HubName) -> None:
        name, report = _name(source), self.report
        report.files.append(name)
        parquet = isinstance(source, File) and source.kind is Kind.PARQUET
        columns = self._parquet_types(source.path) if isinstance(source, File) and parquet else None
        shape = Shape()
        check: RowCheck | None = None
        unit = "row"
        # What is null in one row and not in another is known when the file has been read.
        turns = _Turns()
        for chunk in chunks_of(source, report, quick=self.quick):
            unit = chunk.unit
            if check is None:
                check = self._check(columns if columns is not None else _columns(chunk))
            self._chunk(chunk, check, turns)
            if chunk.rows is not None:
                shape_of(chunk.rows, chunk.numbers, shape)
            report.rows += len(chunk.numbers)
            if self.on_rows is not None:
                self.on_rows(report.rows)
        if not parquet and shape.counts:
            report_shape(shape, name, unit, report)
            feature = {key: below.feature() for key, below in shape.keys.items()}
            self.features[name] = feature
        turns.tell(report, name, unit)

    def finish(self, validation: Sequence[str]) -> None:
        self.repeats.tell(self.report, validation)
        first: dict[str, dict[str, Feature]] = {}
        for name, feature in self.features.items():
            for other, theirs in first.items():
                if found := difference(feature, theirs):
                    self.report.add("type-differs", name, f"{found} {other}")
                    break
            else:
                first[name] = feature

    def _check(self, columns: Iterable[str]) -> RowCheck:
        special = {} if self.lengths is None else {"special": self.lengths.special}
        return RowCheck(self.format or _format(columns), self.environments, contents=not self.quick, **special)

    def _chunk(self, chunk: Chunk, check: RowCheck, turns: _Turns) -> None:
        if chunk.table is not None:
            screened = Screened(chunk.table, check)
            positions, keys = np.flatnonzero(screened.look), screened.keys
        else:
            positions, keys = np.arange(len(chunk.numbers)), None
        rows = chunk.rows_at(positions)
        for position, row in zip(positions, rows, strict=True):
            number = chunk.numbers[int(position)]
            for rule, found in check(row):
                self.report.add(rule, chunk.file, found, (number,), chunk.unit)
            turns.take(row, number, check)
        if keys is None and not self.quick:
            every = rows if len(rows) == len(chunk.numbers) else chunk.rows_at(np.arange(len(chunk.numbers)))
            keys = np.array([key_of(row.get("prompt")) for row in every], np.uint64)
        if keys is not None:
            self.repeats.take(chunk.file, chunk.unit, chunk.numbers, keys)
        if self.lengths is not None:
            self.lengths.take(chunk, self.report)

    def _parquet_types(self, path: Path) -> list[str] | None:
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(path) as file:
                schema = file.schema_arrow
        except Exception:
            return None  # told when its rows are read
        feature = schema_feature(schema)
        self.features[str(path)] = feature
        if place := unsupported(feature):
            self.report.add("unsupported-type", str(path), f"{place} is a type that `datasets` does not know")
        if fault := _metadata_fault(schema.metadata or {}):
            self.report.add("unsupported-type", str(path), fault)
        return list(schema.names)


class _Turns:
    """Rows without `max_turns` where others of the file have it: loaders give them a null, and `int(None)` fails."""

    def __init__(self) -> None:
        self.given = {"max_turns": False, "extra_info.max_turns": False}
        self.missing: dict[str, list[int]] = {"max_turns": [], "extra_info.max_turns": []}

    def take(self, row: dict[str, Any], number: int, check: RowCheck) -> None:
        extra = row.get("extra_info")
        inside = isinstance(extra, dict) and "max_turns" in extra
        self.given["max_turns"] |= "max_turns" in row
        self.given["extra_info.max_turns"] |= inside
        env_class = row.get("env_class")
        contract = check.contract(env_class) if isinstance(env_class, str) and env_class in check.known else None
        if check.format != "skyrl" or contract is None or contract.max_turns == 1:
            return
        if "max_turns" not in row:
            self.missing["max_turns"].append(number)
            if not inside and env_class == "gsm8k_multi_turn":  # the one that looks there
                self.missing["extra_info.max_turns"].append(number)

    def tell(self, report: Report, file: str, unit: str) -> None:
        for place, rows in self.missing.items():
            if self.given[place] and rows:
                report.add("null-max-turns", file, f"{place} is null here, and given in other rows", rows, unit)


def _name(source: File | HubName) -> str:
    return source.name if isinstance(source, HubName) else str(source.path)


def _columns(chunk: Chunk) -> list[str]:
    return list(dict.fromkeys(name for row in chunk.rows or () for name in row))


def _format(columns: Iterable[str]) -> str:
    """The format of a file; SkyRL's where nothing tells, for it asks for the most."""
    columns = set(columns)
    try:
        found = detect(columns).name
    except TreetuneError:
        return "skyrl"
    return "skyrl" if found == "verl" and "reward_model" not in columns else found


def _metadata_fault(metadata: dict[bytes, bytes]) -> str | None:
    import json

    try:
        json.loads(metadata.get(b"huggingface", b"{}"))
    except ValueError:
        return "the metadata that `datasets` reads is no JSON"
    return None
