"""Files of rows that SkyRL reads itself, and the environments that their rows name.

used_in(row_files(["train.parquet", "more/*.jsonl"]), {"spell": "spell.py:Spell"})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from treetune.errors import UsageError
from treetune.rows.layouts import detect
from treetune.rows.reading import read_rows
from treetune.rows.sources import File, HubName, Kind, Sources, find
from treetune.validate.files import ENDINGS


def names_rows(tasks: Any) -> bool:
    """Whether tasks are files of rows rather than declared in YAML or in a mapping."""
    if tasks is None or isinstance(tasks, Mapping):
        return False
    names = [tasks] if isinstance(tasks, str | Path) else list(tasks)
    return not any(Path(name).suffix.lower() in (".yaml", ".yml") for name in names)


def row_files(sources: Sources) -> list[File]:
    """The files that are named; one that SkyRL would not read is told now."""
    return [_readable(source) for source in find(sources)]


def used_in(files: Iterable[File], given: Mapping[str, str], default: str) -> dict[str, str]:
    """The environments that rows name, or SkyRL takes by `default` where they name none. Rows may come from anywhere:
    they choose no code that was not `given`."""
    ids = dict.fromkeys(default if id is None else id for file in files for id in environments_in(file))
    for id in ids:
        if ":" in id.removeprefix("skyrl:") and id not in given:
            raise UsageError(f"the rows name code to run: {id}", remedy=f"if you trust it, say --env {id}")
    return {id: id for id in ids}


def environments_in(file: File) -> list[str | None]:
    """The ids that the rows of a file have; None where some have none."""
    if file.kind is not Kind.PARQUET:
        return list(dict.fromkeys(row.get("env_class") for row in read_rows(file.path, columns=["env_class"])))
    import pyarrow.parquet as pq

    if "env_class" not in pq.read_schema(file.path).names:
        return [None]
    found: list[str | None] = pq.read_table(file.path, columns=["env_class"])["env_class"].unique().to_pylist()
    return found


def _readable(source: File | HubName) -> File:
    convert = "treetune convert {} rows.parquet --to skyrl"
    if isinstance(source, HubName):
        raise UsageError(f"no such file: {source.name}", remedy=convert.format(source.name) + " makes one of a dataset")
    if source.path.suffix.lower() not in ENDINGS:
        raise UsageError(f"SkyRL does not read {source.path}", remedy=convert.format(source.path))
    columns = _columns(source)
    format = detect(columns).name
    if format != "skyrl" and ("reward_model" in columns or "ground_truth" in columns):
        raise UsageError(f"{source.path} has rows of {format}", remedy=convert.format(source.path))
    return source


def _columns(file: File) -> list[str]:
    if file.kind is not Kind.PARQUET:
        return list(next(read_rows(file.path), {}))
    import pyarrow.parquet as pq

    names: list[str] = pq.read_schema(file.path).names
    return names
