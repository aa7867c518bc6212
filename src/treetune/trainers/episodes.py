"""Starts the episodes that a trainer's bridge plays: episodes of a taskset in this process, or of rows, here or on task
servers.

    episode = await LocalEpisodes(streams).start(task_index)      # with the methods of `TaskServerClient`
    async with await RowEpisodes().start(scorer, task) as episode:
        step = await episode.step("an answer")

In this process, a row is played by the taskset that its `scorer` names, so its reward is the same as in `eval`. Servers
must serve the tasks that the rows were built from. The servers look up a task by uid, and are refused if they do not
have it. Failures raise a `ServeError` in both cases.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Awaitable, Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, Self, TypeVar

import msgspec

from treetune.chat.calls import ToolCall
from treetune.chat.images import has_images
from treetune.chat.message import begins_answer
from treetune.chat.tokens import Rewrites
from treetune.core.agent import AgentNeeds, AgentRun
from treetune.core.contract import Limits
from treetune.core.environment import Action, Environment, Observation, SingleTurn, Step
from treetune.core.mixture import ask_owner, owner_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset, scored_in_group
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource
from treetune.core.trace import Trace
from treetune.data.rows.scorer import ScoredBy, row_tools, taskset_of, with_type
from treetune.errors import TreetuneError, UsageError, format_error
from treetune.gateway import AgentPolicy
from treetune.play.episode import CLOSE_SECONDS, DeadlinePassed, Episode
from treetune.play.rollout import score_together
from treetune.play.streams import Streams
from treetune.serve import Denied, Misused, RemoteEpisode, ServeError, TaskServerClient
from treetune.system import threads

T = TypeVar("T")
_STARTS = 32
"""How many episodes of a batch start at the same time: each start may open a sandbox."""


class LocalEpisode(Episode):
    info: dict[str, Any] = {}
    one_answer = False
    """Whether any answer ends the episode, because the task has no environment of its own and no tools."""
    scores_answers = True
    """Whether an answer without a tool call is scored; if False, it only ends the episode."""

    @property
    def task(self) -> Task:
        return self._task

    async def play_turn(self, action: Action | list[ToolCall]) -> Step:
        return self.with_ending(await super().play_turn(action))

    async def hand_in(self, run: AgentRun) -> Step:
        return self.with_ending(await super().hand_in(run))

    async def begin(self) -> Observation:
        observation = await super().begin()
        self.one_answer = isinstance(self._environment, SingleTurn) and not self.tools
        self.scores_answers = getattr(type(self._environment), "step", None) is not Environment.step
        return observation

    def refuse_alone(self) -> None:
        """Raise if the episode has no reward without the others of its group."""
        if self.contract.group_score and not self._taskset.scores_alone(self._task):
            raise scored_in_group(self._taskset.name, self._task)

    async def score_group(self, traces: Sequence[Trace]) -> None:
        """Set the rewards of traces of the task to those of the taskset's `score_group`."""
        await score_together(self._taskset, self._task, traces)

    async def cancel(self) -> None:
        await self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class LocalEpisodes:
    def __init__(self, streams: Streams, timeout: float = 600.0, needs: AgentNeeds | None = None) -> None:
        """`timeout` is the seconds allowed for one start or step; `needs` are those of an agent that plays."""
        self._streams, self._limits, self._needs = streams, Limits(timeout=timeout), needs

    async def info(self) -> dict[str, Any]:
        return {"num_tasks": self._streams.count}

    def task(self, task_index: int) -> Task:
        return self._streams.task(self._streams.draw_at(task_index))

    def kind_of(self, task_index: int) -> tuple[Any, ...]:
        """Identify what plays a task, without starting it: tasks of one kind have the same environment and the same
        form of prompt."""
        task = self.task(task_index)
        owner, inner = owner_of(self._streams.taskset, task)
        prompt = has_images(task.messages), begins_answer(task.messages)
        return id(owner), task.env_class, owner.offers_tools(inner), *prompt

    async def start(self, task_index: int) -> LocalEpisode:
        task = await self._streams.fetch(self._streams.draw_at(task_index))
        how = {"in_group": True, "needs": self._needs}
        episode = await LocalEpisode.start(self._streams.taskset, task, self._limits, **how)
        episode.info = {"task_index": task_index, "data_source": task.data_source}
        return episode

    async def start_many(self, task_indices: Sequence[int]) -> list[LocalEpisode | ServeError]:
        free = asyncio.Semaphore(_STARTS)

        async def start(index: int) -> LocalEpisode | ServeError:
            async with free:
                return await or_error(self.start(index))

        starting = [asyncio.ensure_future(start(index)) for index in task_indices]
        try:
            return list(await asyncio.gather(*starting))
        except asyncio.CancelledError:  # the caller never gets the episodes that have started
            for begun in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(begun, LocalEpisode):
                    await begun.cancel()
            raise

    async def step_many(self, moves: Sequence[tuple[LocalEpisode, Any]]) -> list[Step | ServeError]:
        return list(await asyncio.gather(*(or_error(episode.step(action)) for episode, action in moves)))

    async def close(self) -> None:
        """Nothing to close: no resource outlives its episode here."""


