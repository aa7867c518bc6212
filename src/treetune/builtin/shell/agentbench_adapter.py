"""A task of `agentrl.worker` turned inside out: it calls for actions, and here it is given them one by one.

    adapter = TaskServerAdapter(task)
    episode = await adapter.start(index)
    while not episode.done:
        await adapter.step(episode, [{"role": "assistant", "content": "ls"}])
    episode.reward

Its worker, redis and Docker are not needed for that. Never more episodes run at a time than the task's `concurrency`;
an episode counts until its code has really ended, also after it was cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Any

from treetune.errors import EnvironmentFault, MissingExtraError, UsageError
from treetune.task import Message

END_SECONDS = 10.0
"""How long a cancelled episode is waited for; its code may be in the middle of something."""
RUNNING, COMPLETED, CANCELLED, TASK_ERROR, LIMIT = (
    "running",
    "completed",
    "cancelled",
    "task error",
    "task limit reached",
)
RESULT_KEYS = ("reward", "score", "result", "success", "succeed")
logger = logging.getLogger(__name__)


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
    def tools(self) -> list[dict[str, Any]] | None:
        tools: list[dict[str, Any]] | None = self.session.tools
        return tools

    @property
    def reward(self) -> float:
        """The last reward that the task gave; where it gave none, what its result says."""
        if self.rewards:
            return self.rewards[-1]
        found: Any = self.result
        if isinstance(found, dict):
            found = next((found[key] for key in RESULT_KEYS if isinstance(found.get(key), int | float)), None)
        return float(found) if isinstance(found, int | float) else 0.0


class TaskServerAdapter:
    def __init__(self, task: Any) -> None:
        try:
            import agentrl.worker.task
            import agentrl.worker.typings
        except ImportError as error:
            raise MissingExtraError.of("agentrl-worker", "agentbench") from error
        self._worker, self._typings = agentrl.worker.task, agentrl.worker.typings
        if not isinstance(task, self._worker.Task):
            raise UsageError(f"{type(task).__name__} is no task of agentrl.worker", remedy="subclass its Task")
        self.task = task
        self._free = asyncio.Semaphore(task.concurrency)
        self._ids = itertools.count(1)
        self._live: set[EpisodeState] = set()

    @property
    def indices(self) -> list[int | str]:
        """Without -1, which stands for samples that a client brings."""
        return [index for index in self.task.get_indices() if index != -1]

    @property
    def live(self) -> int:
        """Episodes whose code has not ended yet."""
        return len(self._live)

    async def start(self, index: int | str) -> EpisodeState:
        """Waits where as many episodes run as the task allows."""
        await self._free.acquire()
        session = self._worker.Session(next(self._ids))
        session.set_tools(self.task.tools)
        state = EpisodeState(index, session)
        self._live.add(state)
        state.running = asyncio.create_task(self._run(state))
        state.running.add_done_callback(lambda _: self._ended(state))
        try:
            self._take(state, await session.controller.agent_pull())
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
            raise UsageError(
                f"no messages of an assistant: {str(error).splitlines()[0]}",
                remedy="send text, or a chat message with the role assistant",
            ) from error
        self._take(state, await state.session.controller.agent_pull(given))
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

    async def release(self) -> None:
        """Ends all episodes, then the task itself."""
        await asyncio.gather(*(self.cancel(state) for state in list(self._live)))
        self.task.release()

    async def _run(self, state: EpisodeState) -> None:
        status, result = TASK_ERROR, None
        try:
            ended = await self.task.start_sample(state.index, state.session)
            # Some give a plain result.
            status = getattr(ended, "status", COMPLETED)
            result = getattr(ended, "result", ended)
        except self._typings.AgentCancelledException:
            status = CANCELLED
        except asyncio.CancelledError:
            status = CANCELLED
        except Exception as error:
            logger.exception("an episode of %s failed", self.task.name)
            result = f"{type(error).__name__}: {error}"
        output = self._typings.TaskOutput(index=state.index, status=status, result=_plain(result))
        output.history = state.session.history.copy()
        await state.session.controller.env_finish(output)

    def _ended(self, state: EpisodeState) -> None:
        self._live.discard(state)
        self._free.release()
        with contextlib.suppress(asyncio.CancelledError):
            if state.running is not None and (error := state.running.exception()) is not None:
                logger.error("an episode of %s failed: %r", self.task.name, error)

    def _take(self, state: EpisodeState, output: Any) -> None:
        state.status = str(getattr(output.status, "value", output.status))
        state.result = output.result
        state.observation = []
        for item in output.history[output.history_ptr :]:
            item = getattr(item, "root", item)
            if isinstance(item, self._typings.RewardHistoryItem):
                state.rewards.append(float(item.reward))
                numbers = {name: value for name, value in item.metrics.items() if isinstance(value, int | float)}
                state.metrics.update({name: float(value) for name, value in numbers.items()})
            else:
                state.observation.append(dict(item))
        if state.status == TASK_ERROR:
            raise EnvironmentFault(f"the task {self.task.name} failed: {output.result}", remedy="look at its own log")


def _plain(result: Any) -> Any:
    return result if result is None or isinstance(result, bool | int | float | str | list | dict) else str(result)
