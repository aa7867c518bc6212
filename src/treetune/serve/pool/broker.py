"""EnvServerPool: a server whose rollouts and environments run in many workers; the order and the episodes' book stay.

server = EnvServerPool(taskset, config, models, PoolConfig(workers=4))
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import msgspec

from treetune.environment import Action, Observation, Sink, Step
from treetune.episode import Limits
from treetune.episode_book import Home
from treetune.errors import EnvironmentFault
from treetune.host import LocalHost, PolicyOf
from treetune.serve.errors import BadRequest, ServeError, WorkerLost
from treetune.serve.executor import Executor
from treetune.serve.models import ModelsConfig
from treetune.serve.pool.engines import Engine, ProcessEngine
from treetune.serve.pool.worker import OpenPayload, StepPayload, WorkerSpec, counts_of
from treetune.serve.pool.workers import Call, Member, PoolConfig, Workers
from treetune.serve.server import EnvServer, ServerConfig
from treetune.serve.task_signer import TaskSigner, concrete_task, pack_task, unpack_trace
from treetune.serve.zmq import wire
from treetune.serve.zmq.wire import pack, unpack, without_none
from treetune.streams import Draw, Streams
from treetune.task import Task
from treetune.taskset import Taskset
from treetune.trace import Trace


class PoolHost(LocalHost):
    """The host of a pool: its streams and episodes are kept here, all else is done by the workers."""

    def __init__(
        self, streams: Streams, policy_of: PolicyOf, limits: Limits, workers: Workers, signer: TaskSigner
    ) -> None:
        super().__init__(streams, policy_of, limits)
        self._workers, self._signer = workers, signer
        workers.on_episode_lost = self.episodes.lose

    async def fetch(self, draw: Draw) -> Task:
        # A generator has one owner, and it is here.
        if self.streams.sequential or self.streams.cheap:
            return await super().fetch(draw)
        return concrete_task(await self._workers.run("make", msgspec.msgpack.encode(draw), size=0), self.taskset)

    async def run_rollout(self, task: Task, **options: Any) -> Trace:
        name = options.pop("request", None)
        request = wire.RunRolloutRequest(task=self._sign(task), **without_none(options))
        data = await self._run_named(name, self._workers.run("run_rollout", pack(request)))
        return unpack_trace(unpack(data, wire.RunRolloutResponse).trace, task)

    async def run_group(self, task: Task, n: int, **options: Any) -> list[Trace]:
        name = options.pop("request", None)
        request = wire.RunGroupRequest(task=self._sign(task), n=n, **without_none(options))
        data = await self._run_named(name, self._workers.run("run_group", pack(request), n))
        return [unpack_trace(trace, task) for trace in unpack(data, wire.RunGroupResponse).traces]

    def _sign(self, task: Task) -> msgspec.Raw:
        return msgspec.Raw(pack_task(task, self._signer.sign(task)))

    async def _open(self, id: str, task: Task) -> tuple[Home, Observation]:
        call = Call("open", pack(OpenPayload(id, msgspec.Raw(pack(task)))), size=1, opens=id)
        observation = unpack(await self._workers.call(call), Observation)
        if call.member is None or not self._workers.has(call.member):
            raise WorkerLost("the worker of this episode died", remedy="start another")
        return _HomeInWorker(self._workers, call.member, id), observation


class _HomeInWorker:
    """The environment of an episode in a worker."""

    __slots__ = ("_id", "_member", "_workers")

    def __init__(self, workers: Workers, member: Member, id: str) -> None:
        self._workers, self._member, self._id = workers, member, id

    async def play(self, action: Action, show: Sink) -> Step:
        payload, over = pack(StepPayload(self._id, action)), True
        try:
            data = await self._workers.call(Call("step", payload, member=self._member, pinned=True, show=show))
            response = unpack(data, wire.StepResponse)
            over = response.done
        except BadRequest as error:
            raise EnvironmentFault(
                f"the environment answered {error.message}", remedy="see what its environment returns"
            ) from None
        finally:
            if over:
                self._workers.release(self._member, self._id)
        return Step(response.observation, response.reward, response.done, response.info, response.truncated)

    async def close(self) -> None:
        self._workers.release(self._member, self._id)
        with contextlib.suppress(ServeError):  # its worker is gone, and the environment with it
            await self._workers.call(Call("close", self._id.encode(), member=self._member, pinned=True))


class EnvServerPool(EnvServer):
    WORKERS = Workers

    def __init__(
        self,
        taskset: Taskset[Any, Any],
        config: ServerConfig | None = None,
        models: ModelsConfig | None = None,
        pool: PoolConfig | None = None,
        engine: Engine | None = None,
    ) -> None:
        super().__init__(taskset, config, models)
        self.pool_config = pool or PoolConfig()
        self._engine = engine

    def _make_host(self, key: bytes) -> tuple[LocalHost, Executor]:
        engine = self._engine or ProcessEngine()
        spec = WorkerSpec(
            identity=b"",
            address="",
            server_key=None,
            taskset=self.taskset,
            count=self.streams.count,
            counts=counts_of(self.taskset),
            models=self.models_config,
            limits=self.config.limits,
            capacity=self.capacity,
            key=key,
            scope=self.streams.identity.digest,
            parent=None if engine.encrypted else os.getpid(),
        )
        workers = self.WORKERS(spec, self.pool_config, engine, self.metrics.count_scored)
        host = PoolHost(self.streams, self.models.policy_of, self.config.limits, workers, self.signer)
        return host, workers
