"""Episodes played over HTTP: what a start, a step and a cancel mean to the server's host, and its errors as answers.

episodes = Episodes(server, HttpConfig())
answer = await episodes.start(StartBody())       # JSON bytes, ready to be sent
answer = await episodes.step(StepBody(id, "42", turn=0))
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from treetune.environment import Step
from treetune.episode import DeadlinePassed
from treetune.episode_book import EPISODE_IDLE_SECONDS, EpisodeEnded, LiveEpisode, Terms, WrongTurn
from treetune.errors import EnvironmentFault
from treetune.serve.errors import Stopping
from treetune.serve.http.wire import (
    RETRY_SECONDS,
    CancelAnswer,
    HttpError,
    StartAnswer,
    StartBody,
    StepAnswer,
    StepBody,
    encode,
    to_http_error,
)
from treetune.serve.server import EnvServer

log = logging.getLogger("treetune.serve")
_MOST_KEPT_BYTES = 256 << 10
"""Replies of one live episode that are kept; the latest always is."""


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "127.0.0.1:5000"
    """Where to listen: HOST:PORT. No host: this machine only; port 0 takes a free one."""
    idle_seconds: Annotated[float, msgspec.Meta(gt=0, le=EPISODE_IDLE_SECONDS)] = 300.0
    """An episode that nobody steps for so long is closed."""
    deadline_seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    """An episode ends so long after its start, whatever it does then."""
    max_episodes: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """The most that live at once; beyond it the answer is 429."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1024)] = 8 << 20
    """The largest body of a request."""


class Episodes:
    def __init__(self, server: EnvServer, config: HttpConfig) -> None:
        self._server = server
        self.config = config
        self._terms = Terms(config.idle_seconds, config.deadline_seconds, _render, _MOST_KEPT_BYTES)
        self._terms.on_end = self._note_empty
        self._starting = 0
        self._empty = asyncio.Event()
        self.stopping = False

    @property
    def live(self) -> dict[str, LiveEpisode]:
        """Those of the server."""
        return self._server.host.episodes.live

    @property
    def count(self) -> int:
        """How many live that were started over HTTP."""
        return self._terms.live

    async def drain(self, seconds: float) -> None:
        """Starts no more; those that live may go on for so long."""
        self.stopping = True
        if self.count or self._starting:
            log.info("waiting for %d episodes to end", self.count + self._starting)
            try:
                await asyncio.wait_for(self._empty.wait(), seconds)
            except TimeoutError:
                log.info("%d episodes had not ended", self.count)

    async def close(self) -> None:
        self.stopping = True
        await self._server.host.episodes.close(self._terms)

    def _note_empty(self) -> None:
        if self.stopping and not self.count and not self._starting:
            self._empty.set()

    # What is asked

    async def start(self, body: StartBody, has_left: Callable[[], bool] = lambda: False) -> bytes:
        """A new episode. Where its caller has left meanwhile it ends: nobody knows how to name it."""
        book = self._server.host.episodes
        if body.request_id is None:
            return await self._start(body, has_left)
        try:
            return await book.start_once(body.request_id, lambda: self._start(body))
        except EpisodeEnded as error:
            raise _http_error_of(error) from None

    async def _start(self, body: StartBody, has_left: Callable[[], bool] = lambda: False) -> bytes:
        if self.stopping:
            raise to_http_error(Stopping("the server is stopping", remedy="ask again when it is back"))
        if self.count + self._starting >= self.config.max_episodes:
            raise HttpError(
                429,
                "busy",
                f"{self.config.max_episodes} episodes are live, as many as may be",
                remedy="ask again when some have ended, or serve with a larger --max-episodes",
                retry_after=RETRY_SECONDS,
            )
        self._starting += 1
        reserved = False
        try:
            self._server.reserve(1)
            reserved = True
            return await self._begin(body, has_left)
        except Exception as error:
            raise to_http_error(error, path="$.task_index") from None
        finally:
            self._starting -= 1
            self._server.release(int(reserved))
            self._note_empty()

    async def _begin(self, body: StartBody, has_left: Callable[[], bool]) -> bytes:
        host = self._server.host
        task, index = await self._server.sample(body.task_index)
        started = await host.start(task, terms=self._terms, name=body.request_id)
        if has_left():
            reason = "whoever started this episode left before it had begun"
            host.episodes.end(host.episodes.live[started.episode], "cancelled", reason)
        info = {"task_index": index, "data_source": task.data_source}
        info |= {key: value for key in ("ability", "env_class") if (value := getattr(task, key))}
        return encode(StartAnswer(started.episode, started.observation, info))

    async def step(self, body: StepBody) -> bytes:
        """The answer to an action; that of a turn which was played is given again, and nothing is played twice."""
        # A caller that goes away does not stop its step: the server does not tell us, and it may come back for it.
        action = body.action if isinstance(body.action, str) else msgspec.structs.asdict(body.action)
        try:
            answer: bytes = await self._server.host.step(body.episode_id, _clean(action), body.turn, terms=self._terms)
            return answer
        except Exception as error:
            raise _http_error_of(error) from None

    async def cancel(self, id: str) -> bytes:
        book = self._server.host.episodes
        if not await book.cancel(id, self._terms):
            raise _http_error_of(EpisodeEnded(id, book.ended.why(id)))
        return encode(CancelAnswer(id))


def _render(step: Step) -> bytes:
    for key in step.info:
        if not isinstance(key, str):
            raise EnvironmentFault(f"a key of `info` is {key!r:.60}", remedy="the keys of `info` are text")
    return encode(StepAnswer(step.observation, step.reward, step.done, step.info))


def _clean(value: Any) -> Any:
    """Without halves of surrogate pairs, which a model can sample and no text can hold."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list) else value


def _http_error_of(error: Exception) -> HttpError:
    if isinstance(error, EpisodeEnded):
        if error.why is None:
            return HttpError(404, "unknown_episode", f"there is no episode {error.id!r:.80}", path="$.episode_id")
        return HttpError(410, error.why.kind, error.why.error, remedy="start another")
    if isinstance(error, WrongTurn):
        return HttpError(409, "usage", error.message, path="$.turn", remedy="send the next turn, or none")
    if isinstance(error, DeadlinePassed):
        return HttpError(504, "timeout", str(error), remedy="serve with a larger --limits.timeout")
    return to_http_error(error)
