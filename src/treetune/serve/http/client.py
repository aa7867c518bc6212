"""TaskServerClient plays episodes on task servers over HTTP.

    async with TaskServerClient("http://127.0.0.1:5000") as client:
        async with await client.start(task_index=3) as episode:
            step = await episode.step("42")          # observation, reward, done, info

Several addresses share the work. A server that does not answer is skipped until it is back. After a lost connection, a
step is repeated only if the server numbers its turns. A server that supports only start and step works, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar, get_args

import msgspec

from treetune.chat.calls import ToolCall, call_message
from treetune.core.contract import Contract
from treetune.core.environment import Action, ContentType, Observation, Step
from treetune.core.score import finite
from treetune.errors import TreetuneError, UsageError
from treetune.play.toolbox import message_of
from treetune.serve.errors import Busy, Denied, Misused, ServeError, Unreachable
from treetune.serve.http.transport import HttpTransport, Refusal
from treetune.serve.http.wire import API_VERSION, UNKNOWN_TASK

START, STEP, CANCEL = "/api/episode/start", "/api/episode/step", "/api/episode/cancel"
INFO, HEALTH = "/api/task/info", "/api/health"
QUICK_SECONDS = 10.0
"""The timeout of requests that a server answers at once: info, cancel."""
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
_AGAIN = {429, 502, 503}
"""Statuses after which the same request may succeed later."""
_LAST_SECONDS = 2.0
R = TypeVar("R")


class StartReply(msgspec.Struct):
    """The answer of every task server to a start."""

    episode_id: str | int
    observation: Any = None
    info: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []
    contract: Contract | None = None


class StepReply(msgspec.Struct):
    """The answer of every task server to a step."""

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = {}
    calls: list[ToolCall] = []


class RemoteServer:
    """One address: what the server offers, how many episodes this client has there, and whether it answers."""

    def __init__(self, transport: HttpTransport, timeout: float, patience: float) -> None:
        self.transport, self.url = transport, transport.url
        self._timeout, self._patience = timeout, patience
        self.live = 0
        self.info: dict[str, Any] = {}
        self.contract: Contract | None = None
        """The contract of every episode, as the info declares it."""
        self._known = False
        self._learning = asyncio.Lock()
        self.left_out_until = 0.0

    def offers(self, feature: str) -> bool:
        offered = self.info.get("features")
        return isinstance(offered, list) and feature in offered

    def leave_out(self) -> None:
        """Prefers other servers for a while. When this server is back, it may offer other features."""
        self._known, self.left_out_until = False, time.monotonic() + LAST_PAUSE

    async def learn(self) -> None:
        """Asks for the server's features, once after each of its starts."""
        async with self._learning:
            if self._known:
                return
            reply = await self.transport.ask("GET", INFO, None, QUICK_SECONDS)
            try:
                self.info = reply.read(dict[str, Any])
            except Denied:
                raise
            except ServeError as error:
                if reply.status in _AGAIN:
                    raise Unreachable(error.message) from None
                self.info = {}  # the server has no info
            self.contract = _read_contract(self.url, self.info.get("contract"))
            version = self.info.get("api_version")
            if isinstance(version, int) and version > API_VERSION:
                raise Misused(
                    f"{self.url} speaks api_version {version}, but this client supports at most {API_VERSION}",
                    remedy="install the treetune of the server here",
                )
            self._known = True

    async def ask(self, path: str, body: Any, kind: type[R], *, repeat: bool) -> R:
        """With `repeat`, asks again after lost connections and while the server is full. Use it only for requests that
        the server runs once."""
        retries = _Retries(self._patience)
        while True:
            try:
                return (await self.transport.ask("POST", path, body, self._timeout)).read(kind)
            except (Unreachable, Refusal) as error:
                if not repeat or (isinstance(error, Refusal) and error.status not in _AGAIN):
                    raise
                await retries.wait(error)

    async def cancel(self, id: str | int) -> None:
        with contextlib.suppress(ServeError):  # it expires on the server
            await self.transport.ask("POST", CANCEL, {"episode_id": id}, QUICK_SECONDS)


