"""EnvServerPool: a server whose rollouts and environments run in workers. It keeps the order and the table of episodes.

server = EnvServerPool(taskset, config, models, PoolConfig(workers=4), doors=[ZmqDoor()])
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from treetune.config.structs import without_none
from treetune.core.environment import Action, Sink, Step
from treetune.core.mixture import is_made_alone, parts_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.trace import Trace
from treetune.errors import EnvironmentFault, format_error
from treetune.play.episode_table import EpisodeHandle
from treetune.play.protocol import Started
from treetune.play.streams import Streams
from treetune.runs.rolling import RollingRun
from treetune.serve import messages
from treetune.serve.errors import BadRequest, ServeError
from treetune.serve.host import HostSpec, ModelsConfig, Scored, ServerHost
from treetune.serve.messages import pack, unpack
from treetune.serve.pool import PoolConfig
from treetune.serve.pool.engines import Engine, ProcessEngine
from treetune.serve.pool.worker import WorkerEnded, WorkerHandle, WorkerSpec
from treetune.serve.pool.workers import WorkerPool
from treetune.serve.server import Door, EnvServer, ServerConfig
from treetune.serve.task_signer import concrete_task, pack_task, unpack_trace
from treetune.system.threads import call_apart


class PoolHost(ServerHost):
    """The host of a pool: it has the streams and the table of episodes; the workers do the rest."""

    def __init__(
        self,
        streams: Streams,
        spec: HostSpec,
        workers: WorkerPool,
        on_scored: Callable[[list[Scored]], None],
        counts: Counter[str],
    ) -> None:
        super().__init__(streams, spec, on_scored, counts)
        self.workers = workers
        workers.on_episode_lost = self._lose_episode
        workers.greetings = self._pack_weights
        streams.make_apart = self._make_in_worker

    async def prepare(self) -> None:
        await self.workers.start()

    def stats(self) -> dict[str, Any]:
        return {**self.workers.stats(), **self.weights.figures()}

    async def _make_in_worker(self, position: int) -> Task:
        if not is_made_alone(self.taskset, position):  # the task is in memory here, so workers need not load all tasks
            task: Task = await call_apart(self.taskset.__getitem__, position)
            return task
        _, data = await self.workers.call("make", pack(position), about=lambda: f"task {position}")
        return concrete_task(data, self.taskset)

    async def run_request(self, method: str, payload: bytes, size: int = 1) -> bytes:
        _, data = await self.workers.call(method, payload, size, about=functools.partial(_name_request, payload))
        return data

    async def run_rollout(self, task: Task, **options: Any) -> Trace:
        name = options.pop("request", None)
        request = messages.RunRolloutRequest(task=self._sign(task), **without_none(options))
        data = await self._run_named(name, self.run_request("run_rollout", pack(request)))
        return unpack_trace(unpack(data, messages.RunRolloutResponse).trace, task)

    async def run_group(self, task: Task, n: int, **options: Any) -> list[Trace]:
        name = options.pop("request", None)
        request = messages.RunGroupRequest(task=self._sign(task), n=n, **without_none(options))
        data = await self._run_named(name, self.run_request("run_group", pack(request), request.of or n))
        return [unpack_trace(trace, task) for trace in unpack(data, messages.RunGroupResponse).traces]

    def _sign(self, task: Task) -> msgspec.Raw:
        return msgspec.Raw(pack_task(task, self._spec.signer.sign(task)))

    async def change_weights(self, method: str, request: messages.WeightsRequest) -> bool:
        """Changes the weights here (for new workers and the metrics) and in every worker."""
        await super().change_weights(method, request)
        payload = pack((method, request))
        asked = [member.ask("weights", payload) for member in self.workers.ready]
        quiet = True
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, bytes):
                quiet = quiet and unpack(answer, bool)
            elif not isinstance(answer, WorkerEnded):  # a new worker gets it when it is ready
                raise answer
        return quiet

    def reach_version(self, model: str | None, endpoint: str | None, version: int) -> None:
        self.models.check(model, endpoint)
        if self.weights_of(model, endpoint).reach(version):
            request = messages.WeightsRequest(model=model, endpoint=endpoint, version=version)
            for member in self.workers.ready:
                member.messages.put(b"do", b"", b"weights", pack(("set_version", request)))

    def _pack_weights(self) -> list[bytes]:
        """The messages about weights that a new worker gets."""
        packed: list[bytes] = []
        for model, endpoint, weights in self.weights.known():
            request = messages.WeightsRequest(model=model, endpoint=endpoint, version=weights.version)
            if weights.version is not None:
                packed.append(pack(("set_version", request)))
            if weights.paused:
                paused = msgspec.structs.replace(request, calls="leave", seconds=weights.pause_left)
                packed.append(pack(("pause", paused)))
        return packed

    async def _open(self, id: str, task: Task) -> tuple[EpisodeHandle, Started]:
        member, data = await self.open_in_worker(id, task)
        return _WorkerEpisode(self, member, id, task, data), unpack(data, Started)

    async def open_in_worker(self, id: str, task: Task) -> tuple[WorkerHandle, bytes]:
        """Starts an environment in a worker; returns the worker and the first observation."""
        about, payload = functools.partial(_name, task), pack((id, task))
        while True:
            member, data = await self.workers.call("open", payload, 1, about=about, opens=id)
            if not member.gone:
                return member, data

    def _lose_episode(self, id: str, how: str) -> None:
        """Handles the death of an episode's worker. An episode without a step is restarted in another worker."""
        episode = self.episodes.live.get(id)
        if episode is None:
            return
        if isinstance(home := episode.home, _WorkerEpisode) and home.is_unplayed:
            home.move(how)
        else:
            self.episodes.lose(id, how)

    async def close(self) -> None:
        await super().close()
        await self.workers.close()


