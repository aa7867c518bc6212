"""Workers as actors of a Ray cluster. Ray places them; jobs and beats go over encrypted ZMQ.

    EnvServerPool(taskset, config, models, PoolConfig(workers=8), RayEngine())

The pool's own heartbeat tells that a worker's node is gone, long before Ray lists it as dead, and a fresh actor takes
its place. The cluster is the one that this process is connected to, or the one that RAY_ADDRESS names.
"""

from __future__ import annotations

import asyncio
import pickle
from concurrent.futures import Future
from typing import Any

from treetune.errors import MissingExtraError, TreetuneError
from treetune.serve.pool.engines import Handle, OnExit
from treetune.serve.pool.worker import Worker, WorkerSpec


class RayEngine:
    encrypted = True

    def __init__(self, silent_seconds: float = 8.0, num_cpus: float = 1.0) -> None:
        """`num_cpus` is what Ray sets aside for each worker."""
        try:
            import ray
        except ImportError:
            raise MissingExtraError.of("Ray", "ray") from None
        self.silent_seconds = silent_seconds
        self._ray: Any = ray
        if not ray.is_initialized():
            try:
                ray.init(address="auto", log_to_driver=True, logging_level="ERROR")
            except ConnectionError as error:
                raise TreetuneError(
                    f"no Ray cluster: {error}",
                    remedy="start one with `ray start --head`, or set RAY_ADDRESS",
                ) from error
        self._actor = ray.remote(num_cpus=num_cpus, max_restarts=0)(_Actor)

    def address(self) -> str:
        return f"tcp://{self._ray.util.get_node_ip_address()}:0"

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> Handle:
        loop = asyncio.get_running_loop()
        actor = self._actor.remote()
        ended: Future[Any] = actor.run.remote(pickle.dumps(spec)).future()

        def told(future: Future[Any]) -> None:
            error = future.exception()
            how = f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else "ended"
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_exit, how)

        ended.add_done_callback(told)
        return _RayHandle(self._ray, actor)

    def close(self) -> None:
        return None


class _RayHandle:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def kill(self) -> None:
        self._ray.kill(self._actor, no_restart=True)


class _Actor:
    def run(self, pickled: bytes) -> None:
        asyncio.run(Worker(pickle.loads(pickled)).run())
