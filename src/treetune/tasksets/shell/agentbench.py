"""Tasksets of tasks written for AgentBench's worker, by the name under which they are served.

    treetune serve agentbench:my_tasks:MyTask --taskset.parameters.name mine
    treetune serve agentbench:tasks.yaml --taskset.task mine --taskset.root AgentBench
    treetune eval agentbench:os-std --taskset.root AgentBench -m MODEL

`os-std`, `os-dev` and `os-env_train` run as `os-interaction` on the data of a checkout. The others are tasks of
`agentrl.worker`, which ask for actions: `EpisodeState` passes actions on one by one, without worker, redis and Docker.
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

import msgspec

from treetune.chat.message import Message
from treetune.config.code_reference import parse_reference
from treetune.config.plugins import absolute_spec, load_object
from treetune.config.structs import load_yaml
from treetune.config.trust import Origin
from treetune.core.contract import Contract
from treetune.core.environment import Action, Environment, Step
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import ConfigError, EnvironmentFault, MissingExtraError, UnknownNameError, UsageError
from treetune.tasksets.shell.taskset import OSInteraction

OS = {"os-std": "std", "os-env_train": "env_train", "os-dev": "dev"}
FAMILIES = {
    "dbbench": ("dbbench.yaml", ("dbbench-std", "dbbench-env_train", "dbbench-dev")),
    "kg": ("kg.yaml", ("kg-std", "kg-env_train", "kg-dev")),
    "webshop": ("webshop.yaml", ("webshop-std", "webshop-env_train", "webshop-dev")),
    "alfworld": ("alfworld.yaml", ("alfworld-std", "alfworld-env_train", "alfworld-dev")),
    "cg": ("card_game.yaml", ("cg-std", "cg-dev")),
    "ltp": ("ltp.yaml", ("ltp-std", "ltp-dev")),
    "m2w": ("mind2web.yaml", ("m2w-std", "m2w-dev")),
    "avalon": ("avalon.yaml", ("avalon-dev-naive", "avalon-dev-single")),
}
"""AgentBench's other tasks: the config that defines them, and their names. The current ones have `-std` and
`-env_train`, earlier ones `-dev`, whose data still exists. Their code needs a checkout, agentrl-worker, and its own
data or servers."""

END_SECONDS = 10.0
"""How many seconds to wait for the code of a cancelled episode."""
RUNNING, COMPLETED, CANCELLED, TASK_ERROR = "running", "completed", "cancelled", "task error"
LIMIT = "task limit reached"
CONFIG = (".yaml", ".yml")
RESULT_KEYS = ("reward", "score", "result", "success", "succeed")
logger = logging.getLogger(__name__)


def taskset_class(spec: str, origin: Origin) -> type[Taskset[Any, Any]]:
    """Return the taskset for `agentbench:SPEC`."""
    if spec in OS:
        return type("AgentBenchOS", (_NamedSplit,), {"NAME": OS[spec]})
    known = [*OS, *(name for _, names in FAMILIES.values() for name in names)]
    if spec in known or ":" in spec or "." in spec:
        return type("AgentBench", (_NamedTask,), {"NAME": spec})
    remedy = "or a class, module:Class or file.py:Class, or one of its configs, tasks.yaml"
    raise UnknownNameError.of("task of AgentBench", spec, known, remedy=remedy)


class AgentBenchConfig(TasksetConfig, frozen=True, kw_only=True):
    spec: str = ""
    """The task, as the TARGET names it: a class, a config file, or an AgentBench name."""
    task: str | None = None
    """The name of the task in a config file."""
    root: str | None = None
    """A checkout of AgentBench: its code is imported from there, and its relative paths start there."""
    parameters: dict[str, Any] = {}
    """Further arguments for the class, in addition to those in a config file."""


class AgentBenchTask(Task, frozen=True, kw_only=True):
    index: int | str
    """The number or name of this sample in its task."""


class AgentBenchTaskset(Taskset[AgentBenchTask, AgentBenchConfig]):
    """Any task of agentrl.worker."""

    MULTI_TURN = True
    RUNS_CODE = True

    @cached_property
    def adapter(self) -> TaskServerAdapter:
        require_worker()
        spec, parameters = self.find_class()
        if self.config.root is not None:
            # Its code is imported, and its data is found, from there.
            root = _absolute(self.config.root)
            self._origin.refuse(f"imports code from {root}")
            sys.path.insert(0, root)
            os.chdir(root)
        # AgentBench writes module.Class.
        cls: Any = load_object(parse_reference(spec if ":" in spec else ":".join(spec.rsplit(".", 1))), self._origin)
        return TaskServerAdapter(cls(**{**parameters, **self.config.parameters}))

    def count(self) -> int:
        return len(self.adapter.indices)

    def task_at(self, index: int) -> AgentBenchTask:
        task = self.adapter.task
        extra = {"tools": task.tools} if task.tools else {}
        return AgentBenchTask(index=self.adapter.indices[index], data_source=task.name, extra_info=extra)

    def environment(self, task: AgentBenchTask) -> Environment:
        return EpisodeState(task, self.adapter)

    def find_class(self) -> tuple[str, dict[str, Any]]:
        """Return the class of the task, and its arguments."""
        spec, root = self.config.spec, self.config.root
        if spec.endswith(CONFIG):
            return _read_config(Path(spec).expanduser(), self.config.task)
        family = spec.partition("-")[0]
        if family not in FAMILIES or ":" in spec or "." in spec:
            return spec, {}
        if root is None:
            why = f"{spec} is AgentBench's own code: it needs a checkout, agentrl-worker and its own dependencies"
            raise UsageError(why, remedy="name the checkout with --taskset.root")
        checkout = Path(root).expanduser()
        config = checkout / "configs" / "tasks" / FAMILIES[family][0]
        return _read_dev(config, spec, checkout) or _read_config(config, spec)


# A TARGET's class is created for its name. Rows name a class that any process finds, with the name in its config.


class _NamedSplit(OSInteraction):
    NAME: ClassVar[Any] = ""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        taskset = OSInteraction(msgspec.structs.replace(config, split=cls.NAME), **options)
        taskset.name = cls.__name__
        return taskset


class _NamedTask(AgentBenchTaskset):
    NAME: ClassVar[str] = ""

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        spec, root = absolute_spec(cls.NAME, [Path.cwd()]), config.root
        if spec.endswith(CONFIG):
            spec = _absolute(spec)
        root = None if root is None else _absolute(root)
        taskset = AgentBenchTaskset(msgspec.structs.replace(config, spec=spec, root=root), **options)
        taskset.name = cls.__name__
        return taskset


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _read_config(path: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Return the class and the parameters of a task in AgentBench's config format: named entries over a `default`."""
    content = load_yaml(str(path), interpolates=False)
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


