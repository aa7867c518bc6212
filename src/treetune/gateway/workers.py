"""A `GatewayPool` is several gateways behind one address, each in a process of its own.

    pool = GatewayPool(make_gateway, 4, "127.0.0.1:8600", token="...")
    url = await pool.start()

Each worker has a port of its own. The address opens sessions in the worker that has the fewest, and the reply leads the
agent there, so its calls pass through one process only. Calls that reach the address itself are redirected. The sockets
belong to the pool: if a worker dies, clients wait in its queue until it is replaced. On a Ray cluster, the workers are
actors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing.connection
import os
import pickle
import signal
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import uvloop

from treetune.errors import UsageError, format_error
from treetune.gateway.gateway import MOST_SESSIONS, Gateway
from treetune.gateway.server import MOST_BYTES, GatewayServer, find_call, refuse_key, render_error
from treetune.system import prometheus
from treetune.system.access import Access, bind_tcp, parse_http_address
from treetune.system.http_app import Headers, HttpRequest, JsonApp, Route, Scope
from treetune.system.http_body import read_body
from treetune.system.http_error import HttpError, encode
from treetune.system.http_listener import HttpListener
from treetune.system.processes import SILENT_SECONDS, join_cluster, spawn_context, why_waiting

log = logging.getLogger("treetune.gateway")
ENGINES = ("processes", "ray")
_SECONDS = 300.0
"""The longest wait for the answer of a worker, which may be starting."""
_PAUSE_SECONDS = 0.5
"""Between the death of a worker and its replacement."""


class GatewayPool:
    def __init__(
        self, make: Callable[[], Gateway], count: int, address: str, *, token: str, engine: str = "processes"
    ) -> None:
        """`make` makes the gateway of a worker; it can be pickled. Processes have the ports after that of the address,
        or any free ones if it is 0. With the `engine` ray, workers are actors of a cluster, each on a free port of its
        node."""
        access = Access(token=token)
        if engine not in ENGINES:
            raise UsageError(f"unknown engine {engine!r}", remedy=f"use {' or '.join(ENGINES)}")
        self._make, self._token, self._count = make, token, count
        self._ray = join_cluster() if engine == "ray" else None
        self._host, self._port = parse_http_address(address, access)
        self._listener, self._app = HttpListener(address, access), _FrontApp(self, access)
        self.workers: list[_Worker] = []
        self.weights: dict[str, Any] = {}
        """What trainers have set, for workers that start later."""
        self._http: aiohttp.ClientSession | None = None

    async def start(self) -> str:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_SECONDS))
        for number in range(1, self._count + 1):
            settings = self._make, self._token, self._tell
            if self._ray is not None:
                self.workers.append(_RayWorker(self._ray, *settings))
                continue
            port = self._port + number if self._port else 0
            self.workers.append(_ProcessWorker(bind_tcp(self._host, port, f"{self._host}:{port}"), *settings))
        await asyncio.gather(*(worker.start() for worker in self.workers))
        await self.ask_all("GET", "/health")  # it waits until they have started
        return await self._listener.start(self._app)

    async def close(self) -> None:
        await self._listener.close()
        await asyncio.gather(*(worker.close() for worker in self.workers))
        if self._http is not None:
            await self._http.close()

    async def ask(
        self, worker: _Worker, method: str, path: str, body: bytes | None = None, host: str = "127.0.0.1"
    ) -> bytes:
        """The answer of a worker. Raises HttpError with its error."""
        assert self._http is not None
        headers = {"Authorization": f"Bearer {self._token}", "Host": f"{worker.host or host}:{worker.port}"}
        try:
            async with self._http.request(method, worker.url + path, data=body, headers=headers) as response:
                content = await read_body(response)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise HttpError(503, "worker_lost", f"a process of the gateway does not answer: {error!r}") from None
        if response.status != 200:
            found = msgspec.json.decode(content)["error"]
            raise HttpError(response.status, found["type"], found["message"])
        return content

    async def ask_all(self, method: str, path: str, body: bytes | None = None) -> list[dict[str, Any]]:
        answers = await asyncio.gather(*(self.ask(worker, method, path, body) for worker in self.workers))
        return [msgspec.json.decode(answer) for answer in answers]

    async def _tell(self, worker: _Worker) -> None:
        """Set the weights of a worker that has replaced another."""
        if self.weights:
            await self.ask(worker, "POST", "/weights", encode(self.weights))

    async def list_sessions(self) -> dict[str, Any]:
        """The sessions and figures of all workers."""
        found = await self.ask_all("GET", "/sessions")
        counts: Counter[str] = Counter(replaced_workers=sum(worker.replaced for worker in self.workers))
        for one in found:
            counts.update(one["counts"])
        sessions = [session for one in found for session in one["sessions"]]
        under_way, paused = sum(one["calls_under_way"] for one in found), max(one["paused"] for one in found)
        return {"sessions": sessions, "calls_under_way": under_way, "paused": paused, "counts": dict(counts)}


class _Worker:
    """One gateway in a process of its own, which is replaced when it ends."""

    url = ""
    host: str | None = None
    """The machine on which it listens, if that is not this one."""
    port = 0

    def __init__(self, make: Callable[[], Gateway], token: str, tell: Callable[[_Worker], Any]) -> None:
        self.keys: set[str] = set()
        self.ended: OrderedDict[str, str] = OrderedDict()
        """The keys of sessions that ended, with the reason."""
        self.replaced = 0
        self._make, self._token, self._tell = make, token, tell
        self._is_closing = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def _note_end(self, why: str) -> None:
        if self._is_closing:
            return
        log.error("a process of the gateway ended (%s), with %s sessions; it is replaced", why, len(self.keys))
        for key in self.keys:
            self.end(key, f"the gateway's process of this session ended: {why}")
        self.keys.clear()
        self.replaced += 1
        task = asyncio.ensure_future(self._replace())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self) -> None:
        while not self._is_closing:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                await self.start()
                break
            except Exception as error:  # such as an actor on a node that is gone too
                log.warning("a process of the gateway does not start: %s", format_error(error).splitlines()[0])
        with contextlib.suppress(HttpError):
            await self._tell(self)

    def end(self, key: str, why: str) -> None:
        self.ended[key] = why
        if len(self.ended) > MOST_SESSIONS:
            self.ended.popitem(last=False)


class _ProcessWorker(_Worker):
    """A process on this machine. Its socket belongs to the pool, so that clients wait while it is replaced."""

    def __init__(self, listening: socket.socket, *settings: Any) -> None:
        super().__init__(*settings)
        host, self.port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
        self._listening = listening

    async def start(self) -> None:
        alive, self._alive = multiprocessing.connection.Pipe(duplex=False)
        arguments = (self._make, self._token, self._listening, dict(self.ended), alive)
        process: Any = spawn_context().Process(target=_run, args=arguments, name=f"gateway-{self.port}")
        process.start()
        alive.close()
        self._process = process
        asyncio.get_running_loop().add_reader(process.sentinel, self._note_exit)

    def _note_exit(self) -> None:
        process = self._process
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        self._alive.close()
        code = process.exitcode or 0
        self._note_end(f"killed by signal {-code}" if code < 0 else f"exit code {code}")

    async def close(self) -> None:
        self._is_closing = True
        self._alive.close()  # the process ends by itself
        await asyncio.to_thread(self._process.join, 5)
        self._process.kill()
        self._listening.close()


class _RayWorker(_Worker):
    """An actor of a Ray cluster, with one CPU. It listens on the address of its node."""

    def __init__(self, ray: Any, *settings: Any) -> None:
        super().__init__(*settings)
        self._ray = ray
        self._actor_class = ray.remote(num_cpus=1, max_restarts=0)(_RayGateway)

    async def start(self) -> None:
        self._actor = self._actor_class.remote()
        begun = [self._actor.__ray_ready__.remote()]
        starting = self._actor.start.remote(pickle.dumps(self._make), self._token, dict(self.ended))
        while True:
            try:
                self.host, self.port = await asyncio.wait_for(asyncio.shield(starting), SILENT_SECONDS)
                break
            except TimeoutError:
                if (why := await asyncio.to_thread(why_waiting, self._ray, begun)) is not None:
                    log.warning("%s; each process of the gateway needs one (-w)", why)
        self.url = f"http://{self.host}:{self.port}"
        loop, ended = asyncio.get_running_loop(), self._actor.run.remote().future()
        ended.add_done_callback(lambda future: loop.call_soon_threadsafe(self._note_actor, future))

    def _note_actor(self, future: Any) -> None:
        error = future.exception()
        self._note_end("ended" if error is None else f"{type(error).__name__}: {error}".splitlines()[0])

    async def close(self) -> None:
        self._is_closing = True
        with contextlib.suppress(Exception):  # the actor or its cluster is already gone
            await asyncio.to_thread(self._ray.kill, self._actor, no_restart=True)


class _RayGateway:
    async def start(self, make: bytes, token: str, ended: dict[str, str]) -> tuple[str, int]:
        import ray

        gateway = pickle.loads(make)()
        gateway.ended.update(ended)
        await gateway.connect()
        host = ray.util.get_node_ip_address()
        self._server = GatewayServer(gateway, f"{host}:0", token=token)
        return host, int((await self._server.start()).rpartition(":")[2])

    async def run(self) -> None:
        await asyncio.Event().wait()  # it ends with its actor


def _run(
    make: Callable[[], Gateway],
    token: str,
    listening: socket.socket,
    ended: dict[str, str],
    alive: multiprocessing.connection.Connection,
) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # signals may reach the whole process group; the pool handles them
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    gateway = make()
    gateway.ended.update(ended)
    uvloop.run(_serve(gateway, token, listening, alive))
    os._exit(0)


async def _serve(
    gateway: Gateway, token: str, listening: socket.socket, alive: multiprocessing.connection.Connection
) -> None:
    server, over = GatewayServer(gateway, token=token), asyncio.Event()
    asyncio.get_running_loop().add_reader(alive.fileno(), over.set)  # it is readable when the pool has ended
    await gateway.connect()
    await server.start(listening)
    await over.wait()
    asyncio.get_running_loop().remove_reader(alive.fileno())
    with contextlib.suppress(asyncio.CancelledError):
        await server.close()


class _FrontApp(JsonApp):
    """Answers at the address of the pool."""

    def __init__(self, pool: GatewayPool, access: Access) -> None:
        routes = [
            Route("POST", "/sessions", self._open),
            Route("GET", "/sessions", self._list),
            Route("GET", "/sessions/*", self._show),
            Route("DELETE", "/sessions/*", self._drop),
            Route("POST", "/weights", self._change_weights),
            Route("GET", "/metrics", self._metrics, content_type=prometheus.CONTENT_TYPE),
            Route("GET", "/health", self._health, needs_token=False),
        ]
        remedy = "send `Authorization: Bearer TOKEN`"
        super().__init__(routes, access, max_bytes=MOST_BYTES, token_remedy=remedy, render_error=render_error)
        self._pool = pool

    def find_route(self, scope: Scope) -> Route:
        found = find_call(scope)
        if found is None:
            return super().find_route(scope)
        worker = self._worker_of(found.key)
        if worker is None:
            raise refuse_key(found.key, *(one.ended for one in self._pool.workers))
        host = worker.host or _find_host(scope["headers"])
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        place = f"http://{host}:{worker.port}/sessions/{found.key}/{found.path}{query}"
        raise HttpError(307, "elsewhere", f"this session is at {place}", location=place)

    def _worker_of(self, key: str) -> _Worker | None:
        return next((worker for worker in self._pool.workers if key in worker.keys), None)

    async def _open(self, request: HttpRequest) -> bytes:
        worker = min(self._pool.workers, key=lambda worker: len(worker.keys))
        host = _find_host(request.headers)
        answer = await self._pool.ask(worker, "POST", "/sessions", request.body or b"{}", host)
        worker.keys.add(msgspec.json.decode(answer)["key"])
        return answer

    async def _list(self, request: HttpRequest) -> bytes:
        return encode(await self._pool.list_sessions())

    async def _show(self, request: HttpRequest) -> bytes:
        return await self._pool.ask(self._named(request), "GET", request.path)

    async def _drop(self, request: HttpRequest) -> bytes:
        worker, key = self._named(request), request.path.rpartition("/")[2]
        answer = await self._pool.ask(worker, "DELETE", request.path)
        worker.keys.discard(key)
        worker.end(key, "the session is closed")
        return answer

    def _named(self, request: HttpRequest) -> _Worker:
        key = request.path.rpartition("/")[2]
        if (worker := self._worker_of(key)) is None:
            lost = next((one.ended[key] for one in self._pool.workers if key in one.ended), None)
            raise HttpError(404, "unknown_session", lost or "there is no such session")
        return worker

    async def _change_weights(self, request: HttpRequest) -> bytes:
        answers = await self._pool.ask_all("POST", "/weights", request.body)
        self._pool.weights |= msgspec.json.decode(request.body)
        return encode({"idle": all(answer["idle"] for answer in answers)})

    async def _metrics(self, request: HttpRequest) -> bytes:
        found = await self._pool.list_sessions()
        gauges = {"sessions": len(found["sessions"]), "workers": len(self._pool.workers)}
        gauges |= {name: found[name] for name in ("calls_under_way", "paused")}
        return prometheus.render(prometheus.Figures("treetune_gateway", gauges, found["counts"]))

    async def _health(self, request: HttpRequest) -> bytes:
        workers = self._pool.workers
        return encode({"status": "ok", "sessions": sum(len(one.keys) for one in workers), "workers": len(workers)})


def _find_host(headers: Headers) -> str:
    """The name under which the client reaches this machine."""
    name = urlsplit(f"//{dict(headers).get(b'host', b'').decode('latin-1')}").hostname or "127.0.0.1"
    return f"[{name}]" if ":" in name else name
