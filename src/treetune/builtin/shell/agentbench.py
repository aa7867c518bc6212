"""Tasksets over tasks written for AgentBench's worker, by the name they are served under.

    treetune serve agentbench:my_tasks:MyTask --taskset.parameters.name mine
    treetune serve agentbench:tasks.yaml --taskset.task os-dev --taskset.root AgentBench
    treetune eval agentbench:os-std --taskset.root AgentBench -m MODEL

`os-dev` and `os-std` run as `os-interaction` on the data of an AgentBench checkout. The others are tasks of
`agentrl.worker`, which call for actions: `TaskServerAdapter` gives them one by one, without worker, redis and Docker.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from treetune.builtin.shell.taskset import OSInteraction
from treetune.config import load_yaml
from treetune.environment import Action, Environment, Step
from treetune.errors import ConfigError, EnvironmentFault, MissingExtraError, UnknownNameError, UsageError
from treetune.plugins import load_object
from treetune.task import Message, Task
from treetune.taskset import Taskset, TasksetConfig

OS = {"os-dev": "dev", "os-std": "std"}
FAMILIES = ("dbbench", "kg", "webshop", "alfworld", "card", "ltp", "m2w")
"""AgentBench's other tasks: their code needs a checkout, agentrl-worker and data or servers of its own."""

END_SECONDS = 10.0
"""How long a cancelled episode is waited for; its code may be in the middle of something."""
RUNNING, COMPLETED, CANCELLED, TASK_ERROR = "running", "completed", "cancelled", "task error"
LIMIT = "task limit reached"
RESULT_KEYS = ("reward", "score", "result", "success", "succeed")
logger = logging.getLogger(__name__)


def taskset_class(spec: str) -> type[Taskset[Any, Any]]:
    """The taskset that `agentbench:SPEC` stands for."""
    if spec in OS:
        return type("AgentBenchOS", (OSInteraction,), {"SPLIT": OS[spec]})
    if spec.rpartition("-")[0] in FAMILIES or ":" in spec or "." in spec:
        return type("AgentBench", (AgentBenchTaskset,), {"SPEC": spec})
    known = [*OS, *(f"{family}-dev" for family in FAMILIES)]
    remedy = "or a class, module:Class or file.py:Class, or one of its configs, tasks.yaml"
    raise UnknownNameError.of("task of AgentBench", spec, known, remedy=remedy)


class AgentBenchConfig(TasksetConfig, frozen=True, kw_only=True):
    task: str | None = None
    """Of a config file: the name of the task in it."""
    root: str | None = None
    """A checkout of AgentBench: its code is imported from there, and its relative paths are meant from there."""
    parameters: dict[str, Any] = {}
    """What the class is made with, beside what a config file says."""


class AgentBenchTask(Task, frozen=True, kw_only=True):
    index: int | str
    """What the task itself calls this sample."""


class AgentBenchTaskset(Taskset[AgentBenchTask, AgentBenchConfig]):
    """Any task of agentrl.worker."""

    SPEC: ClassVar[str] = ""

    @cached_property
    def adapter(self) -> TaskServerAdapter:
        require_worker()
        spec, parameters = self._find_class()
        if self.config.root is not None:
            # Its code finds itself and its data from there.
            root = str(Path(self.config.root).expanduser().resolve())
            sys.path.insert(0, root)
            os.chdir(root)
        # AgentBench writes module.Class.
        cls: Any = load_object(spec if ":" in spec else ":".join(spec.rsplit(".", 1)))
        return TaskServerAdapter(cls(**{**parameters, **self.config.parameters}))

    def count(self) -> int:
        return len(self.adapter.indices)

    def task_at(self, index: int) -> AgentBenchTask:
        task = self.adapter.task
        extra = {"tools": task.tools} if task.tools else {}
        return AgentBenchTask(index=self.adapter.indices[index], data_source=task.name, extra_info=extra)

    def environment(self, task: AgentBenchTask) -> Environment:
        return AgentBenchEnvironment(task, self.adapter)

    def _find_class(self) -> tuple[str, dict[str, Any]]:
        """The class of the task, and what it is made with."""
        if self.SPEC.endswith((".yaml", ".yml")):
            return _read_config(Path(self.SPEC).expanduser(), self.config.task)
        family = self.SPEC.rpartition("-")[0]
        if family not in FAMILIES:
            return self.SPEC, {}
        if self.config.root is None:
            why = f"{self.SPEC} is AgentBench's own code: it needs a checkout, agentrl-worker and what it asks for"
            raise UsageError(why, remedy="name the checkout with --taskset.root")
        return _read_config(Path(self.config.root).expanduser() / "configs" / "tasks" / f"{family}.yaml", self.SPEC)


