"""Presents an episode that verifiers plays as a Treetune environment: start, step, close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from treetune.chat.message import Message
from treetune.core.environment import Action, Environment, Step
from treetune.core.score import finite
from treetune.core.task import Task
from treetune.errors import EnvironmentFault, TreetuneError, format_error
from treetune.play.toolbox import message_of
from treetune.system.threads import submit_in_background
from treetune.trainers.verifiers.model_calls import Conversation

T = TypeVar("T")


class EpisodeOutcome(NamedTuple):
    """The data that verifiers reports about an episode that it played."""

    reward: float
    metrics: dict[str, float]
    truncated: bool = False


class ScoringFailed(Exception):
    """Raised if a reward function raised. Other answers are then tried: if the task can be scored with one of them, the
    policy's answer is at fault and earns the value that verifiers gives for it, else 0."""

    def __init__(self, why: str, outcome: EpisodeOutcome | None = None) -> None:
        super().__init__(why)
        self.outcome = outcome or EpisodeOutcome(0.0, {})


OTHER_ANSWERS = ("0", "I do not know.")
MOST_ANSWERS = 64
Play = Callable[[str], Coroutine[Any, Any, EpisodeOutcome]]
"""Plays an episode with the model at an address; raises if it fails."""


class ForeignEpisode(Environment):
    """An episode in which verifiers runs the tool calls itself."""

    MULTI_TURN = True
    RAW_CALLS = True

    def __init__(self, task: Task, play: Play, empty: str = "") -> None:
        """`empty` replaces an empty answer."""
        super().__init__(task)
        self._play, self._empty = play, empty
        self._conversation: Conversation | None = None
        self._running: asyncio.Task[EpisodeOutcome] | None = None

    async def start(self) -> list[Message]:
        shown = await _in_background(self._begin())
        if shown is None:
            raise EnvironmentFault("verifiers ended the episode before it called the model")
        return shown

    async def step(self, action: Action) -> Step:
        message = message_of(action)
        answer = message if message is not None else {"role": "assistant", "content": action.text}
        if not answer.get("tool_calls") and not answer.get("content"):
            answer = {**answer, "content": self._empty}
        return await _in_background(self._answer({"role": "assistant", "content": None, **answer}))

    async def close(self) -> None:
        await _in_background(self._end())

    # On the background loop

    async def _begin(self) -> list[Message] | None:
        self._conversation = await Conversation.open()
        self._running = asyncio.ensure_future(self._play(self._conversation.url))
        shown = await self._conversation.next(self._running)
        if shown is None:
            with suppress(ScoringFailed):
                await self._outcome()
        self.raw_tools = self._conversation.tools
        return shown

    async def _answer(self, message: Message) -> Step:
        assert self._conversation is not None
        assert self._running is not None
        self._conversation.answer(message)
        shown = await self._conversation.next(self._running)
        if shown is not None:
            if self._conversation.tools != self.raw_tools:
                raise EnvironmentFault("verifiers offers different tools in the middle of an episode")
            return Step(shown)
        info: dict[str, Any] = {}
        try:
            outcome = await self._outcome()
        except ScoringFailed as failure:
            await self._blame(failure)
            info = {"explanation": str(failure), "warning": f"a reward function raised: {failure}", "success": False}
            outcome = failure.outcome
        metrics = {name: finite(value, f"metric {name!r}") for name, value in outcome.metrics.items()}
        info["metrics"] = metrics
        return Step(reward=finite(outcome.reward, "reward"), done=True, info=info, truncated=outcome.truncated)

    async def _blame(self, failure: ScoringFailed) -> None:
        """Raise if the policy is not at fault: the task cannot be scored after other answers either."""
        known = getattr(self.task, "data", {}).get("answer")
        for other in (*([known] if isinstance(known, str) else []), *OTHER_ANSWERS):
            if await self._can_be_scored(other):
                return
        raise EnvironmentFault(f"verifiers could not score it: {failure}")

    async def _can_be_scored(self, answer: str) -> bool:
        conversation = await Conversation.open()
        running = asyncio.ensure_future(self._play(conversation.url))
        try:
            for _ in range(MOST_ANSWERS):
                if await conversation.next(running) is None:
                    await running
                    return True
                conversation.answer({"role": "assistant", "content": answer})
        except Exception:
            return False
        finally:
            running.cancel()
            conversation.close()
        return False

    async def _outcome(self) -> EpisodeOutcome:
        assert self._running is not None
        try:
            return await self._running
        except (TreetuneError, ScoringFailed):
            raise
        except Exception as error:
            raise EnvironmentFault(f"verifiers could not play it: {format_error(error)}") from error

    async def _end(self) -> None:
        if self._running is not None and not self._running.done():
            self._running.cancel()
            # Its resources are released before this episode counts as closed.
            with suppress(asyncio.CancelledError, Exception):
                await self._running
        if self._conversation is not None:
            self._conversation.close()


async def _in_background(work: Coroutine[Any, Any, T]) -> T:
    """Run work on the background loop and return its result; cancelling the caller cancels the work."""
    done: T = await asyncio.wrap_future(submit_in_background(work))
    return done


class Held:
    """A resource that episodes share, such as verifiers' servers: opened for the first, closed after the last."""

    def __init__(self, serve: Callable[[], Any]) -> None:
        """`serve` returns an async context manager, which a single task enters and leaves."""
        self._serve = serve
        self._users = 0
        # While one is being closed, no other is opened: they belong to the same object.
        self._lock = asyncio.Lock()
        self._server: asyncio.Task[None] | None = None
        self._unused = asyncio.Event()

    async def run(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async with self._lock:
            if self._server is None:
                self._server = await self._open()
            self._users += 1
        try:
            return await work()
        finally:
            await asyncio.shield(self._leave())

    async def _open(self) -> asyncio.Task[None]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unused = asyncio.Event()
        server = asyncio.ensure_future(self._hold(ready, self._unused))
        try:
            await ready
        except BaseException:
            self._unused.set()
            with suppress(Exception):
                await asyncio.shield(server)
            raise
        return server

    async def _leave(self) -> None:
        async with self._lock:
            self._users -= 1
            if not self._users and self._server is not None:
                server, self._server = self._server, None
                self._unused.set()
                with suppress(Exception):  # errors while it cleans up; the episodes are over
                    await server

    async def _hold(self, ready: asyncio.Future[None], unused: asyncio.Event) -> None:
        try:
            async with self._serve():
                if not ready.done():
                    ready.set_result(None)
                await unused.wait()
        except Exception as error:
            if ready.done():
                raise
            ready.set_exception(error)