def _read_dev(config: Path, name: str, checkout: Path) -> tuple[str, dict[str, Any]] | None:
    """Return a `-dev` task that a checkout's config lacks, but whose samples are next to those of its `-std` task."""
    standard = name.removesuffix("-dev") + "-std"
    content = load_yaml(str(config))
    if not name.endswith("-dev") or name in content or standard not in content:
        return None
    module, parameters = _read_config(config, standard)
    data = Path(str(parameters.get("data_file", "")))
    for sample in (data.with_name(f"dev{data.suffix}"), data.with_name("dev.jsonl"), data.with_name("dev.json")):
        if (checkout / sample).is_file():
            return module, {**parameters, "name": name, "data_file": str(sample)}
    return None


class TaskServerAdapter:
    """A task of agentrl.worker, and what its episodes share."""

    def __init__(self, task: Any) -> None:
        self.worker, self.typings = require_worker()
        if not isinstance(task, self.worker.Task):
            raise UsageError(f"{type(task).__name__} is not a task of agentrl.worker", remedy="subclass its Task")
        self.task = task
        self.places = asyncio.Semaphore(task.concurrency)
        self.ids = itertools.count(1)
        # Without -1, which marks samples that a client brings.
        self.indices: list[int | str] = [index for index in task.get_indices() if index != -1]


def require_worker() -> tuple[Any, Any]:
    """Return the modules of agentrl-worker that tasks use."""
    try:
        return import_module("agentrl.worker.task"), import_module("agentrl.worker.typings")
    except ImportError as error:
        raise MissingExtraError.of("agentrl-worker", "agentbench") from error


