"""Rows as tables, and tables as parquet whose values come back as they were.

    with GrowingParquet(path, exact=True) as writer:
        writer.write(table_of(rows))

Types are canonical, so that trainers can join built files: text is `string`, whole numbers int64, fractions float64.
What Arrow cannot hold as it is (mixed types, integers over 64 bits, mappings without keys) becomes JSON text, listed in
the file's metadata. A ground truth never does: trainers compare with it (see `MixedTruths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types

from treetune.errors import TasksetError
from treetune.images import has_images
from treetune.rows.arrow_values import (
    JSON_FIELDS,
    children_of,
    drop_nulls,
    is_list,
    json_fields_of,
    set_column,
    struct_of,
    to_iso_texts,
    to_json_text,
    to_python,
    with_json_fields,
)
from treetune.rows.formats import FORMATS, MAPPINGS
from treetune.rows.image_columns import COLUMN as IMAGES
from treetune.rows.image_columns import HUGGINGFACE, image_column, image_type
from treetune.rows.round_trip import MARK, with_parts

TRUTHS = tuple(".".join(format.truth) for format in FORMATS.values())

ROW_GROUP = 2_000
"""Rows of one row group: reading one row reads all of its group."""

MixedAs = Literal["refused", "text", "json"]
"""What becomes of ground truths of several types: an error, JSON text as elsewhere, or Arrow's type for JSON, which
`datasets` gives trainers as the values they are."""

_encode_sorted = msgspec.json.Encoder(order="sorted").encode


class MixedTruths(TasksetError):
    """Ground truths that are no one Arrow type."""


def _refuse_truths(path: str) -> MixedTruths:
    return MixedTruths(
        f"{path} has values of several types, or a number that does not fit in 64 bits: no parquet column holds them",
        remedy="make all of them text, or all of them lists or mappings of one shape",
    )


def read_uids(path: str | Path) -> list[str]:
    """The uid of each row of a file in the canonical layout."""
    table = pq.ParquetFile(path).read(columns=["extra_info.uid"])
    uids: list[str] = pc.struct_field(table["extra_info"], "uid").to_pylist()
    return uids


# Rows as a table


def table_of(rows: list[dict[str, Any]], *, truths: MixedAs = "refused") -> pa.Table:
    """Rows as a table of exactly their values, whose metadata lists what is JSON text."""
    columns: dict[str, pa.Array] = {}
    json_fields: list[str] = []
    if _mixes_contents(rows):
        rows = list(map(with_parts, rows))
    for name in dict.fromkeys(name for row in rows for name in row):
        if name == IMAGES and (images := image_column([row.get(name) for row in rows])) is not None:
            columns[name] = images
            continue
        infer = infer_mapping if name in MAPPINGS else infer_column
        try:
            columns[name] = infer([row.get(name) for row in rows], name, json_fields, exact=True, truths=truths)
        except UnicodeEncodeError as error:
            problem = f"{name} has text that is no Unicode: {error.object!r:.80}"
            raise TasksetError(problem, remedy="remove lone surrogates") from None
        except TypeError:
            raise TasksetError(f"{name} has a key that is no text", remedy="name its keys by text") from None
    return with_json_fields(pa.table(columns), json_fields)


def _mixes_contents(rows: list[dict[str, Any]]) -> bool:
    """Whether images make parts of some contents, and others are text."""
    prompts = [prompt for row in rows if isinstance(prompt := row.get("prompt"), list)]
    messages = [message for prompt in prompts for message in prompt if isinstance(message, dict)]
    kinds = {type(message.get("content")) for message in messages}
    images = any(IMAGES in row for row in rows) or (list in kinds and has_images(messages))
    return {str, list} <= kinds and images and all(row.get("prompt") and "extra_info" in row for row in rows)


def infer_column(
    values: list[Any], path: str, json_fields: list[str], *, exact: bool = False, truths: MixedAs = "refused"
) -> pa.Array:
    """Values as a column of a canonical type; where none holds them as JSON text, and `json_fields` gets the path.
    `exact`: nor may a type change a value."""
    if path in TRUTHS and truths == "json":
        return pa.ExtensionArray.from_storage(pa.json_(pa.string()), json_array(values))
    try:
        array = pa.array(values)
        if pa.struct([]) not in _types_in(array.type):  # which parquet cannot store
            column = conform(array, canonical_type(array.type))
            if not exact or _is_exact(column, values):
                return column
    except (pa.ArrowException, OverflowError):
        pass
    if path in TRUTHS and truths == "refused":
        raise _refuse_truths(path)
    json_fields.append(path)
    return json_array(values)


def infer_mapping(values: list[Any], path: str, json_fields: list[str], **options: Any) -> pa.Array:
    """Mappings as a column, key by key, so that one mixed key does not make JSON of all."""
    keys = keys_of(values) if all(value is None or isinstance(value, dict) for value in values) else []
    if not keys or "" in keys:  # which no path can name
        return infer_column(values, path, json_fields, **options)
    arrays = [
        infer_column([value.get(key) if value else None for value in values], f"{path}.{key}", json_fields, **options)
        for key in keys
    ]
    return pa.StructArray.from_arrays(arrays, keys, mask=pa.array([value is None for value in values]))


def keys_of(rows: list[Any]) -> list[str]:
    """The keys of all rows, in the order of their first appearance."""
    return list(dict.fromkeys(chain.from_iterable(row for row in rows if row)))


def _is_exact(array: pa.Array, values: list[Any]) -> bool:
    """Whether no value was changed to fit its type."""
    certain = (types.is_string, types.is_int64, types.is_boolean, types.is_null, types.is_nested)
    if all(any(is_kind(type_) for is_kind in certain) for type_ in _types_in(array.type)):
        return True
    return bool(_encode_sorted(drop_nulls(values)) == _encode_sorted(to_python(array)))


def _types_in(type_: pa.DataType) -> Iterator[pa.DataType]:
    yield type_
    for number in range(type_.num_fields if types.is_nested(type_) else 0):
        yield from _types_in(type_.field(number).type)


def messages_column(values: list[list[dict[str, Any]]]) -> pa.Array:
    """Prompts as a column. Where some contents are text and others lists of parts, the text becomes a part: the same
    message, and a column has one type."""
    try:
        try:
            array = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            array = pa.array([[to_parts(message) for message in prompt] for prompt in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
        problem = f"prompts that no parquet column can hold: {error}"
        raise TasksetError(problem, remedy="give a key of messages one type in all rows") from None
    return conform(array, canonical_type(array.type))


def to_parts(message: Any) -> Any:
    content = message.get("content") if isinstance(message, dict) else None
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def prompt_column(contents: pa.Array, system_prompt: str | None) -> pa.Array:
    import numpy as np

    count, roles = len(contents), ["user"]
    if system_prompt is not None:
        roles, order = ["system", "user"], np.zeros(2 * count, dtype=np.int64)
        order[1::2] = np.arange(1, count + 1)
        contents = pa.concat_arrays([pa.array([system_prompt], pa.string()), contents]).take(pa.array(order))
    messages = pa.StructArray.from_arrays([pa.array(roles * count, pa.string()), contents], ["role", "content"])
    offsets = np.arange(0, len(messages) + 1, len(roles), dtype=np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), messages)


def constant_column(value: str | None, count: int) -> pa.Array:
    return pa.nulls(count, pa.string()) if value is None else pa.repeat(pa.scalar(value, pa.string()), count)


# Types


_CANONICAL = {
    # A date or a time is its ISO text, which is what every trainer and every wire can hold.
    pa.string(): (types.is_temporal, types.is_decimal, types.is_large_string, types.is_string_view),
    pa.binary(): (types.is_large_binary, types.is_binary_view, types.is_fixed_size_binary),
    pa.int64(): (types.is_integer,),
    pa.float64(): (types.is_floating,),
}


def canonical_type(type_: pa.DataType) -> pa.DataType:
    if types.is_dictionary(type_):
        return canonical_type(type_.value_type)
    if is_list(type_):
        return pa.list_(canonical_type(type_.value_type))
    if types.is_struct(type_):
        # A struct without keys cannot be stored; it becomes JSON.
        fields = [(field.name, canonical_type(field.type)) for field in type_]
        return pa.struct(fields) if fields else pa.string()
    kinds = _CANONICAL.items()
    return next((canonical for canonical, tests in kinds if any(test(type_) for test in tests)), type_)


def unify_types(first: pa.DataType, second: pa.DataType, *, exact: bool) -> pa.DataType | None:
    """The type that holds both, or None where only JSON can. `exact`: without changing a value, as 1 becomes 1.0."""
    schemas = [pa.schema([("x", first)]), pa.schema([("x", second)])]
    try:
        return pa.unify_schemas(schemas, promote_options="default" if exact else "permissive").field("x").type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None


def conform(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """`array` as `type_`: keys that are missing become nulls, and what cannot be cast to text becomes JSON."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    if array.type == type_:
        return array
    if types.is_dictionary(array.type):
        return conform(array.dictionary_decode(), type_)
    if types.is_null(array.type):
        return pa.nulls(len(array), type_)
    if types.is_struct(array.type) and types.is_struct(type_):
        children = children_of(array)
        arrays = [
            conform(children[field.name], field.type) if field.name in children else pa.nulls(len(array), field.type)
            for field in type_
        ]
        return pa.StructArray.from_arrays(arrays, fields=list(type_), mask=pc.is_null(array))
    if is_list(array.type) and is_list(type_):
        array = array if types.is_list(array.type) else array.cast(pa.list_(array.type.value_type))
        values = conform(array.flatten(), type_.value_type)  # without those below nulls, so the offsets are others
        ends = pc.cumulative_sum(pc.fill_null(pc.list_value_length(array), 0)).cast(pa.int32())
        offsets = pa.concat_arrays([pa.array([0], pa.int32()), ends])
        return pa.ListArray.from_arrays(offsets, values, type=type_, mask=pc.is_null(array))
    if types.is_string(type_) and types.is_temporal(array.type):
        return pa.array(to_iso_texts(array), pa.string())
    is_text = types.is_string(canonical_type(array.type)) and not types.is_nested(array.type)
    if types.is_string(type_) and not is_text:
        return json_array(array.to_pylist())
    return array.cast(type_)


