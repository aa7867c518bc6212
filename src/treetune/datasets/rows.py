"""From a dataset's rows to a trainer's: prompts, ground truths, uids, in one canonical layout (verl's).

    builder = RowBuilder(taskset, columns, made=False)
    table, dropped = builder.build(source_table, first_index=0)

Template tasks are built column by column; a taskset that overrides `_make_map_fn` row by row. Both give the same rows.
"""

from __future__ import annotations

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.datasets.expression import Filter
from treetune.datasets.ground_truth import GroundTruth, stored
from treetune.datasets.schema import JSON_FIELDS, SPLIT, canonical_type, conform, json_array, refuse_mixed_truths
from treetune.datasets.source import Batch
from treetune.datasets.template import Template
from treetune.errors import ConfigError, TasksetError, TreetuneError, did_you_mean
from treetune.formats.verl import reward_spec
from treetune.plugins import load_object
from treetune.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.taskset import DatasetTaskset

RESERVED = ("index", "uid", "scorer", "env_class")
"""Keys of `extra_info` that Treetune itself fills in."""

Row = dict[str, Any]


class RowDropped(Exception):
    """Raised while a row is made, to leave it out; the reason is counted and reported."""


class RowBuilder:
    """Picklable, so that other processes and machines build rows too.

    `made`: the source holds a trainer's rows already, from a `build_dataset` of a subclass.
    """

    def __init__(self, taskset: DatasetTaskset, columns: Mapping[str, pa.DataType], *, made: bool) -> None:
        self.taskset = taskset
        self.columns = dict(columns)
        self._made = made
        config = taskset.config
        names = list(self.columns)
        for field in config.extra_fields if not made else ():
            if field not in names:
                raise ConfigError([("extra_fields", f"no column {field!r}{did_you_mean(field, names)}; there are: "
                                    + ", ".join(names))])  # fmt: skip
            if field in RESERVED:
                raise ConfigError([("extra_fields", f"{field!r} is a key that Treetune fills in itself")])
        self._filter, self._filter_late = _row_filter(config.filter, names, config.pass_rates is not None)
        self._pass_rates = read_pass_rates(config.pass_rates) if config.pass_rates is not None else {}
        self._by_column = not made and not taskset.overrides_rows and config.prompt_format == "template"
        if self._by_column:
            self._template = template_of(taskset, self.columns)
            self._truth = GroundTruth(config.ground_truth, names) if config.ground_truth is not None else None
        # Also where columns are built: a source may turn out to give rows.
        self._make_row = (lambda row, index: row) if made else accepting_index(taskset._make_map_fn())

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.taskset, self.columns, self._made)

    def build(self, batch: Batch, first_index: int) -> tuple[pa.Table | None, Counter[str]]:
        """The rows of a batch, the first of which has this index, and how many were dropped for what."""
        dropped: Counter[str] = Counter()
        indices = list(range(first_index, first_index + len(batch)))
        if self._filter is not None and not self._filter_late:
            kept = [number for number, row in enumerate(_pylist(batch)) if self._filter(row)]
            dropped["filter"] += len(batch) - len(kept)
            batch, indices = _taken(batch, kept), [indices[number] for number in kept]
        if not indices:
            return None, dropped
        if self._by_column and not isinstance(batch, list):
            built = self._columns(batch, indices, dropped)
        else:
            built = self._rows(_pylist(batch), indices, dropped)
        if built is not None and self._filter is not None and self._filter_late:
            built = self._filtered_late(_pylist(batch), indices, built, dropped)
        return built, dropped

    def _filtered_late(
        self, rows: list[Row], indices: list[int], built: pa.Table, dropped: Counter[str]
    ) -> pa.Table | None:
        """By pass rate, which is known by uid and so only once a row is made."""
        import pyarrow as pa
        import pyarrow.compute as pc

        assert self._filter is not None
        extra = built["extra_info"].combine_chunks()
        source = dict(zip(indices, rows, strict=True))
        mask = []
        for index, uid in zip(
            pc.struct_field(extra, "index").to_pylist(), pc.struct_field(extra, "uid").to_pylist(), strict=True
        ):
            rate = self._pass_rates.get(uid)
            keep = rate is not None and bool(self._filter({**source[index], "pass_rate": rate}))
            mask.append(keep)
            if not keep:
                dropped["no pass rate" if rate is None else "filter"] += 1
        built = built.filter(pa.array(mask, pa.bool_()))
        return built if built.num_rows else None

    def _columns(self, table: pa.Table, indices: list[int], dropped: Counter[str]) -> pa.Table | None:
        import pyarrow as pa

        config = self.taskset.config
        truths: list[Any] | None = None
        if self._truth is not None:
            truths = [self._truth.found(value) for value in table[self._truth.column].to_pylist()]
            if None in truths:
                kept = [number for number, truth in enumerate(truths) if truth is not None]
                dropped["no ground truth"] += len(truths) - len(kept)
                table, indices = table.take(kept), [indices[number] for number in kept]
                truths = [truths[number] for number in kept]
                if not truths:
                    return None
        (batch,) = table.combine_chunks().to_batches()
        contents = self._template.render(batch)
        columns: dict[str, pa.Array] = {
            "data_source": _constant(config.data_source, table.num_rows),
            "prompt": _prompts(contents, config.system_prompt),
        }
        if config.ability is not None:
            columns["ability"] = _constant(config.ability, table.num_rows)
        if truths is not None:
            columns["reward_model"] = pa.StructArray.from_arrays(
                [_constant(config.reward_method, table.num_rows), _inferred(truths, "reward_model.ground_truth", [])],
                ["style", "ground_truth"],
            )
        extra = {
            "index": pa.array(indices, pa.int64()),
            "uid": pa.array(self._uids(contents.to_pylist(), truths), pa.string()),
            "scorer": _constant(self.taskset.scorer, table.num_rows),
        }
        if config.env_class is not None:
            extra["env_class"] = _constant(config.env_class, table.num_rows)
        for field in config.extra_fields:
            extra[field] = conform(table[field], canonical_type(table[field].type))
        columns["extra_info"] = pa.StructArray.from_arrays(list(extra.values()), list(extra))
        return pa.table(columns)

    def _uids(self, contents: list[str], truths: list[Any] | None) -> list[str]:
        """`Task.uid` of each row, by putting together the canonical JSON it hashes."""
        config = self.taskset.config
        encode = msgspec.json.Encoder(order="sorted").encode
        environment = b'"env_class":' + encode(config.env_class) + b"," if config.env_class is not None else b""
        system = (
            b'{"content":' + encode(config.system_prompt) + b',"role":"system"},'
            if config.system_prompt is not None
            else b""
        )
        head = b"{" + environment + b'"prompt":[' + system + b'{"content":'
        middle = b',"role":"user"}],"reward_spec":{'
        tail = b',"method":' + encode(config.reward_method) + b"}}"
        if truths is None:
            return [_hash(head + encode(content) + middle + b"}}") for content in contents]
        middle += b'"ground_truth":'
        return [
            _hash(head + encode(content) + middle + encode(truth) + tail)
            if isinstance(truth, str)
            else self._task(content, truth).uid
            for content, truth in zip(contents, truths, strict=True)
        ]

    def _task(self, content: str, truth: Any) -> Task:
        config = self.taskset.config
        system = [{"role": "system", "content": config.system_prompt}] if config.system_prompt is not None else []
        return Task(
            prompt=[*system, {"role": "user", "content": content}],
            env_class=config.env_class,
            reward_spec={"method": config.reward_method, "ground_truth": truth},
        )

    def _rows(self, source: list[Row], indices: list[int], dropped: Counter[str]) -> pa.Table | None:
        rows: list[Row] = []
        for row, index in zip(source, indices, strict=True):
            try:
                made = self._make_row(row, index)
            except RowDropped as reason:
                dropped[str(reason)] += 1
                continue
            except TreetuneError:
                raise
            except Exception as error:
                raise TasksetError(f"row {index} could not be made: {type(error).__name__}: {error}") from error
            if made is None:
                dropped["map function"] += 1
            else:
                rows.append(self.finished(made, index))
        return rows_table(rows) if rows else None

    def finished(self, row: Mapping[str, Any], index: int) -> Row:
        """A row with everything that a canonical one has."""
        taskset, config = self.taskset, self.taskset.config
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), list):
            raise TasksetError(
                f"row {index} has no prompt (a list of messages): {row!r:.200}",
                remedy="the function of _make_map_fn() returns data_source, prompt and extra_info at the least",
            )
        row = {"data_source": config.data_source, **row}
        reward = dict(row.get("reward_model") or {})
        if "ground_truth" in reward:
            reward["ground_truth"] = stored(_plain(reward["ground_truth"]))
            row["reward_model"] = {"style": config.reward_method, **reward}
        extra = {"index": index, **{key: _plain(value) for key, value in dict(row.get("extra_info") or {}).items()}}
        env_class = row.pop("env_class", None) or extra.get("env_class") or config.env_class
        task = Task(prompt=row["prompt"], env_class=env_class, reward_spec=reward_spec(row.get("reward_model")))
        extra = {"index": extra.pop("index"), "uid": task.uid, "scorer": taskset.scorer, **_without(extra, RESERVED)}
        if env_class is not None:
            extra["env_class"] = env_class
        return {**row, "extra_info": extra}


