"""Treetune: one task, every trainer.

    from treetune import Task, Taskset

Names are loaded when they are first used: a program that only needs a cached path should not pay for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from treetune import catalog
from treetune.builtin_tables import tables

if TYPE_CHECKING:
    from treetune.environment import Action as Action
    from treetune.environment import Environment as Environment
    from treetune.environment import Observation as Observation
    from treetune.environment import Rendered as Rendered
    from treetune.environment import Step as Step
    from treetune.environment import make as make
    from treetune.environment import register as register
    from treetune.episode import Limits as Limits
    from treetune.errors import InvalidAction as InvalidAction
    from treetune.errors import ToolError as ToolError
    from treetune.errors import TreetuneError as TreetuneError
    from treetune.evaluation.call import evaluate as evaluate
    from treetune.evaluation.call import evaluate_async as evaluate_async
    from treetune.evaluation.compare import compare as compare
    from treetune.from_config import build_taskset as build_taskset
    from treetune.message import Message as Message
    from treetune.mixture import Mixture as Mixture
    from treetune.mixture import Union as Union
    from treetune.policy import Completion as Completion
    from treetune.policy import Policy as Policy
    from treetune.policy import Request as Request
    from treetune.policy import Sampling as Sampling
    from treetune.rollout import run_rollout as run_rollout
    from treetune.runs.places import open_run as open_run
    from treetune.runs.run import Run as Run
    from treetune.score import UNCHECKED as UNCHECKED
    from treetune.score import VALID as VALID
    from treetune.score import Score as Score
    from treetune.score import Verdict as Verdict
    from treetune.score import invalid as invalid
    from treetune.target import load_taskset as load_taskset
    from treetune.task import Task as Task
    from treetune.taskset import Taskset as Taskset
    from treetune.taskset_config import ShuffleConfig as ShuffleConfig
    from treetune.taskset_config import TasksetConfig as TasksetConfig
    from treetune.tools import Tool as Tool
    from treetune.tools import tool as tool
    from treetune.trace import Outcome as Outcome
    from treetune.trace import Trace as Trace
    from treetune.trace import Turn as Turn

    __version__: str

tables.update({name: table for name, table in vars(catalog).items() if name.isupper()})

_HOMES = {
    name: module
    for module, names in {
        "environment": "Action Environment Observation Rendered Step make register",
        "episode": "Limits",
        "errors": "InvalidAction ToolError TreetuneError",
        "evaluation.call": "evaluate evaluate_async",
        "evaluation.compare": "compare",
        "mixture": "Mixture Union",
        "policy": "Completion Policy Request Sampling",
        "rollout": "run_rollout",
        "runs.places": "open_run",
        "runs.run": "Run",
        "score": "UNCHECKED VALID Score Verdict invalid",
        "from_config": "build_taskset",
        "target": "load_taskset",
        "message": "Message",
        "task": "Task",
        "taskset": "Taskset",
        "taskset_config": "ShuffleConfig TasksetConfig",
        "tools": "Tool tool",
        "trace": "Outcome Trace Turn",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from treetune.version import read_version

        return read_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'treetune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"treetune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