def json_array(values: Iterable[Any]) -> pa.Array:
    """Each value as JSON text."""
    return pa.array([None if value is None else to_json_text(value) for value in values], pa.string())


# Tables as a file


class GrowingParquet:
    """A file whose schema may grow with every table: then what was written is written again under the wider one.
    `exact`: where no type holds what two tables have as it is, JSON does; else a wider type may, such as that of
    fractions for whole numbers."""

    def __init__(self, path: Path, *, exact: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.schema: pa.Schema | None = None
        self.json_fields: set[str] = set()
        self._exact = exact
        self._writer: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def write(self, table: pa.Table) -> None:
        already = frozenset(json_fields_of(table.schema.metadata))
        table = table.replace_schema_metadata(None)
        schema, json_fields = self.schema, {*self.json_fields, *already}
        wider = table.schema if schema is None else widen(schema, table.schema, json_fields, exact=self._exact)
        before, self.json_fields = frozenset(self.json_fields), json_fields
        self.schema = with_mark(wider) if json_fields else wider
        if schema is not None and (self.schema != schema or json_fields != before):
            self._rewrite(before)
        self._put(table, already)
        self.rows += table.num_rows

    def _rewrite(self, json_fields: frozenset[str]) -> None:
        """Write what there is again, under the schema as it is now."""
        self._close()
        earlier = self.path.with_name(f"{self.path.name}.narrow")
        self.path.rename(earlier)
        with pq.ParquetFile(earlier) as file:
            for number in range(file.num_row_groups):
                self._put(file.read_row_group(number), json_fields)
        earlier.unlink()

    def _put(self, table: pa.Table, already_json: frozenset[str]) -> None:
        assert self.schema is not None
        table = _add_mark(_encode_fields(table, self.json_fields - already_json), self.json_fields)
        rows = conform(table.to_struct_array(), pa.struct(list(self.schema)))
        if self._writer is None:
            holds_images = (IMAGES, image_type()) in zip(self.schema.names, self.schema.types, strict=True)
            schema = self.schema.with_metadata(HUGGINGFACE) if holds_images else self.schema
            self._writer = pq.ParquetWriter(self.path, schema, compression="zstd", compression_level=1)
        self._writer.write_table(pa.Table.from_struct_array(rows), row_group_size=ROW_GROUP)

    def _close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            if self.json_fields:
                writer.add_key_value_metadata({JSON_FIELDS: msgspec.json.encode(sorted(self.json_fields))})
            writer.close()


def widen(
    known: Iterable[pa.Field], new: Iterable[pa.Field], json_fields: set[str], *, exact: bool = False, under: str = ""
) -> pa.Schema:
    """The schema that holds rows of both; `json_fields` gets the paths that become JSON text."""
    fields = {field.name: field.type for field in known}
    for field in new:
        path, one, other = f"{under}{field.name}", fields.get(field.name), field.type
        if one is None:
            both = other
        elif path in json_fields:
            both = pa.string()
        elif path in MAPPINGS and types.is_struct(one) and types.is_struct(other):
            both = pa.struct(list(widen(one, other, json_fields, exact=exact, under=f"{path}.")))
        elif (both := unify_types(one, other, exact=exact)) is None:
            if path in TRUTHS:
                raise _refuse_truths(path)
            if path == IMAGES and image_type() in (one, other):
                raise TasksetError(
                    "some rows have images and others only their addresses: no parquet column holds both",
                    remedy="fetch those images yourself, or write .jsonl",
                )
            if path == "prompt" and not exact:
                raise TasksetError(
                    "prompts whose contents are text in some rows and lists in others, many rows apart",
                    remedy='write text contents as [{"type": "text", "text": ...}] throughout',
                )
            json_fields.add(path)
            both = pa.string()
        fields[field.name] = both
    return pa.schema(fields.items())


def _encode_fields(table: pa.Table, paths: set[str]) -> pa.Table:
    """`table` with the values at these paths as JSON text."""
    for path in paths:
        name, _, key = path.partition(".")
        if name not in table.column_names:
            continue
        column = conform(table[name], table.schema.field(name).type)
        if key:
            children = children_of(column)
            if key not in children:
                continue
            column = struct_of({**children, key: json_array(children[key].to_pylist())}, column)
        else:
            column = json_array(column.to_pylist())
        table = set_column(table, name, column)
    return table


def with_mark(schema: pa.Schema) -> pa.Schema:
    """A schema whose rows say themselves which of their values are JSON text: trainers do not see the metadata."""
    place = schema.get_field_index("extra_info")
    if place < 0 or not types.is_struct(kind := schema.field(place).type):
        return schema
    return schema.set(place, pa.field("extra_info", unify_types(kind, pa.struct([(MARK, pa.string())]), exact=True)))


def _add_mark(table: pa.Table, json_fields: set[str]) -> pa.Table:
    if not json_fields or "extra_info" not in table.column_names:
        return table
    column = conform(table["extra_info"], table.schema.field("extra_info").type)
    if not types.is_struct(column.type):
        return table
    mark = pa.repeat(pa.scalar(msgspec.json.encode(sorted(json_fields)).decode(), pa.string()), len(column))
    return set_column(table, "extra_info", struct_of({**children_of(column), MARK: mark}, column))
