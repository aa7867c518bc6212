"""Makes the files that a trainer gets for a list of tasks: one per task or, if tasks have weights, one file drawn from
their mixture.

    files = build_files(tasksets, "verl")
    files[0].path, files[0].shares

If tasks set `join: true`, files that a trainer could not join are converted to one layout; docs/dataset-tasks.md says
what changes. The built file stays; its converted copy is kept next to it in the cache.

A drawn file has the first draws of the mixture that `eval`, `serve` and the other trainers take from the same list. It
has as many rows as the tasks together, so that an epoch is as long as without weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from treetune.config.structs import to_plain
from treetune.core.mixture import Mixture
from treetune.data.arrow_values import (
    children_of,
    find_clashes,
    schema_tree,
    set_column,
    struct_of,
)
from treetune.data.datasets.dataset_rows import BUILDER_VERSION
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.data.rows.agent_column import AGENT, with_agent
from treetune.data.rows.cache import Cache, Sidecar, config_hash
from treetune.data.rows.scorer import BY_RULE
from treetune.errors import TasksetError

if TYPE_CHECKING:
    import pyarrow as pa

CachedFile = tuple[Sidecar, Path, bool]
"""The result of a build: the sidecar, the path, and whether it was a cache hit."""

Build = Callable[[DatasetTaskset], CachedFile]


class Share(msgspec.Struct, frozen=True):
    """One task's share of a drawn file."""

    name: str
    weight: float
    draws: int
    """Rows in the file."""
    rows: int
    """Rows of the task. With fewer draws some are not in the file, with more they are repeated."""


class ListFile(NamedTuple):
    name: str
    sidecar: Sidecar
    path: Path
    hit: bool
    shares: list[Share]
    """Empty if the file holds one task."""


def draws_by_weight(weights: Sequence[Any]) -> bool:
    """Whether a list is a mixture: it has several entries, and at least one has a weight. An entry without a weight
    counts as 1."""
    return len(weights) > 1 and any(weight is not None for weight in weights)


def build_files(
    tasksets: Sequence[DatasetTaskset],
    format: str = "verl",
    agents: Sequence[str] | None = None,
    *,
    num_draws: int | None = None,
    build: Build | None = None,
) -> list[ListFile]:
    """`agents`: the agent loop of each task, which its rows then name. `num_draws`: the number of rows of a drawn file.
    `build` replaces the tasksets' own build."""
    make = build or (lambda taskset: taskset.build(format))
    if not draws_by_weight([taskset.config.weight for taskset in tasksets]):
        files = join_files(tasksets, [make(taskset) for taskset in tasksets], agents)
        return [ListFile(taskset.name, *file, []) for taskset, file in zip(tasksets, files, strict=True)]
    # Pass rates that schedule a task's rows are part of the draw.
    whole = [taskset._unscheduled for taskset in tasksets]
    files = join_files(whole, [make(taskset) for taskset in whole], agents)
    return [_draw_file(tasksets, files, format, num_draws)]


def _draw_file(
    tasksets: Sequence[DatasetTaskset], files: Sequence[CachedFile], format: str, count: int | None
) -> ListFile:
    """Return the file that the tasksets' mixture draws from their files, from the cache."""
    sidecars = [sidecar for sidecar, _, _ in files]
    weights = [1.0 if taskset.config.weight is None else taskset.config.weight for taskset in tasksets]
    wanted = count or sum(sidecar.rows for sidecar in sidecars)
    orders = [(to_plain(each.config)["shuffle"], each.order_key(format)) for each in tasksets]
    asked = {"like": [sidecar.digest for sidecar in sidecars], "weights": weights, "orders": orders, "draws": wanted}
    key = f"{sidecars[0].key.partition('_')[0]}_{config_hash({**asked, 'version': BUILDER_VERSION}, {})}"
    cache = Cache(tasksets[0].cache_dir)

    def write(path: Path) -> Sidecar:
        from treetune.data.rows.growing_parquet import write_taken

        starts = [sum(sidecar.rows for sidecar in sidecars[:number]) for number in range(len(files))]
        mixture = Mixture.of(tasksets, weights)
        places = [mixture.place(mixture.position_at(index, None)) for index in range(wanted)]
        schema = write_taken([path for _, path, _ in files], [starts[source] + row for source, row in places], path)
        drawn = Counter(source for source, _ in places)
        shares = [
            Share(taskset.name, weight, drawn[number], sidecar.rows)
            for number, (taskset, weight, sidecar) in enumerate(zip(tasksets, weights, sidecars, strict=True))
        ]
        return Sidecar(
            config={"format": format, "mixture": msgspec.to_builtins(shares)},
            source=", ".join(dict.fromkeys(sidecar.source for sidecar in sidecars)),
            rows=wanted,
            dropped=dict(sum((Counter(sidecar.dropped) for sidecar in sidecars), Counter())),
            flaws=[flaw for sidecar in sidecars for flaw in sidecar.flaws],
            fingerprint=key,
            schema=schema_tree(schema),
            versions=sidecars[0].versions,
        )

    sidecar, drawn_hit = cache.get_or_build(key, write)
    shares = msgspec.convert(sidecar.config["mixture"], list[Share])
    hit = drawn_hit and all(was_hit for _, _, was_hit in files)
    return ListFile("mixture", sidecar, cache.path(key), hit, shares)


# Files that a trainer can join

Converter = Callable[["pa.Table"], "pa.Table"]

CONTENT = ("prompt", "content")


