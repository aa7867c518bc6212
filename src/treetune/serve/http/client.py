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
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any, Self, TypeVar, get_args

import msgspec

from treetune.environment import Action, ContentType, Observation, Step
from treetune.errors import TreetuneError, UsageError
from treetune.score import finite
from treetune.serve.errors import Busy, Denied, Misused, ServeError, Unreachable
from treetune.serve.http.transport import HttpReply, HttpTransport, Refusal
from treetune.serve.http.wire import API_VERSION

START, STEP, CANCEL = "/api/episode/start", "/api/episode/step", "/api/episode/cancel"
START_BATCH, STEP_BATCH = "/api/episode/start_batch", "/api/episode/step_batch"
INFO, HEALTH = "/api/task/info", "/api/health"
QUICK_SECONDS = 10.0
"""For what a server answers at once: info, health, cancel."""
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
        self.transport = transport
        self._timeout, self._patience = timeout, patience
        self.live = 0
        self.info: dict[str, Any] = {}
        self.problem: ServeError | None = None
        """Why it is left out."""
        self._known = False
        self._learning = asyncio.Lock()
        self._again_at = 0.0
        self._pause = FIRST_PAUSE

    @property
    def url(self) -> str:
        return self.transport.url

    def offers(self, *features: str) -> bool:
        offered = self.info.get("features")
        return isinstance(offered, list) and all(feature in offered for feature in features)

    async def is_ready(self) -> bool:
        if not self._known:
            if time.monotonic() < self._again_at:
                return False
            try:
                await self.learn()
            except Unreachable as error:
                self.leave_out(error)
                return False
        return True

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

    async def answers(self) -> bool:
        try:
            return (await self.transport.ask("GET", HEALTH, None, QUICK_SECONDS)).status < 500
        except ServeError:
            return False

    async def ask(self, path: str, body: Any, *, repeat: bool = False) -> HttpReply:
        """`repeat` asks again after lost connections and while there is no room: for what the server does only once."""
        retries = _Retries(self._patience)
        while True:
            try:
                reply = await self.transport.ask("POST", path, body, self._timeout)
                if not repeat or reply.status not in _AGAIN:
                    return reply
                problem = reply.error()
            except Unreachable as error:
                if not repeat:
                    raise
                problem = error
            await retries.wait(problem)

    async def ask_batch(self, path: str, key: str, bodies: list[Any], kind: type[R]) -> list[R | ServeError]:
        """The replies to many requests; where a whole batch fails, its error for each of them."""
        most = max(1, int(self.info.get("max_batch") or 256))
        replies: list[R | ServeError] = []
        for first in range(0, len(bodies), most):
            some = bodies[first : first + most]
            url = self.url + path
            try:
                items = (await self.ask(path, {key: some}, repeat=True)).read(dict[str, list[Any]]).get(key, [])
                if len(items) != len(some):
                    raise ServeError(f"{url} gave {len(items)} answers to {len(some)} requests")
                replies += [_read_item(url.removesuffix("_batch"), item, kind) for item in items]
            except ServeError as error:
                replies += [error] * len(some)
        return replies

    async def cancel(self, id: str | int) -> None:
        with contextlib.suppress(ServeError):  # it expires there
            await self.transport.ask("POST", CANCEL, {"episode_id": id}, QUICK_SECONDS)

    def leave_out(self, problem: ServeError) -> None:
        """It is not asked for a while, longer each time. When it is back it may offer something else."""
        self._known, self.problem = False, problem
        self._again_at = time.monotonic() + self._pause
        self._pause = min(LAST_PAUSE, self._pause * 2)


class RemoteEpisode:
    """One live episode. As a context manager it is cancelled at the end, unless it is over by then."""

    def __init__(self, server: RemoteServer, reply: StartReply) -> None:
        self.server = server
        self.id = reply.episode_id
        self.observation = read_observation(reply.observation)
        self.info = reply.info
        self.turn = 0
        """The next one."""
        self.over = False
        self.numbered = server.offers("turn")
        """The server plays no turn twice, so that a step can be asked for again."""
        server.live += 1

    @property
    def url(self) -> str:
        return self.server.url

    async def step(self, action: Any) -> Step:
        """The answer to an action: text, or an `Action`."""
        try:
            reply = await self.server.ask(STEP, self.make_step(action), repeat=self.numbered)
            return self.read_step(reply.read(StepReply))
        except ServeError as error:
            self.note_error(error)
            raise

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

    def read_step(self, reply: StepReply) -> Step:
        self.turn += 1
        if reply.done:
            self._end()
        try:
            if reply.reward is None and reply.done:
                raise ServeError("the episode ended without a reward", remedy="a step that is done has one")
            reward = finite(reply.reward or 0.0, "reward")
        except TreetuneError as error:
            raise ServeError(f"{self.url}{STEP}: {error.message}", remedy=error.remedy) from None
        truncated = bool(reply.info.get("truncated"))
        return Step(read_observation(reply.observation), reward, reply.done, reply.info, truncated)

    def note_error(self, error: ServeError) -> None:
        if isinstance(error, Refusal) and error.status in (404, 410):
            self._end()  # the server no longer has it: nothing to cancel

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self.server.live -= 1