async def or_error(work: Awaitable[T]) -> T | ServeError:
    """Return the result, or the failure as a `ServeError`. An environment failure is not the model's failure."""
    try:
        return await work
    except Exception as error:
        return as_failure(error)


def as_failure(error: Exception) -> ServeError:
    if isinstance(error, ServeError):
        return error
    if isinstance(error, DeadlinePassed):
        return ServeError(f"the environment did not answer in time: {error}", remedy="allow more: timeout=")
    return ServeError(getattr(error, "message", format_error(error)), remedy=getattr(error, "remedy", None))


class EpisodeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User settings for episodes of rows, in verl and slime."""

    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """Timeout in seconds for one start or step of an environment; after that it has failed."""
    urls: tuple[str, ...] = ()
    """Task servers that play the episodes. Without them, each trainer process plays its own."""
    token_env: str = "TREETUNE_TOKEN"
    """The variable that holds the servers' token."""
    patience: Annotated[float, msgspec.Meta(ge=0)] = 60.0
    """How many seconds to wait for a server that does not answer."""
    max_turns: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """A lower turn limit than that of the tasks; at the limit an episode counts with what it has earned so far."""
    turn_discount: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """The reward is multiplied by this for each turn. The default is what the task declares."""
    rewrites: Rewrites | None = None
    """If a chat template rewrites an earlier answer, for example by dropping its reasoning: `split` trains each stretch
    as a separate sample, `keep` continues from the sampled tokens."""
    call_format: str | None = None
    """How the model writes tool calls, if its chat template does not show it."""
    agent: str | None = None
    """An agent that plays the episodes, with the model behind a gateway: a known one, a program, `FILE.py:FUNCTION`, or
    a YAML file with its settings."""


def connect(urls: str | Sequence[str], token_env: str, timeout: float, patience: float) -> TaskServerClient:
    """Return a client for one or more task servers; `token_env` names the variable with their token."""
    return TaskServerClient(urls, token=os.environ.get(token_env) or None, timeout=timeout, patience=patience)