class EpisodeState(Environment):
    """One episode: the task's own code runs alongside it and asks for actions."""

    CONTRACT = Contract(turn_discount=0.95)

    task: AgentBenchTask

    def __init__(self, task: AgentBenchTask, adapter: TaskServerAdapter) -> None:
        super().__init__(task)
        self._served, self._typings, self._places = adapter.task, adapter.typings, adapter.places
        self._session = adapter.worker.Session(next(adapter.ids))
        self._session.set_tools(adapter.task.tools)
        self._running: asyncio.Task[None] | None = None
        self._status = RUNNING
        self._result: Any = None
        self._rewards: list[float] = []
        self._metrics: dict[str, float] = {}

    async def start(self) -> list[Message]:
        """Start the episode. Waits while the task's maximum number of episodes is running."""
        await self._places.acquire()
        self._running = asyncio.create_task(self._run())
        # Code that ignores its cancellation counts until it ends.
        self._running.add_done_callback(lambda _: self._places.release())
        return await self._pull()

    async def step(self, action: Action) -> Step:
        shown: list[Message] = []
        if self._status == RUNNING:  # it may have ended before it asked for an action
            shown = await self._pull(self._read_action(action.content))
        info: dict[str, Any] = {"status": self._status, "metrics": self._metrics}
        if self._status == RUNNING:
            return Step(shown, info=info)
        # The last reward from the task; if it gave none, the one in its result.
        named = self._result if isinstance(self._result, dict) else {"result": self._result}
        found = [*self._rewards[-1:], *(named.get(key) for key in RESULT_KEYS)]
        reward = next((float(value) for value in found if isinstance(value, int | float)), 0.0)
        info |= {"result": self._result, "success": reward > 0}
        return Step(shown, reward, True, info, truncated=self._status == LIMIT)

    async def close(self) -> None:
        if self._running is None or self._running.done():
            return
        if self._served.full_async:
            self._running.cancel()
        else:
            controller = self._session.controller
            controller.env_input = self._typings.AgentOutput(status=self._typings.AgentOutputStatus.CANCELLED)
            controller.env_signal.release()
        await asyncio.wait([self._running], timeout=END_SECONDS)
        if not self._running.done():
            logger.warning("an episode of %s was cancelled and has not ended yet", self._served.name)

    def _read_action(self, content: Any) -> Any:
        """Convert to messages of an assistant, which the worker accepts."""
        if isinstance(content, str):
            content = {"role": "assistant", "content": content}
        elif isinstance(content, dict) and "tool_calls" in content:
            content = {"role": "assistant", **content}
        try:
            return self._typings.AgentOutput(messages=content if isinstance(content, list) else [content])
        except ValueError as error:
            why = f"not messages of an assistant: {str(error).splitlines()[0]}"
            raise UsageError(why, remedy="send text, or a chat message with the role assistant") from error

    async def _run(self) -> None:
        status, result = TASK_ERROR, None
        try:
            ended = await self._served.start_sample(self.task.index, self._session)
            # Some return a plain result.
            status = getattr(ended, "status", COMPLETED)
            result = getattr(ended, "result", ended)
        except (self._typings.AgentCancelledException, asyncio.CancelledError):
            status = CANCELLED
        except Exception as error:
            logger.exception("an episode of %s failed", self._served.name)
            result = f"{type(error).__name__}: {error}"
        if result is not None and not isinstance(result, bool | int | float | str | list | dict):
            result = str(result)
        output = self._typings.TaskOutput(index=self.task.index, status=status, result=result)
        output.history = self._session.history.copy()
        await self._session.controller.env_finish(output)

    async def _pull(self, given: Any = None) -> list[Message]:
        """Return the new messages when the task asks for the next action, or has ended."""
        output = await self._session.controller.agent_pull(given)
        self._status = str(getattr(output.status, "value", output.status))
        self._result = output.result
        shown: list[Message] = []
        for item in output.history[output.history_ptr :]:
            item = getattr(item, "root", item)
            if isinstance(item, self._typings.RewardHistoryItem):
                self._rewards.append(float(item.reward))
                metrics = item.metrics.items()
                self._metrics |= {name: float(value) for name, value in metrics if isinstance(value, int | float)}
            else:
                shown.append(dict(item))
        if self._status == TASK_ERROR:
            why = f"the task {self._served.name} failed: {output.result}"
            raise EnvironmentFault(why, remedy="check its own log")
        return shown
