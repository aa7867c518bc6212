"""From a dataset's rows to a trainer's: prompts, ground truths, uids, in one canonical layout (verl's).

    builder = RowBuilder(taskset, columns, made=False)
    table, dropped = builder.build(source_table, first_index=0)

Template tasks are built column by column; a taskset that overrides `_make_map_fn` row by row. Both give the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pyarrow as pa

from treetune.datasets.config import no_column
from treetune.datasets.map_function import NO_PROMPT, NO_TRUTH, GroundTruth, Row, RowDropped, call_make_map_fn
from treetune.datasets.row_table import RESERVED, extra_info, find_fault, find_lack, table_of_rows
from treetune.datasets.selection import read_pass_rates, row_filter
from treetune.datasets.taskset import DatasetTaskset
from treetune.datasets.template import Template
from treetune.errors import ConfigError, TasksetError, TreetuneError, described
from treetune.plugins import file_of
from treetune.rows.arrow_values import canonical_type, conform, pause_gc
from treetune.rows.loading import SourceBatch
from treetune.rows.parquet import constant_column, infer_column, prompt_column
from treetune.rows.round_trip import ADDED, encode_unseen, encode_unseen_prompts
from treetune.rows.rule import RULE
from treetune.task import uids_of_texts

Faults = list[tuple[str, str]]


class _Built(NamedTuple):
    table: pa.Table
    numbers: list[int]
    """Which rows of the batch these are."""
    uids: list[str]
    """Of their tasks. A row may carry one of the user's own."""


