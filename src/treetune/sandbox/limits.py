"""The limits of a sandbox, how a command in it ended, and what enforces the limit of memory.

However the code inside ends, a `Result` is returned. Only a sandbox that cannot start raises an exception.

    parent = CgroupParent.find()        # None: this process may make no cgroups
    memory = Cgroup(parent, limit, all_at_once=True) if parent else WatchedMemory(limit, mounts)
    memory.is_exceeded()                # asked while it runs, and once after

A cgroup is exact, and the kernel kills at once. Without a writable one, the sandbox's processes are inspected. Both
apply to all processes together, in addition to the limit of each single process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from treetune.errors import TreetuneError

KILLED = 128 + 9
"""The exit code of a killed command, as in a shell."""


class SandboxUnavailable(TreetuneError, code="no-sandbox"):
    """Raised if a sandbox cannot start here; nothing was run."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds from the command's start: clock time while it waits, processor time while it works, but at most ten times
    as much clock time. So load on the machine does not decide whether a command finishes in time."""
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] = 512
    """Memory in MB. A process that asks for more gets an error (`MemoryError`). Processes that together exceed
    `memory_mb` + `disk_mb` (files are kept in memory) are killed."""
    processes: Annotated[int, msgspec.Meta(ge=1)] = 64
    """The maximum number of processes and threads at one time."""
    disk_mb: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Space in MB for files in the working folder and `/tmp` together. Shared memory (`/dev/shm`) may hold the same
    amount again."""
    output_kb: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Limit in KB for standard output, and the same for standard error; a command that writes more is killed."""

    shown: tuple[tuple[str, str], ...] = ()
    """For sandboxes with a shell: further files and folders of the host that are visible inside, read-only, and their
    paths there. Sockets work too."""

    @property
    def all_memory(self) -> int:
        """Bytes of memory for all processes together. Files are kept in memory, so they are included."""
        return (self.memory_mb + self.disk_mb) << 20


DEFAULT_LIMITS = SandboxLimits()


class Ended(StrEnum):
    COMPLETED = "completed"
    """The command ended by itself, successfully or not: `exit_code` says which."""
    TIMEOUT = "timeout"
    """It exceeded its time, as `SandboxLimits.seconds` counts it."""
    MEMORY = "memory"
    """Its processes together exceeded the memory limit."""
    OUTPUT = "output"
    """It exceeded the output limit."""
    KILLED = "killed"
    """It was ended from outside: by the host or an operator."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    """As in a shell: 128 + n if signal n ended it (137 for a limit), 127 if there is no such command."""
    stdout: bytes = b""
    """For a command in a shell, what the terminal showed, including errors."""
    stderr: bytes = b""
    omitted: int = 0
    """Bytes omitted from the middle of `stdout`: a shell keeps the beginning and the end."""
    ended: Ended
    """In a shell, `memory` and `killed` mean that the sandbox has ended too."""
    restarted: bool = False
    """The shell itself ended (`exit`, `exec`, an ignored deadline) and was restarted: files and background processes
    are still there, variables and the current folder are not."""
    seconds: float
    """Wall-clock time of the command, without the sandbox's own start."""

    @property
    def ok(self) -> bool:
        return self.ended is Ended.COMPLETED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 become U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode(errors="replace")


# Memory of all processes


INODE_BYTES = 1024
"""The memory that the kernel needs for an empty file."""


class Memory:
    """No limit on the sum: for hosts where processes of a sandbox cannot be inspected."""

    entrance: str | None = None
    """A file of a cgroup: the kernel limits a process that writes 0 to it, and its children. None: call `attach` for
    the sandbox, and poll `is_exceeded`."""

    def attach(self, pid: int) -> None:
        """Count the sandbox that has this first process."""

    def is_exceeded(self) -> bool:
        """Whether it has used more than allowed."""
        return False

    def close(self) -> None:
        """Release its resources."""


class WatchedMemory(Memory):
    """Counts the memory of the sandbox's processes and of the files in its mounts."""

    def __init__(self, limit: int, mounts: Sequence[str]) -> None:
        self._limit, self._mounts = limit, mounts
        self._root: Path | None = None

    def attach(self, pid: int) -> None:
        self._root = Path(f"/proc/{pid}/root")
        os.stat(self._root)  # raises PermissionError here, rather than missing processes later

    def is_exceeded(self) -> bool:
        if self._root is None:
            return False
        processes: list[Path] = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            # The sandbox's own /proc shows only its processes, including daemons.
            processes = [entry for entry in (self._root / "proc").iterdir() if entry.name.isdigit()]
        files = 0
        for mount in self._mounts:
            with contextlib.suppress(OSError):
                usage = os.statvfs(self._root / mount)
                files += (usage.f_files - usage.f_ffree) * INODE_BYTES
        # Resident pages are cheap to read but count a shared page in every process. The exact sum is read if needed.
        if sum(map(_read_resident, processes)) + files <= self._limit:
            return False
        return sum(map(_read_proportional, processes)) + files > self._limit


