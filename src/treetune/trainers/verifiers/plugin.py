"""Lets verifiers play a TARGET: the classes that an exported package subclasses.

class MyEnvTaskset(TreetuneTaskset):
    CONFIG = Path(__file__).with_name("taskset.yaml")

verifiers loads the taskset, which yields the tasks in the order of `treetune eval`. For each rollout it launches the
harness, which plays our episode; every model call goes through verifiers' interception endpoint, which records the
tokens. A request names a task by index and uid. The harness plays the task at that index of its own taskset, so a
client cannot change the question or the right answer. Every failure is raised: verifiers drops such a rollout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import verifiers.v1 as vf
from verifiers.v1.errors import HarnessError, TaskError
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig

from treetune.chat.message import Message
from treetune.core.contract import Limits
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Outcome, Trace
from treetune.errors import TreetuneError, UsageError, format_error
from treetune.play import streams
from treetune.play.leases import Draw
from treetune.play.rollout import Rollout
from treetune.play.streams import Streams
from treetune.system.digest import digest
from treetune.trainers.verifiers.model_calls import InterceptedModel
from treetune.trainers.verifiers.package import check_playable, check_task, open_taskset

OPENING = "(The environment opens the conversation.)"
"""The prompt of a task that has none, because verifiers requires one."""
INFO = "treetune"
"""The key of verifiers' trace that holds the result of the episode."""

_served: dict[str, _Served] = {}
"""The tasksets that this process loaded, by their name in a task's data. A request cannot name any other task."""


class _Served:
    """A taskset whose episodes are played here."""

    def __init__(self, taskset: Taskset[Any, Any], file: Path, overrides: dict[str, str], config: Any) -> None:
        self.taskset, self.config = taskset, config
        self.limits = Limits(
            max_turns=config.max_turns,
            timeout=config.timeout,
            timeout_reward=config.timeout_reward,
            max_tool_calls=config.max_tool_calls,
        )
        self._file, self._overrides = file, overrides
        self._loading: asyncio.Future[Streams] | None = None

    async def task(self, index: int, uid: str) -> Task:
        loading = self._loading
        if loading is None or loading.get_loop() is not asyncio.get_running_loop() or _failed(loading):
            loading = self._loading = asyncio.ensure_future(self._load())
        task = await (await asyncio.shield(loading)).fetch(Draw("", index))
        if task.uid != uid:
            raise UsageError(
                f"task {index} of {self.taskset.name} is not the requested one: it was changed on the way, or the "
                "taskset of the client differs from that of the server",
                remedy="use the same package, arguments and data on both sides",
            )
        return task

    async def _load(self) -> Streams:
        # A generator has only one reader, and verifiers iterates over the other one.
        own = self.taskset
        if own.sequential:
            own = open_taskset(self._file, self._overrides)
        return await streams.load(own)


def _failed(loading: asyncio.Future[Any]) -> bool:
    return loading.done() and (loading.cancelled() or loading.exception() is not None)


class TreetuneTaskData(vf.TaskData):  # type: ignore[misc]
    taskset: str = ""
    """Which of the loaded tasksets the task belongs to."""
    index: int = -1
    """Its place in the order of that taskset."""
    position: int = -1
    """Its place in load order, whatever the order."""
    uid: str = ""


class TreetuneTask(vf.Task[TreetuneTaskData]):  # type: ignore[misc]
    @property
    def key(self) -> str:
        """The same for every order of the tasks and for all limits."""
        return f"{self.data.uid}-{self.data.position}"

    @vf.reward(weight=1.0)  # type: ignore[untyped-decorator]
    async def episode_reward(self, trace: vf.Trace) -> float:
        return float(_played(trace)["reward"])

    @vf.metric  # type: ignore[untyped-decorator]
    async def episode_metrics(self, trace: vf.Trace) -> dict[str, float]:
        return dict(_played(trace)["metrics"])


def _played(trace: vf.Trace) -> dict[str, Any]:
    """Return the data that the harness recorded about an episode. Without it there is no reward, and so no zero
    either."""
    found: dict[str, Any] | None = trace.info.get(INFO)
    if found is None:
        ended = f" ({trace.stop_condition})" if trace.stop_condition else ""
        raise RuntimeError(
            f"the episode was not played to its end{ended}: it has no reward. It is played by the harness of its own "
            "package; give it more time (--env.agent.timeout.rollout), or a reward (--env.taskset.timeout-reward)"
        )
    return found


class TreetuneTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    overrides: dict[str, Any] = {}
    """Keys of the TARGET, as after `--taskset.` on Treetune's command line: `{"level": 2, "shuffle.seed": 1}`."""
    max_turns: int | None = None
    """The answer limit of one episode. By default the environment decides, and verifiers' own limits apply."""
    timeout: float | None = None
    """Time limit of one episode, in seconds."""
    timeout_reward: float | None = None
    """The reward of an episode that ran out of time. By default it has no reward and is a failure."""
    max_tool_calls: int | None = None
    """The maximum number of tool calls in one episode. By default, the one that the task declares, or 128."""
    model_timeout: float = 3600.0
    """Timeout of one model call, in seconds."""
    model_retries: int = 6
    """How often a model call is repeated after 408, 409, 429, 5xx or a lost connection."""


class TreetuneTaskset(vf.Taskset[TreetuneTask, TreetuneTasksetConfig]):  # type: ignore[misc]
    CONFIG: ClassVar[Path]
    """The config of the exported TARGET, a file in the package."""

    def __init__(self, config: TreetuneTasksetConfig) -> None:
        super().__init__(config)
        overrides = {f"taskset.{key}": _as_written(value) for key, value in config.overrides.items()}
        self.taskset = open_taskset(self.CONFIG, overrides)
        check_playable(self.taskset)
        if self.taskset.endless != self.INFINITE:
            which = "never ends with these overrides, and ends" if self.taskset.endless else "ends with these overrides"
            raise UsageError(
                f"{type(self).__name__} {which} without: verifiers reads INFINITE off the class",
                remedy="give the keys to `treetune export verifiers`, which writes another package",
            )
        self._key = digest([type(self).__module__, config.model_dump(mode="json")])
        _served[self._key] = _Served(self.taskset, self.CONFIG, overrides, config)

    def load(self) -> Iterable[TreetuneTask]:
        for index, task in enumerate(_in_order(self.taskset)):
            check_task(self.taskset, task)
            named = {"id": task.uid, "name": task.data_source or None, "prompt": _prompt(task)}
            data = TreetuneTaskData(**named, taskset=self._key, index=index, position=task.idx, uid=task.uid)
            yield TreetuneTask(data, self.config.task)


def _in_order(taskset: Taskset[Any, Any]) -> Iterator[Task]:
    """Yield the tasks as `treetune eval` draws them."""
    return (taskset.at(index) for index in count()) if taskset.endless else taskset.draw()


def _prompt(task: Task) -> str | list[Message]:
    """Return the fields of a task that a person, or a trainer's filter, sees. The episode itself shows the actual
    question."""
    messages = [dict(message) for message in task.messages]
    if not messages:
        return OPENING
    if len(messages) == 1 and messages[0].get("role") == "user" and isinstance(messages[0]["content"], str):
        return str(messages[0]["content"]) or OPENING
    return messages


def _as_written(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


class TreetuneHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Plays episodes in the environment's process: no program, no container."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TreetuneTaskData,
    ) -> ProgramResult:
        served = _served.get(getattr(data, "taskset", ""))
        if served is None:
            raise TaskError("this process has not loaded the taskset of this task: use the same package and arguments")
        try:
            task = await served.task(data.index, data.uid)
        except Exception as error:
            raise TaskError(str(error) if isinstance(error, TreetuneError) else format_error(error)) from error
        policy = InterceptedModel(ctx.model, endpoint, secret, trace, data.system_prompt, served.config)
        ours = Trace(task=task, uid=task.uid, model=ctx.model)
        try:
            await Rollout(served.taskset, policy, ours, None, served.limits).run()
        except asyncio.CancelledError:
            # verifiers' own deadline counts as well.
            ours.reward = served.limits.timeout_reward
            _note(trace, ours)
            raise
        finally:
            await policy.close()
        if ours.reward is None:
            failure = ours.failure
            why = f"{failure.phase}: {failure.type}: {failure.message}" if failure is not None else str(ours.outcome)
            # If a model call failed, verifiers takes that call's error as the cause.
            raise (HarnessError if ours.outcome is Outcome.POLICY_ERROR else TaskError)(why)
        _note(trace, ours)
        return ProgramResult(exit_code=0, stdout="", stderr="")


def _note(trace: vf.Trace, ours: Trace) -> None:
    if ours.reward is None:
        return
    said = {"success": float(ours.success)} if ours.success is not None else {}
    trace.info[INFO] = {
        "uid": ours.uid,
        "reward": ours.shaped_reward,
        "rewards": [turn.reward for turn in ours.turns],
        "outcome": ours.outcome.value,
        "answer": ours.answer,
        "explanation": ours.explanation,
        "metrics": {**said, "raw_reward": ours.reward, "truncated": float(ours.outcome == "truncated"), **ours.metrics},
        "warnings": ours.warnings,
    }


class TreetuneEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig(runtime=SubprocessConfig())
    """The model. The runtime is this machine: an episode needs no container, because code runs in a sandbox."""


class TreetuneEnv(vf.Env[TreetuneEnvConfig]):  # type: ignore[misc]
    """One agent that plays one episode."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task)