def _remade(taskset: DatasetTaskset, columns: Mapping[str, pa.DataType], made: bool) -> RowBuilder:
    return RowBuilder(taskset, columns, made=made)


def template_of(taskset: DatasetTaskset, columns: Mapping[str, pa.DataType]) -> Template:
    import pyarrow as pa

    texts = [name for name, kind in columns.items() if pa.types.is_string(kind) or pa.types.is_large_string(kind)]
    return Template(taskset.config.prompt_template, list(columns), texts)


def read_pass_rates(path: str) -> dict[str, float]:
    """What `treetune eval --write-pass-rate` wrote: a line of JSON per uid."""
    from pathlib import Path

    try:
        lines = Path(path).expanduser().read_bytes().splitlines()
        return {entry["uid"]: float(entry["pass_rate"]) for entry in map(msgspec.json.decode, lines)}
    except OSError as error:
        raise ConfigError([("pass_rates", f"cannot read {path}: {error.strerror}")]) from None
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError([("pass_rates", f"{path} is no pass-rate file: {error}")]) from None


def accepting_index(function: Callable[..., Any]) -> Callable[[Row, int], Any]:
    """A map function takes the row, or the row and its index."""
    parameters = inspect.signature(function).parameters.values()
    several = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return function if several or len(positional) > 1 else lambda row, index: function(row)


