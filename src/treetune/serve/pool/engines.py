"""Engines start a pool's workers, as processes on this machine or as actors of a Ray cluster.

    engine = load_engine("processes")
    engine.prepare(taskset)                      # once, in a thread
    handle = engine.start(spec, on_exit)
    engine.kill(handle)

An engine only starts and kills workers. The pool itself detects dead and stuck workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import pickle
import shutil
import signal
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvloop

from treetune.core.taskset import Taskset
from treetune.errors import TreetuneError, UsageError, format_error
from treetune.serve.pool.worker import Worker, WorkerSpec
from treetune.system.processes import join_cluster, spawn_context, why_waiting
from treetune.system.threads import call_apart

log = logging.getLogger("treetune.serve")

OnExit = Callable[[str], None]
"""Called once, on the event loop, with the reason why a worker ended."""
_REMEMBERED = 1000
_WHY_SECONDS = 5.0
_PREFIX = "treetune-pool-"


class ProcessEngine:
    """Runs workers as processes on this machine. Their exit is noticed at once; the heartbeat is for stuck workers."""

    encrypted = False
    """Whether connections to workers leave this machine and are therefore encrypted."""
    silent_seconds = 60.0
    """A worker without a heartbeat for this long counts as dead."""

    _scratch: ScratchFolder | None = None

    def prepare(self, taskset: Taskset[Any, Any]) -> None:
        """Pickles the taskset once for all workers. Pickling a large one blocks the process for seconds, even in a
        thread, so replacing a worker must not repeat it."""
        try:
            self._scratch = ScratchFolder()
            self._folder = self._scratch.path
            self._taskset = self._folder / "taskset.pickle"
            with open(self._taskset, "wb") as file:
                pickle.dump(taskset, file, pickle.HIGHEST_PROTOCOL)
        except OSError as error:
            raise TreetuneError(
                f"{taskset.name} cannot be written to a file for the workers: {error}",
                remedy="make room there, or set TMPDIR",
            ) from error
        except Exception as error:
            raise _unpicklable(taskset, error) from error

    def address(self) -> str:
        """The address where the broker listens for workers."""
        return f"ipc://{self._folder}/workers"

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> Any:
        """Starts a worker; returns the handle that `kill` takes."""
        folder = self._folder / spec.identity.decode()
        folder.mkdir()
        # Spawned, not forked: threads and locks of user code are not copied.
        process: Any = spawn_context().Process(
            target=_run_process, args=(spec, self._taskset, folder), name=folder.name
        )
        process.start()
        loop = asyncio.get_running_loop()

        def report() -> None:
            loop.remove_reader(process.sentinel)
            process.join()
            call_apart(shutil.rmtree, folder, True)
            code = process.exitcode or 0
            process.close()  # otherwise its descriptor stays open until garbage collection
            on_exit(f"killed by signal {-code}" if code < 0 else f"exit code {code}")

        loop.add_reader(process.sentinel, report)
        return process

    def kill(self, process: Any) -> None:
        process.kill()

    def why_waiting(self) -> str | None:
        """Returns why workers do not start, if that is known."""
        return None

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()


def _run_process(spec: WorkerSpec, pickled: Path, folder: Path) -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # signals may reach the whole process group; the broker handles them
    # Temporary files of user code are removed with the worker.
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    with contextlib.suppress(OSError):
        # If memory runs out, the kernel should kill a worker rather than the broker.
        Path("/proc/self/oom_score_adj").write_text("500")
    with open(pickled, "rb") as file:
        taskset = pickle.load(file)
    uvloop.run(Worker(spec, taskset).run())
    # Stuck threads of user code must not keep the process alive.
    os._exit(0)


class RayEngine:
    """Workers that are actors of a Ray cluster, with one CPU each. The pool's own heartbeat detects a lost node long
    before Ray lists it as dead."""

    encrypted = True
    silent_seconds = 8.0

    def __init__(self) -> None:
        self._ray: Any = join_cluster()
        self._actor = self._ray.remote(num_cpus=1, max_restarts=0)(_RayActor)
        self._begun: deque[Any] = deque(maxlen=_REMEMBERED)
        """For each of the last workers, a reference that is ready once the cluster has placed it."""

    def prepare(self, taskset: Taskset[Any, Any]) -> None:
        try:
            pickled = pickle.dumps(taskset, pickle.HIGHEST_PROTOCOL)
        except Exception as error:
            raise _unpicklable(taskset, error) from error
        self._taskset = self._ray.put(pickled)  # once per node, not once per worker

    def address(self) -> str:
        return f"tcp://{self._ray.util.get_node_ip_address()}:0"

    def start(self, spec: WorkerSpec, on_exit: OnExit) -> Any:
        loop = asyncio.get_running_loop()
        actor = self._actor.remote()
        self._begun.append(actor.__ray_ready__.remote())
        ended: Future[Any] = actor.run.remote(pickle.dumps(spec), self._taskset).future()

        def report(future: Future[Any]) -> None:
            error = future.exception()
            how = f"{type(error).__name__}: {error}".splitlines()[0] if error is not None else "ended"
            if not loop.is_closed():
                loop.call_soon_threadsafe(on_exit, how)

        ended.add_done_callback(report)
        return actor

    def kill(self, actor: Any) -> None:
        def kill() -> None:
            with contextlib.suppress(Exception):  # the actor or its cluster is already gone
                self._ray.kill(actor, no_restart=True)

        call_apart(kill)  # blocks if the head of the cluster does not answer

    def why_waiting(self) -> str | None:
        why = why_waiting(self._ray, self._begun)
        return why and f"{why}; each worker needs one (-w)"

    def close(self) -> None:
        return None


class _RayActor:
    def run(self, spec: bytes, taskset: bytes) -> None:
        asyncio.run(Worker(pickle.loads(spec), pickle.loads(taskset)).run())


Engine = ProcessEngine | RayEngine


async def ask_why(engine: Engine) -> str | None:
    """Returns why workers do not start, if the engine finds out in time."""
    try:
        async with asyncio.timeout(_WHY_SECONDS):
            why: str | None = await call_apart(engine.why_waiting)
            return why
    except Exception as error:  # for example, the cluster does not answer
        log.debug("could not determine why workers do not start: %s", format_error(error))
        return None


def load_engine(name: str) -> Engine:
    if name == "processes":
        return ProcessEngine()
    if name == "ray":
        return RayEngine()
    raise UsageError(f"unknown engine {name!r}", remedy="use processes or ray")


def _unpicklable(taskset: Taskset[Any, Any], error: Exception) -> UsageError:
    return UsageError(
        f"{taskset.name} cannot be sent to a worker: {format_error(error)}",
        remedy="define it in a module or file, without open files or lambdas; or leave out --workers",
    )


class ScratchFolder:
    """A folder of this process for the needs of its workers: their socket, the taskset, their temporary files.

    The folder is locked while its process lives. The next process that creates such a folder removes the folders of
    killed processes.
    """

    def __init__(self) -> None:
        # Only the owner can access it. A socket's path has at most 107 characters, which a long TMPDIR exceeds.
        usual = tempfile.gettempdir()
        place = Path(usual if len(usual) <= 64 else "/tmp")
        for left in place.glob(f"{_PREFIX}*"):
            if (lock := _lock_folder(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            lock = _lock_folder(self.path)
            if lock is not None and self.path.exists():  # otherwise another process removed it as abandoned
                self._lock = lock
                return

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _lock_folder(folder: Path) -> int | None:
    """Locks the folder; returns None if a live process holds it, or another user owns it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            # The lock is bound to the descriptor, which no child has: spawned processes close it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