class RowBuilder:
    """Picklable, so that other processes and machines build rows too.

    `made`: the source holds a trainer's rows already, from a `build_dataset` of a subclass.
    """

    def __init__(self, taskset: DatasetTaskset, columns: Mapping[str, pa.DataType], made: bool) -> None:
        """Raises every fault of the config that the columns show."""
        self.taskset = taskset
        self.columns = dict(columns)
        self._made = made
        config, names = taskset.config, list(self.columns)
        self._by_column = not made and not taskset.overrides_rows and config.prompt_format == "template"
        self._truth: GroundTruth | None = None
        self._pass_rates: dict[str, float] = {}
        faults: Faults = []
        for field in [] if made else config.extra_fields:
            if field in RESERVED:
                faults.append(("extra_fields", f"{field!r} is a key that Treetune fills in itself"))
            elif field not in names:
                faults.append(("extra_fields", no_column(field, names)))
        with _collect(faults, "filter"):
            chosen = None if made else config.filter
            self._filter, self._filter_late = row_filter(chosen, names, config.pass_rates is not None)
        if config.pass_rates is not None:
            with _collect(faults, "pass_rates"):
                self._pass_rates = read_pass_rates(config.pass_rates)
        if not made and not taskset.overrides_rows:  # a function of the user's own may make columns of its own
            if self._by_column:
                texts = [name for name, kind in self.columns.items() if str(kind) in ("string", "large_string")]
                with _collect(faults, "prompt_template"):
                    self._template = Template(config.prompt_template, names, texts)
            elif config.chat_messages_field not in names:
                faults.append(("chat_messages_field", no_column(config.chat_messages_field, names)))
            if config.ground_truth is not None:
                with _collect(faults, "ground_truth"):
                    self._truth = GroundTruth(config.ground_truth, names)
        if faults:
            raise ConfigError(faults)
        # Also where columns are built: a source may turn out to give rows.
        self._make_row = (lambda row, index: row) if made else call_make_map_fn(taskset)

    def __reduce__(self) -> tuple[Any, ...]:
        return RowBuilder, (self.taskset, self.columns, self._made)

    def check_first(self, row: Row) -> None:
        """Raises the faults of its config that a map function of a user's own finds in the first row."""
        try:
            self._make_row(row, 0)
        except ConfigError:
            raise
        except Exception:
            return  # reported with its row, when it is built

    def build(self, batch: SourceBatch, first_index: int) -> tuple[pa.Table | None, Counter[str]]:
        """The rows of a batch, the first of which has this index, and how many were dropped for what."""
        try:
            return self._build(batch, first_index)
        except TreetuneError:
            raise
        except (ValueError, TypeError, OverflowError) as error:  # Arrow's errors and those of text are among them
            raise self._locate_fault(batch, first_index, error) from None

    def _build(self, batch: SourceBatch, first_index: int) -> tuple[pa.Table | None, Counter[str]]:
        dropped: Counter[str] = Counter()
        indices = list(range(first_index, first_index + len(batch)))
        if self._filter is not None and not self._filter_late:
            kept = [number for number, row in enumerate(_to_rows(batch)) if self._keeps(row, indices[number])]
            dropped["filter"] += len(batch) - len(kept)
            batch, indices = _take(batch, kept), [indices[number] for number in kept]
        if not indices:
            return None, dropped
        with pause_gc():
            if self._by_column and not isinstance(batch, list):
                built = self._build_columns(batch, indices, dropped)
            else:
                built = self._build_rows(_to_rows(batch), indices, dropped)
        if built is None:
            return None, dropped
        if self._filter is not None and self._filter_late:
            return self._filter_by_rate(batch, indices, built, dropped), dropped
        return built.table, dropped

    def _keeps(self, row: Row, index: int) -> bool:
        assert self._filter is not None
        try:
            return bool(self._filter(row))
        except Exception as error:
            expression = file_of(self.taskset.config.filter or "") is None  # its error says all there is to say
            why = str(error) if expression else described(error)
            raise TasksetError(f"the filter failed on row {index}: {why}") from (None if expression else error)

    def _filter_by_rate(
        self, batch: SourceBatch, indices: list[int], built: _Built, dropped: Counter[str]
    ) -> pa.Table | None:
        """By pass rate, which is known by uid and so only once a row is made."""
        mask = []
        rows = _to_rows(_take(batch, built.numbers))
        for row, number, uid in zip(rows, built.numbers, built.uids, strict=True):
            rate = self._pass_rates.get(uid)
            keep = rate is not None and self._keeps({**row, "pass_rate": rate}, indices[number])
            mask.append(keep)
            if not keep:
                dropped["no pass rate" if rate is None else "filter"] += 1
        table = built.table.filter(pa.array(mask, pa.bool_()))
        return table if table.num_rows else None

    def _build_columns(self, table: pa.Table, indices: list[int], dropped: Counter[str]) -> _Built | None:
        config, scorer = self.taskset.config, self.taskset.scorer
        kept = list(range(table.num_rows))
        if lacking := set(self._template.find_lacking(table)):
            self._leave_out(NO_PROMPT, [indices[number] for number in sorted(lacking)], dropped)
            kept = [number for number in kept if number not in lacking]
            table = _take(table, kept)
        truths: list[Any] | None = None
        if self._truth is not None:
            truths = list(map(self._truth.find, table[self._truth.column].to_pylist()))
            if None in truths:
                right = [number for number, truth in enumerate(truths) if truth is not None]
                wrong = [indices[kept[number]] for number, truth in enumerate(truths) if truth is None]
                self._leave_out(NO_TRUTH, wrong, dropped)
                table, truths = _take(table, right), [truths[number] for number in right]
                kept = [kept[number] for number in right]
        if not kept:
            return None
        (batch,) = table.combine_chunks().to_batches()
        contents = self._template.render(batch)
        columns: dict[str, pa.Array] = {
            "data_source": constant_column(config.data_source, len(kept)),
            "prompt": prompt_column(contents, config.system_prompt),
        }
        if config.ability is not None:
            columns["ability"] = constant_column(config.ability, len(kept))
        if truths is not None:
            columns["reward_model"] = pa.StructArray.from_arrays(
                [
                    constant_column(config.reward_method, len(kept)),
                    infer_column(truths, "reward_model.ground_truth", []),
                ],
                ["style", "ground_truth"],
            )
        uids = uids_of_texts(contents.to_pylist(), truths, config.system_prompt, config.env_class, config.reward_method)
        row_json: list[str] | None = None
        if scorer not in (None, RULE):
            reward = {"style": config.reward_method, "ground_truth": ""} if truths is not None else None
            around = {"ability": config.ability, "reward_model": reward}
            prompt_lists = columns["prompt"].to_pylist()
            if replaced := [field for field in config.extra_fields if field in ADDED]:
                rows = zip(prompt_lists, table.select(replaced).to_pylist(), strict=True)
                row_json = [encode_unseen({"prompt": prompt, **around, "extra_info": info}) for prompt, info in rows]
            else:
                row_json = encode_unseen_prompts(prompt_lists, around)
        columns["extra_info"] = extra_info(
            [indices[number] for number in kept],
            uids,
            [scorer] * len(kept),
            [config.env_class] * len(kept),
            row_json,
            {field: conform(table[field], canonical_type(table[field].type)) for field in config.extra_fields},
            [],
        )
        return _Built(pa.table(columns), kept, uids)

    def _build_rows(self, source: list[Row], indices: list[int], dropped: Counter[str]) -> _Built | None:
        rows: list[Row] = []
        kept: list[int] = []
        left_out: dict[str, list[int]] = {}
        make_row = self._make_row
        for number, row in enumerate(source):
            index = indices[number]
            try:
                made = make_row(row, index)
            except RowDropped as reason:
                left_out.setdefault(str(reason), []).append(index)
                continue
            except TreetuneError:
                raise
            except Exception as error:
                raise TasksetError(f"row {index} could not be made: {described(error)}") from error
            if made is None:
                dropped["map function"] += 1
                continue
            if (fault := find_fault(made)) is not None:
                raise TasksetError(
                    f"row {index} {fault}: {made!r:.200}",
                    remedy="the function of _make_map_fn() returns data_source, prompt and extra_info at the least",
                )
            if not self._made and (lack := find_lack(made)) is not None:
                left_out.setdefault(lack, []).append(index)
                continue
            rows.append(made)
            kept.append(number)
        for why, places in left_out.items():
            self._leave_out(why, places, dropped)
        if not rows:
            return None
        table, uids = table_of_rows(self.taskset, rows, [indices[number] for number in kept])
        return _Built(table, kept, uids)

    def _leave_out(self, reason: str, indices: list[int], dropped: Counter[str]) -> None:
        dropped[reason] += len(indices)
        if self.taskset.config.drop_missing or reason not in (NO_PROMPT, NO_TRUTH):
            return
        shown = ", ".join(map(str, indices[:10])) + (", ..." if len(indices) > 10 else "")
        raise TasksetError(
            f"{reason}: row{'s' * (len(indices) > 1)} {shown}",
            remedy="correct them; drop_missing: true leaves such rows out and counts them",
        )

    def _locate_fault(self, batch: SourceBatch, first: int, error: Exception) -> TreetuneError:
        """What is wrong with which row. Rows are built many at a time, so they are built one by one again to find the
        first that fails alone; where none does, the first of the batch is named."""
        number, alone = 0, _slice(batch, 0)
        for candidate in range(len(batch)):
            try:
                self._build(_slice(batch, candidate), first + candidate)
            except TreetuneError as fault:
                return fault
            except Exception as fault:
                number, alone, error = candidate, _slice(batch, candidate), fault
                break
        problem, remedy = f": {error}", None
        if isinstance(error, TypeError) and "expected bytes" in str(error):
            problem, remedy = " has a key that is no text", "name the keys of a row, and of mappings in it, by text"
        elif isinstance(error, UnicodeEncodeError):
            half = error.object[error.start : error.end]
            problem = f": text that is no Unicode: {half!r} is half of a character"
        elif isinstance(error, UnicodeDecodeError):
            wrong = error.object[error.start : error.end]
            problem = f": text that is no UTF-8: {error.reason} ({wrong!r})"
            remedy = "convert the file, as by `iconv -f latin1 -t utf-8`"
        elif not isinstance(alone, list) and (field := self._unstorable_field(alone)) is not None:
            problem = f": {field} cannot be kept in extra_info: {error}"
        if "not in range" in str(error) and remedy is None:
            remedy = (
                "whole numbers have 64 bits with a sign: leave the column out of extra_fields, or make it text first"
            )
        return TasksetError(f"row {first + number}{problem}", remedy=remedy)

    def _unstorable_field(self, row: pa.Table) -> str | None:
        for field in self.taskset.config.extra_fields:
            try:
                conform(row[field], canonical_type(row[field].type))
            except (ValueError, TypeError):
                return field
        return None


@contextmanager
def _collect(faults: Faults, key: str) -> Iterator[None]:
    """Adds what is raised inside to the faults, under the key where it has none of its own."""
    try:
        yield
    except ConfigError as error:
        faults.extend(error.faults)
    except TreetuneError as error:
        faults.append((key, str(error)))


def _to_rows(batch: SourceBatch) -> list[Row]:
    return batch if isinstance(batch, list) else batch.to_pylist()


def _slice(batch: SourceBatch, number: int) -> SourceBatch:
    return batch[number : number + 1] if isinstance(batch, list) else batch.slice(number, 1)


def _take(batch: Any, numbers: list[int]) -> Any:
    if isinstance(batch, list):
        return [batch[number] for number in numbers]
    return batch.take(pa.array(numbers, pa.int64()))
