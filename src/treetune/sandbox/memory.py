"""The memory that all processes of one sandbox use together.

    held = parent.hold(limit) if parent else Watched(limit)
    held.entrance        # a file through which what becomes the sandbox enters; where there is none:
    held.attach(pid)     # before the command starts
    held.passed()        # asked while it runs, and once after
    held.close()

A cgroup is exact, and the kernel kills at once; where none is writable, the sandbox's processes are looked at as they
run. Either is beside the limit that each process has for itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from treetune.sandbox.protocol import SandboxLimits

INODE_BYTES = 1024
"""What the kernel keeps for a file without content."""
MOUNTS = ("tmp", "dev/shm")


class Memory(Protocol):
    @property
    def KERNEL_KILLS(self) -> bool:
        """Whether the kernel ends what takes too much, so that nobody else has to."""

    @property
    def entrance(self) -> str | None:
        """A file: a process that writes 0 to it is held, and all that it starts. None: the sandbox is attached."""

    def attach(self, pid: int) -> None:
        """Hold the sandbox whose first process this is."""

    def passed(self) -> bool:
        """Whether it has used more than it may."""

    def close(self) -> None:
        """Give back what holding it took."""


def allowed(limits: SandboxLimits) -> int:
    """Bytes of all processes together. Files are kept in memory, so what they may have is part of it."""
    return (limits.memory_mb + limits.disk_mb) << 20


class PerProcess:
    """No limit on the sum: for hosts that let nothing look into the sandbox."""

    KERNEL_KILLS = False
    entrance = None

    def attach(self, pid: int) -> None: ...

    def passed(self) -> bool:
        return False

    def close(self) -> None: ...


class Watched:
    KERNEL_KILLS = False
    entrance = None

    def __init__(self, limit: int, mounts: Sequence[str] = MOUNTS) -> None:
        self._limit, self._mounts = limit, mounts
        self._root: Path | None = None

    def attach(self, pid: int) -> None:
        self._root = Path(f"/proc/{pid}/root")
        os.stat(self._root)  # PermissionError here, not unseen processes later

    def passed(self) -> bool:
        if self._root is None:
            return False
        processes = self._processes()
        # Resident pages are cheap to ask for but count a shared one in every process; what is exact is asked only then.
        if sum(map(_resident, processes)) + self._files() <= self._limit:
            return False
        return sum(map(_proportional, processes)) + self._files() > self._limit

    def close(self) -> None: ...

    def _processes(self) -> list[Path]:
        assert self._root is not None
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The sandbox's own /proc: its processes and no others, daemons among them.
            return [entry for entry in (self._root / "proc").iterdir() if entry.name.isdigit()]
        return []

    def _files(self) -> int:
        assert self._root is not None
        count = 0
        for mount in self._mounts:
            with contextlib.suppress(OSError):
                usage = os.statvfs(self._root / mount)
                count += usage.f_files - usage.f_ffree
        return count * INODE_BYTES


def _resident(process: Path) -> int:
    try:
        return int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0  # it ended meanwhile


def _proportional(process: Path) -> int:
    """Memory of its own and its share of what it shares, without files of the host."""
    try:
        text = (process / "smaps_rollup").read_text()
    except OSError:
        return _resident(process)
    return sum(int(kilobytes) << 10 for kilobytes in re.findall(r"^Pss_(?:Anon|Shmem): *(\d+) kB", text, re.M))
