"""Files of one list that a trainer cannot join as they are, made alike where their tasks say `join: true`.

    files = joined(tasksets, [taskset.build() for taskset in tasksets])

Messages get the keys that those of another file have, text contents become parts, a ground truth that is text becomes a
list of one, and another key of `extra_info` becomes JSON text, which Treetune reads as it was. The file that was built
stays; its like is kept in the cache beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.errors import TasksetError
from treetune.rows.arrow_values import find_clashes, json_fields_of, schema_tree
from treetune.rows.cache import Cache, Sidecar, config_hash
from treetune.rows.rule import RULE

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.taskset import DatasetTaskset

File = tuple[Sidecar, Path, bool]
"""What `built` gives: the sidecar, the path, whether it was a hit."""

AGENT = "agent_name"
"""The column that names a row's agent loop: where the joined rows have it, each must name one."""

TRUTHS = (("reward_model", "ground_truth"), ("ground_truth",))
"""Where a truth lies that the rule compares, in the formats of verl and TRL."""


def joined(tasksets: Sequence[DatasetTaskset], built: Sequence[File]) -> list[File]:
    """The files that a trainer can join: those that were built, or their likes. What cannot be joined is told now, not
    when the model is loaded."""
    names = [f"{number} ({taskset.name})" for number, taskset in enumerate(tasksets)]
    _refuse_lone_agents(names, built)
    if not any(_clashes_between(built)):
        return list(built)
    wide, json_fields = _wide(tasksets, built, names)
    changed = [find_clashes(sidecar.schema, schema_tree(wide)) for sidecar, _, _ in built]
    for number, (taskset, found) in enumerate(zip(tasksets, changed, strict=True)):
        if found and not taskset.config.join:
            one, other, between = next(_clashes_between(built))
            raise TasksetError(
                f"tasks {names[one]} and {names[other]} cannot be used in one list: {'; '.join(between)}",
                remedy=f"set join: true in task {names[number]}: {'; '.join(map(_change, found))}",
            )
    return [
        _like(taskset, file, wide, json_fields) if found else file
        for taskset, file, found in zip(tasksets, built, changed, strict=True)
    ]


def _clashes_between(built: Sequence[File]) -> Iterator[tuple[int, int, list[str]]]:
    for (one, first), (other, second) in combinations(enumerate(built), 2):
        if found := find_clashes(first[0].schema, second[0].schema):
            yield one, other, found


def _refuse_lone_agents(names: Sequence[str], built: Sequence[File]) -> None:
    having = [AGENT in sidecar.schema for sidecar, _, _ in built]
    if any(having) and not all(having):
        with_one, without = names[having.index(True)], names[having.index(False)]
        raise TasksetError(
            f"tasks {with_one} and {without} cannot be used in one list: task {without} has no column {AGENT}, so its "
            "rows would name no agent",
            remedy=f"give all of them the column {AGENT}, or none",
        )


def _change(clash: str) -> str:
    path = clash.partition(" ")[0]
    if "(null and" in clash:
        return f"{path}, which is empty there, gets the type of the others"
    if path.endswith("ground_truth"):
        return f"each text of {path} becomes a list of one, and an answer that is any of a list is right"
    if path.startswith("extra_info."):
        return f"{path} becomes JSON text, which Treetune reads as it was"
    return "its messages get the keys, or the parts, of the others"


def _wide(
    tasksets: Sequence[DatasetTaskset], built: Sequence[File], names: Sequence[str]
) -> tuple[pa.Schema, set[str]]:
    """The schema that holds all files, and which of its fields are JSON text."""
    import pyarrow.parquet as pq

    from treetune.rows.parquet import GrowingParquet

    schemas = [pq.read_schema(path).remove_metadata() for _, path, _ in built]
    lists = any(_is_list_of_text(_truth_type(schema)) for schema in schemas)
    growing = GrowingParquet(Path())
    wide = None
    for number, (taskset, schema) in enumerate(zip(tasksets, schemas, strict=True)):
        if lists and _is_text(_truth_type(schema)) and taskset.scorer in (None, RULE):
            schema = _with_truths(schema)
        schema = _with_parts(schema, schemas)
        try:
            wide = schema if wide is None else growing.widen(wide, schema)
        except TasksetError:
            one, other, between = next(_clashes_between(built))
            raise TasksetError(
                f"tasks {names[one]} and {names[other]} cannot be used in one list: {'; '.join(between)}",
                remedy=f"no key makes them alike: a custom_cls of task {names[number]} can give them one shape",
            ) from None
    assert wide is not None
    return wide, growing.json_fields


