"""Tasksets over tasks written for AgentBench's worker, by the name they are served under.

    treetune serve agentbench:my_tasks:MyTask --taskset.parameters.name mine
    treetune serve agentbench:tasks.yaml --taskset.task os-dev --taskset.root AgentBench
    treetune eval agentbench:os-std --taskset.root AgentBench -m MODEL

`os-dev` and `os-std` need only the data of an AgentBench checkout: they run as `os-interaction`. The others need what
their own code needs, and say so.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from treetune.builtin.shell.agentbench_adapter import EpisodeState, TaskServerAdapter
from treetune.builtin.shell.taskset import OSInteraction, OSInteractionConfig
from treetune.config import load_yaml
from treetune.environment import Action, Environment, Step
from treetune.errors import ConfigError, MissingExtraError, UnknownNameError, UsageError
from treetune.plugins import load_object
from treetune.task import Message, Task
from treetune.taskset import Taskset, TasksetConfig

OS = {"os-dev": "dev", "os-std": "std"}
ELSEWHERE = {
    "dbbench": "agentrl-worker and the MySQL containers of its dbbench task",
    "kg": "agentrl-worker and a SPARQL server with Freebase",
    "webshop": "agentrl-worker and the WebShop data",
    "alfworld": "agentrl-worker and the ALFWorld games",
    "card": "agentrl-worker and the card game's own server",
    "ltp": "agentrl-worker and a model that hosts",
    "m2w": "agentrl-worker and the Mind2Web data",
}
"""AgentBench's other tasks, and what their code needs beside a checkout."""


def taskset_class(spec: str) -> type[Taskset[Any, Any]]:
    """The taskset that `agentbench:SPEC` stands for."""
    if spec in OS:
        return type("AgentBenchOS", (AgentBenchOS,), {"SPLIT": OS[spec]})
    family = spec.rpartition("-")[0]
    if family in ELSEWHERE:
        return type("AgentBench", (AgentBenchTaskset,), {"SPEC": spec, "FAMILY": family})
    if ":" in spec or spec.endswith((".yaml", ".yml")) or "." in spec:
        return type("AgentBench", (AgentBenchTaskset,), {"SPEC": spec})
    raise UnknownNameError.of(
        "task of AgentBench",
        spec,
        [*OS, *(f"{family}-dev" for family in ELSEWHERE)],
        remedy="or a class, module:Class or file.py:Class, or one of its configs, tasks.yaml",
    )


class AgentBenchOSConfig(OSInteractionConfig, frozen=True, kw_only=True):
    data: str = ""
    """Absent: that of the checkout."""
    root: str = ""
    """A checkout of AgentBench."""


class AgentBenchOS(OSInteraction):
    """os-dev and os-std: AgentBench's samples, on our own machines."""

    SPLIT: ClassVar[Literal["std", "dev"]] = "std"
    config_type = AgentBenchOSConfig

    def __init__(self, config: AgentBenchOSConfig | None = None) -> None:
        config = config or AgentBenchOSConfig()
        if not config.root and not config.data:
            problem = "is required: the folder of an AgentBench checkout (or taskset.data: its samples alone)"
            raise ConfigError([("taskset.root", problem)])
        folder = Path(config.root).expanduser() / "data" / "os_interaction"
        scripts = folder / "scripts"
        super().__init__(
            msgspec.structs.replace(
                config,
                split=self.SPLIT,
                data=config.data or str(folder / "data"),
                scripts_root=config.scripts_root or (str(scripts) if config.root and scripts.is_dir() else None),
            )
        )


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
    FAMILY: ClassVar[str | None] = None

    @cached_property
    def adapter(self) -> TaskServerAdapter:
        return TaskServerAdapter(self._made())

    @cached_property
    def _indices(self) -> list[int | str]:
        return self.adapter.indices

    def count(self) -> int:
        return len(self._indices)

    def task_at(self, index: int) -> AgentBenchTask:
        tools = self.adapter.task.tools
        return AgentBenchTask(
            index=self._indices[index],
            data_source=self.adapter.task.name,
            extra_info={"tools": tools} if tools else {},
        )

    def environment(self, task: AgentBenchTask) -> Environment:
        return AgentBenchEnvironment(task, self.adapter)

    def _made(self) -> Any:
        try:
            import agentrl.worker.task  # noqa: F401
        except ImportError as error:
            raise MissingExtraError.of("agentrl-worker", "agentbench") from error
        spec, parameters = self._class_spec()
        if self.config.root is not None:
            # Its code finds itself and its data from there.
            root = str(Path(self.config.root).expanduser().resolve())
            sys.path.insert(0, root)
            os.chdir(root)
        # AgentBench writes module.Class.
        named = spec if ":" in spec else ":".join(spec.rsplit(".", 1))
        cls: Any = load_object(named)
        return cls(**{**parameters, **self.config.parameters})

    def _class_spec(self) -> tuple[str, dict[str, Any]]:
        if not self.SPEC.endswith((".yaml", ".yml")):
            if self.FAMILY is None:
                return self.SPEC, {}
            if self.config.root is None:
                raise UsageError(
                    f"{self.SPEC} is a task of AgentBench's own code: it needs a checkout, {ELSEWHERE[self.FAMILY]}",
                    remedy="name the checkout with --taskset.root",
                )
            place = Path(self.config.root).expanduser() / "configs" / "tasks" / f"{self.FAMILY}.yaml"
            return _from_config(place, self.SPEC)
        place = Path(self.SPEC).expanduser()
        return _from_config(place, self.config.task)


def _from_config(path: Path, name: str | None) -> tuple[str, dict[str, Any]]:
    """Class and parameters of a task in AgentBench's kind of config: named entries over a `default`."""
    content = load_yaml(str(path))
    known = [key for key, value in content.items() if isinstance(value, dict) and key != "default"]
    if name is None and len(known) == 1:
        name = known[0]
    if name not in known:
        raise UnknownNameError.of("task of this config", str(name), known, remedy="pick one with --taskset.task")
    default = content.get("default") or {}
    entry = {**default, **content[name]}
    if not isinstance(entry.get("module"), str):
        raise ConfigError([(f"{name}.module", "is required: the class, as module.Class")], source=str(path))
    return entry["module"], {**(default.get("parameters") or {}), **(content[name].get("parameters") or {})}


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
        assert self._state is not None
        if self._state.done:
            # It ended before it asked for anything.
            return _step_of(self._state)
        return _step_of(await self._adapter.step(self._state, _messages(action)))

    async def close(self) -> None:
        if self._state is not None:
            await self._adapter.cancel(self._state)


def _messages(action: Action) -> list[Message]:
    content = action.content
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    if isinstance(content, dict) and "role" not in content and "tool_calls" in content:
        content = {"role": "assistant", **content}
    return content if isinstance(content, list) else [content]


def _step_of(state: EpisodeState) -> Step:
    info: dict[str, Any] = {"status": state.status, "metrics": state.metrics}
    if not state.done:
        return Step(state.observation, info=info)
    info |= {"result": state.result, "success": state.reward > 0}
    return Step(state.observation, reward=state.reward, done=True, truncated=state.truncated, info=info)