def join_files(
    tasksets: Sequence[DatasetTaskset], built: Sequence[CachedFile], agents: Sequence[str] | None = None
) -> list[CachedFile]:
    """Return files that a trainer can join: the built files, or converted copies. Files that cannot be joined raise an
    error now, not when the model is loaded. `agents`: the agent loop of each taskset, which its rows then name."""
    if agents is not None:
        built = [_name_agent(*each) for each in zip(tasksets, built, agents, strict=True)]
    names = [f"{number} ({taskset.name})" for number, taskset in enumerate(tasksets)]
    with_agents = [AGENT in sidecar.schema for sidecar, _, _ in built]
    if any(with_agents) and not all(with_agents):
        without = ", ".join(name for name, having in zip(names, with_agents, strict=True) if not having)
        remedy = f"give all tasks of the list the column {AGENT}, or none of them"
        raise TasksetError(
            f"rows of task {without} would not name an agent, but others have the column {AGENT}", remedy=remedy
        )
    clashes = next(_find_clashes(names, built), None)
    if clashes is None:
        return list(built)
    converters = _choose_converters(tasksets, built)
    schema, json_fields = _widen_schemas(names, built, converters)
    asked = {"schema": str(schema), "json": sorted(json_fields)}
    files: list[CachedFile] = []
    for name, taskset, file, convert in zip(names, tasksets, built, converters, strict=True):
        changed = find_clashes(file[0].schema, schema_tree(schema))
        if changed and not taskset.config.join:
            remedy = f"set join: true in task {name}, which then gets the types of the others: {'; '.join(changed)}"
            raise TasksetError(clashes, remedy=remedy)
        files.append(_change_file(taskset, file, asked, convert, schema, json_fields) if changed else file)
    return files


def _name_agent(taskset: DatasetTaskset, file: CachedFile, agent: str) -> CachedFile:
    """Return the file with the column that names an agent loop. A file that has the column stays as it is."""
    if AGENT in file[0].schema:
        return file
    return _change_file(taskset, file, {AGENT: agent}, partial(with_agent, agent=agent))


def _change_file(
    taskset: DatasetTaskset, file: CachedFile, asked: Mapping[str, Any], change: Converter, *wider: Any
) -> CachedFile:
    """Return the file with changed tables, from the cache. `asked` identifies the change. `wider` is the schema for the
    rows, with its fields that are JSON text."""
    sidecar, path, hit = file
    cache = Cache(taskset.cache_dir)
    key = f"{sidecar.key.partition('_')[0]}_{config_hash({'like': sidecar.key, **asked}, {})}"

    def write(place: Path) -> Sidecar:
        from treetune.data.rows.growing_parquet import write_changed

        return msgspec.structs.replace(sidecar, schema=schema_tree(write_changed(path, place, change, *wider)))

    changed, changed_hit = cache.get_or_build(key, write)
    return changed, cache.path(key), hit and changed_hit


def _find_clashes(names: Sequence[str], built: Sequence[CachedFile]) -> Iterator[str]:
    for (one, first), (other, second) in combinations(zip(names, built, strict=True), 2):
        if found := find_clashes(first[0].schema, second[0].schema):
            yield f"tasks {one} and {other} cannot be used in one list: {'; '.join(found)}"


def _choose_converters(tasksets: Sequence[DatasetTaskset], built: Sequence[CachedFile]) -> list[Converter]:
    """Choose which texts of each file become lists or parts, because another file has lists or parts there."""
    from treetune.data.rows.formats import FORMATS

    # The path of a ground truth that the rule compares, per format.
    truths = [format.truth for format in FORMATS.values() if not format.has_environments]
    trees = [sidecar.schema for sidecar, _, _ in built]
    with_lists = any(_type_at(tree, path) == ["string"] for tree in trees for path in truths)
    with_parts = any(isinstance(_type_at(tree, CONTENT), list) for tree in trees)
    converters: list[Converter] = []
    for taskset, tree in zip(tasksets, trees, strict=True):
        ruled = with_lists and (taskset.row_scorer or BY_RULE).by_scorer
        texts = [path for path in truths if ruled and _type_at(tree, path) == "string"]
        parts = with_parts and _type_at(tree, CONTENT) == "string"
        converters.append(partial(_convert_values, truths=texts, parts=parts))
    return converters


def _type_at(tree: Any, path: Sequence[str]) -> Any:
    """Return the type at a path of keys, through mappings and lists of mappings."""
    for name in path:
        tree = tree[0] if isinstance(tree, list) else tree
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def _convert_values(table: pa.Table, truths: Sequence[tuple[str, ...]], parts: bool) -> pa.Table:
    import pyarrow as pa

    from treetune.data.rows.image_columns import with_part

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
        prompts = [list(map(with_part, prompt)) for prompt in table["prompt"].to_pylist()]
        table = set_column(table, "prompt", pa.array(prompts, pa.list_(messages)))
    return table


def _widen_schemas(
    names: Sequence[str], built: Sequence[CachedFile], converters: Sequence[Converter]
) -> tuple[pa.Schema, set[str]]:
    """Return the schema that holds all converted files, and which of its fields are JSON text."""
    import pyarrow.parquet as pq

    from treetune.data.rows.growing_parquet import widen

    json_fields: set[str] = set()
    wide: pa.Schema | None = None
    for name, (_, path, _), convert in zip(names, built, converters, strict=True):
        schema = convert(pq.read_schema(path).remove_metadata().empty_table()).schema
        try:
            wide = schema if wide is None else widen(wide, schema, json_fields)
        except TasksetError:
            remedy = f"no config key can convert them; a custom_cls of task {name} can give them the same shape"
            raise TasksetError(next(_find_clashes(names, built)), remedy=remedy) from None
    return wide, json_fields
