"""Processes for work that must be killable, such as a query that cannot be interrupted, process pools, and Ray.

    workers = ProgramPool(__file__, "SQLite", remedy="install Python's sqlite3")
    replies = workers.ask(["SELECT 1", 5.0], 1)      # blocks, so call it in a thread
    ProcessPoolExecutor(2, spawn_context())          # runs no file of the current folder when it starts
    join_cluster().remote(work).remote()             # the running Ray cluster, with its token if it has one

A worker is one of our files, run as a program. It is started when needed, and kept. It prints `ready`, then for each
line of JSON that it reads it writes the requested number of lines. It limits itself by timers and limits of the kernel:
a request that exceeds one ends the worker, which gives a score rather than an exception. Workers end with our process:
their input closes, and a busy one ends when its time is up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from treetune.errors import EnvironmentFault, MissingExtraError, TreetuneError

_LATE = (-signal.SIGPROF, -signal.SIGALRM)
_SAFE_PATH = "PYTHONSAFEPATH"
_live: dict[int, set[subprocess.Popen[str]]] = {}
"""Workers by process id, because a forked child must not end its parent's workers."""


class ProgramPool:
    def __init__(self, file: str, what: str, remedy: str, flags: tuple[str, ...] = ("-P",)) -> None:
        # -P: do not search the file's folder for modules.
        self._command, self._what, self._remedy = [sys.executable, *flags, file], what, remedy
        self.idle: dict[int, list[subprocess.Popen[str]]] = {}
        """Idle workers by process id, because a forked child must not use its parent's workers."""

    def ask(self, request: Any, count: int) -> list[Any]:
        """The replies to a request; fewer if the worker ended before the last one."""
        idle = self.idle.setdefault(os.getpid(), [])
        replies: list[Any] = []
        for waiting in (idle, []):  # an idle worker may have been killed, so retry once; then the request is at fault
            worker = waiting.pop() if waiting else self._start()
            assert worker.stdin is not None
            assert worker.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # the worker has ended, so there is no reply
                print(json.dumps(request), file=worker.stdin, flush=True)
            replies = []
            while len(replies) < count and (line := worker.stdout.readline()):
                replies.append(json.loads(line))
            if len(replies) == count:
                idle.append(worker)
                break
            ended = worker.wait()
            _live[os.getpid()].discard(worker)
            for stream in (worker.stdin, worker.stdout):
                with contextlib.suppress(BrokenPipeError):  # unread input
                    stream.close()
            if ended in _LATE or replies:
                break
        return replies

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        worker = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        _live.setdefault(os.getpid(), set()).add(worker)
        assert worker.stdout is not None
        if worker.stdout.readline() != "ready\n":
            raise EnvironmentFault(f"{self._what} does not start", remedy=self._remedy)
        return worker


@atexit.register
def _end_workers() -> None:
    for worker in _live.pop(os.getpid(), set()):
        worker.kill()
        worker.wait()


# Processes of `multiprocessing`


def spawn_context() -> SpawnContext:
    """A context for process pools. Python starts pool processes with `python -c`, which searches the current folder for
    modules first, so a `pickle.py` there would run. Processes of this context do not search the current folder."""
    with _safe_path():
        resource_tracker.ensure_running()  # also started with `python -c`, by the first lock or queue
    return _SafeContext()


class _SafeProcess(SpawnProcess):
    _was_set = False
    """Whether the user has set the variable; if so, programs that this process starts get it too."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        process_obj._was_set = _SAFE_PATH in os.environ
        with _safe_path():
            return SpawnProcess._Popen(process_obj)

    def run(self) -> None:
        if not self._was_set:
            os.environ.pop(_SAFE_PATH, None)
        super().run()


class _SafeContext(SpawnContext):
    Process = _SafeProcess


@contextlib.contextmanager
def _safe_path() -> Iterator[None]:
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before


_MODE = "RAY_AUTH_MODE"
_CONNECT_SECONDS = 10.0
_END_OF_LOG = re.compile(r"\s*Last \d+ lines of the Raylet logs:.*|\n\s*\[state-dump\][^\n]*", re.DOTALL)
"""Matches the part of a raylet's log in Ray's messages."""


def join_cluster() -> Any:
    """The module `ray`, connected to the cluster this process has joined, to RAY_ADDRESS, or to a local one."""
    try:
        import ray
    except ImportError:
        raise MissingExtraError.of("Ray", "ray") from None
    if not ray.is_initialized():
        address = os.environ.get("RAY_ADDRESS") or "auto"
        try:
            if _MODE not in os.environ and "://" not in address:
                address = _find_and_unlock(address)
            ray.init(address=address, log_to_driver=True, logging_level="ERROR")
            _shorten_messages(ray)
        except (ConnectionError, ValueError, ray.exceptions.RayError) as error:
            raise TreetuneError(
                f"no Ray cluster can be joined: {str(error).splitlines()[0]}",
                remedy="start one with `ray start --head`, or set RAY_ADDRESS; if the cluster has a "
                "token, put it in ~/.ray/auth_token or RAY_AUTH_TOKEN here too",
            ) from error
    return ray


def _shorten_messages(ray: Any) -> None:
    """When a raylet ends, Ray prints dozens of lines of its state from the log. Keep only the cause."""
    worker = ray._private.worker
    show = getattr(worker, "print_to_stdstream", None)
    if show is None:  # a Ray version that prints differently
        return

    def show_short(data: dict[str, Any], *args: Any, **options: Any) -> None:
        if data.get("pid") == "raylet":
            data = {**data, "lines": [_END_OF_LOG.sub("", str(text)) for text in data.get("lines", [])]}
        show(data, *args, **options)

    worker.print_to_stdstream = show_short


SILENT_SECONDS = 10.0
"""After this long without a result, check whether the cluster has a free CPU."""


def why_waiting(ray: Any, begun: Sequence[Any]) -> str | None:
    """Why our work does not begin on the cluster: no CPU is free. `begun` are references that become ready when work
    begins; None if all have."""
    if not ray.wait(list(begun), num_returns=len(begun), timeout=0)[1]:
        return None
    if ray.available_resources().get("CPU", 0) >= 1:
        return None
    held = int(ray.cluster_resources().get("CPU", 0))
    return f"no CPU of the Ray cluster is free: {held} are held, as `ray status` shows"


def _find_and_unlock(address: str) -> str:
    """Return HOST:PORT. If that cluster requires a token, this process sends its own. `ray.init` sends one only to a
    cluster that it finds by itself, and even if that cluster has no token, which then fails."""
    try:
        from ray._private.services import canonicalize_bootstrap_address
        from ray._raylet import Config, GcsClient
        from ray.exceptions import AuthenticationError
    except ImportError:  # a Ray version without tokens
        return address
    found: str | None = canonicalize_bootstrap_address(address)
    if found is None:
        raise ConnectionError(f"RAY_ADDRESS={address} names none that runs")
    _refuse_silent(found, address)
    try:
        with _no_standard_error():  # where a missing token would be reported
            GcsClient(address=found)
    except AuthenticationError:
        os.environ[_MODE] = "token"
        Config.initialize("")  # Config has already read the mode, so read it again
    return found


def _refuse_silent(found: str, address: str) -> None:
    """Raise if nothing listens, because Ray would retry silently for most of a minute."""
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"nothing answers at {found if address == 'auto' else address} ({error})") from error


@contextmanager
def _no_standard_error() -> Iterator[None]:
    """Silence standard error, including that of native code."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
