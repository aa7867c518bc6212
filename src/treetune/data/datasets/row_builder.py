"""Converts a dataset's rows to a trainer's rows: prompts, ground truths and uids, in one canonical layout (verl's).

    builder = RowBuilder(taskset, columns, made=False)
    table, notes = builder.build(source_table, first_index=0)

Template tasks are built column by column; a taskset that overrides `_make_map_fn` row by row. Both give the same rows.
A key whose values have mixed types becomes JSON, and the table's metadata lists it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pyarrow as pa

from treetune.chat.message import add_paragraph
from treetune.config.plugins import file_of
from treetune.core.finding import Flaw
from treetune.core.profile import OUTSIDE, UNRATED, Rates
from treetune.core.task import Task, uids_of_texts
from treetune.data.arrow_values import (
    pause_gc,
    to_json_text,
    to_python,
    values_of,
    with_json_fields,
)
from treetune.data.datasets.choices import MADE, Choices
from treetune.data.datasets.config import GroundTruthConfig, no_column
from treetune.data.datasets.dataset_rows import DatasetRows
from treetune.data.datasets.images import ImageReader
from treetune.data.datasets.map_function import (
    MISSING,
    NO_PROMPT,
    NO_TRUTH,
    RESERVED,
    RowDropped,
    call_make_map_fn,
    complete_row,
    find_fault,
    find_lack,
    truth_finder,
    write_images,
)
from treetune.data.datasets.selection import DROPPED, Notes, dropped_for, row_filter
from treetune.data.datasets.template import Template
from treetune.data.rows import parquet
from treetune.data.rows.image_columns import PLACE
from treetune.data.rows.row_codec import ADDED, KEY, ROW, encode_unseen_prompts
from treetune.data.rows.scorer import BY_RULE
from treetune.data.sources.local_files import SourceBatch
from treetune.data.sources.names import Row
from treetune.errors import ConfigError, Faults, TasksetError, TreetuneError, format_error, gather_faults

REPLACED = frozenset(("uid", *ADDED))
"""Keys of `extra_info` that Treetune fills in if a row has none, or that a trainer fills in. Rows with these keys are
made one by one."""


class RowBuilder:
    """Builds rows; picklable, so that other processes and machines can build rows too.

    `made`: the source already has a trainer's rows, from a subclass's `build_dataset`.
    """

    def __init__(self, taskset: DatasetRows, columns: Mapping[str, Any], made: bool) -> None:
        """`columns`: their names and types. Raises every fault of the config that the columns show."""
        self.taskset = taskset
        self.columns = dict(columns)
        self._made = made
        config, names = taskset.config, list(self.columns)
        self._choices: Choices | None = None
        self._truth_column = ""
        own_rows = made or taskset.overrides_rows or not REPLACED.isdisjoint(config.extra_fields)
        self._by_column = config.prompt_format == "template" and not own_rows and not config.images
        self._images = ImageReader(config)
        self._rates: Rates | None = None
        faults: Faults = []
        if config.choices is not None and not made:
            with gather_faults(faults):
                self._choices = Choices(config.choices, names)
            names = [*(name for name in names if name not in MADE), *MADE]
        read = set() if config.scorer is None else set(config.scorer.columns())  # added to the extra fields
        for field in [] if made else config.extra_fields:
            key = "scorer" if field in read else "extra_fields"
            if field in RESERVED:
                faults.append((key, _explain_reserved(field)))
            elif field not in names:
                faults.append((key, no_column(field, names)))
        if not made and not taskset.overrides_rows:
            faults += [("images", no_column(name, names)) for name in config.images if name not in names]
        if config.images and config.max_prompt_length is not None:
            faults.append(("max_prompt_length", "counts only text, not images: leave this to the trainer"))
        with gather_faults(faults, "filter"):
            self._filter = row_filter(None if made else config.filter, names, taskset._origin)
        if config.profile is not None and config.profile.path is not None:
            with gather_faults(faults):
                self._rates = Rates(config.profile)
                self._rates.by_uid  # noqa: B018 - read now, with the other faults
        if not made and not taskset.overrides_rows:  # a user's function may use any columns
            if config.prompt_format == "template":
                texts = [name for name, kind in self.columns.items() if str(kind) in ("string", "large_string")]
                texts = [name for name in texts if name not in config.images]
                if config.prompt_template is not None and not config.prompt_template.strip():
                    faults.append(("prompt_template", f"is empty: write a text with {{column}} or {PLACE} in it"))
                with gather_faults(faults, "prompt_template"):
                    self._template = Template(config.prompt_template, names, texts)
            elif config.chat_messages_field not in names:
                faults.append(("chat_messages_field", no_column(config.chat_messages_field, names)))
            if config.ground_truth is not None:
                with gather_faults(faults, "ground_truth"):
                    self._truth_column, self._find_truth = truth_finder(config.ground_truth, names)
        with gather_faults(faults):
            self._request = self._request_for(config.env_class)
        if faults:
            raise ConfigError(faults)
        # Needed for column building too: a source may turn out to yield rows.
        self._make_row = (lambda row, index: row) if made else call_make_map_fn(taskset)

    def _request_for(self, env_class: str | None) -> str | None:
        """The sentence in which prompts ask for the form of the answer, if they do."""
        form = self.taskset.answer_format(Task(env_class=env_class))
        return form.ask() if form is not None and form.instruct else None

    def __reduce__(self) -> tuple[Any, ...]:
        return RowBuilder, (self.taskset, self.columns, self._made)

    @property
    def used_columns(self) -> set[str]:
        """The columns that rows are made from, if our own map function makes them."""
        config, choices = self.taskset.config, self.taskset.config.choices
        used = {self._truth_column, *config.extra_fields, *config.images}
        used |= {config.chat_messages_field} if config.prompt_format != "template" else set(self._template.columns)
        return used if choices is None else used | {choices.column or "", choices.answer, *choices.columns}

    def check_first(self, batches: Iterator[SourceBatch]) -> None:
        """Raise the config faults that a user's map function finds in the first row."""
        try:
            for row in _to_rows(next(batches, []))[:1]:
                self._make_row(row if self._choices is None else {**row, **self._choices.of(row)}, 0)
        except ConfigError:
            raise
        except Exception:
            return  # reported with its row when it is built

    def build(self, batch: SourceBatch, first_index: int) -> tuple[pa.Table | None, Notes]:
        """Build the rows of a batch, the first of which has this index; return them with their notes."""
        try:
            return self._build(batch, first_index)
        except TreetuneError:
            raise
        except (ValueError, TypeError, OverflowError) as error:  # these include Arrow's errors and text errors
            raise self._locate_fault(batch, first_index, error) from None

    def _build(self, batch: SourceBatch, first_index: int) -> tuple[pa.Table | None, Notes]:
        notes = Notes()
        indices = list(range(first_index, first_index + len(batch)))
        if self._filter is not None:
            kept = [number for number, row in enumerate(_to_rows(batch)) if self._keeps(row, indices[number])]
            notes.dropped["filter"] += len(batch) - len(kept)
            batch, indices = _take(batch, kept), [indices[number] for number in kept]
        if not indices:
            return None, notes
        whole = batch if self._choices is None else self._choices.add(batch)
        with pause_gc():
            if self._by_column:
                table = self._build_columns(whole, batch, indices, notes)
            else:
                table = self._build_rows(_to_rows(whole), batch, indices, notes)
        return table, notes

    def _keeps(self, row: Row, index: int) -> bool:
        assert self._filter is not None
        try:
            return bool(self._filter(row))
        except Exception as error:
            expression = file_of(self.taskset.config.filter or "") is None  # its error is already complete
            why = str(error) if expression else format_error(error)
            raise TasksetError(f"the filter failed on row {index}: {why}") from (None if expression else error)

    def _select_by_rate(self, table: pa.Table, uids: list[str], notes: Notes) -> pa.Table:
        """Select the rows that the profile keeps. A pass rate is stored under a task's uid, which is known once its row
        is made."""
        profile = self.taskset.config.profile
        if self._rates is None or profile is None:
            return table
        rates = list(map(self._rates.of, uids))
        for rate in rates:
            if rate is None or not profile.keeps(rate):
                notes.dropped[UNRATED if rate is None else OUTSIDE] += 1
        return table.filter(pa.array([rate is not None and profile.keeps(rate) for rate in rates], pa.bool_()))

    def _build_columns(
        self, table: SourceBatch, source: SourceBatch, indices: list[int], notes: Notes
    ) -> pa.Table | None:
        config, scorer = self.taskset.config, self.taskset.row_scorer
        texts: list[Any] = self._template.fill(table)
        truths: list[Any] | None = None
        if config.ground_truth is not None:
            truths = list(map(self._find_truth, values_of(table, self._truth_column)))
        kept = list(range(len(texts)))
        if None in texts or (truths is not None and None in truths):
            left_out: dict[str, list[int]] = {}
            for number, text in enumerate(texts):
                if text is None or (truths is not None and truths[number] is None):
                    left_out.setdefault(NO_PROMPT if text is None else NO_TRUTH, []).append(number)
            self._leave_out(left_out, source, indices, notes)
            gone = {number for numbers in left_out.values() for number in numbers}
            kept = [number for number in kept if number not in gone]
            table, texts = _take(table, kept), _take(texts, kept)
            truths = None if truths is None else _take(truths, kept)
        if not kept:
            return None
        if (request := self._request) is not None:
            texts = [text if request in text else f"{text}\n\n{request}" for text in texts]
        columns: dict[str, pa.Array] = {
            "data_source": parquet.constant_column(config.data_source, len(kept)),
            "prompt": parquet.prompt_column(pa.array(texts, pa.string()), config.system_prompt),
        }
        if config.ability is not None:
            columns["ability"] = parquet.constant_column(config.ability, len(kept))
        if truths is not None:
            method = parquet.constant_column(config.reward_method, len(kept))
            with _name_mixed_truths(truths, _take(indices, kept)):
                stored = parquet.infer_column(truths, "reward_model.ground_truth", [])
            columns["reward_model"] = pa.StructArray.from_arrays([method, stored], ["style", "ground_truth"])
        tools = self.taskset.tool_names
        around_uid = (config.system_prompt, config.env_class, config.reward_method, tools)
        uids = uids_of_texts(texts, truths, *around_uid)
        indices = _take(indices, kept)
        extra = {
            "index": pa.array(indices, pa.int64()),
            "uid": pa.array(uids, pa.string()),
            "scorer": parquet.constant_column(None if scorer is None else scorer.text, len(kept)),
        }
        if config.env_class is not None:
            extra["env_class"] = parquet.constant_column(config.env_class, len(kept))
        if tools:
            extra[KEY] = parquet.constant_column(to_json_text({"tools": tools}), len(kept))
        if scorer not in (None, BY_RULE):
            reward = {"style": config.reward_method, "ground_truth": ""} if truths is not None else None
            around = {"ability": config.ability, "reward_model": reward}
            extra[ROW] = pa.array(encode_unseen_prompts(columns["prompt"].to_pylist(), around), pa.string())
        json_fields: list[str] = []
        for field in config.extra_fields:
            extra[field] = _store_field(table, field, json_fields)
        columns["extra_info"] = pa.StructArray.from_arrays(list(extra.values()), list(extra))
        return self._select_by_rate(with_json_fields(pa.table(columns), json_fields), uids, notes)

    def _build_rows(self, whole: list[Row], source: SourceBatch, indices: list[int], notes: Notes) -> pa.Table | None:
        rows: list[Row] = []
        uids: list[str] = []
        left_out: dict[str, list[int]] = {}
        make_row, config = self._make_row, self.taskset.config
        for number, row in enumerate(whole):
            index = indices[number]
            try:
                made = make_row(row, index)
            except RowDropped as reason:
                left_out.setdefault(str(reason), []).append(number)
                continue
            except TreetuneError:
                raise
            except Exception as error:
                raise TasksetError(f"row {index} could not be made: {format_error(error)}") from error
            if made is None:
                left_out.setdefault("map function", []).append(number)
                continue
            if (fault := find_fault(made)) is not None:
                raise TasksetError(
                    f"row {index} {fault}: {made!r:.200}",
                    remedy="the function of _make_map_fn() must return at least data_source, prompt and extra_info",
                )
            if not self._made and (lack := find_lack(made)) is not None:
                left_out.setdefault(lack, []).append(number)
                continue
            named, request = made.get("env_class"), self._request
            if isinstance(named, str) and named != config.env_class:
                request = self._request_for(named)
            if request is not None:
                made = {**made, "prompt": add_paragraph(made["prompt"], request)}
            uid, row = complete_row(self.taskset, *write_images(made, index, self._images), index)
            rows.append(row)
            uids.append(uid)
        self._leave_out(left_out, source, indices, notes)
        if not rows:
            return None
        truths = [(row.get("reward_model") or {}).get("ground_truth") for row in rows]
        with _name_mixed_truths(truths, [row["extra_info"]["index"] for row in rows]):
            table = parquet.table_of(rows, exact=False)
        return self._select_by_rate(table, uids, notes)

    def _leave_out(
        self, left_out: Mapping[str, list[int]], source: SourceBatch, indices: list[int], notes: Notes
    ) -> None:
        """Count the dropped rows by reason, and report rows that lack something. Raises if the config says
        `drop_missing: false`."""
        for reason, numbers in left_out.items():
            notes.dropped[reason] += len(numbers)
            if reason not in MISSING:
                continue
            first = self._explain_lack(reason, _to_rows(_take(source, numbers[:1]))[0])
            if not self.taskset.config.drop_missing:
                shown = ", ".join(str(indices[number]) for number in numbers[:10]) + ", ..." * (len(numbers) > 10)
                raise TasksetError(
                    f"{reason}: row{'s' * (len(numbers) > 1)} {shown}" + (f" ({first})" if first else ""),
                    remedy="correct them; drop_missing: true leaves such rows out and counts them",
                )
            notes.report(Flaw.of(DROPPED, dropped_for(reason), first, [indices[number] for number in numbers]))

    def _explain_lack(self, reason: str, row: Row) -> str:
        """Return the column in which a source row lacks something, and its value. Empty if a user's function made the
        row."""
        config = self.taskset.config
        if self.taskset.overrides_rows:
            return ""
        whole = row if self._choices is None else {**row, **self._choices.of(row)}
        if reason == NO_TRUTH:
            columns: Sequence[str] = [self._truth_column]
        elif reason == NO_PROMPT:
            of_template = config.prompt_format == "template"
            columns = self._template.columns if of_template else [config.chat_messages_field]
        else:
            columns = config.images
        if not columns:  # a prompt that is empty and the same in all rows
            return ""
        column = next((name for name in columns if whole.get(name) is None), columns[0])
        if self._choices is not None and column in MADE:
            return self._choices.problem(row) or ""
        found = f"{column} is {reprlib.repr(whole.get(column))}"
        truth = config.ground_truth
        if reason == NO_TRUTH and whole.get(column) and truth is not None:
            path, pattern = (truth.column, truth.pattern) if isinstance(truth, GroundTruthConfig) else (truth, None)
            found += ", where ground_truth.pattern matches nothing" if pattern is not None else f", which has no {path}"
        return found

    def _locate_fault(self, batch: SourceBatch, first: int, error: Exception) -> TreetuneError:
        """Find the faulty row. Rows are built many at a time, so they are built again one by one to find the first that
        fails alone. If no row fails alone, the error names the first row of the batch."""
        remedy = "correct the row: text is UTF-8, keys are text, and whole numbers of extra_fields have 64 bits"
        for number in range(len(batch)):
            try:
                self._build(_take(batch, [number]), first + number)
            except TreetuneError as fault:
                return fault
            except Exception as fault:
                return TasksetError(f"row {first + number}: {fault}", remedy=getattr(fault, "remedy", remedy))
        return TasksetError(f"row {first}: {error}", remedy=remedy)


