"""`treetune train skyrl`: SkyRL's own entry point, with the tasks' rows and environments."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from treetune.data.rows.agent_column import is_silent, row_needs_loop
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.scored_by import ScoredBy
from treetune.data.rows.scorer import environment_of
from treetune.data.sources.names import File, FileKind
from treetune.errors import TreetuneError
from treetune.trainers import launch
from treetune.trainers.launch import Launch, TrainRequest
from treetune.trainers.skyrl.tasks import list_environments

USUAL_TURNS = 50
"""The turn limit if episodes may have several turns and nothing sets a limit. Most environments end them earlier."""


def plan(request: TrainRequest) -> Launch:
    files = request.build("skyrl")
    gpus, batch = launch.count_gpus(), launch.batch_size(files)
    validates = bool(files.get("val"))
    built = [file.path for split in files.values() for file in split]
    turns = most_turns(built)
    planned: dict[str, Any] = {
        "trainer.policy.model.path": request.model,
        "trainer.placement.policy_num_gpus_per_node": gpus,
        "trainer.placement.ref_num_gpus_per_node": gpus,
        "generator.inference_engine.num_engines": gpus,
        "generator.max_turns": turns if turns > 1 else None,
        "trainer.train_batch_size": batch,
        "trainer.policy_mini_batch_size": batch,
        "trainer.max_training_steps": request.steps,
        "trainer.eval_interval": None if validates else -1,
        "trainer.eval_before_train": None if validates else False,
        "trainer.logger": "console",
    }
    config = launch.merge(planned, request.overrides)
    tasks = [
        *(f"tasks={path}" for path in launch.paths(files, "train")),
        *(f"val_tasks={path}" for path in launch.paths(files, "val")),
    ]
    # Rows cannot choose code by themselves; these are the user's own, just built.
    named = {id for path in built for id in list_environments(File(Path(path), FileKind.PARQUET))}
    trusted = [word for id in sorted(filter(None, named)) if ":" in id for word in ("--env", id)]
    return Launch(
        trainer="skyrl",
        package="skyrl",
        install="install skyrl as its guide says, on Python 3.12 or later",
        data=launch.describe_files(files),
        config=config,
        command=[sys.executable, "-m", "treetune.trainers.skyrl", *tasks, *trusted, *launch.words(config)],
    )


def most_turns(paths: Iterable[Path | str]) -> int:
    return max((_turns_of(row) for path in paths for row in _one_of_each_kind(path)), default=1)


def _one_of_each_kind(path: Path | str) -> Iterator[dict[str, Any]]:
    """Return one row for each combination of environment, scorer, `max_turns`, and whether there are tools."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        keys = ["env_class", *(f"extra_info.{name}" for name in ("scorer", "max_turns", "treetune"))]
        table = file.read(columns=keys).flatten()
        if (note := keys[-1]) in table.column_names:
            tools = pc.match_substring(table[note], '"tools"')
            table = table.drop_columns([note]).append_column("tools", tools)
        if not table.num_columns:
            return
        kinds = table.append_column("at", pa.array(range(table.num_rows))).group_by(table.column_names)
        wanted = sorted(kinds.aggregate([("at", "min")])["at_min"].to_pylist())
        before = 0
        for batch in file.iter_batches():
            while wanted and wanted[0] < before + len(batch):
                yield from batch.slice(wanted.pop(0) - before, 1).to_pylist()
            if not wanted:
                return
            before += len(batch)


def _turns_of(row: dict[str, Any]) -> int:
    task = FORMATS["skyrl"].task_of(row, whole=False)
    if (own := task.extra_info.get("max_turns")) is not None:
        return int(own)
    environment = ScoredBy("environment", str(task.env_class))
    scored = ScoredBy.read((row.get("extra_info") or {}).get("scorer")) or environment
    if not row_needs_loop(task, scored) and not is_silent(scored):
        return 1
    return _turns_said_by(scored if scored.kind == "environment" else environment) or USUAL_TURNS


def _turns_said_by(scored: ScoredBy) -> int | None:
    """Return the turns that an environment declares, by its contract or by `MAX_TURNS`."""
    try:
        cls = environment_of(scored)
    except TreetuneError:
        return None
    contract = getattr(cls, "CONTRACT", None)
    most = getattr(cls, "MAX_TURNS", 1) if contract is None else contract.max_turns
    return most if most > 1 else None
