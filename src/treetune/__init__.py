"""Treetune: one task, every trainer.

    from treetune import Task, Taskset

Names are imported on first use, so a program loads only what it uses.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from treetune import catalog
from treetune.config import tables

if TYPE_CHECKING:
    from treetune.chat.message import Message as Message
    from treetune.core.contract import Contract as Contract
    from treetune.core.contract import Limits as Limits
    from treetune.core.environment import Action as Action
    from treetune.core.environment import Environment as Environment
    from treetune.core.environment import Observation as Observation
    from treetune.core.environment import Rendered as Rendered
    from treetune.core.environment import Step as Step
    from treetune.core.environment import make as make
    from treetune.core.environment import register as register
    from treetune.core.from_config import build_taskset as build_taskset
    from treetune.core.mixture import Mixture as Mixture
    from treetune.core.mixture import Union as Union
    from treetune.core.policy import Completion as Completion
    from treetune.core.policy import Policy as Policy
    from treetune.core.policy import Request as Request
    from treetune.core.policy import Sampling as Sampling
    from treetune.core.score import UNCHECKED as UNCHECKED
    from treetune.core.score import VALID as VALID
    from treetune.core.score import Score as Score
    from treetune.core.score import Verdict as Verdict
    from treetune.core.score import invalid as invalid
    from treetune.core.task import Task as Task
    from treetune.core.taskset import Taskset as Taskset
    from treetune.core.taskset_config import ShuffleConfig as ShuffleConfig
    from treetune.core.taskset_config import TasksetConfig as TasksetConfig
    from treetune.core.tool import Tool as Tool
    from treetune.core.tool import tool as tool
    from treetune.core.trace import Outcome as Outcome
    from treetune.core.trace import Trace as Trace
    from treetune.core.trace import Turn as Turn
    from treetune.errors import InvalidAction as InvalidAction
    from treetune.errors import ToolError as ToolError
    from treetune.errors import TreetuneError as TreetuneError
    from treetune.evaluation.api import evaluate as evaluate
    from treetune.evaluation.api import evaluate_async as evaluate_async
    from treetune.evaluation.comparison import compare as compare
    from treetune.play.rollout import run_rollout as run_rollout
    from treetune.runs.discovery import open_run as open_run
    from treetune.runs.run import Run as Run
    from treetune.tasksets.target import load_taskset as load_taskset

    __version__: str

tables.update({name: table for name, table in vars(catalog).items() if name.isupper()})

_HOMES = {
    name: module
    for module, names in {
        "core.environment": "Action Environment Observation Rendered Step make register",
        "core.contract": "Contract Limits",
        "errors": "InvalidAction ToolError TreetuneError",
        "evaluation.api": "evaluate evaluate_async",
        "evaluation.comparison": "compare",
        "core.mixture": "Mixture Union",
        "core.policy": "Completion Policy Request Sampling",
        "play.rollout": "run_rollout",
        "runs.discovery": "open_run",
        "runs.run": "Run",
        "core.score": "UNCHECKED VALID Score Verdict invalid",
        "core.from_config": "build_taskset",
        "tasksets.target": "load_taskset",
        "chat.message": "Message",
        "core.task": "Task",
        "core.taskset": "Taskset",
        "core.taskset_config": "ShuffleConfig TasksetConfig",
        "core.tool": "Tool tool",
        "core.trace": "Outcome Trace Turn",
    }.items()
    for name in names.split()
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from treetune.system.folders import read_version

        return read_version()
    if name not in _HOMES:
        raise AttributeError(f"module 'treetune' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"treetune.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
