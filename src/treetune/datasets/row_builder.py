"""From a dataset's rows to a trainer's: prompts, ground truths, uids, in one canonical layout (verl's).

    builder = RowBuilder(taskset, columns, made=False)
    table, dropped = builder.build(source_table, first_index=0)

Template tasks are built column by column; a taskset that overrides `_make_map_fn` row by row. Both give the same rows.
A key whose values are of mixed types becomes JSON, and the table says which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from treetune.datasets.config import no_column
from treetune.datasets.map_function import (
    NO_PROMPT,
    NO_TRUTH,
    GroundTruth,
    Row,
    RowDropped,
    call_make_map_fn,
    find_fault,
    find_lack,
    plain,
    store_truth,
)
from treetune.datasets.selection import read_pass_rates, row_filter
from treetune.datasets.taskset import DatasetTaskset
from treetune.datasets.template import Template
from treetune.errors import ConfigError, Faults, TasksetError, TreetuneError, described, gather_faults
from treetune.plugins import file_of
from treetune.rows.arrow_values import pause_gc, with_json_fields
from treetune.rows.formats import FORMATS
from treetune.rows.loading import SourceBatch
from treetune.rows.parquet import (
    canonical_type,
    conform,
    constant_column,
    infer_column,
    infer_mapping,
    keys_of,
    messages_column,
    prompt_column,
)
from treetune.rows.round_trip import ADDED, MARK, ROW, encode_unseen, encode_unseen_prompts
from treetune.rows.rule import RULE
from treetune.task import uid_of, uids_of_texts

RESERVED = ("index", "scorer", "env_class", ROW, MARK)
"""Keys of `extra_info` that Treetune itself fills in."""

_COMPLETED = ("data_source", "prompt", "reward_model", "extra_info", "env_class")
"""Columns whose values are checked or completed; any other is stored as the map function gave it."""


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
        with gather_faults(faults, "filter"):
            chosen = None if made else config.filter
            self._filter, self._filter_late = row_filter(chosen, names, config.pass_rates is not None)
        if config.pass_rates is not None:
            with gather_faults(faults, "pass_rates"):
                self._pass_rates = read_pass_rates(config.pass_rates)
        if not made and not taskset.overrides_rows:  # a function of the user's own may make columns of its own
            if self._by_column:
                texts = [name for name, kind in self.columns.items() if str(kind) in ("string", "large_string")]
                with gather_faults(faults, "prompt_template"):
                    self._template = Template(config.prompt_template, names, texts)
            elif config.chat_messages_field not in names:
                faults.append(("chat_messages_field", no_column(config.chat_messages_field, names)))
            if config.ground_truth is not None:
                with gather_faults(faults, "ground_truth"):
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
        texts: list[Any] = self._template.fill(table)
        truths = None if self._truth is None else [*map(self._truth.find, table[self._truth.column].to_pylist())]
        kept = list(range(len(texts)))
        if None in texts or (truths is not None and None in truths):
            left_out: dict[str, list[int]] = {}
            for number, text in enumerate(texts):
                if text is None or (truths is not None and truths[number] is None):
                    left_out.setdefault(NO_PROMPT if text is None else NO_TRUTH, []).append(number)
            self._leave_out(left_out, indices, dropped)
            gone = {number for numbers in left_out.values() for number in numbers}
            kept = [number for number in kept if number not in gone]
            table, texts = _take(table, kept), _take(texts, kept)
            truths = None if truths is None else _take(truths, kept)
        if not kept:
            return None
        columns: dict[str, pa.Array] = {
            "data_source": constant_column(config.data_source, len(kept)),
            "prompt": prompt_column(pa.array(texts, pa.string()), config.system_prompt),
        }
        if config.ability is not None:
            columns["ability"] = constant_column(config.ability, len(kept))
        if truths is not None:
            method = constant_column(config.reward_method, len(kept))
            stored = infer_column(truths, "reward_model.ground_truth", [])
            columns["reward_model"] = pa.StructArray.from_arrays([method, stored], ["style", "ground_truth"])
        uids = uids_of_texts(texts, truths, config.system_prompt, config.env_class, config.reward_method)
        row_json: list[str] | None = None
        if scorer not in (None, RULE):
            reward = {"style": config.reward_method, "ground_truth": ""} if truths is not None else None
            around = {"ability": config.ability, "reward_model": reward}
            prompts = columns["prompt"].to_pylist()
            if replaced := [field for field in config.extra_fields if field in ADDED]:
                rows = zip(prompts, table.select(replaced).to_pylist(), strict=True)
                row_json = [encode_unseen({"prompt": prompt, **around, "extra_info": info}) for prompt, info in rows]
            else:
                row_json = encode_unseen_prompts(prompts, around)
        fields = {field: _store_field(table[field], field) for field in config.extra_fields}
        environments, scorers = [config.env_class] * len(kept), [scorer] * len(kept)
        columns["extra_info"] = _extra_info(_take(indices, kept), uids, scorers, environments, row_json, fields, [])
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
                left_out.setdefault(str(reason), []).append(number)
                continue
            except TreetuneError:
                raise
            except Exception as error:
                raise TasksetError(f"row {index} could not be made: {described(error)}") from error
            if made is None:
                left_out.setdefault("map function", []).append(number)
                continue
            if (fault := find_fault(made)) is not None:
                raise TasksetError(
                    f"row {index} {fault}: {made!r:.200}",
                    remedy="the function of _make_map_fn() returns data_source, prompt and extra_info at the least",
                )
            if not self._made and (lack := find_lack(made)) is not None:
                left_out.setdefault(lack, []).append(number)
                continue
            rows.append(made)
            kept.append(number)
        self._leave_out(left_out, indices, dropped)
        if not rows:
            return None
        table, uids = _table_of_rows(self.taskset, rows, _take(indices, kept))
        return _Built(table, kept, uids)

    def _leave_out(self, left_out: Mapping[str, list[int]], indices: list[int], dropped: Counter[str]) -> None:
        """Counts the rows that are left out, by reason; raises where the config makes faults of them."""
        for reason, numbers in left_out.items():
            dropped[reason] += len(numbers)
            if not self.taskset.config.drop_missing and reason in (NO_PROMPT, NO_TRUTH):
                shown = ", ".join(str(indices[number]) for number in numbers[:10]) + ", ..." * (len(numbers) > 10)
                raise TasksetError(
                    f"{reason}: row{'s' * (len(numbers) > 1)} {shown}",
                    remedy="correct them; drop_missing: true leaves such rows out and counts them",
                )

    def _locate_fault(self, batch: SourceBatch, first: int, error: Exception) -> TreetuneError:
        """What is wrong with which row. Rows are built many at a time, so they are built one by one again to find the
        first that fails alone; where none does, the first of the batch is named."""
        number = 0
        for candidate in range(len(batch)):
            try:
                self._build(_take(batch, [candidate]), first + candidate)
            except TreetuneError as fault:
                return fault
            except Exception as fault:
                number, error = candidate, fault
                break
        problem, remedy = f": {error}", None
        if isinstance(error, TypeError) and "expected bytes" in str(error):
            problem, remedy = " has a key that is no text", "name the keys of a row, and of mappings in it, by text"
        elif isinstance(error, UnicodeEncodeError):
            problem = f": text that is no Unicode: {error.object[error.start : error.end]!r} is half of a character"
        elif isinstance(error, UnicodeDecodeError):
            problem = f": text that is no UTF-8: {error.reason} ({error.object[error.start : error.end]!r})"
            remedy = "convert the file, as by `iconv -f latin1 -t utf-8`"
        elif "not in range" in str(error):
            remedy = "whole numbers have 64 bits: leave the column out of extra_fields, or make it text first"
        return TasksetError(f"row {first + number}{problem}", remedy=remedy)


def _to_rows(batch: SourceBatch) -> list[Row]:
    return batch if isinstance(batch, list) else batch.to_pylist()


def _take(batch: Any, numbers: list[int]) -> Any:
    if isinstance(batch, list):
        return [batch[number] for number in numbers]
    return batch.take(pa.array(numbers, pa.int64()))


def _store_field(column: pa.ChunkedArray, field: str) -> pa.Array:
    try:
        return conform(column, canonical_type(column.type))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{field} cannot be kept in extra_info: {error}") from None


def _table_of_rows(taskset: DatasetTaskset, rows: list[Row], indices: list[int]) -> tuple[pa.Table, list[str]]:
    """Made rows with everything that a canonical row has; and the uid of each row's task."""
    config, mixed = taskset.config, list[str]()
    names = keys_of(rows)
    columns: dict[str, Any] = {
        name: infer_column([row.get(name) for row in rows], name, mixed) for name in names if name not in _COMPLETED
    }
    columns["prompt"] = messages_column([row["prompt"] for row in rows])
    columns["data_source"] = pa.array(
        [str(config.data_source if (own := row.get("data_source")) is None else own) for row in rows], pa.string()
    )
    specs: list[dict[str, Any]] = [{}] * len(rows)
    rewards: list[dict[str, Any] | None] = [None] * len(rows)
    if "reward_model" in names:
        rewards = [_complete_reward(row.get("reward_model"), config.reward_method) for row in rows]
        specs = [_reward_spec(reward) for reward in rewards]
        columns["reward_model"] = infer_mapping(rewards, "reward_model", mixed)
    given = [row.get("extra_info") or {} for row in rows]
    keys = keys_of(given)
    environments = [config.env_class] * len(rows)
    if "env_class" in names or "env_class" in keys:
        environments = [
            _env_class(row.get("env_class") or info.get("env_class") or config.env_class, index)
            for row, info, index in zip(rows, given, indices, strict=True)
        ]
    uids = [
        uid_of({"prompt": row["prompt"], "env_class": env_class, "reward_spec": spec})
        for row, env_class, spec in zip(rows, environments, specs, strict=True)
    ]
    own = taskset.scorer
    scorers = [
        taskset.scorer_of_environment(env_class)
        if env_class is not None
        else (None if own == RULE and "ground_truth" not in spec else own)
        for env_class, spec in zip(environments, specs, strict=True)
    ]
    row_json = None
    if any(scorer not in (None, RULE) for scorer in scorers):
        seen = [name for name in names if name not in ("data_source", "extra_info", "env_class")]
        row_json = []
        for row, reward, info in zip(rows, rewards, given, strict=True):
            unseen = {key: plain(row[key]) for key in seen if key in row}
            row_json.append(encode_unseen({**unseen, "reward_model": reward, "extra_info": info}))
    if "index" in keys:
        indices = [_index(info.get("index", index), index) for info, index in zip(given, indices, strict=True)]
    fields = {
        key: infer_column([plain(info.get(key)) for info in given], f"extra_info.{key}", mixed)
        for key in keys
        if key not in RESERVED
    }
    columns["extra_info"] = _extra_info(indices, uids, scorers, environments, row_json, fields, mixed)
    ordered = dict.fromkeys(["data_source", "prompt", *names, "extra_info"])
    table = pa.table({name: columns[name] for name in ordered if name in columns})
    return with_json_fields(table, mixed), uids


