"""Uploads built rows as a Hugging Face dataset: parquet files by split, and a card that says what scores the rows.

push_rows({"train": [Path("cache/x.parquet")]}, "me/sums", title="sums", command="treetune build sums.yaml")
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from treetune.data.arrow_values import find_clashes, read_extra, schema_tree
from treetune.data.rows.scorer import ScoredBy
from treetune.errors import UsageError, plural
from treetune.system.hub import Card, check_repo, upload

_MOST = 5
"""How many scorers a card names at most."""


def push_rows(
    splits: Mapping[str, Sequence[Path]], repo: str, *, title: str, command: str, format: str, private: bool = False
) -> str:
    """Upload the rows and return the dataset's URL."""
    import pyarrow.parquet as pq

    check_repo(repo)
    scorers = _scorers([path for paths in splits.values() for path in paths])
    with tempfile.TemporaryDirectory(prefix="treetune-push-") as folder:
        files: dict[str, Path | bytes] = {}
        named: dict[str, list[str]] = {}
        counts: dict[str, int] = {}
        for split, paths in _make_alike(splits, Path(folder)).items():
            named[split] = [f"data/{split}-{number:05}-of-{len(paths):05}.parquet" for number in range(len(paths))]
            files |= dict(zip(named[split], paths, strict=True))
            counts[split] = sum(pq.read_metadata(path).num_rows for path in paths)
        card = Card(title, named, _describe_dataset(repo, counts, scorers, command, format)).page()
        message = f"{plural(sum(counts.values()), 'row')} as {format}"
        return upload(repo, {"README.md": card, **files}, private=private, message=message)


def _make_alike(splits: Mapping[str, Sequence[Path]], folder: Path) -> dict[str, list[Path]]:
    """Return the files with identical columns, which a dataset requires. If they differ, copies get all columns, with
    nulls for those a file lacks."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from treetune.data.rows.growing_parquet import write_changed

    schemas = {path: pq.read_schema(path).remove_metadata() for paths in splits.values() for path in paths}
    problem = ""
    try:
        whole = pa.unify_schemas(list(schemas.values()), promote_options="permissive")
        problem = "; ".join(c for each in schemas.values() for c in find_clashes(schema_tree(each), schema_tree(whole)))
    except pa.ArrowException as error:
        problem = str(error)
    if problem:
        remedy = "push the lists one by one, or give their tasks the same columns"
        raise UsageError(f"the files are no one dataset: {problem}", remedy=remedy)
    found: dict[str, list[Path]] = {split: list(paths) for split, paths in splits.items()}
    for split, paths in found.items():
        for number, path in enumerate(paths):
            if not schemas[path].equals(whole):
                paths[number] = folder / f"{split}-{number}.parquet"
                write_changed(path, paths[number], lambda table: table, whole)
    return found


def _describe_dataset(repo: str, counts: Mapping[str, int], scorers: Sequence[str], command: str, format: str) -> str:
    from treetune.system.folders import read_version

    lines = [
        f"Tasks for reinforcement learning of language models, built by Treetune {read_version()} as rows of {format}.",
        *("", "| split | rows |", "|---|---|"),
        *(f"| {split} | {count:,} |" for split, count in counts.items()),
        *("", "Every row has its prompt, its ground truth, and in `extra_info.scorer` what scores an answer:", ""),
        *(f"- {scorer}" for scorer in scorers),
        *("", "```shell", command, f"treetune show {repo}:{next(iter(counts))} -n 3"),
        *(f"treetune eval {repo}:{next(iter(counts))} -m MODEL", "```", "", "```python"),
        *("from datasets import load_dataset", "", f'rows = load_dataset("{repo}")', "```"),
    ]
    return "\n".join(lines)


def _scorers(paths: Sequence[Path]) -> list[str]:
    """Describe in words what scores the rows."""
    import pyarrow.compute as pc

    found: dict[str, None] = {}
    for path in paths:
        if (scorers := read_extra(path, "scorer")) is not None:
            found |= dict.fromkeys(map(_describe, pc.unique(scorers).to_pylist()))
    named = list(found) or ["the trainer, by its own rule for `data_source`"]
    return named[:_MOST] + ([f"and {len(named) - _MOST} others"] if len(named) > _MOST else [])


def _describe(scorer: str | None) -> str:
    if scorer is None:
        return "the trainer, by its own rule for `data_source`, where a row names no scorer"
    if (scored := ScoredBy.read(scorer)) is None or scored.kind == "rule":
        return "`rule`: the answer is compared with the ground truth, as numbers where both are"
    if scored.kind == "environment" or not scored.value.startswith("{"):
        return f"the environment `{scored.value}`"
    node: dict[str, Any] = msgspec.json.decode(scorer)
    if node.keys() == {"scorer"}:
        return f"the scorer `{node['scorer'].get('kind', '')}` of Treetune"
    custom = node.get("custom_cls") or {}
    if "path" not in custom:
        return f"the taskset `{node.get('id')}`"
    place = str(custom["path"])
    where = (
        f"in the module `{place[6:]}`" if place.startswith("pkg://") else f"in `{Path(place).name}`, which is not here"
    )
    return f"the taskset `{custom.get('name')}` {where}"
