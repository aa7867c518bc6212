"""TaskServerClient: episodes on task servers, played over HTTP from here.

    async with TaskServerClient("http://127.0.0.1:5000") as client:
        async with await client.start(task_index=3) as episode:
            step = await episode.step("42")          # observation, reward, done, info

Several addresses share the work: an episode stays on its server, a server that does not answer is left out until it is
back. A step is repeated after a lost connection only where the server numbers its turns (it then plays no turn twice);
`GET /api/task/info` tells. Servers that know nothing but start and step are served all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Self

import msgspec

from treetune.environment import Action, Step
from treetune.errors import TreetuneError, UsageError
from treetune.score import finite
from treetune.serve.errors import Busy, Misused, ServeError, Unreachable
from treetune.serve.http.peer import (
    AGAIN,
    FIRST_PAUSE,
    LAST_PAUSE,
    QUICK_SECONDS,
    Peer,
    observed,
    read_answer,
    read_item,
)
from treetune.serve.http.transport import Answer, Link, Refusal, error_of

START, STEP, CANCEL = "/api/episode/start", "/api/episode/step", "/api/episode/cancel"
START_BATCH, STEP_BATCH = "/api/episode/start_batch", "/api/episode/step_batch"
_LAST_SECONDS = 2.0


class StartAnswer(msgspec.Struct):
    episode_id: str | int
    observation: Any = None
    info: dict[str, Any] = {}


class StepAnswer(msgspec.Struct):
    observation: Any = None
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = {}


class RemoteEpisode:
    """One live episode. As a context manager it is cancelled at the end, unless it is over by then."""

    def __init__(self, client: TaskServerClient, server: Peer, answer: StartAnswer) -> None:
        self._client, self._server = client, server
        self.id = answer.episode_id
        self.observation = observed(answer.observation)
        self.info = answer.info
        self.turn = 0
        """The next one."""
        self.over = False
        self.numbered = server.offers("turn")
        """The server plays no turn twice, so that a step can be asked for again."""
        server.live += 1

    @property
    def url(self) -> str:
        return self._server.link.url

    async def step(self, action: Any) -> Step:
        """The answer to an action: text, or an `Action`."""
        try:
            move = self._move(action)
            answer = await self._client._step(self._server, move, self.numbered)
            return self._taken(answer)
        except ServeError as error:
            self._failed(error)
            raise

    async def cancel(self) -> None:
        """Tells the server that nobody will step it again. A server that cannot be told lets it expire."""
        if not self.over:
            self._end()
            await self._client._cancel(self._server, self.id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        if not self.over:
            # Shielded: whoever is cancelled still says so to the server.
            await asyncio.shield(self.cancel())

    def _move(self, action: Any) -> dict[str, Any]:
        if self.over:
            raise Misused("this episode is over", remedy="start another")
        action = Action.of(action)
        told = action.content if action.type == "text" else {"type": action.type, "content": action.content}
        move = {"episode_id": self.id, "action": told}
        return {**move, "turn": self.turn} if self.numbered else move

    def _taken(self, answer: StepAnswer) -> Step:
        self.turn += 1
        if answer.done:
            self._end()
        try:
            if answer.reward is None and answer.done:
                raise ServeError("the episode ended without a reward", remedy="a step that is done has one")
            reward = finite(answer.reward or 0.0, "reward")
        except TreetuneError as error:
            raise ServeError(f"{self.url}{STEP}: {error.message}", remedy=error.remedy) from None
        truncated = bool(answer.info.get("truncated"))
        return Step(observed(answer.observation), reward, answer.done, answer.info, truncated)

    def _failed(self, error: ServeError) -> None:
        if isinstance(error, Refusal) and error.status in (404, 410):
            self._end()  # the server knows it no more: nothing to cancel

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self._server.live -= 1


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
        self._servers = [Peer(Link(url, token, max_connections)) for url in dict.fromkeys(urls)]
        self._timeout, self._patience = timeout, patience
        self._unwanted: set[asyncio.Future[None]] = set()
        """Starts that nobody waits for any more."""

    @property
    def urls(self) -> list[str]:
        return [server.link.url for server in self._servers]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._unwanted:  # a moment for what was given up; after that it expires there
            await asyncio.wait(self._unwanted, timeout=_LAST_SECONDS)
        for undone in self._unwanted:
            undone.cancel()
        for server in self._servers:
            await server.link.close()

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
        return await self._all([{} if index is None else {"task_index": index} for index in task_indices])

    async def step_many(self, moves: Sequence[tuple[RemoteEpisode, Any]]) -> list[Step | ServeError]:
        """A step of each of several episodes, in the order asked; steps that failed are errors."""
        results: list[Step | ServeError] = [Unreachable("not asked")] * len(moves)
        batches: dict[int, list[int]] = {}
        for number, (episode, _) in enumerate(moves):
            batches.setdefault(id(episode._server), []).append(number)

        async def on_server(numbers: list[int]) -> None:
            server = moves[numbers[0]][0]._server
            if not (server.offers("batch") and all(moves[number][0].numbered for number in numbers)):
                single = (_or_error(moves[number][0].step(moves[number][1])) for number in numbers)
                for number, result in zip(numbers, await asyncio.gather(*single), strict=True):
                    results[number] = result
                return
            bodies = [moves[number][0]._move(moves[number][1]) for number in numbers]
            answers = await self._batched(server, STEP_BATCH, "steps", bodies)
            for number, answer in zip(numbers, answers, strict=True):
                episode = moves[number][0]
                try:
                    results[number] = episode._taken(read_item(server, STEP, answer, StepAnswer))
                except ServeError as error:
                    episode._failed(error)
                    results[number] = error

        await asyncio.gather(*map(on_server, batches.values()))
        return results

    # Starting

    async def _start(self, body: dict[str, Any]) -> RemoteEpisode:
        request_id = secrets.token_hex(12)
        until = time.monotonic() + self._patience
        pause = FIRST_PAUSE
        while True:
            problem: ServeError | None = None
            for server in await self._ready():
                name = {"request_id": request_id} if server.offers("request_id") else {}
                server.live += 1  # counted while it is asked, so that others go elsewhere
                try:
                    answer = await self._asked_to_start(server, {**body, **name})
                    return RemoteEpisode(self, server, read_answer(server, START, answer, StartAnswer))
                except Unreachable as error:
                    server.down()
                    problem = error
                except Refusal as error:
                    if error.status not in AGAIN:
                        raise
                    problem, pause = error, max(pause, error.retry_after or 0.0)
                finally:
                    server.live -= 1
            if time.monotonic() + pause > until:
                raise _given_up(problem or next(server.problem for server in self._servers if server.problem))
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(LAST_PAUSE, pause * 2)

    async def _asked_to_start(self, server: Peer, body: dict[str, Any]) -> Answer:
        """Where the caller is cancelled meanwhile, the episode that it would have got is cancelled too."""
        asked = asyncio.ensure_future(server.link.ask("POST", START, body, self._timeout))
        try:
            return await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._give_up(self._undo(server, asked))
            raise

    async def _undo(self, server: Peer, asked: asyncio.Future[Answer]) -> None:
        with contextlib.suppress(ServeError):
            started = read_answer(server, START, await asked, StartAnswer)
            await self._cancel(server, started.episode_id)

    async def _undo_all(self, server: Peer, asked: asyncio.Future[list[Any]]) -> None:
        for answer in await asked:
            with contextlib.suppress(ServeError):
                await self._cancel(server, read_item(server, START, answer, StartAnswer).episode_id)

    def _give_up(self, undoing: Coroutine[Any, Any, None]) -> None:
        self._unwanted.add(undone := asyncio.ensure_future(undoing))
        undone.add_done_callback(self._unwanted.discard)

    async def _ready(self) -> list[Peer]:
        """The servers to ask, the least busy first; those that were down only once they answer again."""
        found = await asyncio.gather(*(server.ready() for server in self._servers))
        up = [server for server, ready in zip(self._servers, found, strict=True) if ready]
        return sorted(up, key=lambda server: (server.live, random.random()))

    async def _all(self, bodies: list[dict[str, Any]]) -> list[RemoteEpisode | ServeError]:
        if len(self._servers) > 1 or not (await self._ready() and self._servers[0].offers("batch", "request_id")):
            return list(await asyncio.gather(*(_or_error(self._start(body)) for body in bodies)))
        server = self._servers[0]
        named = [{**body, "request_id": secrets.token_hex(12)} for body in bodies]
        asked = asyncio.ensure_future(self._batched(server, START_BATCH, "episodes", named))
        try:
            answers = await asyncio.shield(asked)
        except asyncio.CancelledError:
            self._give_up(self._undo_all(server, asked))
            raise

        async def started(body: dict[str, Any], answer: Any) -> RemoteEpisode:
            try:
                return RemoteEpisode(self, server, read_item(server, START, answer, StartAnswer))
            except Refusal as error:
                if error.status not in AGAIN:
                    raise
                return await self._start(body)

        return list(await asyncio.gather(*(_or_error(started(*pair)) for pair in zip(bodies, answers, strict=True))))

    # Stepping

    async def _step(self, server: Peer, move: dict[str, Any], numbered: bool) -> StepAnswer:
        if numbered:
            answer = await self._repeated(server, STEP, move)
        else:
            answer = await server.link.ask("POST", STEP, move, self._timeout)
        return read_answer(server, STEP, answer, StepAnswer)

    async def _repeated(self, server: Peer, path: str, body: Any) -> Answer:
        """Asks again after lost connections and while there is no room: only for what the server does once."""
        until, pause = time.monotonic() + self._patience, FIRST_PAUSE
        while True:
            try:
                answer = await server.link.ask("POST", path, body, self._timeout)
                if answer.status not in AGAIN:
                    return answer
                problem: ServeError = error_of(server.link.url + path, answer)
                pause = max(pause, answer.retry_after or 0.0)
            except Unreachable as error:
                problem = error
            if time.monotonic() + pause > until:
                raise _given_up(problem)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(LAST_PAUSE, pause * 2)

    async def _batched(self, server: Peer, path: str, key: str, items: list[Any]) -> list[Any]:
        """The answers to many requests; where a whole batch fails, its error for each of them."""
        most = max(1, int(server.info.get("max_batch") or 256))
        answers: list[Any] = []
        for first in range(0, len(items), most):
            some = items[first : first + most]
            try:
                answer = await self._repeated(server, path, {key: some})
                found = read_answer(server, path, answer, dict[str, list[Any]])[key]
                if len(found) != len(some):
                    raise ServeError(f"{server.link.url}{path} gave {len(found)} answers to {len(some)} requests")
                answers += found
            except KeyError:
                answers += [ServeError(f"{server.link.url}{path} answered without {key!r}")] * len(some)
            except ServeError as error:
                answers += [error] * len(some)
        return answers

    async def _cancel(self, server: Peer, id: str | int) -> None:
        try:
            await server.link.ask("POST", CANCEL, {"episode_id": id}, QUICK_SECONDS)
        except ServeError:
            return  # it expires there


def _given_up(problem: ServeError) -> ServeError:
    if isinstance(problem, Refusal) and problem.status == 429:
        return Busy(f"no room for another episode: {problem.message}", remedy="lower the concurrency, or add a server")
    return problem


async def _or_error(work: Any) -> Any:
    try:
        return await work
    except ServeError as error:
        return error
