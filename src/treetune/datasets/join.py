"""Files of one list that a trainer cannot join as they are, made alike where their tasks say `join: true`.

    files = join_files(tasksets, [taskset.build() for taskset in tasksets])

Messages get the keys that those of another file have, text contents become parts, a ground truth that is text becomes a
list of one, and another key of `extra_info` becomes JSON text, which Treetune reads as it was. The file that was built
stays; its converted copy is kept in the cache beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.errors import TasksetError
from treetune.rows.arrow_values import children_of, find_clashes, json_fields_of, schema_tree, set_column, struct_of
from treetune.rows.cache import Cache, Sidecar, config_hash
from treetune.rows.rule import RULE

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.datasets.taskset import DatasetTaskset

File = tuple[Sidecar, Path, bool]
"""What a build gives: the sidecar, the path, whether it was a hit."""

AGENT = "agent_name"
"""The column that names a row's agent loop: where the joined rows have it, each must name one."""

CONTENT = ("prompt", "content")


def join_files(tasksets: Sequence[DatasetTaskset], built: Sequence[File]) -> list[File]:
    """The files that a trainer can join: those that were built, or converted copies. What cannot be joined is refused
    now, not when the model is loaded."""
    names = [f"{number} ({taskset.name})" for number, taskset in enumerate(tasksets)]
    _refuse_lone_agents(names, built)
    clashes = next(_find_clashes(names, built), None)
    if clashes is None:
        return list(built)
    schema, json_fields = _widen_schemas(tasksets, built, names)
    changes = [find_clashes(sidecar.schema, schema_tree(schema)) for sidecar, _, _ in built]
    for name, taskset, changed in zip(names, tasksets, changes, strict=True):
        if changed and not taskset.config.join:
            remedy = f"set join: true in task {name}: {'; '.join(map(_describe_change, changed))}"
            raise TasksetError(clashes, remedy=remedy)
    return [
        _convert_file(taskset, file, schema, json_fields) if changed else file
        for taskset, file, changed in zip(tasksets, built, changes, strict=True)
    ]


def _find_clashes(names: Sequence[str], built: Sequence[File]) -> Iterator[str]:
    for (one, first), (other, second) in combinations(zip(names, built, strict=True), 2):
        if found := find_clashes(first[0].schema, second[0].schema):
            yield f"tasks {one} and {other} cannot be used in one list: {'; '.join(found)}"


def _refuse_lone_agents(names: Sequence[str], built: Sequence[File]) -> None:
    having = [AGENT in sidecar.schema for sidecar, _, _ in built]
    if any(having) and not all(having):
        with_one, without = names[having.index(True)], names[having.index(False)]
        raise TasksetError(
            f"tasks {with_one} and {without} cannot be used in one list: task {without} has no column {AGENT}, so its "
            "rows would name no agent",
            remedy=f"give all of them the column {AGENT}, or none",
        )


def _describe_change(clash: str) -> str:
    path = clash.partition(" ")[0]
    if "(null and" in clash:
        return f"{path}, which is empty there, gets the type of the others"
    if path.endswith("ground_truth"):
        return f"each text of {path} becomes a list of one, and an answer that is any of a list is right"
    if path.startswith("extra_info."):
        return f"{path} becomes JSON text, which Treetune reads as it was"
    return "its messages get the keys, or the parts, of the others"