@contextmanager
def _name_mixed_truths(truths: list[Any], numbers: list[int]) -> Iterator[None]:
    """Add the rows with clashing ground truths to the error. `numbers` are the row numbers."""
    try:
        yield
    except parquet.MixedTruths as error:
        clash = parquet.find_clash(truths)
        raise parquet.refuse_truths(error.path, {numbers[place]: truth for place, truth in clash.items()}) from None


def _explain_reserved(field: str) -> str:
    what = "the number of the row in the source, " if field == "index" else ""
    return (
        f"{field!r} is a key that Treetune fills in itself, {what}so the column needs another name there: "
        f"made['extra_info']['source_{field}'] = row['{field}'] in _make_map_fn of a subclass"
    )


def _to_rows(batch: SourceBatch) -> list[Row]:
    if isinstance(batch, list):
        return batch
    if not any(parquet.is_open(field.type, "") for field in batch.schema):
        return list(batch.to_pylist())
    # Without the keys that only other rows have: otherwise each row would get all of them and memory would run out.
    return [
        dict(zip(batch.column_names, values, strict=True))
        for values in zip(*map(_to_values, batch.columns), strict=True)
    ]


def _to_values(column: pa.ChunkedArray) -> list[Any]:
    opened = parquet.is_open(column.type, "")
    return list(chain.from_iterable(map(to_python, column.chunks))) if opened else list(column.to_pylist())


def _take(batch: Any, numbers: list[int]) -> Any:
    if isinstance(batch, list):
        return [batch[number] for number in numbers]
    return batch.take(pa.array(numbers, pa.int64()))


def _store_field(table: SourceBatch, field: str, json_fields: list[str]) -> pa.Array:
    """Return a column's values with an Arrow type or as JSON, which is then listed in `json_fields`."""
    path = f"extra_info.{field}"
    if isinstance(table, list):
        return parquet.infer_column(values_of(table, field), path, json_fields)
    column = table[field]
    try:
        if parquet.is_open(column.type, path):
            json_fields.append(path)
            return parquet.json_array(_to_values(column))
        return parquet.conform(column, parquet.canonical_type(column.type))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field} cannot be kept in extra_info: {error}") from None