def _like(taskset: DatasetTaskset, file: File, wide: pa.Schema, json_fields: set[str]) -> File:
    """The file with the types of `wide`, out of the cache."""
    sidecar, path, hit = file
    cache = Cache(taskset.cache_dir)
    asked = {"like": sidecar.key, "schema": str(wide), "json": sorted(json_fields)}
    key = f"{sidecar.key.partition('_')[0]}_{config_hash(asked, {})}"
    like, like_hit = cache.get_or_build(key, lambda place: _write(place, sidecar, path, wide, json_fields))
    return like, cache.path(key), hit and like_hit


def _write(place: Path, sidecar: Sidecar, path: Path, wide: pa.Schema, json_fields: set[str]) -> Sidecar:
    import pyarrow.parquet as pq

    from treetune.rows.parquet import GrowingParquet, with_mark

    with pq.ParquetFile(path) as source, GrowingParquet(place) as writer:
        metadata = source.metadata.metadata
        own = json_fields_of(metadata)
        writer.json_fields = json_fields.union(own)
        writer.schema = with_mark(wide) if writer.json_fields else wide
        for number in range(source.num_row_groups):
            table = _alike(source.read_row_group(number), wide)
            writer.write(table.replace_schema_metadata(metadata))
        schema = schema_tree(writer.schema)
    return msgspec.structs.replace(sidecar, schema=schema, seconds=0.0)


def _alike(table: pa.Table, wide: pa.Schema) -> pa.Table:
    """Truths as lists and contents as parts, where `wide` has them so; the writer does the rest."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from treetune.rows.arrow_values import to_parts

    if _is_text(_truth_type(table.schema)) and _is_list_of_text(_truth_type(wide)):
        name = "reward_model" if "reward_model" in table.column_names else "ground_truth"
        column = table[name].combine_chunks()
        truths = pc.struct_field(column, "ground_truth") if name == "reward_model" else column
        lists = pa.array([None if truth is None else [truth] for truth in truths.to_pylist()], pa.list_(pa.string()))
        if name == "reward_model":
            children = dict(zip([field.name for field in column.type], column.flatten(), strict=True))
            children["ground_truth"] = lists
            lists = pa.StructArray.from_arrays(list(children.values()), list(children), mask=column.is_null())
        table = table.set_column(table.column_names.index(name), name, lists)
    if _is_text(_content_type(table.schema)) and not _is_text(_content_type(wide)):
        prompts = [[to_parts(message) for message in prompt] for prompt in table["prompt"].to_pylist()]
        array = pa.array(prompts, wide.field("prompt").type)
        table = table.set_column(table.column_names.index("prompt"), "prompt", array)
    return table


def _truth_type(schema: pa.Schema) -> Any:
    for first, *rest in TRUTHS:
        kind = schema.field(first).type if first in schema.names else None
        for name in rest:
            kind = kind.field(name).type if kind is not None and kind.get_field_index(name) >= 0 else None
        if kind is not None:
            return kind
    return None


def _with_truths(schema: pa.Schema) -> pa.Schema:
    """The schema with truths that are lists of text."""
    import pyarrow as pa

    lists = pa.list_(pa.string())
    name = "reward_model" if "reward_model" in schema.names else "ground_truth"
    if name == "reward_model":
        lists = pa.struct([(f.name, lists if f.name == "ground_truth" else f.type) for f in schema.field(name).type])
    return schema.set(schema.get_field_index(name), pa.field(name, lists))


def _content_type(schema: pa.Schema) -> Any:
    import pyarrow as pa

    kind = schema.field("prompt").type if "prompt" in schema.names else None
    if kind is None or not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return None
    return kind.value_type.field("content").type if kind.value_type.get_field_index("content") >= 0 else None


def _with_parts(schema: pa.Schema, all: Sequence[pa.Schema]) -> pa.Schema:
    """The schema with contents that are lists of parts, where those of another are."""
    import pyarrow as pa

    parts = next((kind for kind in map(_content_type, all) if kind is not None and pa.types.is_list(kind)), None)
    if parts is None or not _is_text(_content_type(schema)):
        return schema
    message = schema.field("prompt").type.value_type
    fields = [(field.name, parts if field.name == "content" else field.type) for field in message]
    return schema.set(schema.get_field_index("prompt"), pa.field("prompt", pa.list_(pa.struct(fields))))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return kind is not None and pa.types.is_string(kind)


def _is_list_of_text(kind: Any) -> bool:
    import pyarrow as pa

    return kind is not None and pa.types.is_list(kind) and pa.types.is_string(kind.value_type)