def _extra_info(
    indices: list[int],
    uids: list[str],
    scorers: list[str | None],
    environments: list[str | None],
    row_json: list[str] | None,
    fields: Mapping[str, pa.Array],
    mixed: list[str],
) -> pa.StructArray:
    """The column of what Treetune adds to rows, and of the user's own fields. A uid of the user's own stays."""
    extra: dict[str, pa.Array] = {
        "index": pa.array(indices, pa.int64()),
        "uid": pa.array(uids, pa.string()),
        "scorer": _texts(scorers),
    }
    if any(environments):
        extra["env_class"] = _texts(environments)
    if row_json is not None:
        extra[ROW] = pa.array(row_json, pa.string())
    extra |= fields
    if "uid" in fields and fields["uid"].null_count:
        own = zip(fields["uid"].to_pylist(), uids, strict=True)
        extra["uid"] = infer_column([uid if mine is None else mine for mine, uid in own], "extra_info.uid", mixed)
    return pa.StructArray.from_arrays(list(extra.values()), list(extra))


def _texts(values: list[str | None]) -> pa.Array:
    """Mostly all are the same, and long."""
    same = values.count(values[0]) == len(values)
    return constant_column(values[0], len(values)) if same else pa.array(values, pa.string())


def _complete_reward(reward: dict[str, Any] | None, method: str) -> dict[str, Any] | None:
    if not reward or "ground_truth" not in reward:
        return reward or None
    if type(reward["ground_truth"]) is str and reward["ground_truth"] and "style" in reward:
        return dict(reward)
    return {"style": method, **reward, "ground_truth": store_truth(plain(reward["ground_truth"]))}


def _reward_spec(reward: dict[str, Any] | None) -> dict[str, Any]:
    """What the format reads, faster for what nearly every row has."""
    if reward is not None and len(reward) == 2 and type(reward.get("ground_truth")) is str and "style" in reward:
        return {"ground_truth": reward["ground_truth"], "method": reward["style"]}
    return FORMATS["verl"].read_reward({"reward_model": reward})


def _env_class(value: Any, index: int) -> str | None:
    if type(value) is not str and value is not None:
        raise TasksetError(f"row {index} has the env_class {value!r}, which is no name")
    return value


def _index(value: Any, position: int) -> int:
    try:
        return value if type(value) is int else int(value)
    except (TypeError, ValueError):
        raise TasksetError(f"row {position} has the index {value!r}, which is no whole number") from None
