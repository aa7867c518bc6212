"""The table of a host's episodes. It holds each one's turn, replies and lifetime, and how it ended.

    table.add("e-1", handle, limits)
    reply = await table.step("e-1", "42", turn=0, terms=limits)

A handle is an environment in this process or in a worker. If a turn is sent again, it gets its first reply and is not
played twice. Idle episodes are closed.
"""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Protocol, TypeVar

import msgspec

from treetune.core.environment import Action, Sink, Step
from treetune.core.trace import Outcome
from treetune.errors import UsageError, reason_of
from treetune.play.episode_record import EpisodeRecord

EPISODE_IDLE_SECONDS = 900.0
"""An episode without a step for this long is closed."""
_SWEEP_SECONDS = 0.5
_CLOSED_AT_ONCE = 128
_MOST_ENDED = 20_000
"""The number of ended episodes to remember. Older ones are reported as unknown."""
_MOST_REPLY_BYTES = 64 << 20
MANY_ENDED = 1000
"""After this many episodes have ended, freed memory is returned to the system."""
T = TypeVar("T")


class EpisodeHandle(Protocol):
    """An environment in this process (`Episode`) or in a worker. The last step, or a failed one, closes it."""

    async def play(self, action: Action, show: Sink) -> Step: ...
    async def close(self) -> None: ...


class SessionLimits(msgspec.Struct, eq=False):
    """How long a server interface keeps its episodes, and how it renders steps."""

    idle_seconds: float = EPISODE_IDLE_SECONDS
    deadline_seconds: float = math.inf
    render: Callable[[Step], Any] = lambda step: step
    kept_bytes: int = 0
    """The maximum size of the replies kept for a live episode. The latest reply is always kept."""
    live: int = 0
    """The number of live episodes under these limits."""
    starting: int = 0
    """The number of episodes that are starting."""


class Ending(msgspec.Struct, frozen=True, gc=False):
    """Why an episode is over."""

    kind: str
    """finished, cancelled, expired, failed, stopping or worker_lost."""
    error: str


ending = functools.lru_cache(maxsize=64)(Ending)
"""Cached, because thousands of episodes may end for the same reason."""
FINISHED = ending("finished", "this episode is over")


_OUTCOMES = {
    "finished": Outcome.COMPLETED,
    "cancelled": Outcome.CANCELLED,
    "stopping": Outcome.CANCELLED,
    "expired": Outcome.TIMEOUT,
    "failed": Outcome.ENVIRONMENT_ERROR,
    "worker_lost": Outcome.ENVIRONMENT_ERROR,
}
"""The outcome in the trace for each kind of ending."""


class EpisodeEnded(UsageError, code="episode-over"):
    """The episode does not exist, or no longer exists."""

    def __init__(self, id: str, why: Ending | None) -> None:
        self.id, self.why = id, why
        if why is not None and why.kind in ("finished", "failed"):
            super().__init__("this episode is over", remedy="start another")
        else:
            super().__init__(f"no episode {id!r:.80} is live", remedy="start one; idle and ended ones are closed")


class WrongTurn(UsageError, code="wrong-turn"):
    def __init__(self, turn: int, asked: int) -> None:
        super().__init__(f"this episode is at turn {turn}, not {asked}", remedy="send the next turn")


class NameTaken(UsageError, code="name-taken"):
    """The name of a start was already used for a different one."""

    def __init__(self, name: str) -> None:
        problem = f"the name {name!r:.80} was already used for a different start"
        super().__init__(problem, remedy="give each start its own name, such as 16 random bytes in hex")


class LiveEpisode(msgspec.Struct, eq=False):
    id: str
    home: EpisodeHandle
    terms: SessionLimits
    name: Hashable | None = None
    """The name of the request that started it."""
    started: float = msgspec.field(default_factory=time.monotonic)
    heard: float = msgspec.field(default_factory=time.monotonic)
    turn: int = 0
    """The number of the next turn."""
    replies: dict[int, Any] = {}
    """Replies by turn."""
    kept_bytes: int = 0
    playing: asyncio.Task[Any] | None = None
    """The step that is running."""
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)
    """Allows only one step at a time."""
    watchers: list[Sink] = []
    """Receive partial observations while a step runs."""
    record: EpisodeRecord | None = None
    """Its result so far, if the host records results."""

    def show(self, text: str) -> None:
        for watcher in list(self.watchers):
            watcher(text)

    def keep(self, reply: Any) -> None:
        self.replies[self.turn] = reply
        self.turn += 1
        self.kept_bytes += _size(reply)
        while self.kept_bytes > self.terms.kept_bytes and len(self.replies) > 1:
            self.kept_bytes -= _size(self.replies.pop(self.turn - len(self.replies)))


