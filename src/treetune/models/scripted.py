"""Policies without a model: for demos and tests, and to see what a taskset rewards."""

from __future__ import annotations

import math
import random
from typing import Any

from treetune.chat.images import name_images
from treetune.chat.message import text_of
from treetune.config.code_reference import parse_reference
from treetune.config.plugins import file_of, load_object
from treetune.config.trust import current_origin
from treetune.core.environment import Environment
from treetune.core.mixture import parts_of
from treetune.core.policy import Completion, Policy, Request
from treetune.core.taskset import Taskset
from treetune.core.tool import message_of_action
from treetune.errors import PolicyError, UsageError, did_you_mean
from treetune.system.threads import call

WRONG = "I do not know."
_LOOKED_AT = 100


def load_script(script: str, taskset: Taskset[Any, Any]) -> Policy:
    if script == "echo":
        return Echo()
    if (probability := _read_probability(script)) is not None:
        if 0 <= probability <= 1:
            return Gold(taskset, probability=probability, name=f"scripted:{script}")
        raise UsageError(f"scripted:{script}: p must be a number from 0 to 1", remedy="write scripted:p=0.5")
    if file_of(script) is not None:
        return _load_own(script)
    hint = did_you_mean(script, ["gold", "echo"])
    remedy = "use scripted:gold, scripted:echo, scripted:p=0.5 or scripted:file.py:Name"
    raise UsageError(f"unknown script {script!r}{hint}", remedy=remedy)


def _read_probability(script: str) -> float | None:
    """Return the probability of a gold answer: NaN if it is not a number, None for another script."""
    if script == "gold":
        return 1.0
    if not script.startswith("p="):
        return None
    try:
        return float(script[2:])
    except ValueError:
        return math.nan


def refuse_without_gold(model: str, taskset: Taskset[Any, Any]) -> None:
    """Refuse a model that gives gold answers on a taskset that has none. If only some tasks have none, their rollouts
    fail."""
    script = model.removeprefix("scripted:") if model.startswith("scripted:") else ""
    if not 0 < (_read_probability(script) or 0) <= 1:
        return
    sources = [part for part in parts_of(taskset) if not getattr(part, "sources", None)]
    if not any(map(_knows_gold, sources)):
        problem = f"{model} gives gold answers, and {taskset.name} has none"
        raise UsageError(problem, remedy="write gold(task), or use another -m, such as scripted:echo")


def _knows_gold(taskset: Taskset[Any, Any]) -> bool:
    """Whether the taskset, its scorer or the environment of one of its first tasks can provide a gold answer."""
    if taskset.overrides("gold") or (taskset.scorer or taskset.default_scorer or taskset.ANSWER) is not None:
        return True
    named = {task.env_class for task in taskset.draw(_LOOKED_AT)} - {None}
    classes = [taskset.environment_class(str(env_class)) for env_class in named]
    if any(getattr(cls, "ANSWER", None) is not None for cls in classes):
        return True
    golds = [getattr(cls, "gold", None) for cls in classes]
    return any(getattr(gold, "__func__", gold) is not getattr(Environment.gold, "__func__", None) for gold in golds)


def _load_own(spec: str) -> Policy:
    """Load a user's policy from a file."""
    made = load_object(parse_reference(spec), current_origin())
    policy: Any = made() if isinstance(made, type) else made
    return _OwnPolicy(policy, _complete_of(policy, spec), f"scripted:{spec}")


def given_policy(own: Any) -> Policy:
    """Wrap a caller's policy object or function of a request; the caller closes it."""
    named = getattr(own, "name", None) or getattr(own, "__name__", None) or type(own).__name__
    ours = type(own).__module__.startswith(f"{__package__}.")  # `-m` accepts such names
    name = str(named) if ours or str(named).startswith("scripted:") else f"scripted:{named}"
    return _OwnPolicy(None, _complete_of(own, repr(own)), name)


def _complete_of(policy: Any, shown: str) -> Any:
    complete = getattr(policy, "complete", policy)
    if not callable(complete) or isinstance(policy, type):
        remedy = "give the class `async def complete(self, request)`, or pass a function of the request"
        raise UsageError(f"{shown:.100} is not a policy", remedy=remedy)
    return complete


class _OwnPolicy(Policy):
    """A user's policy, which needs neither a name nor `close`."""

    def __init__(self, own: Any, complete: Any, name: str) -> None:
        self._own, self._complete, self.name = own, complete, name

    async def complete(self, request: Request) -> Completion:
        said = await call(self._complete, request)
        return Completion(text=said) if isinstance(said, str) else said

    async def close(self) -> None:
        if hasattr(self._own, "close"):
            await call(self._own.close)


class Gold(Policy):
    """Returns the gold answer, or with probability 1 - p a wrong one; the same draw for the same rollout."""

    def __init__(self, taskset: Taskset[Any, Any], *, probability: float, name: str) -> None:
        self.name = name
        self._taskset = taskset
        self._probability = probability

    async def complete(self, request: Request) -> Completion:
        seed = request.sampling.seed or 0
        if random.Random(f"{seed}/{request.key}").random() >= self._probability:
            return _answer(request, WRONG)
        gold = await self._taskset.gold_of(request.task)
        if gold is None:
            problem = f"task {request.task.idx} of {self._taskset.name} has no gold answer"
            raise PolicyError(problem, remedy="write gold(task), or use another model")
        if isinstance(gold, str):
            return _answer(request, gold)
        if request.turn >= len(gold):
            raise PolicyError(f"the gold answer of task {request.task.idx} has only {len(gold)} actions")
        action = gold[request.turn]
        return _answer(request, action) if isinstance(action, str) else completion_of(action)


class Echo(Policy):
    """Repeats the last message, which must earn no reward."""

    name = "scripted:echo"

    async def complete(self, request: Request) -> Completion:
        asked = request.messages[: -1 if request.continues else None]
        content = asked[-1].get("content") if asked else ""
        text = text_of(content)
        return _answer(request, name_images(content) if text is None else text)


def completion_of(action: Any) -> Completion:
    """Turn an action of a gold answer (text, or tool calls) into a completion."""
    if isinstance(action, str):
        return Completion(text=action)
    return Completion(message=message_of_action(action), finish_reason="tool_calls")


def _answer(request: Request, text: str) -> Completion:
    """Return the whole message: the task's prefix is added if the text does not begin with it."""
    return Completion(text=text if text.startswith(request.prefix) else request.prefix + text)


class Replay(Policy):
    """Repeats recorded completions, which scores saved traces again."""

    name = "replay"

    def __init__(self, completions: list[Completion]) -> None:
        self._completions = completions

    async def complete(self, request: Request) -> Completion:
        if request.turn >= len(self._completions):
            raise PolicyError(f"the recording has only {len(self._completions)} answers")
        return self._completions[request.turn]
