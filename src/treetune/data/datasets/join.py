"""Files of one list that a trainer cannot join as they are, made alike where their tasks say `join: true`.

    files = join_files(tasksets, [taskset.build() for taskset in tasksets])

The keys of messages, parts, lists of ground truths: docs/dataset-tasks.md says what becomes alike. The file that was
built stays; its converted copy is kept in the cache beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.data.rows.agent_column import COLUMN as AGENT
from treetune.data.rows.agent_column import with_agent
from treetune.data.rows.arrow_values import (
    children_of,
    find_clashes,
    schema_tree,
    set_column,
    struct_of,
)
from treetune.data.rows.cache import Cache, Sidecar, config_hash
from treetune.data.rows.rule import RULE
from treetune.errors import TasksetError
from treetune.scorers import SCORER

if TYPE_CHECKING:
    import pyarrow as pa

    from treetune.data.datasets.taskset import DatasetTaskset

File = tuple[Sidecar, Path, bool]
"""What a build gives: the sidecar, the path, whether it was a hit."""

Converter = Callable[["pa.Table"], "pa.Table"]

CONTENT = ("prompt", "content")


def join_files(
    tasksets: Sequence[DatasetTaskset], built: Sequence[File], agents: Sequence[str] | None = None
) -> list[File]:
    """The files that a trainer can join: those that were built, or converted copies. What cannot be joined is refused
    now, not when the model is loaded. `agents`: the agent loop of each taskset, which its rows then name."""
    if agents is not None:
        built = [_name_agent(*each) for each in zip(tasksets, built, agents, strict=True)]
    names = [f"{number} ({taskset.name})" for number, taskset in enumerate(tasksets)]
    with_agents = [AGENT in sidecar.schema for sidecar, _, _ in built]
    if any(with_agents) and not all(with_agents):
        without = ", ".join(name for name, having in zip(names, with_agents, strict=True) if not having)
        remedy = f"give all tasks of the list the column {AGENT}, or none"
        raise TasksetError(f"rows of task {without} would name no agent: others have the column {AGENT}", remedy=remedy)
    clashes = next(_find_clashes(names, built), None)
    if clashes is None:
        return list(built)
    converters = _choose_converters(tasksets, built)
    schema, json_fields = _widen_schemas(names, built, converters)
    asked = {"schema": str(schema), "json": sorted(json_fields)}
    files: list[File] = []
    for name, taskset, file, convert in zip(names, tasksets, built, converters, strict=True):
        changed = find_clashes(file[0].schema, schema_tree(schema))
        if changed and not taskset.config.join:
            remedy = f"set join: true in task {name}, which then gets the types of the others: {'; '.join(changed)}"
            raise TasksetError(clashes, remedy=remedy)
        files.append(_change_file(taskset, file, asked, convert, schema, json_fields) if changed else file)
    return files


def _name_agent(taskset: DatasetTaskset, file: File, agent: str) -> File:
    """The file with the column that names an agent loop; one that has it stays."""
    if AGENT in file[0].schema:
        return file
    return _change_file(taskset, file, {AGENT: agent}, partial(with_agent, agent=agent))


def _change_file(taskset: DatasetTaskset, file: File, asked: Mapping[str, Any], change: Converter, *wider: Any) -> File:
    """The file with changed tables, from the cache. `asked` identifies the change; `wider` are the schema that the rows
    get, and which of its fields are JSON text."""
    sidecar, path, hit = file
    cache = Cache(taskset.cache_dir)
    key = f"{sidecar.key.partition('_')[0]}_{config_hash({'like': sidecar.key, **asked}, {})}"

    def write(place: Path) -> Sidecar:
        from treetune.data.rows.growing_parquet import write_changed

        return msgspec.structs.replace(sidecar, schema=schema_tree(write_changed(path, place, change, *wider)))

    changed, changed_hit = cache.get_or_build(key, write)
    return changed, cache.path(key), hit and changed_hit


def _find_clashes(names: Sequence[str], built: Sequence[File]) -> Iterator[str]:
    for (one, first), (other, second) in combinations(zip(names, built, strict=True), 2):
        if found := find_clashes(first[0].schema, second[0].schema):
            yield f"tasks {one} and {other} cannot be used in one list: {'; '.join(found)}"


def _choose_converters(tasksets: Sequence[DatasetTaskset], built: Sequence[File]) -> list[Converter]:
    """What makes the texts of each file lists and parts, where another file has those."""
    from treetune.data.rows.formats import FORMATS

    # Where a truth lies that the rule compares, in each format.
    truths = [format.truth for format in FORMATS.values() if not format.has_environments]
    trees = [sidecar.schema for sidecar, _, _ in built]
    with_lists = any(_type_at(tree, path) == ["string"] for tree in trees for path in truths)
    with_parts = any(isinstance(_type_at(tree, CONTENT), list) for tree in trees)
    converters: list[Converter] = []
    for taskset, tree in zip(tasksets, trees, strict=True):
        scorer = taskset.row_scorer or RULE
        ruled = with_lists and (scorer == RULE or scorer.startswith(SCORER))
        texts = [path for path in truths if ruled and _type_at(tree, path) == "string"]
        parts = with_parts and _type_at(tree, CONTENT) == "string"
        converters.append(partial(_convert_values, truths=texts, parts=parts))
    return converters


def _type_at(tree: Any, path: Sequence[str]) -> Any:
    """The type at a path of keys, through mappings and lists of them."""
    for name in path:
        tree = tree[0] if isinstance(tree, list) else tree
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _convert_values(table: pa.Table, truths: Sequence[tuple[str, ...]], parts: bool) -> pa.Table:
    import pyarrow as pa

    from treetune.data.rows.parquet import to_parts

    for path in truths:
        column = table[path[0]].combine_chunks()
        children = children_of(column) if len(path) > 1 else {}
        texts = children.get("ground_truth", column).to_pylist()
        lists = pa.array([None if text is None else [text] for text in texts], pa.list_(pa.string()))
        nested = struct_of({**children, "ground_truth": lists}, column) if children else lists
        table = set_column(table, path[0], nested)
    if parts:
        part = pa.struct([("type", pa.string()), ("text", pa.string())])
        keys = {field.name: field.type for field in table.schema.field("prompt").type.value_type}
        messages = pa.struct(list({**keys, "content": pa.list_(part)}.items()))
        prompts = [[to_parts(message) for message in prompt] for prompt in table["prompt"].to_pylist()]
        table = set_column(table, "prompt", pa.array(prompts, pa.list_(messages)))
    return table


def _widen_schemas(
    names: Sequence[str], built: Sequence[File], converters: Sequence[Converter]
) -> tuple[pa.Schema, set[str]]:
    """The schema that holds all files once they are converted, and which of its fields are JSON text."""
    import pyarrow.parquet as pq

    from treetune.data.rows.growing_parquet import widen

    json_fields: set[str] = set()
    wide: pa.Schema | None = None
    for name, (_, path, _), convert in zip(names, built, converters, strict=True):
        schema = convert(pq.read_schema(path).remove_metadata().empty_table()).schema
        try:
            wide = schema if wide is None else widen(wide, schema, json_fields)
        except TasksetError:
            remedy = f"no key makes them alike: a custom_cls of task {name} can give them one shape"
            raise TasksetError(next(_find_clashes(names, built)), remedy=remedy) from None
    return wide, json_fields
