"""Runs user code that would block the event loop in threads, and provides a loop for synchronous callers.

    result = await call(environment.step, action)       # from async code
    trace = run_in_background(play(task))                # from synchronous code

An `async def` runs on the loop, anything else in a thread. A caller that gives up (a timeout, a cancellation) leaves
its thread behind. Such a thread no longer counts, so calls that never return cannot block others.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from functools import cache, lru_cache
from queue import SimpleQueue
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

MOST_CALLS = 256
"""The maximum number of concurrent calls in threads per event loop; further calls wait."""

T = TypeVar("T")

_LOOK_SECONDS = 0.2

Late = Callable[[Any], None]
"""Receives the result of a call whose caller was cancelled."""


async def call(function: Callable[..., Any], *args: Any, late: Late | None = None) -> Any:
    try:
        if _is_async(function):
            return await function(*args)
        async with _limit():
            result = await call_apart(function, *args, late=late)
        return await result if inspect.isawaitable(result) else result
    except SystemExit as error:
        # If a scorer exits, the scorer has failed; the program must not end.
        raise RuntimeError(f"sys.exit({error.code!r}) was called") from error


def _is_async(function: Callable[..., Any]) -> bool:
    # Cached per method, because inspecting it costs more than a small step.
    method = getattr(function, "__func__", None)
    return _is_async_method(method) if method is not None else inspect.iscoroutinefunction(function)


_is_async_method = lru_cache(maxsize=1024)(inspect.iscoroutinefunction)
_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
_core_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _limit() -> asyncio.Semaphore:
    return _limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(MOST_CALLS))


def limit_to_cores() -> asyncio.Semaphore:
    """Limits concurrency to the cores of this process, so that work does not wait for a core while its clock runs."""
    return _core_limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(len(os.sched_getaffinity(0))))


def call_apart(function: Callable[..., Any], *args: Any, late: Late | None = None) -> asyncio.Future[Any]:
    """Like `call`, for plain functions that never wait for others. The end of the loop does not cancel it."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        result = None
        error: BaseException | None = None
        try:
            result = context.run(function, *args)
        except (StopIteration, asyncio.CancelledError) as raised:
            # asyncio cannot transport the first, and would treat the second as a cancellation of the caller.
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        except BaseException as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed
            settle(result, error)
        error = None  # its traceback references this frame

    def settle(result: Any, error: BaseException | None) -> None:
        if not outcome.cancelled():
            outcome.set_exception(error) if error is not None else outcome.set_result(result)
        elif late is not None and error is None:
            late(result)

    _threads.submit(work)
    return outcome


class _DaemonThreads:
    """Threads that end with the process. `ThreadPoolExecutor` joins its threads at exit, so a single environment that
    is stuck in a step would keep the program from ending."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def submit(self, work: Callable[[], None]) -> None:
        self._work.put(work)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._run, name="treetune", daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()
            self._idle.release()


_threads = _DaemonThreads()
BACKGROUND = "treetune-background"


def run_in_background(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the background loop and return its result. Ctrl-C cancels it."""
    under_way = submit_in_background(work)
    try:
        return under_way.result()
    except BaseException:
        under_way.cancel()
        raise


def run_apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new loop and return its result: in this thread, or in another one if this one runs a loop,
    as in a notebook. Ctrl-C cancels it and waits for its end."""
    try:
        waiting = asyncio.current_task()
    except RuntimeError:
        return asyncio.run(work)
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()

    async def begin() -> T:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(begin()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, name="treetune apart", daemon=True)
    thread.start()
    try:
        # On Ctrl-C, `asyncio.run` cancels its task, which cannot notice while it waits here.
        while waiting is None or not waiting.cancelling():
            with suppress(TimeoutError):
                return outcome.result(_LOOK_SECONDS)
            if outcome.done():  # the work itself raised a TimeoutError
                return outcome.result()
        raise asyncio.CancelledError
    except BaseException:
        loop, task = begun.result()
        with suppress(RuntimeError):  # the work has ended, and the loop is closed
            loop.call_soon_threadsafe(cast(Any, task).cancel)
        thread.join()
        raise


def submit_in_background(work: Coroutine[Any, Any, Any]) -> Future[Any]:
    """Start a coroutine on the background loop."""
    with _starting:
        loop = _background_loop()
    return asyncio.run_coroutine_threadsafe(work, loop)


@cache
def _background_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=BACKGROUND, daemon=True).start()
    return loop


_starting = threading.Lock()


def _forget_threads() -> None:
    """Reset the threads after a fork, because a child has none."""
    global _threads
    _threads = _DaemonThreads()
    _background_loop.cache_clear()
    _starting.release()


os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_forget_threads)
