"""Treetune: one task, every trainer.

    from treetune import Task, Taskset

Names are loaded when they are first used: a program that only needs a cached path should not pay for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.environment import Action, Environment, Observation, Step, make, register
    from treetune.episode import Limits
    from treetune.errors import TreetuneError
    from treetune.mixture import Mixture, Union
    from treetune.policy import Completion, Policy, Request, Sampling
    from treetune.rollout import run_rollout
    from treetune.score import UNCHECKED, VALID, Score, Verdict, invalid
    from treetune.target import build_taskset, load_taskset
    from treetune.task import Message, Task
    from treetune.taskset import ShuffleConfig, Taskset, TasksetConfig
    from treetune.trace import Outcome, Trace, Turn

__version__ = "0.1.0"

__all__ = [
    "UNCHECKED",
    "VALID",
    "Action",
    "Completion",
    "Environment",
    "Limits",
    "Message",
    "Mixture",
    "Observation",
    "Outcome",
    "Policy",
    "Request",
    "Sampling",
    "Score",
    "ShuffleConfig",
    "Step",
    "Task",
    "Taskset",
    "TasksetConfig",
    "Trace",
    "TreetuneError",
    "Turn",
    "Union",
    "Verdict",
    "build_taskset",
    "invalid",
    "load_taskset",
    "make",
    "register",
    "run_rollout",
]

_HOMES = {
    name: module
    for module, names in {
        "environment": "Action Environment Observation Step make register",
        "episode": "Limits",
        "errors": "TreetuneError",
        "mixture": "Mixture Union",
        "policy": "Completion Policy Request Sampling",
        "rollout": "run_rollout",
        "score": "UNCHECKED VALID Score Verdict invalid",
        "target": "build_taskset load_taskset",
        "task": "Message Task",
        "taskset": "ShuffleConfig Taskset TasksetConfig",
        "trace": "Outcome Trace Turn",
    }.items()
    for name in names.split()
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'treetune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"treetune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
