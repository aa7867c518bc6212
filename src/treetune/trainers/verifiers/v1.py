"""Converts v1 tasksets of verifiers to Treetune tasksets."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any, Self

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.errors import TaskError
from verifiers.v1.graph import MessageNode
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.utils import loaders
from verifiers.v1.utils.decorators import discover_decorated

from treetune.chat.message import Message
from treetune.core.environment import Environment
from treetune.core.score import Score
from treetune.errors import EnvironmentFault, PluginError, TasksetError, UsageError, format_error
from treetune.trainers.verifiers import chat_harness
from treetune.trainers.verifiers.foreign_episode import EpisodeOutcome, ForeignEpisode, Held, ScoringFailed
from treetune.trainers.verifiers.imported import (
    VerifiersConfig,
    VerifiersTask,
    VerifiersTaskset,
    first_line,
)

_MESSAGES = {"system": vf.SystemMessage, "user": vf.UserMessage}


class V1Config(VerifiersConfig, frozen=True, kw_only=True):
    harness: str | None = None
    """The verifiers harness that plays. By default the environment's own, else a conversation with the tools."""
    runtime: str = "subprocess"
    """Where the harness and the task's own commands run: `subprocess` is this machine; `docker` and others isolate."""
    env: dict[str, Any] = {}
    """Further keys of verifiers' environment, as after `--env.` of vf-eval."""


class V1Taskset(VerifiersTaskset):
    config: V1Config

    @classmethod
    def named(cls, env: str, module: Any) -> type[V1Taskset]:
        try:
            theirs = loaders.taskset_class(env)
            fields = loaders.taskset_config_type(env).model_fields
        except (TypeError, ValueError, AttributeError) as error:
            raise PluginError(f"verifiers:{env} is not an environment of verifiers: {error}") from error
        keys = {name: field.default for name, field in fields.items() if name != "id"}
        name, doc = f"Verifiers{theirs.__name__}", first_line(theirs, module)
        return cls.for_environment(env, name, V1Config, keys, doc, INFINITE=bool(theirs.INFINITE))

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Self:
        """Return a taskset that scores answers here, or one that verifiers plays."""
        taskset = cls(config, **options)
        if taskset.needs_verifiers is None:
            return taskset
        played: Any = type(cls.__name__, (V1Played, cls), {"__doc__": cls.__doc__})
        return played(config, **options).checked()  # type: ignore[no-any-return]

    @cached_property
    def _theirs(self) -> Any:
        try:
            node = {"id": self.ENV, **self.arguments()}
            return loaders.load_taskset(loaders.taskset_config_type(self.ENV).model_validate(node))
        except Exception as error:
            raise UsageError(
                f"verifiers:{self.ENV} could not be made: {format_error(error)}",
                remedy=f"`treetune list verifiers:{self.ENV}` shows its keys",
            ) from error

    @cached_property
    def needs_verifiers(self) -> str | None:
        """Return why verifiers must play it; None if its rewards need only the conversation."""
        task_type = type(self._theirs).task_type()
        task = task_type(task_type.data_type().model_construct(), self._theirs.config.task)
        if self.config.harness is not None or self.config.env:
            return "a harness or an environment was named"
        if loaders.environment_class(self.ENV) is not SingleAgentEnv:
            return "it has its own environment"
        if loaders.default_harness_id(self.ENV) != "bash":
            return "it has its own harness"
        if task_type.NEEDS_CONTAINER:
            return "its tasks need a container"
        if type(self._theirs).toolsets(self._theirs.config) or task_type.toolsets(self._theirs.config.task):
            return "it has tools"
        for hook in ("setup", "finalize", "stage_verifier", "runtime_env", "score"):
            if getattr(task_type, hook) is not getattr(vf.Task, hook):
                return f"its tasks have {hook}()"
        for function in [*task.hooks("metric"), *task.hooks("reward"), *(each.score for each in task.plugged_judges())]:
            # verifiers skips such a function if there is no runtime, which would change the reward.
            needed = inspect.signature(function).parameters.get("runtime")
            if needed is not None and needed.default is inspect.Parameter.empty:
                return f"{function.__name__} needs a runtime"
        if task.hooks("stop") or discover_decorated(task, "intercept"):
            return "its tasks stop or change model calls"
        return None

    def load_tasks(self) -> Iterator[VerifiersTask]:
        for task in self._theirs:
            data = task.data.model_dump(mode="json")
            prompt = _messages(task.data)
            if not prompt and self.needs_verifiers is None:
                raise TasksetError(f"task {task.data.idx} of verifiers:{self.ENV} has no prompt")
            yield VerifiersTask(prompt=prompt or None, data=data)

    def _task(self, task: VerifiersTask) -> Any:
        """Return the task in verifiers' form."""
        task_type = type(self._theirs).task_type()
        return task_type(task_type.data_type().model_validate(task.data), self._theirs.config.task)

    async def reward(self, task: VerifiersTask, answer: str) -> Score:
        theirs = self._task(task)
        messages = [_as_message(message) for message in task.messages]
        nodes = [MessageNode(parent=n - 1 if n else None, message=message) for n, message in enumerate(messages)]
        said = vf.AssistantMessage(content=answer)
        nodes.append(MessageNode(parent=len(nodes) - 1 if nodes else None, message=said, sampled=True))
        of_task = TraceTask(type=type(theirs).__name__, data=theirs.data, key=theirs.key, hash=theirs.hash)
        trace = Trace(task=of_task, agent=AgentInfo(config=vf.AgentConfig()), nodes=nodes)
        try:
            await theirs.score(trace, None)
        except TaskError as error:
            raise error.__cause__ or error from None  # the function's own error says whose fault it is
        outcome = _outcome(trace)
        return Score(outcome.reward, metrics=outcome.metrics)