def _read_config(path: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Class and parameters of a task in AgentBench's kind of config: named entries over a `default`."""
    content = load_yaml(str(path))
    known = [key for key, value in content.items() if isinstance(value, dict) and key != "default"]
    if name is None and len(known) == 1:
        name = known[0]
    if name not in known:
        raise UnknownNameError.of("task of this config", str(name), known, remedy="pick one with --taskset.task")
    default, entry = content.get("default") or {}, content[name]
    module = entry.get("module", default.get("module"))
    if not isinstance(module, str):
        raise ConfigError([(f"{name}.module", "is required: the class, as module.Class")], source=str(path))
    return module, {**(default.get("parameters") or {}), **(entry.get("parameters") or {})}


class AgentBenchEnvironment(Environment):
    task: AgentBenchTask

    def __init__(self, task: AgentBenchTask, adapter: TaskServerAdapter) -> None:
        super().__init__(task)
        self._adapter = adapter
        self._state: EpisodeState | None = None

    async def start(self) -> list[Message]:
        self._state = await self._adapter.start(self.task.index)
        return self._state.observation

    async def step(self, action: Action) -> Step:
        state = self._state
        assert state is not None
        if not state.done:  # it may have ended before it asked for anything
            content = action.content
            if isinstance(content, str):
                content = {"role": "assistant", "content": content}
            elif isinstance(content, dict) and "tool_calls" in content:
                content = {"role": "assistant", **content}
            await self._adapter.step(state, content if isinstance(content, list) else [content])
        info: dict[str, Any] = {"status": state.status, "metrics": state.metrics}
        if not state.done:
            return Step(state.observation, info=info)
        info |= {"result": state.result, "success": state.reward > 0}
        return Step(state.observation, state.reward, True, info, state.truncated)

    async def close(self) -> None:
        if self._state is not None:
            await self._adapter.cancel(self._state)


def require_worker() -> tuple[Any, Any]:
    """The modules of agentrl-worker that tasks are written with."""
    try:
        return import_module("agentrl.worker.task"), import_module("agentrl.worker.typings")
    except ImportError as error:
        raise MissingExtraError.of("agentrl-worker", "agentbench") from error


class EpisodeState:
    """One live episode: what was shown last, and how it ended."""

    def __init__(self, index: int | str, session: Any) -> None:
        self.index, self.session = index, session
        self.observation: list[Message] = []
        """The messages that are new since the last action."""
        self.status = RUNNING
        self.result: Any = None
        self.rewards: list[float] = []
        self.metrics: dict[str, float] = {}
        self.running: asyncio.Task[None] | None = None

    @property
    def done(self) -> bool:
        return self.status != RUNNING

    @property
    def truncated(self) -> bool:
        return self.status == LIMIT

    @property
    def reward(self) -> float:
        """The last reward that the task gave; where it gave none, what its result says."""
        named = self.result if isinstance(self.result, dict) else {"result": self.result}
        found = [*self.rewards[-1:], *(named.get(key) for key in RESULT_KEYS)]
        return next((float(value) for value in found if isinstance(value, int | float)), 0.0)


class TaskServerAdapter:
    def __init__(self, task: Any) -> None:
        self._worker, self._typings = require_worker()
        if not isinstance(task, self._worker.Task):
            raise UsageError(f"{type(task).__name__} is no task of agentrl.worker", remedy="subclass its Task")
        self.task = task
        self._places = asyncio.Semaphore(task.concurrency)
        self._ids = itertools.count(1)
        self.live = 0
        """Episodes whose code has not ended yet."""

    @cached_property
    def indices(self) -> list[int | str]:
        """Without -1, which stands for samples that a client brings."""
        return [index for index in self.task.get_indices() if index != -1]

    async def start(self, index: int | str) -> EpisodeState:
        """Waits where as many episodes run as the task allows."""
        await self._places.acquire()
        self.live += 1
        session = self._worker.Session(next(self._ids))
        session.set_tools(self.task.tools)
        state = EpisodeState(index, session)
        state.running = asyncio.create_task(self._run(state))
        state.running.add_done_callback(self._free_place)
        try:
            self._update(state, await session.controller.agent_pull())
        except BaseException:
            await asyncio.shield(self.cancel(state))
            raise
        return state

    async def step(self, state: EpisodeState, messages: list[Message]) -> EpisodeState:
        if state.done:
            raise UsageError("this episode is over", remedy="start another")
        try:
            given = self._typings.AgentOutput(messages=messages)
        except ValueError as error:
            why = f"no messages of an assistant: {str(error).splitlines()[0]}"
            raise UsageError(why, remedy="send text, or a chat message with the role assistant") from error
        self._update(state, await state.session.controller.agent_pull(given))
        return state

    async def cancel(self, state: EpisodeState) -> None:
        """Ends an episode. Code that does not end now keeps its place until it does."""
        assert state.running is not None
        if state.running.done():
            return
        if self.task.full_async:
            state.running.cancel()
        else:
            controller = state.session.controller
            controller.env_input = self._typings.AgentOutput(status=self._typings.AgentOutputStatus.CANCELLED)
            controller.env_signal.release()
        await asyncio.wait([state.running], timeout=END_SECONDS)
        if not state.running.done():
            logger.warning("an episode of %s was cancelled and has not ended yet", self.task.name)

    async def _run(self, state: EpisodeState) -> None:
        status, result = TASK_ERROR, None
        try:
            ended = await self.task.start_sample(state.index, state.session)
            # Some give a plain result.
            status = getattr(ended, "status", COMPLETED)
            result = getattr(ended, "result", ended)
        except (self._typings.AgentCancelledException, asyncio.CancelledError):
            status = CANCELLED
        except Exception as error:
            logger.exception("an episode of %s failed", self.task.name)
            result = f"{type(error).__name__}: {error}"
        if result is not None and not isinstance(result, bool | int | float | str | list | dict):
            result = str(result)
        output = self._typings.TaskOutput(index=state.index, status=status, result=result)
        output.history = state.session.history.copy()
        await state.session.controller.env_finish(output)

    def _free_place(self, running: asyncio.Task[None]) -> None:
        self.live -= 1
        self._places.release()

    def _update(self, state: EpisodeState, output: Any) -> None:
        state.status = str(getattr(output.status, "value", output.status))
        state.result = output.result
        state.observation = []
        for item in output.history[output.history_ptr :]:
            item = getattr(item, "root", item)
            if isinstance(item, self._typings.RewardHistoryItem):
                state.rewards.append(float(item.reward))
                metrics = item.metrics.items()
                state.metrics |= {name: float(value) for name, value in metrics if isinstance(value, int | float)}
            else:
                state.observation.append(dict(item))
        if state.status == TASK_ERROR:
            raise EnvironmentFault(f"the task {self.task.name} failed: {output.result}", remedy="look at its own log")
