"""Episodes played over HTTP: how many may live, for how long, and what becomes of a step that is asked for twice.

    episodes = Episodes(server, HttpConfig())
    answer = await episodes.start(StartBody())       # JSON bytes, ready to be sent
    answer = await episodes.step(StepBody(id, "42", turn=0))

The environments live in the crew of the server, here or in its workers. What is kept here is small: the turn, the
answers given, and when the episode was last heard of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from treetune.environment import Sink, shown_to
from treetune.host import EPISODE_IDLE_SECONDS
from treetune.serve.errors import BadRequest, Stopping
from treetune.serve.executor import Job, LocalCrew
from treetune.serve.http.ended_episodes import Gone, Past, gone
from treetune.serve.http.wire import (
    RETRY_SECONDS,
    CancelAnswer,
    HttpError,
    StartAnswer,
    StartBody,
    StepAnswer,
    StepBody,
    encode,
    http_error,
)
from treetune.serve.work import Done
from treetune.serve.zmq.codec import pack, unpack
from treetune.serve.zmq.server import EnvServer
from treetune.serve.zmq.wire import CancelRequest, StartRequest, StartResponse, StepRequest, StepResponse, raise_failure
from treetune.task import Task

log = logging.getLogger("treetune.serve")
_SWEEP_SECONDS = 0.5
_CLOSED_AT_ONCE = 128
_MOST_KEPT_BYTES = 256 << 10
"""Answers of one live episode that are kept; the latest always is."""


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


class Live:
    """A live episode as the server sees it."""

    __slots__ = (
        "answers",
        "busy",
        "free",
        "heard",
        "id",
        "job",
        "kept_bytes",
        "name",
        "opening",
        "started",
        "turn",
        "watchers",
    )

    def __init__(self, id: str, opening: bytes = b"", name: str | None = None) -> None:
        self.id = id
        self.name = name
        """Of the request that started it."""
        self.opening = opening
        """What start answered."""
        self.started = self.heard = time.monotonic()
        self.turn = 0
        """The next one."""
        self.answers: dict[int, bytes] = {}
        self.kept_bytes = 0
        self.busy = False
        """A step is under way."""
        self.free: asyncio.Future[None] | None = None
        """Done when the step under way is; made only where somebody waits for that."""
        self.job = b""
        self.watchers: list[Sink] = []
        """Who is shown what the environment shows during a step."""

    def show(self, text: str) -> None:
        for watcher in list(self.watchers):
            watcher(text)

    def keep(self, answer: bytes) -> None:
        self.answers[self.turn] = answer
        self.turn += 1
        self.kept_bytes += len(answer)
        while self.kept_bytes > _MOST_KEPT_BYTES and len(self.answers) > 1:
            self.kept_bytes -= len(self.answers.pop(self.turn - len(self.answers)))

    async def wait_free(self) -> None:
        if self.free is None:
            self.free = asyncio.get_running_loop().create_future()
        await asyncio.wait([self.free])

    def rest(self) -> None:
        """The step is over."""
        self.busy, self.heard = False, time.monotonic()
        if self.free is not None:
            self.free.set_result(None)
            self.free = None


class Episodes:
    def __init__(self, server: EnvServer, config: HttpConfig) -> None:
        self._server = server
        self.config = config
        self.live: dict[str, Live] = {}
        self._starting = 0
        self._past = Past()
        self._named: dict[str, asyncio.Task[str]] = {}
        """By `request_id`: the starts under way and of live episodes; they give the id."""
        self._prefix = secrets.token_bytes(80)  # longer than any id that a client of the other door may give
        self._number = 0
        self._closings: dict[str, asyncio.Task[None]] = {}
        self._sweeper: asyncio.Task[None] | None = None
        self._empty = asyncio.Event()
        self.stopping = False
        server.on_episode_lost = self._lost

    def open(self) -> None:
        self._sweeper = asyncio.create_task(self._sweep())

    async def drain(self, seconds: float) -> None:
        """Starts no more; those that live may go on for so long."""
        self.stopping = True
        if self.live or self._starting:
            log.info("waiting for %d episodes to end", len(self.live) + self._starting)
            try:
                await asyncio.wait_for(self._empty.wait(), seconds)
            except TimeoutError:
                log.info("%d episodes had not ended", len(self.live))

    async def close(self) -> None:
        self.stopping = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for episode in list(self.live.values()):
            self._end(episode, "stopping", "the server has stopped")
        await asyncio.gather(*self._closings.values(), return_exceptions=True)

    # What is asked

    async def start(self, body: StartBody, has_left: Callable[[], bool] = lambda: False) -> bytes:
        """A new episode. Where its caller has left meanwhile it ends: nobody knows how to name it."""
        if body.request_id is None:
            begun = self.live[await self._start(body)]
            if has_left():
                self._end(begun, "cancelled", "whoever started this episode left before it had begun")
            return begun.opening
        id = await self._start_once(body.request_id, body)
        if (episode := self.live.get(id)) is None:
            raise self._gone_error(id)
        return episode.opening

    async def _start_once(self, name: str, body: StartBody) -> str:
        """The same name gets the same episode: the answer to the first may have been lost."""
        if (why := self._past.of_name(name)) is not None:
            raise _told(why)
        if name not in self._named:
            self._named[name] = asyncio.create_task(self._start(body))
        try:
            return await asyncio.shield(self._named[name])
        except Exception:
            self._named.pop(name, None)  # what failed may be tried again
            raise

    async def _start(self, body: StartBody) -> str:
        if self.stopping:
            raise http_error(Stopping("the server is stopping", remedy="ask again when it is back"))
        if len(self.live) + self._starting >= self.config.max_episodes:
            raise HttpError(
                429,
                "busy",
                f"{self.config.max_episodes} episodes are live, as many as may be",
                remedy="ask again when some have ended, or serve with a larger --max-episodes",
                retry_after=RETRY_SECONDS,
            )
        self._starting += 1
        try:
            return await self._started(body)
        except Exception as error:
            raise http_error(error, path="$.task_index") from None
        finally:
            self._starting -= 1
            self._note_empty()

    async def _started(self, body: StartBody) -> str:
        drawn = await self._server.draw(body.task_index)
        done = await self._do("start", StartRequest(task=drawn.task))
        response = unpack(done.data, StartResponse)
        raise_failure(response)
        task = unpack(drawn.task, Task)
        info = {"task_index": drawn.index, "data_source": task.data_source}
        info |= {key: value for key in ("ability", "env_class") if (value := getattr(task, key))}
        opening = encode(StartAnswer(response.episode, response.observation, info))
        self.live[response.episode] = Live(response.episode, opening, body.request_id)
        return response.episode

    async def step(self, body: StepBody) -> bytes:
        """The answer to an action; that of a turn which was played is given again, and nothing is played twice."""
        turn = body.turn
        while True:
            episode = self.live.get(body.episode_id)
            if episode is None:
                return self._answer_of_gone(body.episode_id, turn)
            if turn is not None and (known := episode.answers.get(turn)) is not None:
                episode.heard = time.monotonic()
                return known
            if turn is not None and turn != episode.turn:
                raise HttpError(
                    409,
                    "usage",
                    f"this episode is at turn {episode.turn}, not {turn}",
                    path="$.turn",
                    remedy="send the next turn, or none",
                )
            if not episode.busy:
                return await self._play(episode, body.action)
            await episode.wait_free()  # the same turn, asked for twice at once, or a step that must wait

    async def _play(self, episode: Live, action: Any) -> bytes:
        # A caller that goes away does not stop its step: the server does not tell us, and it may come back for it.
        episode.busy = True
        try:
            request = StepRequest(episode=episode.id, action=action, turn=episode.turn)
            done = await self._do("step", request, episode)
            try:
                response = unpack(done.data, StepResponse)
            except BadRequest as error:  # the environment's fault, not the caller's
                raise self._broken(episode, f"the environment answered {error.message}") from None
            if not response.success:
                raise self._failed(episode, done, response)
            if episode.id not in self.live:  # it was ended meanwhile, and the environment did not mind
                raise self._gone_error(episode.id)
            return self._taken(episode, response)
        finally:
            episode.rest()

    def _taken(self, episode: Live, response: StepResponse) -> bytes:
        answer = encode(StepAnswer(response.observation, response.reward, response.done, response.info))
        episode.keep(answer)
        if response.done:
            self._past.keep_answer(episode.id, episode.turn - 1, answer)
            self._forget(episode, gone("finished", "this episode is over"))
        return answer

    def _broken(self, episode: Live, error: str) -> HttpError:
        self._end(episode, "failed", f"this episode ended with an error: {error}")
        return HttpError(500, "failed", error, remedy="see what its environment returns")

    def _failed(self, episode: Live, done: Done, response: StepResponse) -> HttpError:
        """A step that fails ends its episode: what the environment is worth then nobody knows."""
        if episode.id not in self.live:  # it was ended from elsewhere while the step was under way
            return self._gone_error(episode.id)
        if done.kind == "worker_lost":
            self._lost(episode.id)
            return self._gone_error(episode.id)
        self._end(episode, "failed", f"this episode ended with an error: {response.error}")
        try:
            raise_failure(response)
        except Exception as error:
            if done.kind == "timeout":
                return HttpError(504, "timeout", response.error or "", remedy="serve with a larger --limits.timeout")
            return http_error(error)
        raise AssertionError("a failure was raised")

    async def cancel(self, id: str) -> bytes:
        episode = self.live.get(id)
        if episode is None:
            self._answer_of_gone(id, None)
        else:
            self._end(episode, "cancelled", "this episode was cancelled")
            await asyncio.wait([self._closings[id]])
        return encode(CancelAnswer(id))

    def _answer_of_gone(self, id: str, turn: int | None) -> bytes:
        if (answer := self._past.answer(id, turn)) is not None:
            return answer
        raise self._gone_error(id)

    def _gone_error(self, id: str) -> HttpError:
        why = self._past.of(id)
        if why is None:
            return HttpError(404, "unknown_episode", f"there is no episode {id!r:.80}", path="$.episode_id")
        return _told(why)

    # How episodes end

    def _end(self, episode: Live, kind: str, error: str) -> None:
        """Stops what is under way in it and closes it, wherever it lives."""
        self._forget(episode, gone(kind, error))
        if episode.busy:
            self._server.crew.stop(episode.job)
        self._closings[episode.id] = task = asyncio.create_task(self._close(episode.id))
        task.add_done_callback(lambda _: self._closings.pop(episode.id, None))

    async def _close(self, id: str) -> None:
        await self._do("cancel", CancelRequest(id=id), Live(id))

    def _forget(self, episode: Live, why: Gone) -> None:
        if self.live.pop(episode.id, None) is None:
            return
        self._past.add(episode.id, why, episode.name)
        if episode.name is not None:
            self._named.pop(episode.name, None)
        self._note_empty()

    def _lost(self, id: str) -> None:
        """Its worker has died, and the episode with it."""
        if (episode := self.live.get(id)) is not None:
            self._forget(episode, gone("worker_lost", "the worker of this episode died, and the episode with it"))

    def _note_empty(self) -> None:
        if self.stopping and not self.live and not self._starting:
            self._empty.set()

    async def _sweep(self) -> None:
        idle, most = self.config.idle_seconds, self.config.deadline_seconds
        while True:
            await asyncio.sleep(min(_SWEEP_SECONDS, idle / 2, most / 2))
            now, ended = time.monotonic(), 0
            for episode in list(self.live.values()):
                if now - episode.started > most:
                    self._end(episode, "expired", f"this episode reached its deadline of {most:g} seconds")
                elif not episode.busy and now - episode.heard > idle:
                    self._end(episode, "expired", f"nobody stepped this episode for {idle:g} seconds")
                else:
                    continue
                ended += 1
                if ended % _CLOSED_AT_ONCE == 0:
                    # Thousands at once would need more memory to end than they did to live.
                    await asyncio.wait(self._closings.values(), timeout=_SWEEP_SECONDS)

    async def _do(self, method: str, request: Any, episode: Live | None = None) -> Done:
        """Has the crew do a job; here and now where there are no workers."""
        self._number += 1
        id = self._prefix + self._number.to_bytes(8, "big")
        if episode is not None:
            episode.job = id
        show = episode.show if episode is not None else None
        if isinstance(self._server.crew, LocalCrew):
            with shown_to(show) if show is not None else contextlib.nullcontext():
                return await self._server.work.do(method, id, pack(request))
        done: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        size = 1 if method == "start" else 0
        home = episode.id if episode is not None else None
        job = Job(id, method, pack(request), lambda told: _settle(done, told), size, home, show=show)
        self._server.crew.submit(job)
        return await done


def _settle(future: asyncio.Future[Done], done: Done) -> None:
    if not future.done():
        future.set_result(done)


def _told(why: Gone) -> HttpError:
    return HttpError(410, why.kind, why.error, remedy="start another")