class TaskServerClient:
    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        token: str | None = None,
        timeout: float = 600.0,
        patience: float = 60.0,
        max_connections: int = 1024,
    ) -> None:
        """`timeout` is for one start or step, which may run a long command; `patience` is how long a server that does
        not answer, or has no room, is asked again."""
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UsageError("no task server was named", remedy="give its address, such as http://127.0.0.1:5000")
        transports = [HttpTransport(url, token, max_connections) for url in dict.fromkeys(urls)]
        self._servers = [RemoteServer(transport, timeout, patience) for transport in transports]
        self._patience = patience
        self._undoing: set[asyncio.Future[None]] = set()
        """Cancels episodes whose caller was cancelled during the start."""

    @property
    def urls(self) -> list[str]:
        return [server.url for server in self._servers]

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

    async def health(self) -> dict[str, bool]:
        """Which servers answer."""
        alive = await asyncio.gather(*(server.answers() for server in self._servers))
        return dict(zip(self.urls, alive, strict=True))

    async def start(self, task_index: int | None = None) -> RemoteEpisode:
        """An episode of that task, or of the next in the server's own order, on the server with the fewest."""
        return await self._start({} if task_index is None else {"task_index": task_index})

    async def start_many(self, task_indices: Sequence[int | None]) -> list[RemoteEpisode | ServeError]:
        """Several at once, in the order asked; those that could not be started are errors."""
        bodies = [{} if index is None else {"task_index": index} for index in task_indices]
        if len(self._servers) > 1 or not (await self._find_ready() and self._servers[0].offers("batch", "request_id")):
            return list(await asyncio.gather(*(_catch_error(self._start(body)) for body in bodies)))
        server = self._servers[0]
        named = [{**body, "request_id": secrets.token_hex(12)} for body in bodies]
        starting = server.ask_batch(START_BATCH, "episodes", named, StartReply)
        replies = await self._undo_if_cancelled(server, starting)

        async def finish(body: dict[str, Any], reply: StartReply | ServeError) -> RemoteEpisode:
            if isinstance(reply, Refusal) and reply.status in _AGAIN:
                return await self._start(body)
            if isinstance(reply, ServeError):
                raise reply
            return RemoteEpisode(server, reply)

        return list(await asyncio.gather(*(_catch_error(finish(*pair)) for pair in zip(bodies, replies, strict=True))))

    async def step_many(self, moves: Sequence[tuple[RemoteEpisode, Any]]) -> list[Step | ServeError]:
        """A step of each of several episodes, in the order asked; steps that failed are errors."""
        numbers_of: dict[int, list[int]] = {}
        for number, (episode, _) in enumerate(moves):
            numbers_of.setdefault(id(episode.server), []).append(number)
        results: dict[int, Step | ServeError] = {}

        async def step_on_server(numbers: list[int]) -> None:
            steps = await _step_together([moves[number] for number in numbers])
            results.update(zip(numbers, steps, strict=True))

        await asyncio.gather(*map(step_on_server, numbers_of.values()))
        return [results[number] for number in range(len(moves))]

    # Starting

    async def _start(self, body: dict[str, Any]) -> RemoteEpisode:
        request_id = secrets.token_hex(12)
        retries = _Retries(self._patience)
        while True:
            problem: ServeError | None = None
            for server in await self._find_ready():
                name = {"request_id": request_id} if server.offers("request_id") else {}
                server.live += 1  # counted while it is asked, so that others go elsewhere
                try:
                    (reply,) = await self._undo_if_cancelled(server, _start_on(server, {**body, **name}))
                    return RemoteEpisode(server, reply)
                except Unreachable as error:
                    server.leave_out(error)
                    problem = error
                except Refusal as error:
                    if error.status not in _AGAIN:
                        raise
                    problem = error
                finally:
                    server.live -= 1
            await retries.wait(problem or next(server.problem for server in self._servers if server.problem))

    async def _undo_if_cancelled(self, server: RemoteServer, starting: Coroutine[Any, Any, list[R]]) -> list[R]:
        """Where the caller is cancelled meanwhile, the episodes that it would have got are cancelled too."""
        started = asyncio.ensure_future(starting)
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


async def _start_on(server: RemoteServer, body: dict[str, Any]) -> list[StartReply]:
    return [(await server.ask(START, body)).read(StartReply)]


async def _step_together(moves: list[tuple[RemoteEpisode, Any]]) -> list[Step | ServeError]:
    """Steps of episodes that live on one server."""
    server = moves[0][0].server
    if not (server.offers("batch") and all(episode.numbered for episode, _ in moves)):
        return list(await asyncio.gather(*(_catch_error(episode.step(action)) for episode, action in moves)))
    bodies = [episode.make_step(action) for episode, action in moves]
    results: list[Step | ServeError] = []
    replies = await server.ask_batch(STEP_BATCH, "steps", bodies, StepReply)
    for (episode, _), reply in zip(moves, replies, strict=True):
        try:
            if isinstance(reply, ServeError):
                raise reply
            results.append(episode.read_step(reply))
        except ServeError as error:
            episode.note_error(error)
            results.append(error)
    return results


async def _undo(server: RemoteServer, started: asyncio.Future[list[Any]]) -> None:
    with contextlib.suppress(ServeError):
        for reply in await started:
            if isinstance(reply, StartReply):
                await server.cancel(reply.episode_id)


async def _catch_error(work: Awaitable[R]) -> R | ServeError:
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
