"""Threads beside the event loop: user code that would block it, and a loop for callers that have none.

    result = await call(environment.step, action)       # from async code
    trace = run_in_background(play(task))                # from code that is not async

An `async def` runs on the loop; anything else runs in a thread. A caller that gives up (a timeout, a cancellation)
leaves its thread behind: the thread no longer counts, so calls that never return cannot keep others from running.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import lru_cache
from queue import SimpleQueue
from typing import Any

Late = Callable[[Any], None]
"""Given the result of a call whose caller has gone, in the thread that ran it."""


async def call(function: Callable[..., Any], *args: Any, late: Late | None = None) -> Any:
    try:
        if _is_async(function):
            return await function(*args)
        result = await _outcome(_threads, function, args, late)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        # The exit of a scorer is its failure, not the end of the program.
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


def _is_async(function: Callable[..., Any]) -> bool:
    # Looked up once for each method: to inspect it costs more than a small step.
    method = getattr(function, "__func__", None)
    return _is_async_method(method) if method is not None else inspect.iscoroutinefunction(function)


_is_async_method = lru_cache(maxsize=1024)(inspect.iscoroutinefunction)


async def call_apart(function: Callable[..., Any], *args: Any) -> Any:
    """Like `call` for a plain function, in a thread of its own: it never waits for a free one."""
    return await _outcome(_DaemonThreads(most=1, stay=False), function, args, None)


async def _outcome(threads: _DaemonThreads, function: Callable[..., Any], args: tuple[Any, ...], late: Any) -> Any:
    work = threads.submit(function, args)
    try:
        return await asyncio.wrap_future(work)
    except asyncio.CancelledError:
        threads.abandon(work, late)
        raise


class _Work(Future[Any]):
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__()
        self.function, self.args = function, args
        self.context = contextvars.copy_context()
        self.abandoned = False
        self.late: Late | None = None

    def run(self) -> None:
        try:
            result = self.context.run(self.function, *self.args)
        except (StopIteration, asyncio.CancelledError) as error:
            # asyncio cannot carry the first, and would take the second for a cancellation of whoever waits.
            self.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(result)

    def tell_late(self) -> None:
        if self.late is not None and self.exception() is None:
            self.late(self.result())


class _DaemonThreads:
    """Threads that end with the process. Those of `ThreadPoolExecutor` are joined at exit, so one environment
    stuck in a step would keep the program from ever ending."""

    def __init__(self, most: int, stay: bool = True) -> None:
        self._most = most
        self._stay = stay
        self.forget()

    def forget(self) -> None:
        """Begins with no thread."""
        self._work: SimpleQueue[_Work] = SimpleQueue()
        self._lock = threading.Lock()
        self._counted = 0
        """Threads that are idle, or at work that somebody waits for."""
        self._idle = 0
        """Idle threads less the work that waits for one."""

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> _Work:
        work = _Work(function, args)
        with self._lock:
            self._idle -= 1
            if self._idle < 0:
                self._add_thread()
        self._work.put(work)
        return work

    def abandon(self, work: _Work, late: Late | None) -> None:
        """Nobody waits for it any more: it is dropped where it has not begun, and replaced where it has."""
        with self._lock:
            if work.cancel():
                return
            work.late = late
            if work.running():
                work.abandoned = True
                self._counted -= 1
                if self._idle < 0:
                    self._add_thread()
                return
        work.tell_late()

    def _add_thread(self) -> None:
        if self._counted < self._most:
            threading.Thread(target=self._run, name="treetune", daemon=True).start()
            self._counted += 1
            self._idle += 1

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work.set_running_or_notify_cancel():
                work.run()
            with self._lock:
                if not work.abandoned:
                    self._idle += 1
            if work.abandoned:
                work.tell_late()
            if work.abandoned or not self._stay:
                return
            del work


_threads = _DaemonThreads(most=256)

# A forked child has no threads, also where its parent had idle ones.
os.register_at_fork(after_in_child=_threads.forget)


BACKGROUND = "treetune-background"


def run_in_background(work: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine gives; waits for it. Who stops waiting (Ctrl-C) cancels it."""
    under_way = submit_in_background(work)
    try:
        return under_way.result()
    except BaseException:
        under_way.cancel()
        raise


def submit_in_background(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """A coroutine under way."""
    return asyncio.run_coroutine_threadsafe(work, _loop.get())


class _Loop:
    """Made when it is first asked for, once, however many threads ask."""

    _running: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock, self._running = threading.Lock(), None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._running is None:
                self._running = asyncio.new_event_loop()
                thread = threading.Thread(target=self._running.run_forever, name=BACKGROUND, daemon=True)
                thread.start()
            return self._running


_loop = _Loop()

# A forked child has no threads: it begins with a loop of its own.
os.register_at_fork(after_in_child=_loop.forget)