class RowEpisodes:
    def __init__(self, settings: EpisodeSettings | None = None, *, attempts: int = 2, in_group: bool = False) -> None:
        """A start that fails because of the environment is tried `attempts` times in all. Set `in_group` if the caller
        scores the episodes of a task together."""
        if attempts < 1:
            raise UsageError(f"attempts must be at least 1, got {attempts}")
        settings = settings or EpisodeSettings()
        self._limits = Limits(timeout=settings.timeout)
        access = settings.urls, settings.token_env, settings.timeout, settings.patience
        self._client = connect(*access) if settings.urls else None
        self.agent = AgentPolicy(settings.agent) if settings.agent is not None else None
        """What plays the episodes instead of the model itself."""
        self.attempts, self._in_group = attempts, in_group

    async def start(self, scored: ScoredBy, task: Task) -> LocalEpisode | RemoteEpisode:
        """Start an episode of a row's task. Raises `ServeError` if it cannot be started."""
        left = self.attempts
        while True:
            left -= 1
            begun = await or_error(self._begin(scored, task))
            if not isinstance(begun, ServeError):
                return begun
            if not left or is_misuse(begun):
                raise begun

    async def _begin(self, scored: ScoredBy, task: Task) -> LocalEpisode | RemoteEpisode:
        if self._client is not None:
            index = task.extra_info.get("index")
            return await self._client.start(index if isinstance(index, int) else None, uid=task.uid)
        taskset = taskset_of(scored)
        typed = with_type(task, taskset)
        owner = _WithRowTools(taskset) if task.tools else taskset
        needs = self.agent.needs if self.agent is not None else None
        episode = await LocalEpisode.start(owner, typed, self._limits, in_group=self._in_group, needs=needs)
        episode.info = {"data_source": task.data_source}
        return episode

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self.agent is not None:
            await self.agent.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


@lru_cache(maxsize=16)
def share_episodes(loop: asyncio.AbstractEventLoop, settings: EpisodeSettings, attempts: int) -> RowEpisodes:
    """Return the episodes of an event loop, created once: for trainers that create their objects anew for every
    episode."""
    return RowEpisodes(settings, attempts=attempts, in_group=True)


def is_misuse(error: TreetuneError) -> bool:
    """Whether the setup is at fault: every row would fail the same way, and retrying does not help."""
    return isinstance(error, Misused | Denied)


class _WithRowTools(Taskset[Task, TasksetConfig]):
    """The taskset of a row that names its own tools."""

    environment = ask_owner("environment")
    contract_of = ask_owner("contract_of")
    reward = ask_owner("reward")
    score_group = ask_owner("score_group")
    scores_group_of = ask_owner("scores_group_of")

    def __init__(self, owner: Taskset[Any, Any]) -> None:
        super().__init__()
        self.name, self._of_row = owner.name, owner

    def _owner(self, task: Task) -> tuple[Taskset[Any, Any], Task]:
        return self._of_row, task

    def load_tasks(self) -> list[Task]:
        return []

    def offers_tools(self, task: Task) -> bool:
        return True

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        return row_tools(task, self._of_row)


class LiveEpisodes:
    """Tracks the episodes that a trainer plays itself until they end, so that none is left running. Used on the
    background loop, where all episodes live."""

    def __init__(self, episodes: Any) -> None:
        self._episodes = episodes
        self._starting: set[asyncio.Task[Any]] = set()
        self._live: set[Any] = set()

    async def start(self, index: int) -> Any:
        starting = asyncio.current_task()
        assert starting is not None
        self._starting.add(starting)
        try:
            episode = await self._episodes.start(index)
        finally:
            self._starting.discard(starting)
        self._live.add(episode)  # tracked even if the caller was cancelled
        return episode

    async def end(self, episode: Any) -> None:
        try:
            await episode.cancel()  # an episode that has ended is awaited until it is closed
        finally:
            self._live.discard(episode)

    async def end_all(self) -> None:
        """End all episodes, and wait for starts that were abandoned."""
        if self._starting:
            await asyncio.wait(self._starting)
        await asyncio.gather(*map(self.end, list(self._live)), return_exceptions=True)


def close_in_background(live: LiveEpisodes, open_ones: Iterable[Any]) -> None:
    """End all episodes, then close what they use, on the background loop. Does not wait long."""

    async def close() -> None:
        await live.end_all()
        for each in open_ones:
            await each.close()

    closing = threads.submit_in_background(close())
    if threading.current_thread().name != threads.BACKGROUND:  # the background thread must not wait for itself
        with contextlib.suppress(Exception):
            closing.result(CLOSE_SECONDS)
