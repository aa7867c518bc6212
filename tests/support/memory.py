"""The memory of a process and of all that it has started."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path


class MemoryWatch:
    """Notes the most bytes that a process and its descendants held at once.

    with MemoryWatch(child.pid) as memory:
        ...
    memory.most
    """

    def __init__(self, pid: int) -> None:
        self._pid, self.most = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, sum(map(_resident, _with_descendants(self._pid))))


def _with_descendants(pid: int) -> list[int]:
    found = [pid]
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _with_descendants(int(child))
    return found


def _resident(pid: int) -> int:
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmRSS:")).split()[1]) << 10
    return 0
