"""What a pool's workers run on: processes of this machine, or actors of a Ray cluster.

    handle = engine.start(spec, on_exit)
    handle.kill()

An engine only starts and kills. Calls and beats go over ZMQ, so the pool itself notices a worker that is gone or stuck.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from treetune.errors import MissingExtraError, TreetuneError, UsageError
from treetune.serve.pool.worker import Worker, WorkerSpec, run_worker
from treetune.serve.zmq.sockets import socket_folder

OnExit = Callable[[str], None]
"""Called once, on the event loop, with how a worker has ended."""


class Handle(Protocol):
    def kill(self) -> None:
        """Ends the worker at once, whatever it is doing."""
        ...


class Engine(Protocol):
    silent_seconds: float
    """A worker that has not beaten for so long is taken for dead."""
    encrypted: bool
    """Whether the way to its workers leaves this machine, and so is encrypted."""

    def address(self) -> str:
        """Where the broker listens for workers."""
        ...

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> Handle: ...

    def close(self) -> None: ...


class ProcessEngine:
    """Workers as processes of this machine. Their end is noticed at once; the long silence is for one that hangs."""

    encrypted = False

    def __init__(self, silent_seconds: float = 60.0) -> None:
        self.silent_seconds = silent_seconds
        self._folder = socket_folder()

    def address(self) -> str:
        return f"ipc://{self._folder}/workers"

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> Handle:
        # Spawned, not forked: whatever threads and locks user code holds stay behind.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=run_worker, args=(spec,), name=spec.identity.decode())
        try:
            process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise UsageError(
                f"{spec.taskset.name} cannot be sent to a worker: {error}",
                remedy="define it in a module or file, without open files or lambdas; or leave out --workers",
            ) from error
        return _ProcessHandle(process, on_exit)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class _ProcessHandle:
    def __init__(self, process: multiprocessing.context.SpawnProcess, on_exit: OnExit) -> None:
        self._process = process
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(process.sentinel, self._report_exit)

    def kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()

    def _report_exit(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._process.join()
        code = self._process.exitcode or 0
        self._on_exit(f"killed by signal {-code}" if code < 0 else f"exit code {code}")


class RayEngine:
    """Workers as actors of the Ray cluster that this process is connected to, or the one that RAY_ADDRESS names. The
    pool's own heartbeat tells that a worker's node is gone, long before Ray lists it as dead."""

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

        def report(future: Future[Any]) -> None:
            error = future.exception()
            how = f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else "ended"
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_exit, how)

        ended.add_done_callback(report)
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


def load_engine(name: str) -> Engine:
    """The engine that `--engine` names."""
    if name == "processes":
        return ProcessEngine()
    if name == "ray":
        return RayEngine()
    raise UsageError(f"unknown engine {name!r}", remedy="use processes or ray")
