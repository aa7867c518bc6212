"""Processes for work that must be killable, such as a query that cannot be interrupted, and for pools of processes.

    workers = WorkerPool(__file__, "SQLite", remedy="install Python's sqlite3")
    replies = workers.ask(["SELECT 1", 5.0], 1)      # waits, so it belongs in a thread
    ProcessPoolExecutor(2, spawn_context())          # runs no file of the current folder as it starts

A worker is a file of ours that runs as a program. It is started when needed, and kept. It says `ready`, then reads a
line of JSON and writes as many lines as were asked for. It limits itself by timers and limits of the kernel: a request
that passes one ends the worker, which is scored, not raised. A worker ends with our process: its input closes, and a
busy one ends after its time.
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
"""By process: a forked child must not end its parent's workers."""


class WorkerPool:
    def __init__(self, file: str, what: str, remedy: str, flags: tuple[str, ...] = ("-P",)) -> None:
        # -P: the folder of the file is not searched for modules.
        self._command, self._what, self._remedy = [sys.executable, *flags, file], what, remedy
        self.idle: dict[int, list[subprocess.Popen[str]]] = {}
        """By process: a forked child must not talk to its parent's workers."""

    def ask(self, request: Any, count: int) -> list[Any]:
        """The replies to a request; fewer if its worker ended before the last."""
        idle = self.idle.setdefault(os.getpid(), [])
        replies: list[Any] = []
        for waiting in (idle, []):  # the machine may have ended an idle worker; a request that ends two is at fault
            worker = waiting.pop() if waiting else self._start()
            assert worker.stdin is not None
            assert worker.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended, so there is no reply
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
                with contextlib.suppress(BrokenPipeError):  # what it did not read
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
    """For pools of processes. Python starts them by `python -c`, which looks for modules in the current folder first: a
    `pickle.py` there would run. These look in no current folder."""
    with _safe_path():
        resource_tracker.ensure_running()  # a process of the same kind, which the first lock or queue starts
    return _SafeContext()


class _SafeProcess(SpawnProcess):
    _was_set = False
    """Whether the user has set the variable: then programs that this process starts get it too."""

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
