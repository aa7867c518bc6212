"""EnvServer: serves a taskset. It owns the order, the episodes and the capacity; doors share them.

    server = EnvServer(taskset, ServerConfig(), ModelsConfig(model="my-model"), doors=[ZmqDoor(), HttpDoor()])
    await server.start()
    await server.stop()

A door translates between a protocol and the server's host: ZMQ (`zmq/door.py`), HTTP (`http/routes.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple, TypedDict, TypeVar, Unpack

import msgspec

from treetune.core.contract import Limits
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import DrawFailed, StreamEnded, TreetuneError, UsageError
from treetune.play.episode_table import SessionLimits
from treetune.play.host import info_of
from treetune.play.leases import DRAW_TRIES, LONGEST_LEASE, Draw
from treetune.play.protocol import Info, Started
from treetune.play.streams import Streams, load
from treetune.runs.rolling import RollingRun
from treetune.serve.errors import Busy, Stopping
from treetune.serve.host import HostSpec, ModelsConfig, Scored, ServerHost
from treetune.serve.metrics import Metrics
from treetune.serve.store import Store, StoredStreams
from treetune.serve.task_signer import TaskSigner, new_key
from treetune.system import process_limits
from treetune.system.access import Access, load_signing_key

log = logging.getLogger("treetune.serve")
CAPACITY = 512
WATCH_SECONDS = 5.0
_TOLD_EVERY = 12
"""The log reports finished work once every this many checks, which is once a minute."""
_DRAIN_TICK = 0.02
_SWEEP_SECONDS = 0.25
T = TypeVar("T")


class Given(TypedDict, total=False):
    """Which client gets a task, and for how long."""

    request: bytes
    digest: bytes
    lease: float
    holder: bytes


class StartedTask(NamedTuple):
    """A started episode and its task."""

    started: Started
    task: Task
    draw: int
    """The task's index in the order."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    access: Access = Access()
    capacity: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The maximum number of concurrent rollouts and episodes, HTTP episodes included. A group counts once per rollout.
    Requests beyond it get `busy`. Absent: 512, or the HTTP door's episode limit if that is higher."""
    limits: Limits = Limits()
    """The turn and time limits of one rollout."""
    state: Path | None = None
    """The folder that stores cursors, recent draws and the key that signs tasks."""
    key_file: Path | None = None
    """The file of the signing key, if it should not be stored in `state`."""
    accept_changes: bool = False
    """Accept a `state` that belongs to other tasks or lacks its latest draws."""
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0
    """How long the server waits for running work when it stops."""
    draw_tries: Annotated[int, msgspec.Meta(ge=1)] = DRAW_TRIES
    """How often the task of a draw may fail before it is skipped."""
    lease: Annotated[float, msgspec.Meta(gt=0, le=LONGEST_LEASE)] | None = None
    """Seconds until a task is handed out again unless the client finishes or renews it. A request may override it.
    Absent: tasks are handed out only once."""


class Door:
    """A protocol by which clients reach a server."""

    name: ClassVar[str]
    address: str
    """The address it listens on; contains the actual port once it is open."""
    public_key: bytes | None = None
    """The key that clients need if connections are encrypted."""
    ended: asyncio.Event | None = None
    """Set when no client can use the door any more; the server then stops. None if that cannot happen."""

    def attach(self, server: EnvServer) -> None:
        """Called before anything is loaded. Raises UsageError for an invalid address."""
        self.server = server

    async def open(self) -> None:
        """Starts listening. The server is ready for work."""

    def under_way(self) -> int:
        """The number of its requests that have not ended."""
        return 0

    async def close(self) -> None:
        """Stops its work and closes its sockets, even if opening it failed."""

    def abandon(self, name: Hashable) -> None:
        """Stops the work of a request whose client has disconnected."""

    def gauges(self) -> dict[str, float]:
        """Its metrics."""
        return {}