def _read_resident(process: Path) -> int:
    fields = _read(process / "statm").split()  # empty if it has ended meanwhile
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if fields else 0


def _read_proportional(process: Path) -> int:
    """Return a process's own memory plus its share of shared memory, without files of the host."""
    text = _read(process / "smaps_rollup")
    counted = sum(int(kilobytes) << 10 for kilobytes in re.findall(r"^Pss_(?:Anon|Shmem): *(\d+) kB", text, re.M))
    return counted if text else _read_resident(process)


class CgroupParent(msgspec.Struct, frozen=True):
    """Where cgroups for sandboxes are created. In version 1 that is a child of this process's cgroup. Version 2 allows
    no child with limits next to processes, so there it is a sibling."""

    path: str
    version: int

    @classmethod
    def find(cls) -> CgroupParent | None:
        for candidate in list_candidates(_read("/proc/self/cgroup"), _read("/proc/self/mountinfo")):
            with contextlib.suppress(OSError):
                _sweep(Path(candidate.path))
                Cgroup(candidate, 64 << 20, all_at_once=True).close()
                return candidate
        return None


class Cgroup(Memory):
    def __init__(self, parent: CgroupParent, limit: int, *, all_at_once: bool) -> None:
        """`all_at_once`: a process that takes too much ends all of them, if the kernel supports it."""
        path = self._path = Path(parent.path) / f"treetune-{os.getpid()}-{secrets.token_hex(6)}"
        # Moving only the calling thread is instant; any other way waits for all processors, 10 ms and more.
        self.entrance = str(path / ("cgroup.procs" if parent.version == 2 else "tasks"))
        self._events = path / ("memory.events" if parent.version == 2 else "memory.oom_control")
        path.mkdir()
        try:
            if parent.version == 2:
                self._write("memory.max", limit)
                self._write("memory.oom.group", int(all_at_once), optional=True)
                self._write("memory.swap.max", 0, optional=True)
            else:
                self._write("memory.limit_in_bytes", limit)
                self._write("memory.memsw.limit_in_bytes", limit, optional=True)
        except OSError:
            self.close()
            raise

    def is_exceeded(self) -> bool:
        killed = re.search(r"^oom_kill (\d+)", self._events.read_text(), re.M)
        return killed is not None and int(killed[1]) > 0

    def close(self) -> None:
        _sweep(self._path.parent)
        for _ in range(100):
            try:
                return self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                # The kernel still counts the last process for a moment.
                time.sleep(0.01)

    def _write(self, name: str, value: int, *, optional: bool = False) -> None:
        if optional and not (self._path / name).exists():
            return
        # Not opened for writing only, which would create an ordinary file if it is missing.
        with open(self._path / name, "rb+", buffering=0) as file:
            file.write(b"%d" % value)


def _sweep(folder: Path) -> None:
    """Remove the cgroups of processes that were killed; one in use cannot be removed."""
    with contextlib.suppress(OSError):  # no more files can be opened: the next check tries again
        for left in folder.glob("treetune-*-*"):
            if not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
                with contextlib.suppress(OSError):
                    left.rmdir()


def list_candidates(memberships: str, mounts: str) -> list[CgroupParent]:
    """Return the cgroups to try, from the contents of /proc/self/cgroup and /proc/self/mountinfo."""
    own = {}
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), Path(path)))
    found = []
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, flags = rest.split()[0], rest.split()[-1].split(",")
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and "memory" not in flags):
            continue
        cgroup = own.get("" if kind == "cgroup2" else "memory")
        if cgroup is None or not cgroup.is_relative_to(root):
            continue
        place = Path(point) / cgroup.relative_to(root)
        beside = place.parent if place != Path(point) else place
        if kind == "cgroup":
            found.append(CgroupParent(str(place), 1))
        elif "memory" in _read(beside / "cgroup.subtree_control").split():
            found.append(CgroupParent(str(beside), 2))
    return found


def _read(path: Path | str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