def _widen_schemas(
    tasksets: Sequence[DatasetTaskset], built: Sequence[File], names: Sequence[str]
) -> tuple[pa.Schema, set[str]]:
    """The schema that holds all files, and which of its fields are JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from treetune.rows.parquet import widen

    texts, json_fields = pa.list_(pa.string()), set[str]()
    kinds = [pa.struct(list(pq.read_schema(path).remove_metadata())) for _, path, _ in built]
    with_lists = any(_type_at(kind, path) == texts for kind in kinds for path in _truths())
    contents = [_type_at(kind, CONTENT) for kind in kinds]
    parts = next((kind for kind in contents if kind is not None and pa.types.is_list(kind)), None)
    wide: pa.Schema | None = None
    for name, taskset, kind in zip(names, tasksets, kinds, strict=True):
        for path in _truths():
            if with_lists and _is_text_at(kind, path) and taskset.scorer in (None, RULE):
                kind = _replace_type(kind, path, texts)
        if parts is not None and _is_text_at(kind, CONTENT):
            kind = _replace_type(kind, CONTENT, parts)
        try:
            wide = pa.schema(list(kind)) if wide is None else widen(wide, kind, json_fields)
        except TasksetError:
            remedy = f"no key makes them alike: a custom_cls of task {name} can give them one shape"
            raise TasksetError(next(_find_clashes(names, built)), remedy=remedy) from None
    return wide, json_fields


def _convert_file(taskset: DatasetTaskset, file: File, schema: pa.Schema, json_fields: set[str]) -> File:
    """The file with the types of a wider schema, from the cache."""
    sidecar, path, hit = file
    cache = Cache(taskset.cache_dir)
    asked = {"like": sidecar.key, "schema": str(schema), "json": sorted(json_fields)}
    key = f"{sidecar.key.partition('_')[0]}_{config_hash(asked, {})}"

    def write(place: Path) -> Sidecar:
        import pyarrow.parquet as pq

        from treetune.rows.parquet import GrowingParquet, with_mark

        with pq.ParquetFile(path) as source, GrowingParquet(place) as writer:
            metadata = source.metadata.metadata
            writer.json_fields = json_fields.union(json_fields_of(metadata))
            writer.schema = with_mark(schema) if writer.json_fields else schema
            for number in range(source.num_row_groups):
                table = _convert_values(source.read_row_group(number), schema)
                writer.write(table.replace_schema_metadata(metadata))
            return msgspec.structs.replace(sidecar, schema=schema_tree(writer.schema))

    converted, converted_hit = cache.get_or_build(key, write)
    return converted, cache.path(key), hit and converted_hit


def _convert_values(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Truths as lists and contents as parts, where the schema has them so; the writer does the rest."""
    import pyarrow as pa

    from treetune.rows.parquet import to_parts

    have, want, texts = pa.struct(list(table.schema)), pa.struct(list(schema)), pa.list_(pa.string())
    for path in _truths():
        if _is_text_at(have, path) and _type_at(want, path) == texts:
            column = table[path[0]].combine_chunks()
            children = children_of(column) if len(path) > 1 else {}
            truths = children.get("ground_truth", column).to_pylist()
            lists = pa.array([None if truth is None else [truth] for truth in truths], texts)
            nested = struct_of({**children, "ground_truth": lists}, column) if children else lists
            table = set_column(table, path[0], nested)
    if _is_text_at(have, CONTENT) and not _is_text_at(want, CONTENT):
        prompts = [[to_parts(message) for message in prompt] for prompt in table["prompt"].to_pylist()]
        table = set_column(table, "prompt", pa.array(prompts, schema.field("prompt").type))
    return table


def _truths() -> list[tuple[str, ...]]:
    """Where a truth lies that the rule compares, in each format."""
    from treetune.rows.formats import FORMATS

    return [format.truth for format in FORMATS.values() if not format.has_environments]


def _type_at(kind: pa.DataType, path: Sequence[str]) -> pa.DataType | None:
    """The type at a path of keys, through structs and lists of them."""
    import pyarrow as pa

    for name in path:
        kind = kind.value_type if pa.types.is_list(kind) else kind
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _is_text_at(kind: pa.DataType, path: Sequence[str]) -> bool:
    return str(_type_at(kind, path)) == "string"


def _replace_type(kind: pa.DataType, path: Sequence[str], other: pa.DataType) -> Any:
    import pyarrow as pa

    if not path:
        return other
    if pa.types.is_list(kind):
        return pa.list_(_replace_type(kind.value_type, path, other))
    first, *rest = path
    return pa.struct([(f.name, _replace_type(f.type, rest, other) if f.name == first else f.type) for f in kind])
