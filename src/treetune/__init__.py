"""Treetune: one task, every trainer.

from treetune import Task, Taskset
"""

from treetune.environment import Action, Environment, Observation, Step, make, register
from treetune.errors import TreetuneError
from treetune.mixture import Mixture, Union
from treetune.policy import Completion, Policy, Request, Sampling
from treetune.rollout import Limits, run_rollout
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