def _name(task: Task) -> str:
    return f"task {task.idx} of {task.data_source}"


def _name_request(payload: bytes) -> str:
    return _name(unpack(unpack(payload, messages.RunRequest).task, Task))


class _WorkerEpisode:
    """The environment of an episode in a worker."""

    __slots__ = ("_first", "_host", "_id", "_member", "_moving", "_name", "_task")

    def __init__(self, host: PoolHost, member: WorkerHandle, id: str, task: Task, first: bytes) -> None:
        """`first` is the worker's message with the first observation."""
        self._host, self._member, self._id, self._name = host, member, id, _name(task)
        self._task: Task | None = task
        """None after the first step: the episode cannot be restarted then."""
        self._first = blake2b(first, digest_size=16).digest()
        self._moving: asyncio.Task[None] | None = None

    @property
    def is_unplayed(self) -> bool:
        return self._task is not None

    async def play(self, action: Action, show: Sink) -> Step:
        if self._moving is not None:
            await asyncio.shield(self._moving)
        self._task = None
        payload, over = pack((self._id, action)), True
        workers = self._host.workers
        try:
            data = await self._member.ask("step", payload, show=show, steps=self._name)
            step = messages.to_step(unpack(data, messages.StepResponse))
            over = step.done
            return step
        except BadRequest as error:
            raise EnvironmentFault(
                f"the environment answered {error.message}", remedy="check what its environment returns"
            ) from None
        finally:
            if over:
                workers.release(self._member, self._id)

    async def close(self) -> None:
        if self._moving is not None:
            self._moving.cancel()
        await self._close_there()

    async def _close_there(self) -> None:
        workers = self._host.workers
        workers.release(self._member, self._id)
        with contextlib.suppress(ServeError):  # the worker is gone, and the environment with it
            await self._member.ask("close", self._id.encode())

    def move(self, how: str) -> None:
        """Restarts it in another worker. Steps wait until that is done."""
        self._moving = asyncio.create_task(self._move(how))

    async def _move(self, how: str) -> None:
        assert self._task is not None
        try:
            self._member, first = await self._host.open_in_worker(self._id, self._task)
            if blake2b(first, digest_size=16).digest() == self._first:
                self._moving = None
                return
            await self._close_there()
            problem = "after the restart it shows something else"
        except Exception as error:
            problem = f"it could not be restarted ({format_error(error)})"
        self._host.episodes.lose(self._id, f"{how}; {problem}")


class EnvServerPool(EnvServer):
    WORKERS = WorkerPool

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        config: ServerConfig | None = None,
        models: ModelsConfig | None = None,
        pool: PoolConfig | None = None,
        engine: Engine | None = None,
        *,
        doors: Sequence[Door],
        traces: RollingRun | None = None,
    ) -> None:
        super().__init__(taskset, config, models, doors=doors, traces=traces)
        self.pool_config = pool or PoolConfig()
        self._engine = engine

    def _make_host(self, spec: HostSpec) -> ServerHost:
        engine = self._engine or ProcessEngine()
        for part in parts_of(self.taskset):
            if not part.overrides("count"):
                part.count()  # cached, so that no worker loads the tasks to count them
        worker = WorkerSpec(host=spec, parent=None if engine.encrypted else os.getpid())
        counts = self.metrics.counts
        workers = self.WORKERS(worker, self.taskset, self.pool_config, engine, self.take_scored, counts)
        return PoolHost(self.streams, spec, workers, self.take_scored, counts)
