"""Processes for work that must be killable, such as a query that cannot be interrupted, and process pools.

    workers = WorkerPool(__file__, "SQLite", remedy="install Python's sqlite3")
    replies = workers.ask(["SELECT 1", 5.0], 1)      # blocks, so call it in a thread
    ProcessPoolExecutor(2, spawn_context())          # runs no file of the current folder when it starts

A worker is one of our files, run as a program. It is started when needed, and kept. It prints `ready`, then for each
line of JSON that it reads it writes the requested number of lines. It limits itself by timers and limits of the kernel:
a request that exceeds one ends the worker, which is scored, not raised. Workers end with our process: their input
closes, and a busy one ends when its time is up.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any

from treetune.errors import EnvironmentFault

_LATE = (-signal.SIGPROF, -signal.SIGALRM)
_SAFE_PATH = "PYTHONSAFEPATH"
_live: dict[int, set[subprocess.Popen[str]]] = {}
"""Workers by process id, because a forked child must not end its parent's workers."""


class WorkerPool:
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
