"""TaskServerClient: episodes on task servers, played over HTTP from here.

    async with TaskServerClient("http://127.0.0.1:5000") as client:
        async with await client.start(task_index=3) as episode:
            step = await episode.step("42")          # observation, reward, done, info

Several addresses share the work: an episode stays on its server, a server that does not answer is left out until it is
back. A server tells what it offers in the `features` of `GET /api/task/info`. A step is repeated after a lost
connection only where the server numbers its turns, and so plays no turn twice. A server that knows only start and step
is fine too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self, TypeVar, get_args

import msgspec

from treetune.environment import Action, ContentType, Observation, Step
from treetune.errors import TreetuneError, UsageError
from treetune.score import finite
from treetune.serve.errors import Busy, Denied, Misused, ServeError, Unreachable
from treetune.serve.http.transport import HttpReply, HttpTransport, Refusal
from treetune.serve.http.wire import API_VERSION

START, STEP, CANCEL = "/api/episode/start", "/api/episode/step", "/api/episode/cancel"
INFO, HEALTH = "/api/task/info", "/api/health"
QUICK_SECONDS = 10.0
"""For what a server answers at once: info, cancel."""
FIRST_PAUSE, LAST_PAUSE = 0.2, 10.0
_AGAIN = {429, 502, 503}
"""Statuses after which the same request may succeed later."""
_LAST_SECONDS = 2.0
R = TypeVar("R")


class StartReply(msgspec.Struct):
    """What any task server answers to a start."""

    episode_id: str | int
    observation: Any = None
    info: dict[str, Any] = {}


class StepReply(msgspec.Struct):
    """What any task server answers to a step."""

    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = {}


class RemoteServer:
    """One address: what it offers, how many episodes it has from here, and whether it answers."""

    def __init__(self, transport: HttpTransport, timeout: float, patience: float) -> None:
        self.transport, self.url = transport, transport.url
        self._timeout, self._patience = timeout, patience
        self.live = 0
        self.info: dict[str, Any] = {}
        self.problem: ServeError | None = None
        """Why it is left out."""
        self._known = False
        self._learning = asyncio.Lock()
        self._again_at, self._pause = 0.0, FIRST_PAUSE

    def offers(self, *features: str) -> bool:
        offered = self.info.get("features")
        return isinstance(offered, list) and all(feature in offered for feature in features)

    async def is_ready(self) -> bool:
        if not self._known and time.monotonic() >= self._again_at:
            try:
                await self.learn()
            except Unreachable as error:
                self.leave_out(error)
        return self._known

    def leave_out(self, problem: ServeError) -> None:
        """It is not asked for a while, longer each time. When it is back it may offer something else."""
        self._known, self.problem = False, problem
        self._again_at = time.monotonic() + self._pause
        self._pause = min(LAST_PAUSE, self._pause * 2)

    async def learn(self) -> None:
        """Asks what the server offers, once for each time that it comes up."""
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
                self.info = {}  # it offers none
            version = self.info.get("api_version")
            if isinstance(version, int) and version > API_VERSION:
                raise Misused(
                    f"{self.url} speaks api_version {version}, this client {API_VERSION} at most",
                    remedy="install the treetune of the server here",
                )
            self._known, self.problem, self._pause = True, None, FIRST_PAUSE

    async def ask_each(
        self, path: str, key: str, bodies: list[Any], kind: type[R], *, repeat: bool
    ) -> list[R | ServeError]:
        """A reply or an error for each request, in batches where the server takes them. `repeat` asks again after lost
        connections and while there is no room: for what the server does only once."""
        if not (repeat and len(bodies) > 1 and self.offers("batch")):
            asking = (self._ask(path, body, kind, repeat) for body in bodies)
            return list(await asyncio.gather(*map(_catch_error, asking)))
        most = max(1, int(self.info.get("max_batch") or 256))
        replies: list[R | ServeError] = []
        for first in range(0, len(bodies), most):
            some = bodies[first : first + most]
            try:
                items = (await self._ask(f"{path}_batch", {key: some}, dict[str, list[Any]], repeat)).get(key, [])
                if len(items) != len(some):
                    raise ServeError(f"{self.url}{path}_batch gave {len(items)} answers to {len(some)} requests")
                replies += [_read_item(self.url + path, item, kind) for item in items]
            except ServeError as error:
                replies += [error] * len(some)
        return replies

    async def _ask(self, path: str, body: Any, kind: type[R], repeat: bool) -> R:
        retries = _Retries(self._patience)
        while True:
            try:
                return (await self.transport.ask("POST", path, body, self._timeout)).read(kind)
            except (Unreachable, Refusal) as error:
                if not repeat or (isinstance(error, Refusal) and error.status not in _AGAIN):
                    raise
                await retries.wait(error)

    async def cancel(self, id: str | int) -> None:
        with contextlib.suppress(ServeError):  # it expires there
            await self.transport.ask("POST", CANCEL, {"episode_id": id}, QUICK_SECONDS)


class RemoteEpisode:
    """One live episode. As a context manager it is cancelled at the end, unless it is over by then."""

    def __init__(self, server: RemoteServer, reply: StartReply) -> None:
        self.server, self.url = server, server.url
        self.id = reply.episode_id
        self.observation = read_observation(reply.observation)
        self.info = reply.info
        self.turn = 0
        """The next one."""
        self.over = False
        self.numbered = server.offers("turn")
        """The server plays no turn twice, so that a step can be asked for again."""
        server.live += 1

    async def step(self, action: Any) -> Step:
        """The answer to an action: text, or an `Action`."""
        (result,) = await _step_together([(self, action)])
        if isinstance(result, ServeError):
            raise result
        return result

    async def cancel(self) -> None:
        """Tells the server that nobody will step it again. A server that does not hear it lets it expire."""
        if not self.over:
            self._end()
            await self.server.cancel(self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not self.over:
            await asyncio.shield(self.cancel())  # also where the caller is cancelled

    def make_step(self, action: Any) -> dict[str, Any]:
        if self.over:
            raise Misused("this episode is over", remedy="start another")
        action = Action.of(action)
        content = action.content if action.type == "text" else {"type": action.type, "content": action.content}
        body = {"episode_id": self.id, "action": content}
        return {**body, "turn": self.turn} if self.numbered else body

    def read_step(self, reply: StepReply | ServeError) -> Step | ServeError:
        if isinstance(reply, ServeError):
            if isinstance(reply, Refusal) and reply.status in (404, 410):
                self._end()  # the server no longer has it: nothing to cancel
            return reply
        self.turn += 1
        if reply.done:
            self._end()
        try:
            if reply.reward is None and reply.done:
                raise ServeError("the episode ended without a reward", remedy="a step that is done has one")
            reward = finite(reply.reward or 0.0, "reward")
        except TreetuneError as error:
            return ServeError(f"{self.url}{STEP}: {error.message}", remedy=error.remedy)
        truncated = bool(reply.info.get("truncated"))
        return Step(read_observation(reply.observation), reward, reply.done, reply.info, truncated)

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self.server.live -= 1


class TaskServerClient:
    def __init__(
        self, urls: str | Sequence[str], *, token: str | None = None, timeout: float = 600.0, patience: float = 60.0
    ) -> None:
        """`timeout` is for one start or step, which may run a long command; `patience` is how long a server that does
        not answer, or has no room, is asked again."""
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UsageError("no task server was named", remedy="give its address, such as http://127.0.0.1:5000")
        self._servers = [RemoteServer(HttpTransport(url, token), timeout, patience) for url in dict.fromkeys(urls)]
        self._patience = patience
        self._undoing: set[asyncio.Future[None]] = set()
        """Cancels episodes whose caller was cancelled during the start."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._undoing:  # what takes longer expires on its server
            await asyncio.wait(self._undoing, timeout=_LAST_SECONDS)
        for undoing in self._undoing:
            undoing.cancel()
        for server in self._servers:
            await server.transport.close()

    async def info(self) -> dict[str, Any]:
        """What the first server tells of its task; nothing where it offers no info."""
        await self._servers[0].learn()
        return self._servers[0].info

    async def start(self, task_index: int | None = None) -> RemoteEpisode:
        """An episode of that task, or of the next in the server's own order, on the server with the fewest."""
        request_id = secrets.token_hex(12)
        retries = _Retries(self._patience)
        while True:
            problem: ServeError | None = None
            for server in await self._find_ready():
                name = {"request_id": request_id} if server.offers("request_id") else {}
                server.live += 1  # counted while it is asked, so that others go elsewhere
                try:
                    (reply,) = await self._start_on(server, [{**_index(task_index), **name}], repeat=False)
                finally:
                    server.live -= 1
                if isinstance(reply, StartReply):
                    return RemoteEpisode(server, reply)
                if isinstance(reply, Unreachable):
                    server.leave_out(reply)
                elif not (isinstance(reply, Refusal) and reply.status in _AGAIN):
                    raise reply
                problem = reply
            await retries.wait(problem or next(server.problem for server in self._servers if server.problem))

    async def start_many(self, task_indices: Sequence[int | None]) -> list[RemoteEpisode | ServeError]:
        """Several at once, in the order asked; those that could not be started are errors."""
        ready = await self._find_ready()
        if len(self._servers) > 1 or not ready or not ready[0].offers("batch", "request_id"):
            return list(await asyncio.gather(*(_catch_error(self.start(index)) for index in task_indices)))
        bodies = [{**_index(index), "request_id": secrets.token_hex(12)} for index in task_indices]
        replies = await self._start_on(ready[0], bodies, repeat=True)

        async def finish(index: int | None, reply: StartReply | ServeError) -> RemoteEpisode:
            if isinstance(reply, Refusal) and reply.status in _AGAIN:
                return await self.start(index)
            if isinstance(reply, ServeError):
                raise reply
            return RemoteEpisode(ready[0], reply)

        finishing = map(finish, task_indices, replies)
        return list(await asyncio.gather(*map(_catch_error, finishing)))

    async def step_many(self, moves: Sequence[tuple[RemoteEpisode, Any]]) -> list[Step | ServeError]:
        """A step of each of several episodes, in the order asked; steps that failed are errors."""
        of_server: dict[RemoteServer, list[tuple[RemoteEpisode, Any]]] = {}
        for move in moves:
            of_server.setdefault(move[0].server, []).append(move)
        results = await asyncio.gather(*map(_step_together, of_server.values()))
        next_of = {server: iter(steps) for server, steps in zip(of_server, results, strict=True)}
        return [next(next_of[episode.server]) for episode, _ in moves]

    async def _start_on(self, server: RemoteServer, bodies: list[Any], repeat: bool) -> list[StartReply | ServeError]:
        """Where the caller is cancelled meanwhile, the episodes that it would have got are cancelled too."""
        asking = server.ask_each(START, "episodes", bodies, StartReply, repeat=repeat)
        started = asyncio.ensure_future(asking)
        try:
            return await asyncio.shield(started)
        except asyncio.CancelledError:
            undoing = asyncio.ensure_future(_undo(server, started))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise

    async def _find_ready(self) -> list[RemoteServer]:
        """The servers to ask, the least busy first; those that were down only once they answer again."""
        ready = await asyncio.gather(*(server.is_ready() for server in self._servers))
        up = [server for server, is_ready in zip(self._servers, ready, strict=True) if is_ready]
        return sorted(up, key=lambda server: (server.live, random.random()))