def rows_table(rows: list[Row]) -> pa.Table:
    """Rows as canonical columns. A key whose values are of mixed types becomes JSON, and the table says which."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in rows for name in row))
    mixed: list[str] = []
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        columns[name] = _struct(values, name, mixed) if name in SPLIT else _inferred(values, name, mixed)
    return pa.table(columns).replace_schema_metadata({JSON_FIELDS: msgspec.json.encode(mixed)} if mixed else None)


def _struct(values: list[Any], name: str, mixed: list[str]) -> pa.Array:
    """Key by key, so that one mixed key does not make JSON of all."""
    import pyarrow as pa

    keys = list(dict.fromkeys(key for value in values if value for key in value))
    if not keys:
        return pa.nulls(len(values))
    arrays = [_inferred([(value or {}).get(key) for value in values], f"{name}.{key}", mixed) for key in keys]
    return pa.StructArray.from_arrays(arrays, keys, mask=pa.array([value is None for value in values]))


def _inferred(values: list[Any], path: str, mixed: list[str]) -> pa.Array:
    import pyarrow as pa

    try:
        array = pa.array(values)
        if array.type != pa.struct([]):
            return conform(array, canonical_type(array.type))
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
        refuse_mixed_truths(path)
    mixed.append(path)
    return json_array(values)


def _prompts(contents: pa.Array, system_prompt: str | None) -> pa.Array:
    import numpy as np
    import pyarrow as pa

    count = len(contents)
    if system_prompt is None:
        roles, offsets = _constant("user", count), np.arange(count + 1, dtype=np.int32)
    else:
        order = np.zeros(2 * count, dtype=np.int64)
        order[1::2] = np.arange(1, count + 1)
        contents = pa.concat_arrays([pa.array([system_prompt], pa.string()), contents]).take(pa.array(order))
        roles = pa.array(["system", "user"] * count, pa.string())
        offsets = np.arange(0, 2 * count + 1, 2, dtype=np.int32)
    messages = pa.StructArray.from_arrays([roles, contents], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array(offsets), messages)


def _constant(value: str | None, count: int) -> pa.Array:
    import pyarrow as pa

    return pa.nulls(count, pa.string()) if value is None else pa.repeat(pa.scalar(value, pa.string()), count)


def _row_filter(spec: str | None, columns: list[str], with_pass_rate: bool) -> tuple[Callable[[Row], Any] | None, bool]:
    """The filter, and whether it can only run once the uid is known."""
    if spec is None:
        return None, False
    from treetune.datasets.taskset import names_file

    if names_file(spec):
        return load_object(spec), with_pass_rate
    names = [*columns, "pass_rate"] if with_pass_rate else columns
    parsed = Filter.parse(spec, names)
    return parsed.keeps, "pass_rate" in parsed.columns


def _pylist(batch: Batch) -> list[Row]:
    return batch if isinstance(batch, list) else batch.to_pylist()


def _taken(batch: Batch, numbers: list[int]) -> Batch:
    return [batch[number] for number in numbers] if isinstance(batch, list) else batch.take(numbers)


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's."""
    return value.tolist() if hasattr(value, "tolist") else value


def _without(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}


def _hash(encoded: bytes) -> str:
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()
