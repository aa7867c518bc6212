"""Calling user code without letting it block the event loop.

    result = await call(environment.step, action)

An `async def` runs on the loop; anything else runs in a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any


async def call(function: Callable[..., Any], *args: Any) -> Any:
    if inspect.iscoroutinefunction(function):
        return await function(*args)
    result = await asyncio.wrap_future(_threads.submit(function, args))
    return await result if inspect.isawaitable(result) else result


class _DaemonThreads:
    """Threads that end with the process. Those of `ThreadPoolExecutor` are joined at exit, so one environment
    stuck in a step would keep the program from ever ending."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._lock = threading.Lock()
        self._started = 0
        self._idle = 0

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._idle == 0 and self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=f"treetune-{self._started}", daemon=True).start()
            else:
                self._idle -= 1
        self._work.put((future, lambda: context.run(function, *args)))
        return future

    def _run(self) -> None:
        while True:
            future, work = self._work.get()
            if future.set_running_or_notify_cancel():
                try:
                    result = work()
                except StopIteration as error:
                    # asyncio cannot carry a StopIteration: whoever waits would wait for ever.
                    future.set_exception(RuntimeError(f"StopIteration: {error}"))
                except BaseException as error:
                    future.set_exception(error)
                else:
                    future.set_result(result)
            del future, work
            with self._lock:
                self._idle += 1


_threads = _DaemonThreads(most=256)