class EpisodeTable:
    def __init__(self, on_ended: Callable[[str, Ending], None] = lambda id, why: None) -> None:
        """`on_ended` is called with the reason for every episode that ends."""
        self._on_ended = on_ended
        self.live: dict[str, LiveEpisode] = {}
        self.ended = EndedEpisodes()
        self._names: dict[Hashable, LiveEpisode] = {}
        self._starts: dict[str, tuple[Hashable, asyncio.Task[Any]]] = {}
        """By name: the request, and the task that starts it."""
        self._closings: dict[str, asyncio.Task[None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._ended_since_trim = 0

    # Starting episodes

    def add(
        self,
        id: str,
        home: EpisodeHandle,
        terms: SessionLimits,
        name: Hashable | None = None,
        record: EpisodeRecord | None = None,
    ) -> None:
        """`name` is the name of the request that started it."""
        episode = self.live[id] = LiveEpisode(id, home, terms, name, record=record)
        terms.live += 1
        if name is not None:
            self._names[name] = episode
        if self._sweeper is None:
            self._sweeper = asyncio.create_task(self._sweep())

    async def start_once(self, name: str, asked: Hashable, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Start an episode, or return the one with the same name, because the reply to the first request may have been
        lost. Raises `NameTaken` if the name was used for a different request, because it then belongs to another
        client."""
        if (why := self.ended.why(name)) is not None:
            raise EpisodeEnded(name, why)
        if name not in self._starts:
            self._starts[name] = asked, asyncio.create_task(start())
        first, starting = self._starts[name]
        if first != asked:
            raise NameTaken(name)
        try:
            result: T = await asyncio.shield(starting)
            return result
        except Exception:
            self._starts.pop(name, None)  # a failed start may be tried again
            raise

    def by_name(self, name: Hashable) -> LiveEpisode | None:
        """The live episode started by a request of this name."""
        return self._names.get(name)

    # Playing episodes

    async def step(self, id: str, action: Any, turn: int | None, terms: SessionLimits) -> Any:
        """Play an action and return the reply as rendered by the terms. `turn` counts from 0; without it a step cannot
        be repeated safely."""
        action = Action.of(action)
        episode = self.live.get(id)
        if episode is None or episode.terms is not terms:
            return self.ended.reply(id, turn, terms)
        if turn is not None and turn > episode.turn:
            raise WrongTurn(episode.turn, turn)
        async with episode.lock:  # the same turn may be requested twice at once
            if id not in self.live:
                return self.ended.reply(id, turn, terms)
            if turn is not None and (played := episode.replies.get(turn)) is not None:
                episode.heard = time.monotonic()
                return played
            if turn is not None and turn != episode.turn:
                raise WrongTurn(episode.turn, turn)
            return await self._play(episode, action)

    async def _play(self, episode: LiveEpisode, action: Action) -> Any:
        """Play a step. A step that fails ends its episode, because the state of the environment is then unknown."""
        playing = episode.playing = asyncio.current_task()
        assert playing is not None
        began = time.perf_counter()
        try:
            step = await episode.home.play(action, episode.show)
            reply = episode.terms.render(step)
        except asyncio.CancelledError:
            if episode.id in self.live:  # the caller cancelled the step
                self.end(episode, "cancelled", "this episode was cancelled")
                raise
        except Exception as error:
            if episode.id in self.live:
                if episode.record is not None:
                    episode.record.fail(error)
                reason = reason_of(error)
                self.end(episode, "failed", f"this episode ended with an error: {reason}")
                raise
        finally:
            episode.playing, episode.heard = None, time.monotonic()
        if episode.id not in self.live:  # it was ended while the step ran
            if playing.cancelling():
                playing.uncancel()
            raise EpisodeEnded(episode.id, self.ended.why(episode.id))
        episode.keep(reply)
        if episode.record is not None:
            episode.record.add(action, step, time.perf_counter() - began)
        if step.done:
            self.ended.keep_reply(episode.id, episode.turn - 1, reply, episode.terms)
            self._remove(episode, FINISHED)
        return reply

    # Ending episodes

    def end(self, episode: LiveEpisode, kind: str, error: str) -> None:
        """End the episode at once. A running step is stopped, and the environment closed, in the background."""
        self._remove(episode, ending(kind, error))
        if episode.playing is not None and episode.playing is not asyncio.current_task():
            episode.playing.cancel()
        self._closings[episode.id] = closing = asyncio.create_task(episode.home.close())
        closing.add_done_callback(lambda _: self._closings.pop(episode.id, None))

    async def cancel(self, id: str, terms: SessionLimits | None = None) -> bool:
        """End an episode and wait until it is closed; return whether there was one with these terms."""
        episode = self.live.get(id)
        if episode is None or (terms is not None and episode.terms is not terms):
            return False
        self.end(episode, "cancelled", "this episode was cancelled")
        await asyncio.wait([self._closings[id]])
        return True

    def lose(self, id: str, how: str) -> None:
        """End an episode because its worker process died."""
        if (episode := self.live.get(id)) is not None:
            self._remove(episode, ending("worker_lost", f"the worker of this episode died: {how}"))

    def _remove(self, episode: LiveEpisode, why: Ending) -> None:
        del self.live[episode.id]
        self.ended.add(episode.id, why, episode.name)
        if episode.name is not None:
            self._names.pop(episode.name, None)
            self._starts.pop(episode.name, None)  # type: ignore[call-overload]
        episode.terms.live -= 1
        self._ended_since_trim += 1
        if episode.record is not None:
            episode.record.end(_OUTCOMES[why.kind], "" if why is FINISHED else why.error)
        self._on_ended(episode.id, why)

    async def close(self, terms: SessionLimits | None = None) -> None:
        """End all episodes, or all with these terms, and wait until they are closed."""
        for episode in list(self.live.values()):
            if terms is None or episode.terms is terms:
                self.end(episode, "stopping", "the server has stopped")
        if self._closings:
            await asyncio.wait(self._closings.values())
        if terms is None and self._sweeper is not None:
            self._sweeper.cancel()

    async def _sweep(self) -> None:
        """End idle episodes and those past their deadline."""
        while self.live:
            shortest = min(min(one.terms.idle_seconds, one.terms.deadline_seconds) for one in self.live.values())
            await asyncio.sleep(min(_SWEEP_SECONDS, max(0.0, shortest / 2)))
            now, ended = time.monotonic(), 0
            for episode in list(self.live.values()):
                idle, most = episode.terms.idle_seconds, episode.terms.deadline_seconds
                if episode.id not in self.live:
                    continue
                if now - episode.started > most:
                    self.end(episode, "expired", f"this episode reached its deadline of {most:g} seconds")
                elif episode.playing is None and now - episode.heard > idle:
                    self.end(episode, "expired", f"no step of this episode for {idle:g} seconds")
                else:
                    continue
                ended += 1
                if ended % _CLOSED_AT_ONCE == 0:
                    # Ending thousands at once would need more memory than they used.
                    await asyncio.wait(self._closings.values(), timeout=_SWEEP_SECONDS)
            # A sweep is expensive if many episodes are live, so it then trims rarely.
            if self._ended_since_trim >= max(MANY_ENDED, len(self.live)):
                await asyncio.sleep(_SWEEP_SECONDS)  # more may be about to end
                self._ended_since_trim = 0
                trim_memory()
        self._sweeper = None


class EndedEpisodes:
    """Why episodes ended, and their last replies, up to a limit."""

    def __init__(self, most: int = _MOST_ENDED, most_bytes: int = _MOST_REPLY_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._why: OrderedDict[int, Ending] = OrderedDict()
        """By hash of the id or name, because keeping the texts would keep the memory around them allocated."""
        self._replies: OrderedDict[str, tuple[int, SessionLimits | None, Any]] = OrderedDict()
        self._bytes = 0

    def add(self, id: str, why: Ending, name: Hashable | None = None) -> None:
        self._why[hash(id)] = why
        if name is not None:
            self._why[hash(name)] = why
        while len(self._why) > 2 * self._most:
            self._why.popitem(last=False)

    def why(self, id: Hashable) -> Ending | None:
        """Why the episode with this id, or started by a request of this name, ended."""
        return self._why.get(hash(id))

    def keep_reply(self, id: str, turn: int, reply: Any, terms: SessionLimits | None = None) -> None:
        """Keep the reply to the step that ended an episode."""
        self._replies[id] = (turn, terms, reply)
        self._bytes += _size(reply)
        while len(self._replies) > 1 and (len(self._replies) > self._most or self._bytes > self._most_bytes):
            _, (_, _, dropped) = self._replies.popitem(last=False)
            self._bytes -= _size(dropped)

    def reply(self, id: str, turn: int | None, terms: SessionLimits | None = None) -> Any:
        """Return the last reply if it belongs to that turn; otherwise raise `EpisodeEnded`."""
        kept = self._replies.get(id)
        if kept is None or kept[:2] != (turn, terms):
            raise EpisodeEnded(id, self.why(id))
        return kept[2]


def _size(reply: Any) -> int:
    return len(reply) if isinstance(reply, bytes) else 1 << 10


def trim_memory() -> None:
    """Return freed memory to the system. glibc would keep 300 MB after ten thousand expired episodes."""
    import ctypes

    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
