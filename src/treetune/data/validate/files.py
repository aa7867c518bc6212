"""Checks files of rows against all rules: reports each fault with its rows, what is expected and how to fix it.

    report = validate(["train.parquet", "validation.parquet"])
    report.ok, report.findings

Memory holds one chunk, plus 8 bytes per prompt. Parquet is read as Arrow, which can be prefiltered; JSON as rows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from treetune.data.arrow_values import arrow_rows, drop_nulls, pause_gc, to_rows
from treetune.data.rows.formats import FORMATS, detect, format_named
from treetune.data.rows.image_columns import IMAGES
from treetune.data.rows.reading import hub_batches, text_batches
from treetune.data.sources.files import open_parquet, rows_within
from treetune.data.sources.names import (
    Batch,
    File,
    FileKind,
    FolderSplits,
    HubName,
    Row,
    Sources,
    find,
    find_with_splits,
)
from treetune.data.validate.column_types import Feature, JsonTypes, find_difference, merge, type_feature
from treetune.data.validate.prompt_rules import LengthCheck, PromptKeys, is_validation, key_of, report_repeats
from treetune.data.validate.reward_rules import Turns, check_forms
from treetune.data.validate.row import check_row, helps
from treetune.data.validate.rules import RULES, SPECIAL, FilesReport, RowContext
from treetune.errors import TreetuneError, UsageError, plural

if TYPE_CHECKING:
    import pyarrow as pa


Source = File | HubName

STRICTEST = "skyrl"
"""The format with the most rules, used if the columns do not identify the format."""
FORM_ROWS = 100
"""How many rows at the beginning of a file are checked for where their answers go."""
SIZE = 16_384
"""Rows per parquet chunk: the fastest of the small sizes."""


def validate(
    sources: Sources,
    *,
    validation: Sources = (),
    format: str | None = None,
    environments: Collection[str] = (),
    quick: bool = False,
    lengths: LengthCheck | None = None,
    on_rows: Callable[[int], None] = lambda count: None,
) -> FilesReport:
    """Check files. Files in `validation`, or named as such, must share no prompt with the others.

    `environments`: ids that are registered elsewhere. `quick`: check only what needs no contents. `lengths`: also count
    each prompt's tokens. `on_rows` gets the number of rows read so far.
    """
    if format is not None:
        format_named(format)
    run = FilesCheck(FilesReport(quick=quick), format, environments, lengths, on_rows)
    groups = split(sources, validation)
    if not any(groups):
        raise UsageError("there is nothing to check", remedy="name at least one file, folder or dataset of rows")
    for group in groups:
        for source in group:
            run.check_file(source)
        run.compare_files([str(source) for source in group])
    report_repeats(run.parts, [str(source) for source in groups[1]], run.report)
    return run.report


def split(sources: Sources, validation: Sources = ()) -> tuple[list[Source], list[Source]]:
    """Return the training files and the validation files, each file once: a folder may hold both."""
    held_out = dict.fromkeys(find(validation))
    training: dict[Source, None] = {}
    by_name: dict[Source, None] = {}
    for name, found in find_with_splits(sources):
        if isinstance(found, FolderSplits):
            splits = found.files if found.named is None else {found.named: list(find(name))}
            files = [(file, split != "train") for split, some in splits.items() for file in some]
        else:
            files = [(file, is_validation(str(file))) for file in found]
        for source, held in files:
            if source not in held_out:
                (by_name if held else training)[source] = None
    if held_out and not (training or by_name):
        raise UsageError(
            f"{next(iter(held_out))} is both the training file and the validation file",
            remedy="name other files than those of --val",
        )
    return list(training), [*by_name, *held_out]


class FilesCheck(msgspec.Struct):
    """The state of one `validate` call."""

    report: FilesReport
    format: str | None
    environments: Collection[str]
    lengths: LengthCheck | None
    on_rows: Callable[[int], None]
    parts: list[PromptKeys] = []
    features: dict[str, dict[str, Feature]] = {}
    turns: dict[str, tuple[Turns, str]] = {}

    def check_file(self, source: Source) -> None:
        name, report = str(source), self.report
        report.files.append(name)
        path = source.path if isinstance(source, File) else None
        if path and _is_parquet(source):
            self._check_types(path)
        types, turns, unit = JsonTypes(path), Turns(), "row"
        check: RowContext | None = None
        for chunk in read_chunks(source, report, quick=report.quick):
            unit = chunk.unit
            if check is None:
                check = self._check_for(self.features.get(name) or [key for row in chunk.rows or () for key in row])
                report.formats[name] = check.format.name
                if path and (endings := check.format.endings) and path.suffix.lower() not in endings:
                    report.add("unknown-ending", name, f"a name that ends in {path.suffix}")
            self._check_chunk(chunk, check, turns)
            if not self.report.quick and chunk.numbers and chunk.numbers[0] < FORM_ROWS:
                self._check_forms(chunk, check)
            if chunk.rows is not None and check.format.in_parquet:
                types.add(chunk.written, chunk.numbers, chunk.unit)
            report.rows += len(chunk.numbers)
            self.on_rows(report.rows)
        if types.features:
            types.report_to(report)
            self.features[name] = types.features
        self.turns[name] = turns, unit

    def _check_forms(self, chunk: Chunk, check: RowContext) -> None:
        """Check the first rows of a file that break no other rule, because their prompts come from one template."""
        some = min(FORM_ROWS, len(chunk.numbers))
        rows = map(check.format.to_plain, chunk.rows_at(np.arange(some)))
        for number, row in zip(chunk.numbers[:some], rows, strict=True):
            sound = next(check_row(row, check), None) is None
            for rule, found in check_forms(row, check) if sound else ():
                self.report.add(rule, chunk.file, found, [number], chunk.unit)

    def compare_files(self, files: Sequence[str]) -> None:
        """Check whether the loader can join the files. It reads training and validation files separately."""
        before: dict[str, Feature] = {}
        fitting: list[str] = []
        for name in files:
            feature = self.features.get(name, {})
            if found := find_difference(feature, before):
                others = (file for file in fitting if find_difference(feature, self.features[file]))
                self.report.add("type-differs", name, f"{found}: the latter in {next(others, 'the files before')}")
            elif feature:
                before = merge(before, feature)
                fitting.append(name)
        column = any("max_turns" in self.features.get(name, {}) for name in files)
        for name in files:
            extra = (before if name in fitting else self.features.get(name, {})).get("extra_info")
            inside = isinstance(extra, dict) and "max_turns" in extra
            turns, unit = self.turns[name]
            turns.report_to(self.report, name, unit, column=column, inside=inside)

    def _check_types(self, path: Path) -> None:
        """Check the types of a parquet file."""
        import pyarrow.parquet as pq

        try:
            schema = pq.read_schema(path)
        except Exception:
            return  # reported when the rows are read
        unsupported: list[str] = []
        self.features[str(path)] = {one.name: type_feature(one.type, one.name, unsupported) for one in schema}
        if unsupported:
            found = f"{unsupported[0]} is a type that `datasets` does not know"
            self.report.add("unsupported-type", str(path), found)

    def _check_for(self, columns: Iterable[str]) -> RowContext:
        """Return the check for the format of a file."""
        format = self.format
        if format is None:
            try:
                format = detect(set(columns), default=STRICTEST).name
            except TreetuneError:
                format = STRICTEST
        special = SPECIAL if self.lengths is None else self.lengths.special
        return RowContext(format, self.environments, contents=not self.report.quick, special=special)

    def _check_chunk(self, chunk: Chunk, check: RowContext, turns: Turns) -> None:
        positions = every = np.arange(len(chunk.numbers))
        keys = None
        if chunk.table is not None and IMAGES not in chunk.table.schema.names:
            from treetune.data.validate.prefilter import columns_of, keys_of, prefilter

            if (columns := columns_of(chunk.table)) is not None:
                positions = np.flatnonzero(prefilter(columns, check))
                keys = keys_of(columns)
        rows = list(map(check.format.to_plain, chunk.rows_at(positions)))
        for position, row in zip(positions.tolist(), rows, strict=True):
            number = chunk.numbers[position]
            for rule, found in check_row(row, check):
                # The fix is tried on the rows that are named: `--fix` is suggested only if it helps.
                fixable = RULES[rule].fixable and self.report.has_room(rule, chunk.file) and helps(rule, row, check)
                self.report.add(rule, chunk.file, found, (number,), chunk.unit, helps=fixable)
            turns.add(chunk.written[position] if chunk.written else row, number, check)
        needs_keys = keys is None and check.contents
        if len(rows) < len(every) and (needs_keys or self.lengths is not None):
            rows = list(map(check.format.to_plain, chunk.rows_at(every)))
        if needs_keys:
            keys = np.array([key_of(row.get("prompt"), row.get(IMAGES)) for row in rows], np.uint64)
        if keys is not None:
            self.parts.append(PromptKeys(chunk.file, chunk.unit, chunk.numbers, keys))
        if self.lengths is not None:
            self.lengths.check(rows, chunk.numbers, chunk.file, chunk.unit, self.report)


# Reading files


class Chunk(NamedTuple):
    """Some rows of one file: a table for parquet, otherwise rows."""

    file: str
    unit: str
    numbers: Sequence[int]
    rows: list[Row] | None
    """The rows without nulls."""
    written: Sequence[Row] = ()
    """The rows with the nulls that were written: `datasets` infers types from them."""
    table: pa.RecordBatch | None = None

    def rows_at(self, positions: np.ndarray[Any, Any]) -> list[Row]:
        """Return some of the rows as trainers see them, without nulls: values that no parquet column holds are JSON
        text."""
        if self.table is None:
            return [(self.rows or [])[position] for position in positions]
        import pyarrow as pa

        # Not `take(positions)`, for which Arrow would import pandas: a fifth of a second.
        indices = pa.Array.from_buffers(pa.int64(), len(positions), [None, pa.py_buffer(positions)])
        some = self.table if len(positions) == self.table.num_rows else self.table.take(indices)
        with pause_gc():
            return to_rows(some.schema.names, some.columns, some.num_rows)


def read_batches(sources: Iterable[Source]) -> Iterator[Batch]:
    """Yield the rows of all readable sources as written; `validate` reports the others."""
    for source in sources:
        for chunk in read_chunks(source, FilesReport()):
            rows = (chunk.rows or []) if chunk.table is None else arrow_rows(chunk.table)
            yield Batch(chunk.file, chunk.unit, chunk.numbers, rows)


def read_chunks(source: Source, report: FilesReport, *, quick: bool = False) -> Iterator[Chunk]:
    """Yield the chunks of one source; whatever cannot be read is reported."""
    name, count = str(source), 0
    try:
        for chunk in _parquet_chunks(name, report, quick) if _is_parquet(source) else _text_chunks(source, report):
            count += len(chunk.numbers)
            yield chunk
    except UsageError:  # the hub has no such dataset
        raise
    except Exception as error:  # damaged files can raise anything
        message = error.message if isinstance(error, TreetuneError) else f"{error}"
        report.add("unreadable", name, f"after {plural(count, 'row')}: {message}" if count else message)
        return
    if not count and ("unreadable", name) not in report.by_place:
        report.add("no-rows", name, "no rows")


def _is_parquet(source: Source) -> bool:
    return isinstance(source, File) and source.kind is FileKind.PARQUET


def _text_chunks(source: Source, report: FilesReport) -> Iterator[Chunk]:
    name = str(source)
    if isinstance(source, HubName):
        batches = hub_batches(source)
    else:
        if source.kind is FileKind.CSV:
            report.add("unreadable", name, "trainers do not read CSV; `treetune convert` writes it as parquet")
        unit = "line" if source.kind is FileKind.LINES else "row"
        batches = text_batches(source, on_fault=lambda number, why: report.add("unreadable", name, why, [number], unit))
    for batch in batches:
        yield Chunk(name, batch.unit, batch.numbers, drop_nulls(batch.rows), batch.rows)


def _parquet_chunks(path: str, report: FilesReport, quick: bool) -> Iterator[Chunk]:
    with open_parquet(Path(path)) as file:
        leaves = [file.schema.column(number).path for number in range(len(file.schema))]
        first = 0
        for batch in file.iter_batches(
            rows_within(file, SIZE), columns=_quick_leaves(leaves) if quick else None, use_threads=False
        ):
            places = range(first, first + batch.num_rows)
            first += batch.num_rows
            table, numbers = _drop_unreadable(batch, places, path, report)
            yield Chunk(path, "row", numbers, None, (), table.replace_schema_metadata(file.metadata.metadata))


_QUICK = ("prompt.role", "extra_info.max_turns", *(".".join(format.truth) for format in FORMATS.values()))
"""The columns that `--quick` reads."""


def _quick_leaves(leaves: list[str]) -> list[str]:
    """Return the leaves that can be read without contents. For other columns, one leaf shows that the column exists."""
    found = []
    for column, group in groupby(leaves, lambda leaf: leaf.partition(".")[0]):
        if column in ("data_source", "ability", IMAGES):
            continue
        own = list(group)
        keys = [leaf.removeprefix(column) for leaf in _QUICK if leaf.startswith(f"{column}.")]
        found += [leaf for leaf in own if any(key in leaf for key in keys)] or own[:1]
    return found


def _drop_unreadable(
    batch: pa.RecordBatch, numbers: Sequence[int], file: str, report: FilesReport
) -> tuple[pa.RecordBatch, Sequence[int]]:
    """Return a batch without rows whose text is not UTF-8: parquet does not check it, and value readers fail on it."""
    import pyarrow as pa

    try:
        batch.validate(full=True)
        return batch, numbers
    except pa.ArrowInvalid as error:
        cause = str(error).partition("\n")[0]
    good = []
    for position in range(batch.num_rows):
        try:
            batch.slice(position, 1).validate(full=True)
            to_rows(batch.schema.names, batch.slice(position, 1).columns, 1)
            good.append(position)
        except (pa.ArrowInvalid, UnicodeDecodeError):
            report.add("unreadable", file, cause, [numbers[position]])
    return batch.take(pa.array(good, pa.int64())), [numbers[position] for position in good]
