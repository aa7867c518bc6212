"""A function over many items in other processes: results in order, and only a few items under way.

    for result in in_processes(partial(tokens.above, 512), batches, processes=8): ...

The processes are programs of their own. Those of `multiprocessing` would run the user's script again, up to where it
waits for them, unless it has an `if __name__ == "__main__"`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import IO, Any, cast


def in_processes(function: Callable[[Any], Any], items: Iterable[Any], processes: int) -> Iterator[Any]:
    """`function` must be one that can be pickled. Where a process fails, this one does its work."""
    workers = [_Worker(function) for _ in range(processes)]
    idle: SimpleQueue[_Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def work(item: Any) -> Any:
        worker = idle.get()
        try:
            return worker.work(item)
        finally:
            idle.put(worker)

    waiting: deque[Future[Any]] = deque()
    with ThreadPoolExecutor(processes) as threads:
        try:
            for item in items:
                waiting.append(threads.submit(work, item))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
            for worker in workers:
                worker.stop()


class _Worker:
    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        code = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._started = self._stopped = False

    def work(self, item: Any) -> Any:
        try:
            return self._asked(item)
        except (EOFError, OSError, ValueError, pickle.PickleError, AttributeError, TypeError):
            self.process.kill()
        if self._stopped:
            return None
        warnings.warn("another process failed, so this one does its work", stacklevel=2)
        return self._function(item)

    def stop(self) -> None:
        self._stopped = True
        self.process.kill()
        self.process.wait()

    def _asked(self, item: Any) -> Any:
        given, taken = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)
        if not self._started:
            pickle.dump(self._function, given)
            self._started = True
        pickle.dump(item, given)
        given.flush()
        return pickle.load(taken)


def serve() -> None:
    """What such a process does: a function in, then items in and results out, until there are no more."""
    given, taken = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever is printed must not come between the results
    function = pickle.load(given)
    while True:
        try:
            item = pickle.load(given)
        except EOFError:
            return
        pickle.dump(function(item), taken)
        taken.flush()