class RemoteEpisode:
    """One live episode. As a context manager, it cancels the episode at the end unless the episode has ended by
    then."""

    def __init__(self, server: RemoteServer, reply: StartReply) -> None:
        self.server, self.url = server, server.url
        self.id = reply.episode_id
        self.observation = read_observation(reply.observation)
        self.info = reply.info
        self.tools = reply.tools
        """The available tools, in OpenAI's form."""
        self.contract = reply.contract or server.contract
        """The contract of the episode, as the server declares it; None if it declares nothing."""
        self.turn = 0
        """The number of the next turn."""
        self.over = False
        self.numbered = server.offers("turn")
        """The server does not play a turn twice, so a step may be sent again."""
        server.live += 1

    async def step(self, action: Any) -> Step:
        """Returns the answer to an action: text, a message with `tool_calls`, or an `Action`."""
        if self.over:
            raise Misused("this episode is over", remedy="start another")
        action = Action.of(action)
        content = action.content if action.type == "text" else {"type": action.type, "content": action.content}
        if (message := message_of(action)) is not None:
            content = {"role": "assistant", "content": message.get("content") or ""}
            content["tool_calls"] = message.get("tool_calls") or []
        body = {"episode_id": self.id, "action": content}
        if self.numbered:
            body["turn"] = self.turn
        try:
            reply = await self.server.ask(STEP, body, StepReply, repeat=self.numbered)
        except Refusal as error:
            if error.status in (404, 410):
                self._end()  # the episode is gone on the server
            raise
        self.turn += 1
        if reply.done:
            self._end()
        try:
            if reply.reward is None and reply.done:
                raise ServeError("the episode ended without a reward", remedy="a finished step has a reward")
            reward = finite(reply.reward or 0.0, "reward")
        except TreetuneError as error:
            raise ServeError(f"{self.url}{STEP}: {error.message}", remedy=error.remedy) from None
        truncated = bool(reply.done and reply.info.get("truncated"))
        observation = read_observation(reply.observation)
        return Step(observation, reward, reply.done, reply.info, truncated, reply.calls)

    async def call(self, name: str, arguments: dict[str, Any], id: str) -> Step:
        """Takes a step that calls one tool."""
        return await self.step(Action("json", call_message(name, arguments, id)))

    async def cancel(self) -> None:
        """Ends the episode on the server. If the request is lost, the episode expires there."""
        if not self.over:
            self._end()
            await self.server.cancel(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not self.over:
            await asyncio.shield(self.cancel())  # even if the caller is cancelled

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self.server.live -= 1


class TaskServerClient:
    def __init__(
        self, urls: str | Sequence[str], *, token: str | None = None, timeout: float = 600.0, patience: float = 60.0
    ) -> None:
        """`timeout` applies to one start or step, which may run a long command. `patience` is how long to retry a
        server that does not answer or is full."""
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UsageError("no task server was named", remedy="pass its address, such as http://127.0.0.1:5000")
        self._servers = [RemoteServer(HttpTransport(url, token), timeout, patience) for url in dict.fromkeys(urls)]
        self._patience = patience
        self._undoing: set[asyncio.Future[None]] = set()
        """Tasks that cancel episodes whose caller was cancelled during the start."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._undoing:  # any other episode expires on its server
            await asyncio.wait(self._undoing, timeout=_LAST_SECONDS)
        for undoing in self._undoing:
            undoing.cancel()
        for server in self._servers:
            await server.transport.close()

    async def info(self) -> dict[str, Any]:
        """Returns the info of the first server; empty if it has none."""
        await self._servers[0].learn()
        return self._servers[0].info

    async def start(
        self, task_index: int | None = None, *, step: int | None = None, uid: str | None = None
    ) -> RemoteEpisode:
        """Starts an episode of that task, or of the next one in the server's own order, on the server with the fewest
        episodes. `step` is the trainer's step, for the traces of a Treetune server. With `uid`, starts the task with
        that uid, whatever its index; a server that cannot look up uids is refused."""
        asked = {"task_index": task_index, "uid": uid}
        body: dict[str, Any] = {key: value for key, value in asked.items() if value is not None}
        ours = {"request_id": secrets.token_hex(12)} | ({} if step is None else {"step": step})
        retries = _Retries(self._patience)
        while True:
            for server in self._sort_servers():
                try:
                    await server.learn()
                    if uid is not None and not server.offers("uid"):
                        remedy = "serve the tasks with this version of Treetune"
                        raise Misused(f"{server.url} cannot look up the task of a row", remedy=remedy)
                    return await self._start_on(server, {**body, **ours} if server.offers("request_id") else body)
                except Unreachable as error:
                    server.leave_out()
                    problem: ServeError = error
                except Refusal as error:
                    if error.reason == UNKNOWN_TASK:
                        raise Misused(error.message, remedy=error.remedy) from None
                    if error.status not in _AGAIN:
                        raise
                    problem = error
            await retries.wait(problem)

    async def start_many(self, task_indices: Sequence[int | None]) -> list[RemoteEpisode | ServeError]:
        """Starts several episodes at once and returns them in the given order; failed starts are errors."""
        return list(await asyncio.gather(*(_catch_error(self.start(index)) for index in task_indices)))

    async def step_many(self, moves: Sequence[tuple[RemoteEpisode, Any]]) -> list[Step | ServeError]:
        """Steps several episodes and returns the results in the given order; failed steps are errors."""
        return list(await asyncio.gather(*(_catch_error(episode.step(action)) for episode, action in moves)))

    async def _start_on(self, server: RemoteServer, body: dict[str, Any]) -> RemoteEpisode:
        """If the caller is cancelled, the episode is cancelled, too."""
        asking = asyncio.ensure_future(server.ask(START, body, StartReply, repeat=False))
        server.live += 1  # counted during the request, so that other starts choose other servers
        try:
            return RemoteEpisode(server, await asyncio.shield(asking))
        except asyncio.CancelledError:
            undoing = asyncio.ensure_future(_undo(server, asking))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        finally:
            server.live -= 1

    def _sort_servers(self) -> list[RemoteServer]:
        """Returns the servers to ask, the least busy first. Skipped servers are used only if there are no others."""
        now = time.monotonic()
        up = [server for server in self._servers if server.left_out_until <= now] or self._servers
        return sorted(up, key=lambda server: (server.live, random.random()))


class _Retries:
    """Pauses between attempts, each longer than the last, until the patience runs out."""

    def __init__(self, patience: float) -> None:
        self._until, self._pause = time.monotonic() + patience, FIRST_PAUSE

    async def wait(self, problem: ServeError) -> None:
        refusal = problem if isinstance(problem, Refusal) else None
        pause = max(self._pause, (refusal and refusal.retry_after) or 0.0)
        if time.monotonic() + pause > self._until:
            if refusal and refusal.status == 429:
                remedy = "lower the concurrency, or add a server"
                raise Busy(f"no room for another episode: {problem.message}", remedy=remedy)
            raise problem
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        self._pause = min(LAST_PAUSE, pause * 2)


def _read_contract(url: str, declared: Any) -> Contract | None:
    try:
        return None if declared is None else msgspec.convert(declared, Contract)
    except msgspec.ValidationError as error:
        raise Misused(f"{url}{INFO}: contract: {error}", remedy="docs/task_server_api.md has its keys") from None


async def _undo(server: RemoteServer, asking: asyncio.Future[StartReply]) -> None:
    with contextlib.suppress(ServeError):
        await server.cancel((await asking).episode_id)


async def _catch_error(work: Coroutine[Any, Any, R]) -> R | ServeError:
    try:
        return await work
    except ServeError as error:
        return error


def read_observation(value: Any) -> Observation:
    """Reads an observation of a server: `{type, content}`, or any other value."""
    if isinstance(value, dict) and value.get("type") in get_args(ContentType) and "content" in value:
        return Observation(value["type"], value["content"])
    return Observation.of(value)
