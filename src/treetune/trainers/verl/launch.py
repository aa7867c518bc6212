"""`treetune train verl`: verl's own entry point, with the tasks' rows, their scoring and their agent loop."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow.parquet as pq
from omegaconf import OmegaConf

from treetune.data.datasets.config import plain_values
from treetune.data.rows.agent_column import AGENT, LOOP, says_nothing
from treetune.trainers import launch
from treetune.trainers.launch import Files, Launch, TrainRequest
from treetune.trainers.verl.config import DEFAULT_LOOP, LOOPS, SETTINGS, write_loops
from treetune.trainers.verl.reward import OURS, leaves_scoring

GROUP = 8


def plan(request: TrainRequest) -> Launch:
    """Plan a training. Overrides that begin with `treetune_loop.` belong to our agent loop, all others to verl."""
    files = request.build("verl")
    given = OmegaConf.from_dotlist([f"{key.lstrip('+')}={value}" for key, value in _pairs(request)])
    batch, validates = launch.batch_size(files), bool(files.get("val"))
    planned: dict[str, Any] = {
        "data.train_files": launch.paths(files, "train"),
        "data.val_files": launch.paths(files, "val" if validates else "train"),  # verl requires some, reads none
        "data.train_batch_size": batch,
        "actor_rollout_ref.model.path": request.model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": batch,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": GROUP,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "algorithm.adv_estimator": "grpo",
        "trainer.n_gpus_per_node": launch.count_gpus(),
        "trainer.total_training_steps": request.steps,
        "trainer.val_before_train": None if validates else False,
        "trainer.test_freq": 10 if validates else None,
        "trainer.logger": ["console"],
        "trainer.project_name": "treetune",
    }
    if not leaves_scoring(given):
        planned |= {"reward.custom_reward_function.path": OURS, "reward.custom_reward_function.name": "compute_score"}
    silent = any(says_nothing(file.path) for found in files.values() for file in found)
    if silent or _names_loop(files):
        settings = plain_values(OmegaConf.select(given, SETTINGS)) or {}
        planned[LOOPS] = str(write_loops(settings, OmegaConf.select(given, LOOPS)))
    if silent:
        planned[DEFAULT_LOOP] = LOOP
    overrides = [text for text in request.overrides if not text.startswith(f"{SETTINGS}.")]
    config = launch.merge(planned, [text for text in overrides if not (LOOPS in planned and text.startswith(LOOPS))])
    return Launch(
        trainer="verl",
        package="verl",
        install="install verl 0.9 as its guide says",
        data=launch.describe_files(files),
        config=config,
        command=[sys.executable, "-m", "verl.trainer.main_ppo", *launch.words(config)],
    )


def _pairs(request: TrainRequest) -> list[tuple[str, str]]:
    return [launch.split_override(text) for text in request.overrides if not text.startswith("~")]


def _names_loop(files: Files) -> bool:
    """Whether rows name our agent loop."""
    return any(AGENT in pq.read_schema(file.path).names for found in files.values() for file in found)