class V1Played(V1Taskset):
    """The same taskset, played by verifiers' own `Env`."""

    MULTI_TURN = True

    @property
    def _role(self) -> str:
        roles = agent_config_fields(self._env_type.model_construct())
        if len(roles) != 1:
            raise UsageError(
                f"verifiers:{self.ENV} has several models ({', '.join(roles)}), but an episode has one policy",
                remedy="name an environment with one agent",
            )
        return str(next(iter(roles)))

    @property
    def _env_type(self) -> Any:
        return loaders.env_config_type(self.ENV, str(self.config.env.get("id") or ""))

    def checked(self) -> Self:
        """Refuse early what could not be played."""
        harness = self.env._harnesses[self._role]
        task_type = type(self._theirs).task_type()
        for what, needs in ((f"the harness {harness.config.id}", harness), (task_type.__name__, task_type)):
            if needs.NEEDS_CONTAINER and self.config.runtime == "subprocess":
                raise UsageError(
                    f"{what} of verifiers:{self.ENV} needs a container, but runs in a process of this machine",
                    remedy="set --taskset.runtime docker (or another of verifiers'), or another --taskset.harness",
                )
        return self

    @cached_property
    def env(self) -> Any:
        harness = self.config.harness
        if harness is None:
            own = loaders.default_harness_id(self.ENV)
            harness = own if own != "bash" else chat_harness.install()
        seat = {"runtime": {"type": self.config.runtime}, "harness": {"id": harness}}
        given = {key: value for key, value in self.config.env.items() if key != self._role}
        node = {
            "taskset": {"id": self.ENV, **self.arguments()},
            **given,
            self._role: {**seat, **self.config.env.get(self._role, {})},
        }
        try:
            return loaders.load_environment(loaders.resolve_env_config(node))
        except Exception as error:
            raise UsageError(f"verifiers:{self.ENV} could not be made: {format_error(error)}") from error

    @cached_property
    def _serving(self) -> dict[asyncio.AbstractEventLoop, Held]:
        """The servers, by loop: there is one loop, and another one after a fork."""
        return {}

    def environment(self, task: VerifiersTask) -> Environment:
        return ForeignEpisode(task, partial(self._play, task))

    async def _play(self, task: VerifiersTask, url: str) -> EpisodeOutcome:
        client = vf.EvalClientConfig(base_url=url, api_key_var="TREETUNE_NO_KEY")
        context = vf.ModelContext(client=client, model="policy", sampling=vf.SamplingConfig())
        held = self._serving.setdefault(asyncio.get_running_loop(), Held(self.env.serving))
        episode = await held.run(partial(self.env.run_episode, self._task(task), context))
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or len(episode.traces) != 1:
            why = f"{errors[-1].type}: {errors[-1].message}" if errors else f"{len(episode.traces)} traces"
            if errors and errors[-1].type == "TaskError" and " scoring:" in errors[-1].message:
                raise ScoringFailed(why)
            raise EnvironmentFault(f"verifiers could not play it: {why}")
        return _outcome(episode.traces[0])


def _outcome(trace: Any) -> EpisodeOutcome:
    """Return the rewards of a finished trace. An undetermined reward is a failure."""
    if missing := [name for name, reward in trace.rewards.items() if reward is None]:
        raise EnvironmentFault(f"verifiers returned no value for the reward {missing[0]}")
    if not trace.rewards:
        raise EnvironmentFault("verifiers returned no reward: no function of the task is marked with @vf.reward")
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    parts = {name: reward.value for name, reward in trace.rewards.items()} if len(trace.rewards) > 1 else {}
    return EpisodeOutcome(trace.reward, {**parts, **metrics}, bool(trace.is_truncated))


def _messages(data: Any) -> list[Message]:
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    return system + [message_to_wire(message) for message in data.prompt or []]


def _as_message(message: Message) -> Any:
    role = str(message.get("role"))
    return _MESSAGES.get(role, vf.AssistantMessage)(content=message.get("content"))
