"""Episodes over HTTP: runs a start, a step or a cancel on the server's host, whether it arrives as a request, in a
batch or over a WebSocket.

    episodes = HttpEpisodes(server, HttpConfig())
    answer = await episodes.start(StartBody(task_index=3))      # JSON

Besides plain requests (`routes.py`), there is a WebSocket, which plays one episode, and a step as server-sent events.
The first message on the WebSocket is the body of `start`, the others are bodies of `step` without the episode's id. The
server closes it after the last step; if the client closes it, the episode ends. The events of a step are `partial`
(what the environment shows during the step), then `step`, or `error` if it fails after something was shown.
`docs/task_server_api.md` shows both.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator

import msgspec

from treetune.core.contract import Contract
from treetune.core.environment import Step
from treetune.errors import UsageError
from treetune.play.episode_table import EpisodeEnded, LiveEpisode, SessionLimits
from treetune.serve.errors import Busy
from treetune.serve.http import HttpConfig, wire
from treetune.serve.http.wire import read_body, to_http_error
from treetune.serve.server import EnvServer
from treetune.system.http_app import Receive, Send, format_event
from treetune.system.http_error import HttpError, encode
from treetune.system.process_limits import Holding
from treetune.system.threads import call, call_apart

SOCKET_PATH = "/api/episode/ws"
_MOST_MESSAGES = 16
"""The number of messages that may wait during a step; together they may be as large as one message. A client that sends
more is disconnected."""
START_SECONDS = 60.0
"""A WebSocket that has not started an episode within this time is closed."""
_LOOK_SECONDS = 5.0
"""How often a silent WebSocket is checked: its episode may have ended."""
_QUIET_SECONDS = 15.0
"""After this much silence a comment is sent, so that proxies keep the connection open."""
_MOST_PARTS = 1000
"""Parts that wait for a slow client; further parts are dropped. The observation contains all of them."""
_MOST_KEPT_BYTES = 256 << 10
"""The size of the replies that are kept for one live episode; the latest reply is always kept."""


class HttpEpisodes:
    def __init__(self, server: EnvServer, config: HttpConfig) -> None:
        self._server, self.config = server, config
        self.terms = SessionLimits(config.idle_seconds, config.deadline_seconds, _render, _MOST_KEPT_BYTES)
        self._uids: asyncio.Future[dict[str, int]] | None = None
        self._contract: Contract | None = None

    @property
    def live(self) -> dict[str, LiveEpisode]:
        """The episodes of the server."""
        return self._server.host.episodes.live

    async def contract(self) -> Contract:
        """Returns the contract of the first task. If that cannot be made, of the taskset."""
        server = self._server
        if self._contract is None:
            self._contract = server.taskset.CONTRACT
            with contextlib.suppress(Exception):  # reported when the task is played
                task = await server.host.fetch(server.streams.draw_at(0))
                self._contract = await call(server.taskset.contract_of, task)
        return self._contract.narrow(server.config.limits).resolved

    async def start(self, body: wire.StartBody) -> bytes:
        if body.request_id is None:
            return await self._begin(body)
        asked = body.task_index, body.step, body.uid
        return await self._server.host.episodes.start_once(body.request_id, asked, lambda: self._begin(body))

    async def _begin(self, body: wire.StartBody) -> bytes:
        self._server.refuse_stopping()
        most = self.config.max_episodes
        if self.terms.live + self.terms.starting >= most:
            remedy = "retry when some have ended, or serve with a larger --max-episodes"
            raise Busy(f"{most} episodes are live, which is the maximum", remedy=remedy)
        try:
            index = body.task_index if body.uid is None else await self._find(body.uid, body.task_index)
            started, task, index = await self._server.start_episode(
                index, self.terms, step=body.step, name=body.request_id
            )
        except UsageError as error:
            raise to_http_error(error, path="$.task_index") from None
        info = {"task_index": index, "data_source": task.data_source}
        info |= {key: value for key in ("ability", "env_class") if (value := getattr(task, key))}
        return encode(wire.StartAnswer(started.episode, started.observation, info, started.tools, started.contract))

    async def _find(self, uid: str, near: int | None) -> int:
        """Returns the index of the task with this uid: `near` if that task has it, otherwise the first. An endless
        order is searched only at `near`. Rows have the uids of their tasks, but not their positions if rows were
        dropped or shuffled.
        """
        streams = self._server.streams
        if streams.sequential:
            raise UsageError(f"{streams.taskset.name} is only a generator: its tasks cannot be requested")
        if near is not None and 0 <= near < (streams.count if streams.count is not None else 2**62):
            task = await self._server.host.fetch(streams.draw_at(near))
            if task.uid == uid:
                return near
        index = None if streams.count is None else (await self._list_uids(streams.count)).get(uid)
        if index is None:
            problem = f"there is no task with the uid {uid!r:.80}{'' if near is None else f', at {near} or elsewhere'}"
            remedy = "serve the tasks that its row was built from; if the tasks are endless, name its task_index too"
            raise HttpError(404, wire.UNKNOWN_TASK, problem, path="$.uid", remedy=remedy)
        return index

    async def _list_uids(self, count: int) -> dict[str, int]:
        """Maps each uid to its first index. Read once."""
        streams = self._server.streams

        def read() -> dict[str, int]:
            return {streams.task(streams.draw_at(index)).uid: index for index in reversed(range(count))}

        if self._uids is None or (self._uids.done() and self._uids.exception() is not None):
            self._uids = call_apart(read)
        return await asyncio.shield(self._uids)

    async def step(self, body: wire.StepBody) -> bytes:
        """Returns the answer to an action. A repeated turn gets the same answer; nothing is played twice."""
        # A step continues if its client disconnects: uvicorn does not report it, and the client may ask again.
        answer: bytes = await self._server.host.step(body.episode_id, body.value, body.turn, terms=self.terms)
        return answer

    async def cancel(self, id: str) -> bytes:
        book = self._server.host.episodes
        if not await book.cancel(id, self.terms):
            raise EpisodeEnded(id, book.ended.why(id))
        return encode(wire.CancelAnswer(id))


def _render(step: Step) -> bytes:
    wire.check_info(step)
    return encode(wire.StepAnswer(step.observation, step.reward, step.done, step.info, step.calls or msgspec.UNSET))


class EpisodeSocket:
    """One episode over one WebSocket."""

    def __init__(self, episodes: HttpEpisodes, receive: Receive, send: Send) -> None:
        self._episodes = episodes
        self._receive, self._send = receive, send
        self._messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        """None: no further messages."""
        self._waiting = Holding()
        self._episode: str | None = None
        self._has_left = False
        """The client has closed the connection."""

    async def run(self) -> None:
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})
        reader = asyncio.create_task(self._read())
        try:
            code, reason = await self._play()
            if not self._has_left:
                with contextlib.suppress(OSError, RuntimeError):  # the client may disconnect now
                    await self._send({"type": "websocket.close", "code": code, "reason": reason})
        finally:
            reader.cancel()
            self._waiting.release()
            await self._cancel()

    async def _play(self) -> tuple[int, str]:
        """Answers each message; returns the code and the reason for closing the connection."""
        until = time.monotonic() + START_SECONDS
        while True:
            begun = self._episode is not None
            try:
                wait = _LOOK_SECONDS if begun else max(0.0, until - time.monotonic())
                async with asyncio.timeout(wait):
                    message = await self._messages.get()
            except TimeoutError:
                if not begun:
                    return 1008, f"no episode was started in {START_SECONDS:g} seconds"
                if not self._is_live():
                    return 1008, "the episode has ended: it was idle too long, or reached its deadline"
                continue
            if message is None:
                return 1008, "more messages than may wait"
            self._waiting.release(len(message))
            answer = await self._answer(message)
            with contextlib.suppress(OSError):  # the client has left; the reader notices that, too
                await self._send({"type": "websocket.send", "text": answer.decode()})
            if self._episode is not None and not self._is_live():
                return 1000, ""

    def _is_live(self) -> bool:
        return self._episode in self._episodes.live

    async def _answer(self, message: bytes) -> bytes:
        """The first valid message starts the episode; the others are its steps."""
        try:
            if self._episode is None:
                answer = await self._episodes.start(read_body(wire.StartBody, message))
                self._episode = str(json.loads(answer)["episode_id"])
                return answer
            move = read_body(wire.MoveBody, message)
            step = wire.StepBody(
                episode_id=self._episode, action=move.action, tool_calls=move.tool_calls, turn=move.turn
            )
            return await self._episodes.step(step)
        except Exception as error:
            return to_http_error(error).body

    async def _read(self) -> None:
        while True:
            message = await self._receive()
            self._has_left = message["type"] == "websocket.disconnect"
            data = message.get("bytes") or (message.get("text") or "").encode()
            fits = self._waiting.add(len(data)) and self._waiting.bytes <= self._episodes.config.max_bytes
            too_many = self._messages.qsize() >= _MOST_MESSAGES or not fits
            if self._has_left or too_many:
                await self._cancel()  # also stops a step that is running
                self._messages.put_nowait(None)
                return
            self._messages.put_nowait(data)

    async def _cancel(self) -> None:
        if self._episode is not None and self._is_live():
            await self._episodes.cancel(self._episode)


async def stream_step(episodes: HttpEpisodes, body: wire.StepBody) -> AsyncGenerator[bytes]:
    """The server-sent events of one step: what the environment shows during the step, then the answer. If the stream is
    closed early, the step continues."""
    parts: asyncio.Queue[str | None] = asyncio.Queue()

    def take(text: str) -> None:
        if parts.qsize() < _MOST_PARTS:
            parts.put_nowait(text)

    episode = episodes.live.get(body.episode_id)
    if episode is not None:
        episode.watchers.append(take)
    step = asyncio.ensure_future(episodes.step(body))
    step.add_done_callback(lambda _: parts.put_nowait(None))
    begun = False
    try:
        while True:
            try:
                text = await asyncio.wait_for(parts.get(), _QUIET_SECONDS)
            except TimeoutError:
                yield b": still at it\n\n"
            else:
                if text is None:
                    break
                yield format_event("partial", encode({"content": text}))
            begun = True
        try:
            yield format_event("step", step.result())
        except Exception as error:
            if not begun:
                raise
            yield format_event("error", to_http_error(error).body)
    finally:
        if episode is not None:
            episode.watchers.remove(take)
        # If nothing awaits the step, asyncio must not log its error.
        step.add_done_callback(lambda step: step.cancelled() or step.exception())
