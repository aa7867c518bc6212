"""`treetune train skyrl`: SkyRL's own entry point, with the tasks' rows and environments."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from treetune.core.agent import OWN_LOOP
from treetune.core.contract import MOST_TURNS
from treetune.data.rows.agent_column import is_silent, row_needs_loop
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.scorer import ScoredBy, taskset_of, with_type
from treetune.data.sources.names import File, FileKind
from treetune.errors import TreetuneError, UsageError
from treetune.trainers import launch
from treetune.trainers.launch import Launch, Setting, TargetTasks, TrainRequest
from treetune.trainers.lengths import count_longer, measure
from treetune.trainers.skyrl.tasks import list_environments, one_of_each_kind
from treetune.trainers.train_run import PARTS, TrainRun, describe_interval, interval

LENGTH = 512
"""SkyRL's default limit for the tokens of prompts."""
BATCH = 64
"""Tasks in a step."""


def plan(request: TrainRequest, run: TrainRun, tasks: TargetTasks) -> Launch:
    if "agent" in request.own:
        raise UsageError(f"agent: {OWN_LOOP}", remedy="train with verl, TRL, slime or AReaL")
    files, validation = launch.with_validation(request, request.build("skyrl"), tasks, "skyrl")
    gpus, batch = launch.count_gpus(), launch.batch_size(files, request.given("trainer.train_batch_size", BATCH))
    validates = bool(files.get("val"))
    per_epoch = launch.count_rows(files) // batch
    epochs = request.count_epochs("trainer.epochs", 1, per_epoch)
    steps = min(epochs * per_epoch, request.steps or epochs * per_epoch)
    every, tenth = interval(steps), describe_interval(steps)
    built = [file.path for split in files.values() for file in split]
    declared = most_turns(built)
    turns = min(declared, request.own.get("max_turns", declared))
    if turns == 1 < declared:
        raise UsageError("max_turns=1: SkyRL reads 1 as no limit", remedy="pass 2 or more")
    if "turn_discount" in request.own:
        remedy = "declare it where the tasks are: CONTRACT = Contract(turn_discount=...)"
        raise UsageError("turn_discount: SkyRL's environments take it from the tasks", remedy=remedy)
    lengths = measure(tasks.train, request.model, request.num_tasks)
    prompts = lengths.prompt_limit(LENGTH) or LENGTH
    longer = count_longer(lengths, launch.paths(files, "train"), request.model, prompts)
    several = lengths.response_limit(prompts) if turns > 1 else None
    logs = request.log_to("wandb", "mlflow", "tensorboard", most=1)
    at_hand = "the GPUs of this machine"
    start = "validate at the start" + " only" * run.resume
    planned: dict[str, Setting] = {
        "trainer.policy.model.path": Setting(request.model, "the model"),
        "trainer.placement.policy_num_gpus_per_node": Setting(gpus, at_hand),
        "trainer.placement.ref_num_gpus_per_node": Setting(gpus, at_hand),
        "generator.inference_engine.num_engines": Setting(gpus, at_hand),
        "generator.max_turns": Setting(
            turns if turns > 1 else None,
            "the most turns that the tasks declare" if turns == declared else launch.AS_SET,
        ),
        "trainer.max_prompt_length": Setting(lengths.prompt_limit(LENGTH), lengths.what),
        "generator.max_input_length": Setting(several and prompts + several, "a prompt and all turns of an episode"),
        "trainer.train_batch_size": Setting(batch, "no more than there are tasks: SkyRL drops an incomplete batch"),
        "trainer.policy_mini_batch_size": Setting(batch, "one update a step"),
        "trainer.epochs": Setting(epochs if epochs > 1 else None, "as many as --steps takes"),
        "trainer.max_training_steps": Setting(request.steps, "--steps"),
        "trainer.eval_interval": Setting(every if validates else -1, tenth if validates else "no validation"),
        "trainer.eval_before_train": Setting(validates and not run.resume, start if validates else "no validation"),
        "trainer.ckpt_interval": Setting(every, f"{tenth}, and the end of each epoch"),
        "trainer.max_ckpts_to_keep": Setting(
            PARTS + 1 if epochs > PARTS else None,
            f"besides the best one; SkyRL also saves at the end of each of the {epochs} epochs",
        ),
        "trainer.ckpt_path": Setting(str(run.checkpoints), "only the checkpoints of this training"),
        "trainer.resume_mode": Setting("latest" if run.resume else "none", "only --resume continues a training"),
        "trainer.export_path": Setting(str(run.validation), "the rollouts of validations, for `treetune view`"),
        "trainer.log_path": Setting(str(run.folder / "logs"), "only the logs of this training"),
        "trainer.logger": Setting(*((logs[0], "--log") if logs else ("console", "no account is needed"))),
        "trainer.project_name": Setting("treetune", "names the project in loggers"),
        "trainer.run_name": Setting(run.name, "tasks, model and a hash of the plan"),
    }
    config = launch.merge(planned, request.theirs)
    named_files = [
        *(f"tasks={path}" for path in launch.paths(files, "train")),
        *(f"val_tasks={path}" for path in launch.paths(files, "val")),
    ]
    # Rows cannot choose code by themselves; these are the user's own, just built.
    named = {id for path in built for id in list_environments(File(Path(path), FileKind.PARQUET))}
    trusted = [word for id in sorted(filter(None, named)) if ":" in id for word in ("--env", id)]
    return Launch(
        trainer="skyrl",
        package="skyrl",
        install="install skyrl as its guide describes, on Python 3.12 or later",
        data=launch.describe_files(files, validation) | launch.describe_lengths(lengths, longer),
        config=config,
        reasons=launch.reasons(planned, config),
        run=run,
        environment=run.environment(logs),
        checkpoints="checkpoints/latest_ckpt_global_step.txt",
        saved="checkpoints/global_step_{step}",
        command=[sys.executable, "-m", "treetune.trainers.skyrl", *named_files, *trusted, *launch.words(config)],
    )


def read_defaults(config: Mapping[str, str]) -> dict[str, Any]:
    from skyrl.train.config import SkyRLTrainConfig

    return dataclasses.asdict(SkyRLTrainConfig())


def most_turns(paths: Iterable[Path | str]) -> int:
    files = (File(Path(path), FileKind.PARQUET) for path in paths)
    return max((_turns_of(row) for file in files for row in one_of_each_kind(file)), default=1)


def _turns_of(row: dict[str, Any]) -> int:
    task = FORMATS["skyrl"].task_of(row, whole=False)
    environment = ScoredBy("environment", str(task.env_class))
    scored = ScoredBy.read((row.get("extra_info") or {}).get("scorer")) or environment
    if not row_needs_loop(task, scored) and not is_silent(scored):
        return 1
    try:
        taskset = taskset_of(scored)
        return taskset.contract_of(with_type(task, taskset)).turns
    except TreetuneError:
        return MOST_TURNS
