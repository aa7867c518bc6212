"""EnvServer: a taskset behind one address. It owns the order; clients pull tasks and have rollouts run.

    server = EnvServer(taskset, ServerConfig(address="tcp://127.0.0.1:5555"), ModelsConfig(model="my-model"))
    await server.start()
    await server.wait_stopped()

It answers what concerns the order itself; rollouts and episodes are jobs for its crew. How messages become answers
that are neither lost nor given twice is `front.py`'s to know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq

from treetune.episode import Limits
from treetune.errors import StorageError, UsageError, user_code
from treetune.host import EPISODE_IDLE_SECONDS, MOST_IN_GROUP, PROTOCOL, LocalHost, info_of
from treetune.serve.access import Access, bind_address, check_address, curve_server, seal_key, secret_key
from treetune.serve.errors import BadRequest, Busy, Misused, Stopping
from treetune.serve.executor import Crew, Job, LocalCrew
from treetune.serve.models import Models, ModelsConfig
from treetune.serve.store import Store
from treetune.serve.task_signer import Seals, new_key
from treetune.serve.work import Done, Work, failed
from treetune.serve.zmq.codec import pack, unpack
from treetune.serve.zmq.front import Front, Handler
from treetune.serve.zmq.sockets import MOST_BYTES, LoopSocket, new_socket
from treetune.serve.zmq.wire import (
    CancelRequest,
    CancelResponse,
    HealthResponse,
    InfoResponse,
    ObserveRequest,
    Request,
    Response,
    RestoreRequest,
    RunGroupRequest,
    SampleRequest,
    SampleResponse,
    StateRequest,
    StateResponse,
    StatsResponse,
    StepRequest,
    failure,
    raise_failure,
)
from treetune.streams import Draw, load
from treetune.taskset import Taskset

log = logging.getLogger("treetune.serve")
_MOST_WAITING = 20_000
"""Samples that wait for a slow taskset, before the answer is `busy`."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "tcp://127.0.0.1:5555"
    """Where to listen; port 0 takes a free one. Empty: nowhere, where there is another door."""
    access: Access = Access()
    capacity: Annotated[int, msgspec.Meta(ge=1)] = 512
    """The most rollouts and episodes under way at once; a group counts as many. Beyond it the answer is `busy`."""
    limits: Limits = Limits()
    """Turns and seconds of one rollout."""
    state: Path | None = None
    """The folder that keeps cursors, recent draws and the key of the seals."""
    key_file: Path | None = None
    """The key of the seals, where `state` is not to keep it."""
    accept_changes: bool = False
    """Go on with a `state` that belongs to other tasks."""
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long work under way may take to end when the server stops."""


class EnvServer(Front):
    def __init__(
        self, taskset: Taskset[Any, Any], config: ServerConfig | None = None, models: ModelsConfig | None = None
    ) -> None:
        self.config = config or ServerConfig()
        super().__init__(self.config.access.token)
        self.taskset = taskset
        self.models_config = models or ModelsConfig()
        self.address = self.config.address
        self.public_key: bytes | None = None
        """What a client needs where connections are encrypted."""
        self.metrics.gauges = self._gauges
        self._jobs: dict[bytes, Job] = {}
        self._in_flight = 0
        self._episodes: dict[str, float] = {}
        """When each live one was last heard of."""
        self._begun_by: dict[bytes, str] = {}
        """Which request began each live one."""
        self.on_episode_lost: Callable[[str], None] = lambda episode: None
        """Told of every episode that went with its worker, for another door."""
        self._recovered: dict[bytes, Draw] = {}
        self._stopping = False
        self._closing = False
        self._stopped = asyncio.Event()
        self._quiet = asyncio.Event()
        """While stopping: no request is under way any more."""
        self._opened = contextlib.AsyncExitStack()
        """What is to be closed, last opened first."""
        handlers: dict[str, Handler] = {
            "health": self._health,
            "info": self._info,
            "sample": self._sample,
            "run_rollout": self._run,
            "run_group": self._run,
            "start": self._run,
            "step": self._run,
            "cancel": self._cancel,
            "observe": self._observe,
            "state": self._state,
            "restore": self._restore,
            "stats": self._stats,
        }
        self._handlers = {name.encode(): (name, handler) for name, handler in handlers.items()}

    # Its life

    async def start(self) -> None:
        """Loads the taskset, gets the crew ready, and only then listens: who is answered is served."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        config, opened = self.config, self._opened
        if config.address:
            check_address(config.address, config.access)
        self.streams = await load(self.taskset)
        key = self._open_store()
        self.seals = Seals(key, self.streams.identity.digest)
        self.models = Models(self.models_config, self.taskset)
        opened.push_async_callback(self.models.close)
        self.host = LocalHost(self.streams, self.models.policy_of, config.limits)
        opened.push_async_callback(self.host.close)
        self.work = Work(self.host, self.seals, config.capacity)
        socket = new_socket(zmq.ROUTER, most_bytes=MOST_BYTES)
        if config.access.curve_key is not None:
            secret = secret_key(config.access.curve_key)
            curve_server(socket, secret)
            self.public_key = zmq.curve_public(secret)
        self._socket = LoopSocket(socket, self._on_batch)
        opened.callback(self._socket.close)
        self._here = LocalCrew(self.work)
        self.crew = self._make_crew(key)
        await self.crew.start()
        opened.push_async_callback(self.crew.close)
        if config.address:
            self.address = bind_address(socket, config.address)
        sweeper = asyncio.create_task(self._sweep())
        opened.callback(sweeper.cancel)

    def _make_crew(self, key: bytes) -> Crew:
        return self._here

    def _open_store(self) -> bytes:
        """The key of the seals; and where cursors were kept, goes on there."""
        config = self.config
        if config.state is not None:
            self._store = Store(config.state)
            self._opened.callback(self._store.close)
            self._store.adopt(self.streams.identity, config.accept_changes)
            self.streams.place(self._store.streams())
            self._recovered = self._store.draws()
        if config.key_file is not None:
            return seal_key(config.key_file)
        return self._store.key() if self._store is not None else new_key()

    async def stop(self) -> None:
        """Takes no more work, lets what is under way end, and closes."""
        if not self._stopping:
            await self.drain()
            await self.close()
        await self.wait_stopped()

    async def drain(self) -> None:
        """Takes no more work, and lets what is under way end."""
        self._stopping = True
        if self.answers.under_way:
            log.info("waiting for %d requests to end", self.answers.under_way)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._quiet.wait(), self.config.drain_seconds)

    async def close(self) -> None:
        """Closes at once; work under way is stopped."""
        self._stopping = self._closing = True
        await self._opened.aclose()
        self._stopped.set()

    async def wait_stopped(self) -> None:
        await self._stopped.wait()

    # What is answered here

    def _health(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        self._answer(identity, id, method, HealthResponse(ready=not self._stopping, in_flight=self._in_flight))

    def _info(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        self._read(id, payload, Request)
        info = info_of(self.streams)
        info.capacity, info.models = self.config.capacity, self.models.names
        self._answer(identity, id, method, InfoResponse(**msgspec.structs.asdict(info)))

    def _sample(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        request = self._read(id, payload, SampleRequest)
        if self._is_known(identity, id):
            return
        if self._stopping:
            raise Stopping("the server is stopping", remedy="ask again when it is back")
        draw = self._draw(id, request)
        if self.streams.cheap:
            try:
                task = self.streams.task(draw)
                data = self.work.sampled(task, draw.index)
            except Exception as error:
                self.answers.keep(id, pack(failure(error)))  # asked again, it is not drawn again
                raise
            self.metrics.sources[task.data_source] += 1
            self.answers.keep(id, data)
            self.metrics.request(method, 0.0)
            self._replies.append((identity, id, data))
            return
        self._begin(identity, id)
        self._made_later.append(Job(id, "make", msgspec.msgpack.encode(draw), self._finisher(id, method), size=0))

    def _draw(self, id: bytes, request: SampleRequest) -> Draw:
        if request.index is not None:
            self.streams.check_index(request.index)
            return Draw("", request.index)
        if self._recovered and (before := self._recovered.pop(id, None)) is not None:
            return before  # drawn by a server that died before its reply arrived
        if self.answers.under_way > _MOST_WAITING:
            raise Busy("too many requests are waiting for a task", remedy="ask again soon")
        self._changes(id, request.stream)
        draw = self.streams.advance(request.stream)
        self._drawn.append((id, draw))
        return draw

    async def draw(self, index: int | None = None) -> SampleResponse:
        """A sealed task for another door: the next of the stream without a name, or the one at an index."""
        if self._stopping:
            raise Stopping("the server is stopping", remedy="ask again when it is back")
        draw = self._drawn_now() if index is None else self._draw(b"", SampleRequest(index=index))
        if self.streams.cheap:
            task = self.streams.task(draw)
            self.metrics.sources[task.data_source] += 1
            return unpack(self.work.sampled(task, draw.index), SampleResponse)
        made: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        id = secrets.token_bytes(80)  # longer than any id that a client may give
        self._make(Job(id, "make", msgspec.msgpack.encode(draw), made.set_result, size=0))
        done = await asyncio.shield(made)
        response = unpack(done.data, SampleResponse)
        raise_failure(response)
        if done.source is not None:
            self.metrics.sources[done.source] += 1
        return response

    def _drawn_now(self) -> Draw:
        """The next draw, saved."""
        before = self.streams.stream_state("")
        draw = self.streams.advance("")
        if self._store is not None:
            try:
                self._store.commit({"": self.streams.stream_state("")}, [])
            except StorageError:
                self.streams.place({"": before})
                raise
        return draw

    def _observe(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        request = self._read(id, payload, ObserveRequest)
        task = self.work.task_of(request.task)
        if self._is_known(identity, id):
            return
        self._changes(id, request.stream)
        with user_code(f"{self.taskset.name}.curriculum().observe()"):
            self.streams.observe(task, request.reward, request.stream)
        self._done_here(identity, id, method, Response())

    def _state(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        request = self._read(id, payload, StateRequest)
        self._answer(identity, id, method, StateResponse(state=self.streams.state(request.stream)))

    def _restore(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        request = self._read(id, payload, RestoreRequest)
        if self._is_known(identity, id):
            return
        for stream in request.state.streams:
            self._changes(id, stream)
        self.streams.restore(request.state)
        self._done_here(identity, id, method, Response())

    def _stats(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        self._read(id, payload, Request)
        stats = {"name": self.taskset.name, **self.metrics.stats(), **self.crew.stats()}
        self._answer(identity, id, method, StatsResponse(stats=stats))

    def _done_here(self, identity: bytes, id: bytes, method: str, response: Any) -> None:
        self.answers.keep(id, pack(response))
        self._answer(identity, id, method, response)

    # What the crew does

    def _make(self, job: Job) -> None:
        # A generator has one owner, and it is here.
        (self._here if self.streams.sequential else self.crew).submit(job)

    def _run(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        size, episode = 1, None
        if method == "step":
            step = self._read(id, payload, StepRequest)
            size, episode = 0, step.episode
            self._check_protocol(step)
            if episode in self._episodes:
                self._episodes[episode] = time.monotonic()
        elif method == "run_group":
            group = self._read(id, payload, RunGroupRequest)
            self._check_protocol(group)
            size = group.n
            if not 1 <= size <= MOST_IN_GROUP:
                raise UsageError(f"a group has 1 to {MOST_IN_GROUP} rollouts, got {size}")
        else:
            self._check_protocol(self._read(id, payload, Request))
        if self._is_known(identity, id):
            return
        if self._stopping:
            raise Stopping("the server is stopping", remedy="ask again when it is back")
        capacity = self.config.capacity
        # A group that is larger than the capacity runs alone.
        if size and self._in_flight and self._in_flight + size > capacity:
            raise Busy(
                f"{self._in_flight} rollouts are under way, of {capacity} at most",
                remedy="ask again when some have ended, or serve with a larger --capacity",
            )
        if size > capacity:
            log.warning("a group of %d is larger than the capacity of %d", size, capacity)
        self._begin(identity, id)
        self._in_flight += size
        job = Job(id, method, payload, self._finisher(id, method, size), size, episode)
        self._jobs[id] = job
        self.crew.submit(job)

    def _check_protocol(self, request: Request) -> None:
        if request.protocol != PROTOCOL:
            raise Misused(
                f"this server speaks protocol {PROTOCOL}, the client protocol {request.protocol}",
                remedy="install the same version of treetune on both sides; a client of your own sends "
                f"`protocol: {PROTOCOL}` once it takes a reward that is null",
            )

    def _cancel(self, identity: bytes, id: bytes, method: str, payload: bytes) -> None:
        request = self._read(id, payload, CancelRequest)
        target = request.id.encode() if isinstance(request.id, str) else request.id
        if not isinstance(target, bytes):
            raise BadRequest("an id is bytes or text")
        # A start that was answered before it was cancelled: nobody will step what it began.
        episode = request.id if request.id in self._episodes else self._begun_by.get(target)
        if episode is not None:
            if not self._is_known(identity, id):
                self._begin(identity, id)
                self._end_episode(id, episode)
            return
        job = self._jobs.get(target)
        found = job is not None and self.crew.stop(target)
        if job is not None:
            job.stopped = True
        self._answer(identity, id, method, CancelResponse(found=found))

    def _end_episode(self, id: bytes, episode: str) -> None:
        job = Job(id, "cancel", pack(CancelRequest(id=episode)), self._finisher(id, "cancel"), 0, episode)
        self._jobs[id] = job
        self.crew.submit(job)

    def _finisher(self, id: bytes, method: str, size: int = 0) -> Callable[[Done], None]:
        began = time.perf_counter()

        def finish(done: Done) -> None:
            if self._closing and done.kind == "cancelled":
                # Nobody cancelled it: whoever waits asks again when the server is back.
                done = failed(Stopping("the server has stopped", remedy="ask again when it is back"))
            job = self._jobs.pop(id, None)
            self._in_flight -= size
            if done.source is not None:
                self.metrics.sources[done.source] += 1
            self._note_episode(id, method, done)
            if method == "start" and done.episode is not None and job is not None and job.stopped:
                self._end_episode(secrets.token_bytes(80), done.episode)  # it had begun before it could be stopped
            self.metrics.scored(done.scored)
            self.metrics.request(method, time.perf_counter() - began, done.kind)
            for identity in self.answers.finish(id, done.data):
                self._send((identity, id, done.data))
            if self._stopping and not self.answers.under_way:
                self._quiet.set()

        return finish

    def _note_episode(self, id: bytes, method: str, done: Done) -> None:
        """A live episode counts as one rollout under way."""
        if done.episode is None:
            return
        if method == "start":
            self._episodes[done.episode] = time.monotonic()
            self._begun_by[id] = done.episode
            self._in_flight += 1
        elif done.over and self._episodes.pop(done.episode, None) is not None:
            self._in_flight -= 1

    async def _sweep(self) -> None:
        """Forgets old answers, and the episodes that nobody steps any more; their hosts close them."""
        while True:
            await asyncio.sleep(5)
            self.answers.shrink()
            oldest = time.monotonic() - EPISODE_IDLE_SECONDS
            for episode in [id for id, heard in self._episodes.items() if heard < oldest]:
                self.forget_episode(episode)
                self.crew.forget(episode)
            self._begun_by = {id: episode for id, episode in self._begun_by.items() if episode in self._episodes}

    def forget_episode(self, episode: str) -> None:
        """An episode that is gone no longer counts."""
        self.on_episode_lost(episode)
        if self._episodes.pop(episode, None) is not None:
            self._in_flight -= 1

    def _gauges(self) -> dict[str, float]:
        return {
            "in_flight": self._in_flight,
            "episodes": len(self._episodes),
            "capacity": self.config.capacity,
            "kept_answers": len(self.answers),
            **{name: value for name, value in self.crew.stats().items() if isinstance(value, int)},
            **{f"cursor:{name}": index for name, index in list(self.streams.cursors.items())},
        }
