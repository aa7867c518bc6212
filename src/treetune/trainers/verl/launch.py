"""`treetune train verl`: verl's own entry point, with the tasks' rows, their scoring and their agent loop."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
from omegaconf import OmegaConf

from treetune.data.datasets.config import plain_values
from treetune.data.rows.agent_column import AGENT, LOOP, says_nothing
from treetune.trainers import launch
from treetune.trainers.launch import Files, Launch, Setting, TargetTasks, TrainRequest
from treetune.trainers.lengths import count_longer, measure
from treetune.trainers.train_run import TrainRun, describe_interval, interval
from treetune.trainers.verl.config import (
    DEFAULT_LOOP,
    LOOPS,
    MANAGER,
    MANAGERS,
    SETTINGS,
    SINGLE_TURN,
    write_list,
    write_loops,
)
from treetune.trainers.verl.reward import OURS, leaves_scoring
from treetune.trainers.verl.several_rows import MODE, MODULES, check_rows, trainer_settings

GROUP = 8
LENGTH = 512
"""verl's default limit for the tokens of prompts, and of responses."""
BATCH, EPOCHS = 64, 30
"""Tasks in a step, and verl's default number of epochs."""


def plan(request: TrainRequest, run: TrainRun, tasks: TargetTasks) -> Launch:
    """Plan a training. Overrides that begin with `treetune_loop.` belong to our agent loop."""
    files, validation = launch.with_validation(request, request.build("verl"), tasks, "verl")
    given = OmegaConf.from_dotlist([f"{key.lstrip('+')}={value}" for key, value in _pairs(request)])
    settings = (plain_values(OmegaConf.select(given, SETTINGS)) or {}) | request.own
    batch, validates = launch.batch_size(files, request.given("data.train_batch_size", BATCH)), bool(files.get("val"))
    per_epoch = launch.count_rows(files) // batch
    epochs = request.count_epochs("trainer.total_epochs", EPOCHS, per_epoch)
    steps = request.steps or epochs * per_epoch
    every, tenth = interval(steps), describe_interval(steps)
    named = _names_loop(files)
    silent = any(says_nothing(file.path) for found in files.values() for file in found)
    loop = silent or named or bool(settings)
    lengths = measure(tasks.train, request.model, request.num_tasks)
    prompts = lengths.prompt_limit(LENGTH) or LENGTH
    longer = count_longer(lengths, launch.paths(files, "train"), request.model, prompts)
    logs = request.log_to("wandb", "mlflow", "tensorboard")
    resumed = find_complete(run) if run.resume else None
    start = "validate at the start" + " only" * run.resume
    planned: dict[str, Setting] = {
        "data.train_files": Setting(launch.paths(files, "train"), "the tasks"),
        # verl requires some, and reads none if it does not validate
        "data.val_files": Setting(launch.paths(files, "val" if validates else "train"), "the tasks to validate with"),
        "data.max_prompt_length": Setting(lengths.prompt_limit(LENGTH), lengths.what),
        "data.max_response_length": Setting(
            lengths.response_limit(prompts) if loop else None, "all turns of an episode together"
        ),
        "data.filter_overlong_prompts": Setting(True if longer else None, f"{longer:,} prompts are longer"),
        "data.train_batch_size": Setting(batch, "no more than there are tasks: verl drops an incomplete batch"),
        "actor_rollout_ref.model.path": Setting(request.model, "the model"),
        "actor_rollout_ref.actor.ppo_mini_batch_size": Setting(batch, "one update a step"),
        "actor_rollout_ref.actor.use_dynamic_bsz": Setting(True, "micro-batches by tokens, for episodes of any length"),
        "actor_rollout_ref.rollout.name": Setting("vllm", "the engine"),
        "actor_rollout_ref.rollout.n": Setting(GROUP, "rollouts in a group, which GRPO compares"),
        "actor_rollout_ref.rollout.tensor_model_parallel_size": Setting(1, "the model fits on one GPU"),
        "algorithm.adv_estimator": Setting("grpo", "needs no critic"),
        "trainer.n_gpus_per_node": Setting(launch.count_gpus(), "the GPUs of this machine"),
        "trainer.total_epochs": Setting(epochs if epochs > EPOCHS else None, "as many as --steps takes"),
        "trainer.total_training_steps": Setting(request.steps, "--steps"),
        "trainer.val_before_train": Setting(validates and not run.resume, start if validates else "no validation"),
        "trainer.test_freq": Setting(every if validates else -1, tenth if validates else "no validation"),
        "trainer.save_freq": Setting(every, f"{tenth}, and the end"),
        "trainer.default_local_dir": Setting(str(run.checkpoints), "only the checkpoints of this training"),
        "trainer.resume_mode": Setting(
            "disable" if not run.resume else "auto" if resumed is None else "resume_path",
            "only --resume continues a training",
        ),
        "trainer.resume_from_path": Setting(resumed, "the newest checkpoint of a step that was validated and logged"),
        "trainer.rollout_data_dir": Setting(str(run.rollouts), "each step's rollouts, for `treetune view`"),
        "trainer.validation_data_dir": Setting(str(run.validation), "each validation's rollouts"),
        "trainer.logger": Setting(["console", *logs], "--log" if logs else "no account is needed"),
        "trainer.project_name": Setting("treetune", "names the project in loggers"),
        "trainer.experiment_name": Setting(run.name, "tasks, model and a hash of the plan"),
    }
    if not leaves_scoring(given):
        why = "each task scores its own answers"
        planned["reward.custom_reward_function.path"] = Setting(OURS, why)
        planned["reward.custom_reward_function.name"] = Setting("compute_score", why)
    if loop:
        loops = str(write_loops(settings, OmegaConf.select(given, LOOPS)))
        if OmegaConf.select(given, "trainer.use_v1") is False:
            planned[f"+{MANAGERS}"] = Setting(MANAGER, "the own metrics and rewards of turns, for verl's v0 trainer")
        planned[LOOPS] = Setting(loops, "the tasks' episodes may have several turns or tools")
    elif OmegaConf.select(given, LOOPS) is None:
        planned[LOOPS] = Setting(str(write_list([SINGLE_TURN])), "verl's loop for one answer, with seeds")
    if silent or (not named and settings):
        why = "the tasks do not say whether they have several turns" if silent else "your settings of our agent loop"
        planned[DEFAULT_LOOP] = Setting(LOOP, why)
    theirs = [text for text in request.theirs if not text.startswith(f"{SETTINGS}.")]
    known = OmegaConf.from_dotlist([word.lstrip("+~") for word in launch.words(launch.merge(planned, theirs))])
    check_rows(known, tasks.credits(), settings.get("rewrites"))
    if loop:
        why = "an episode counts once, however many rows it has"
        for key, value in trainer_settings(known).items():
            planned[key if key == MODE else f"+{key}"] = Setting(value, why)
    # Ours have what the user set.
    ours = [key.lstrip("+") for key in (LOOPS, MODE, f"+{MODULES}") if key in planned]
    config = launch.merge(planned, [text for text in theirs if not text.lstrip("+").startswith(tuple(ours))])
    reasons = launch.reasons(planned, config)
    return Launch(
        trainer="verl",
        package="verl",
        install="install verl 0.9 as its guide describes",
        data=launch.describe_files(files, validation) | launch.describe_lengths(lengths, longer),
        config=config,
        reasons=reasons,
        environment=run.environment(logs),
        command=[sys.executable, "-m", "verl.trainer.main_ppo", *launch.words(config)],
        run=run,
        checkpoints="checkpoints/latest_checkpointed_iteration.txt",
        saved="checkpoints/global_step_{step}",
        watched=reasons["trainer.rollout_data_dir"] != launch.AS_SET,
    )


