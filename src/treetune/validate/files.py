"""Check files of rows against all rules: every fault with its rows, what is expected and how to fix it.

    report = validate(["train.parquet", "validation.parquet"])
    report.ok, report.findings

One chunk is in memory at a time, and 8 bytes for each prompt to find those that come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from treetune.errors import TreetuneError, UsageError
from treetune.rows.layouts import detect, format_named
from treetune.rows.sources import File, HubName, Kind, Sources, find
from treetune.validate.chunks import Chunk, chunks_of
from treetune.validate.fix import helps
from treetune.validate.json_types import JsonTypes
from treetune.validate.prefilter import Screened
from treetune.validate.prompts import key_of
from treetune.validate.repeats import Repeats, is_validation
from treetune.validate.report import Report
from treetune.validate.row import RowCheck
from treetune.validate.rules import RULES
from treetune.validate.shape import (
    Feature,
    difference,
    merged,
    schema_feature,
    unsupported,
)
from treetune.validate.turns import Turns

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.validate.lengths import Lengths

OnRows = Callable[[int], None]
ENDINGS = (".parquet", ".json", ".jsonl")
"""Names of files that SkyRL's loader knows; it takes any other for a dataset of the hub."""


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
    training, held_out = split(sources, validation)
    for source in (*training, *held_out):
        run.file(source)
    for group in (training, held_out):
        run.compare([str(source) for source in group])
    run.repeats.tell(report, [str(source) for source in held_out])
    return report


def split(sources: Sources, validation: Sources = ()) -> tuple[list[File | HubName], list[File | HubName]]:
    """The training files and the validation files, each once: a folder may hold both."""
    held_out = dict.fromkeys(find(validation))
    training = dict.fromkeys(source for source in find(sources) if source not in held_out)
    if held_out and not training:
        raise UsageError(
            f"{next(iter(held_out))!s} is the training file and the validation file",
            remedy="name other files beside those of --val",
        )
    told = [source for source in training if is_validation(str(source))]
    return [source for source in training if source not in told], [*told, *held_out]


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
        self.format = format_named(format).name if format is not None else None
        self.environments = environments
        self.quick = quick
        self.lengths = lengths
        self.on_rows = on_rows
        self.repeats = Repeats()
        self.features: dict[str, dict[str, Feature]] = {}
        self.turns: dict[str, tuple[Turns, str]] = {}

    def file(self, source: File | HubName) -> None:
        name, report = str(source), self.report
        report.files.append(name)
        parquet = isinstance(source, File) and source.kind is Kind.PARQUET
        schema = self._parquet_types(source.path) if isinstance(source, File) and parquet else None
        types = JsonTypes(source)
        check: RowCheck | None = None
        unit = "row"
        turns = Turns()
        for chunk in chunks_of(source, report, quick=self.quick):
            unit = chunk.unit
            if check is None:
                check = self._check(schema.names if schema is not None else _columns(chunk))
                report.formats[name] = check.format
                self._ending(source, check)
            self._chunk(chunk, check, turns)
            if chunk.rows is not None:
                types.take(chunk)
            report.rows += len(chunk.numbers)
            if self.on_rows is not None:
                self.on_rows(report.rows)
        if types.features:
            if isinstance(source, File):  # what comes from the hub has been read by `datasets` already
                types.tell(report)
            self.features[name] = types.features
        self.turns[name] = turns, unit

    def compare(self, files: Sequence[str]) -> None:
        """Whether the loader puts files together. It reads those for training and those for validation apart."""
        before: dict[str, Feature] = {}
        fitting: list[str] = []
        for name in files:
            feature = self.features.get(name, {})
            if found := difference(feature, before):
                other = next((file for file in fitting if difference(feature, self.features[file])), "the files before")
                self.report.add("type-differs", name, f"{found} {other}")
            elif feature:
                before = merged(before, feature)
                fitting.append(name)
        column = any("max_turns" in self.features.get(name, {}) for name in files)
        for name in files:
            inside = _has_turns(before if name in fitting else self.features.get(name, {}))
            turns, unit = self.turns[name]
            turns.tell(self.report, name, unit, column=column, inside=inside)

    def _ending(self, source: File | HubName, check: RowCheck) -> None:
        if check.format == "skyrl" and isinstance(source, File) and source.path.suffix.lower() not in ENDINGS:
            self.report.add("unknown-ending", str(source.path), f"a name that ends in {source.path.suffix}")

    def _check(self, columns: Iterable[str]) -> RowCheck:
        special = {} if self.lengths is None else {"special": self.lengths.special}
        return RowCheck(self.format or _format(columns), self.environments, contents=not self.quick, **special)

    def _chunk(self, chunk: Chunk, check: RowCheck, turns: Turns) -> None:
        if chunk.table is not None:
            screened = Screened(chunk.table, check)
            positions, keys = np.flatnonzero(screened.look), screened.keys
        else:
            positions, keys = np.arange(len(chunk.numbers)), None
        rows = chunk.rows_at(positions)
        for position, row in zip(positions, rows, strict=True):
            number = chunk.numbers[int(position)]
            for rule, found in check(row):
                # Fixing is tried on the rows that are shown: that tells whether to advise it.
                fixable = RULES[rule].fixable and self.report.is_shown(rule, chunk.file) and helps(rule, row, check)
                self.report.add(rule, chunk.file, found, (number,), chunk.unit, helps=fixable)
            if chunk.given:
                turns.take(chunk.given[int(position)], number, check)
        if chunk.table is not None:
            turns.take_batch(chunk.table, chunk.numbers, check)
        if keys is None and not self.quick:
            every = rows if len(rows) == len(chunk.numbers) else chunk.rows_at(np.arange(len(chunk.numbers)))
            keys = np.array([key_of(row.get("prompt")) for row in every], np.uint64)
        if keys is not None:
            self.repeats.take(chunk.file, chunk.unit, chunk.numbers, keys)
        if self.lengths is not None:
            self.lengths.take(chunk, self.report)

    def _parquet_types(self, path: Path) -> pa.Schema | None:
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
        return schema


def _has_turns(features: dict[str, Feature]) -> bool:
    extra = features.get("extra_info")
    return isinstance(extra, dict) and "max_turns" in extra


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
