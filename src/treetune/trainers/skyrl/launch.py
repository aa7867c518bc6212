"""`treetune train skyrl`: SkyRL's own entry point, with the tasks' rows and their environments."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from treetune.data.rows.sources import File, FileKind
from treetune.trainers import launch
from treetune.trainers.launch import Launch, TrainRequest
from treetune.trainers.skyrl.tasks import list_environments
from treetune.trainers.skyrl.turns import most_turns


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
    # Rows choose no code by themselves; these are the user's own, just built.
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