def find_complete(run: TrainRun) -> str | None:
    """Return the newest checkpoint whose step has rollouts: verl validates and writes them after it has saved. None if
    there is none in the run folder."""
    newest = run.checkpoints / "latest_checkpointed_iteration.txt"
    last = int(newest.read_text()) if newest.exists() else 0
    saved = {int(place.name.rpartition("_")[2]): str(place) for place in run.checkpoints.glob("global_step_*")}
    written = {int(file.stem) for file in run.rollouts.glob("*.jsonl")}
    complete = [step for step in saved.keys() & written if step <= last]
    return saved[max(complete)] if complete else None


def read_defaults(config: Mapping[str, str]) -> dict[str, Any]:
    """Return verl's own config, without importing verl."""
    from hydra import compose, initialize_config_dir  # type: ignore[import-not-found,unused-ignore]

    (package,) = cast(ModuleSpec, find_spec("verl")).submodule_search_locations or []
    with initialize_config_dir(str(Path(package) / "trainer" / "config"), version_base=None):
        composed = compose("ppo_trainer")
    found: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    return found


def _pairs(request: TrainRequest) -> list[tuple[str, str]]:
    return [launch.split_override(text) for text in request.theirs if not text.startswith("~")]


def _names_loop(files: Files) -> bool:
    """Whether rows name our agent loop."""
    return any(AGENT in pq.read_schema(file.path).names for found in files.values() for file in found)
