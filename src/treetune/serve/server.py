"""EnvServer: a taskset that is served. It owns the order, the episodes and the capacity, whichever door is used.

    server = EnvServer(taskset, ServerConfig(address="tcp://127.0.0.1:5555"), ModelsConfig(model="my-model"))
    await server.start()
    await server.wait_stopped()

Two doors translate between their wire and its host: ZMQ (`zmq/door.py`) and HTTP (`http/`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec
import zmq

from treetune.episode import Limits
from treetune.host import Info, LocalHost, info_of
from treetune.serve.access import Access, bind_address, check_address, encrypt_server, load_curve_key, load_signing_key
from treetune.serve.errors import Busy, Stopping
from treetune.serve.executor import Executor, LocalExecutor
from treetune.serve.metrics import Metrics
from treetune.serve.models import Models, ModelsConfig
from treetune.serve.store import Store, StoredStreams
from treetune.serve.task_signer import TaskSigner, new_key
from treetune.serve.zmq.door import ZmqDoor
from treetune.serve.zmq.sockets import MOST_BYTES, new_socket
from treetune.streams import Streams, load
from treetune.task import Task
from treetune.taskset import Taskset

log = logging.getLogger("treetune.serve")
CAPACITY = 512


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    address: str = "tcp://127.0.0.1:5555"
    """Where to listen; port 0 takes a free one. Empty: nowhere, where there is another door."""
    access: Access = Access()
    capacity: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The most rollouts and episodes under way at once, those over HTTP too; a group counts as many. Beyond it the
    answer is `busy`. Absent: 512, or as many episodes as the HTTP door allows where that is more."""
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


class EnvServer:
    def __init__(
        self, taskset: Taskset[Any, Any], config: ServerConfig | None = None, models: ModelsConfig | None = None
    ) -> None:
        self.config = config or ServerConfig()
        self.taskset = taskset
        self.models_config = models or ModelsConfig()
        self.capacity = self.config.capacity or CAPACITY
        self.address = self.config.address
        self.public_key: bytes | None = None
        """What a client needs where connections are encrypted."""
        self.metrics = Metrics()
        self.metrics.gauges = self._gauges
        self.door = ZmqDoor(self)
        self.order: StoredStreams
        self.host: LocalHost
        self.executor: Executor
        self.signer: TaskSigner
        self.stopping = False
        """Takes no more work."""
        self.closing = False
        """Work under way is stopped."""
        self._reserved = 0
        self._stopped = asyncio.Event()
        self._opened = contextlib.AsyncExitStack()
        """What is to be closed, last opened first."""

    # Its life

    async def start(self) -> None:
        """Loads the taskset, gets the workers ready, and only then listens: who is answered is served."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> None:
        config, opened = self.config, self._opened
        if config.address:
            check_address(config.address, config.access)
        streams = await load(self.taskset)
        key = self._open_store(streams)
        self.signer = TaskSigner(key, streams.identity.digest)
        self.models = Models(self.models_config, self.taskset)
        opened.push_async_callback(self.models.close)
        socket = new_socket(zmq.ROUTER, most_bytes=MOST_BYTES)
        if config.access.curve_key is not None:
            secret = load_curve_key(config.access.curve_key)
            encrypt_server(socket, secret)
            self.public_key = zmq.curve_public(secret)
        self.door.open(socket)
        opened.callback(self.door.close)
        self.host, self.executor = self._make_host(key)
        opened.push_async_callback(self.host.close)
        await self.executor.start()
        opened.push_async_callback(self.executor.close)
        opened.push_async_callback(self.door.stop_work)
        if config.address:
            self.address = bind_address(socket, config.address)

    def _make_host(self, key: bytes) -> tuple[LocalHost, Executor]:
        host = LocalHost(self.streams, self.models.policy_of, self.config.limits)
        return host, LocalExecutor(host, self.signer, self.capacity, self.metrics.count_scored)

    def _open_store(self, streams: Streams) -> bytes:
        """The key of the seals; and where cursors were kept, goes on there."""
        config, store = self.config, None
        if config.state is not None:
            store = Store(config.state)
            self._opened.callback(store.close)
            store.adopt(streams.identity, config.accept_changes)
            streams.place(store.streams())
        self.order = StoredStreams(streams, store)
        if config.key_file is not None:
            return load_signing_key(config.key_file)
        return store.key() if store is not None else new_key()

    @property
    def streams(self) -> Streams:
        return self.order.streams

    async def stop(self) -> None:
        """Takes no more work, lets what is under way end, and closes."""
        if not self.stopping:
            await self.drain()
            await self.close()
        await self.wait_stopped()

    async def drain(self) -> None:
        """Takes no more work, and lets what is under way end."""
        self.stopping = True
        await self.door.drain(self.config.drain_seconds)

    async def close(self) -> None:
        """Closes at once; work under way is stopped."""
        self.stopping = self.closing = True
        await self._opened.aclose()
        self._stopped.set()

    async def wait_stopped(self) -> None:
        await self._stopped.wait()

    # What both doors ask

    def info(self) -> Info:
        info = info_of(self.streams)
        info.capacity, info.models = self.capacity, self.models.names
        return info

    def refuse_stopping(self) -> None:
        if self.stopping:
            raise Stopping("the server is stopping", remedy="ask again when it is back")

    async def sample(self, index: int | None = None) -> tuple[Task, int]:
        """The next task of the stream without a name, or the one at an index; and which draw it is."""
        self.refuse_stopping()
        draw = self.order.draw(index=index)
        self.order.commit()
        task = await self.host.fetch(draw)
        self.metrics.sources[task.data_source] += 1
        return task, draw.index

    @property
    def in_flight(self) -> int:
        """Rollouts under way, and episodes that live or start."""
        return self._reserved + len(self.host.episodes.live)

    def reserve(self, size: int) -> None:
        """Makes room for rollouts, or for an episode while it starts; `release` gives it back."""
        used = self.in_flight
        # A group that is larger than the capacity runs alone.
        if size and used and used + size > self.capacity:
            raise Busy(
                f"{used} rollouts are under way, of {self.capacity} at most",
                remedy="ask again when some have ended, or serve with a larger --capacity",
            )
        if size > self.capacity:
            log.warning("a group of %d is larger than the capacity of %d", size, self.capacity)
        self._reserved += size

    def release(self, size: int) -> None:
        self._reserved -= size

    def _gauges(self) -> dict[str, float]:
        return {
            "in_flight": self.in_flight,
            "episodes": len(self.host.episodes.live),
            "capacity": self.capacity,
            "kept_answers": len(self.door.replies),
            **{name: value for name, value in self.executor.stats().items() if isinstance(value, int)},
            **{f"cursor:{name}": index for name, index in list(self.streams.cursors.items())},
        }