class _Retries:
    """Pauses between attempts, longer each time, until patience ends."""

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


def _index(task_index: int | None) -> dict[str, Any]:
    return {} if task_index is None else {"task_index": task_index}


async def _step_together(moves: list[tuple[RemoteEpisode, Any]]) -> list[Step | ServeError]:
    """Steps of episodes that live on one server."""
    repeat = all(episode.numbered for episode, _ in moves)
    bodies = [episode.make_step(action) for episode, action in moves]
    replies = await moves[0][0].server.ask_each(STEP, "steps", bodies, StepReply, repeat=repeat)
    return [episode.read_step(reply) for (episode, _), reply in zip(moves, replies, strict=True)]


async def _undo(server: RemoteServer, started: asyncio.Future[list[StartReply | ServeError]]) -> None:
    for reply in await started:
        if isinstance(reply, StartReply):
            await server.cancel(reply.episode_id)


async def _catch_error(work: Coroutine[Any, Any, R]) -> R | ServeError:
    try:
        return await work
    except ServeError as error:
        return error


def _read_item(url: str, item: Any, kind: type[R]) -> R | ServeError:
    """One answer of a batch: what a single request would have been answered, or an error with its `status`."""
    if isinstance(item, dict) and isinstance(status := item.get("status"), int) and "error" in item:
        return HttpReply(url, status, json.dumps(item).encode()).error()
    try:
        return msgspec.convert(item, kind)
    except msgspec.ValidationError as error:
        return ServeError(f"{url} sent something else than its answer: {error}")


def read_observation(value: Any) -> Observation:
    """What a server shows: `{type, content}`, or anything else that can be shown."""
    if isinstance(value, dict) and value.get("type") in get_args(ContentType) and "content" in value:
        return Observation(value["type"], value["content"])
    return Observation.of(value)