class EnvServer:
    def __init__(
        self,
        taskset: Taskset[Any, Any],
        config: ServerConfig | None = None,
        models: ModelsConfig | None = None,
        *,
        doors: Sequence[Door],
        traces: RollingRun | None = None,
    ) -> None:
        """Doors are opened in the given order and closed in reverse. `traces` stores the trace of every rollout and
        episode, and is closed with the server."""
        self.config = config or ServerConfig()
        self.taskset = taskset
        self.models_config = models or ModelsConfig()
        self.capacity = self.config.capacity or CAPACITY
        self.metrics = Metrics(self._gauges)
        self.traces = traces
        self.order: StoredStreams
        self.host: ServerHost
        self.signer: TaskSigner
        self.stopping = False
        """The server accepts no new work."""
        self.closing = False
        """Running work is being stopped."""
        self._reserved = 0
        self._opened = contextlib.AsyncExitStack()
        """What has to be closed, in reverse order of opening."""
        self.doors = list(doors)
        for door in self.doors:
            door.attach(self)

    # Lifecycle

    async def start(self) -> None:
        """Loads the taskset, starts the workers, and listens when all are ready."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        if self.traces is not None:
            self._opened.push_async_callback(asyncio.to_thread, self.traces.close)
        streams = await load(self.taskset, self.config.draw_tries)
        self.signer = TaskSigner(self._open_store(streams), streams.identity.digest)
        spec = HostSpec(
            models=self.models_config,
            limits=self.config.limits,
            signer=self.signer,
            capacity=self.capacity,
            keeps_traces=self.traces is not None,
        )
        self.host = self._make_host(spec)
        self._opened.push_async_callback(self.host.close)
        await self.host.prepare()
        self._opened.callback(self._log_ended)
        self._opened.callback(asyncio.create_task(self._watch()).cancel)
        sweeper = asyncio.create_task(self._sweep())
        self._opened.callback(sweeper.cancel)
        for door in self.doors:
            self._opened.push_async_callback(door.close)
            await door.open()

    async def _watch(self) -> None:
        for beat in itertools.count(1):
            await asyncio.sleep(WATCH_SECONDS)
            process_limits.check_descriptors()
            if beat % _TOLD_EVERY == 0:
                self._log_ended()

    def _log_ended(self) -> None:
        for line in self.metrics.report_ended():
            log.info("%s", line)

    def _make_host(self, spec: HostSpec) -> ServerHost:
        return ServerHost(self.streams, spec, self.take_scored, self.metrics.counts)

    def _open_store(self, streams: Streams) -> bytes:
        """Returns the key that signs tasks. Restores stored cursors."""
        config, store = self.config, None
        if config.state is not None:
            store = Store(config.state, accept_loss=config.accept_changes)
            self._opened.callback(store.close)
            store.adopt(streams.identity, config.accept_changes)
        self.order = StoredStreams(streams, store)
        self._opened.callback(self.commit)
        if config.key_file is not None:
            return load_signing_key(config.key_file)
        return store.key if store is not None else new_key()

    @property
    def streams(self) -> Streams:
        return self.order.streams

    @property
    def address(self) -> str:
        """The address of its first door."""
        return self.doors[0].address

    @property
    def addresses(self) -> dict[str, str]:
        """The address of each door, by the door's name."""
        return {door.name: door.address for door in self.doors}

    @property
    def public_key(self) -> bytes | None:
        return next((door.public_key for door in self.doors if door.public_key is not None), None)

    async def stop(self) -> None:
        """Stops accepting work, waits for running work, and closes."""
        await self.drain()
        await self.close()

    async def drain(self) -> None:
        """Stops accepting work and waits for running work, with one time limit for all doors."""
        self.stopping = True
        if left := self._under_way():
            log.info("waiting for running work: %s", left)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.drain_seconds):
                while self._under_way():  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_TICK)
        if left := self._under_way():
            log.info("had not ended: %s", left)

    def _under_way(self) -> str:
        return ", ".join(f"{door.name} {count}" for door in self.doors if (count := door.under_way()))

    async def close(self) -> None:
        """Closes immediately and cancels running work."""
        self.stopping = self.closing = True
        await self._opened.aclose()

    # Called by the doors

    def info(self) -> Info:
        info = info_of(self.streams)
        info.capacity, info.models = self.capacity, self.host.models.names
        return info

    def refuse_stopping(self) -> None:
        if self.stopping:
            raise Stopping("the server is stopping", remedy="retry when it is back")

    async def sample(self, index: int | None = None) -> tuple[Task, int]:
        """Returns the next task of the unnamed stream, or the task at `index`, with the index of its draw."""
        self.refuse_stopping()

        async def fetch(draw: Draw) -> tuple[int, Task]:
            task = await self.host.fetch(draw)
            return task.idx, task

        if index is not None:
            draw = self.streams.draw_at(index)
            _, task = await fetch(draw)
        else:
            draw = self.order.advance("")
            self.streams.pending.hold(draw)
            task = await self.make(draw, fetch, lease=self.config.lease or 0.0)
        self.metrics.sources[task.data_source] += 1
        return task, draw.index

    def refuse_beyond_end(self, index: int | None) -> None:
        count = self.streams.count
        if index is not None and count is not None and index >= count:
            raise UsageError(f"there is no task {index}: indices go from 0 to {count - 1}")

    async def start_episode(
        self, index: int | None, terms: SessionLimits, *, step: int | None = None, name: Hashable | None = None
    ) -> StartedTask:
        """Starts an episode of the next task, or of the task at an index, under the limits of a door. It counts against
        the capacity from now on."""
        self.refuse_stopping()
        self.reserve(1)
        terms.starting += 1
        try:
            self.refuse_beyond_end(index)
            task, drawn = await self.sample(index)
            return StartedTask(await self.host.start(task, step=step, terms=terms, name=name), task, drawn)
        finally:
            terms.starting -= 1
            self.release(1)

    async def make(self, draw: Draw, fetch: Callable[[Draw], Awaitable[tuple[int, T]]], **given: Unpack[Given]) -> T:
        """Returns the result of `fetch` for a held draw, with the `idx` of its task. The draw is then stored."""
        try:
            task, result = await self.streams.make(draw, fetch, (Stopping,))
        except (DrawFailed, StreamEnded):
            self.order.refuse(given.get("request", b""), given.get("digest", b""))
            self.commit()
            raise
        self.order.hand_out(draw, task, **given)
        self.order.commit()
        return result

    def commit(self) -> None:
        """Stores changes that no request caused. If that fails, the next change tries again."""
        try:
            self.order.commit()
        except TreetuneError as error:
            log.error("%s", error)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            try:
                if self.streams.pending.leased:
                    self._expire_leases()
                if self.streams.pending.changed:
                    self.commit()
            except Exception:
                log.exception("checking the leases failed")

    def _expire_leases(self) -> None:
        """Releases tasks whose leases expired and stops their work."""
        pending, episodes = self.streams.pending, self.host.episodes
        for id in [id for id, episode in episodes.live.items() if episode.playing is not None]:
            pending.renew_work(id)  # its client waits for the step
        before = pending.expired
        for name in pending.expire():
            if isinstance(name, str) and name in episodes.live:
                episodes.end(episodes.live[name], "expired", "the lease of its task expired")
            for door in self.doors:
                door.abandon(name)
        if pending.expired > before:
            log.info("%d leases expired: their tasks are handed out again", pending.expired - before)

    @property
    def in_flight(self) -> int:
        """The number of running rollouts, and of episodes that are live or starting."""
        return self._reserved + len(self.host.episodes.live)

    def reserve(self, size: int) -> None:
        """Reserves capacity for rollouts, or for an episode that is starting; `release` frees it."""
        used = self.in_flight
        # A group that is larger than the capacity runs alone.
        if size and used and used + size > self.capacity:
            raise Busy(
                f"{used} rollouts are running, of {self.capacity} at most",
                remedy="retry when some have ended, or serve with a larger --capacity",
            )
        if size > self.capacity:
            log.warning("a group of %d is larger than the capacity of %d", size, self.capacity)
        self._reserved += size

    def release(self, size: int) -> None:
        self._reserved -= size

    def take_scored(self, scored: list[Scored]) -> None:
        """Counts and stores every finished rollout and episode of all doors."""
        self.metrics.count_scored(scored)
        if self.traces is not None:
            for one in scored:
                self.traces.put(one.line)

    def _gauges(self) -> dict[str, float]:
        gauges: dict[str, float] = {
            "in_flight": self.in_flight,
            "episodes": len(self.host.episodes.live),
            "capacity": self.capacity,
            "leases": self.streams.pending.leased,
            "expired_leases": self.streams.pending.expired,
            "given_back": self.streams.pending.given_back,
            "skipped_draws": self.streams.pending.skipped,
            **{name: value for name, value in self.host.stats().items() if isinstance(value, int)},
            **{f"cursor:{name}": index for name, index in list(self.streams.cursors.items())},
        }
        if self.traces is not None:
            gauges |= self.traces.figures()
        for door in self.doors:
            gauges |= door.gauges()
        return gauges
