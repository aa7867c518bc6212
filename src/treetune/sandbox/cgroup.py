"""A cgroup of its own for each sandbox, where this process may make one.

    parent = Parent.find()           # None: not here
    held = parent.hold(limit)        # a Memory

Version 1 takes a child of the cgroup that this process is in. Version 2 allows no child with limits beside processes,
so there it is a sibling.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

import msgspec


class Parent(msgspec.Struct, frozen=True):
    """Where cgroups for sandboxes are made."""

    path: str
    version: int

    @classmethod
    def find(cls) -> Parent | None:
        for candidate in _candidates(_text("/proc/self/cgroup"), _text("/proc/self/mountinfo")):
            with contextlib.suppress(OSError):
                _sweep(Path(candidate.path))
                candidate.hold(64 << 20).close()
                return candidate
        return None

    def hold(self, limit: int, *, name: str | None = None, all_at_once: bool = True) -> Cgroup:
        """`all_at_once`: with one process that takes too much all are killed, where the kernel can do so."""
        # A run has its thread to itself, so no other run has this name.
        path = Path(self.path) / f"treetune-{os.getpid()}-{name or threading.get_native_id()}"
        return Cgroup(path, self.version, limit, all_at_once)


class Cgroup:
    KERNEL_KILLS = True

    def __init__(self, path: Path, version: int, limit: int, all_at_once: bool = True) -> None:
        self._path = path
        # Moving oneself as a single thread is at once; any other way waits for all processors, 10 ms and more.
        self.entrance = str(path / ("cgroup.procs" if version == 2 else "tasks"))
        self._events = path / ("memory.events" if version == 2 else "memory.oom_control")
        path.mkdir()
        try:
            if version == 2:
                self._write("memory.max", limit)
                self._write("memory.oom.group", int(all_at_once), optional=True)
                self._write("memory.swap.max", 0, optional=True)
            else:
                self._write("memory.limit_in_bytes", limit)
                self._write("memory.memsw.limit_in_bytes", limit, optional=True)
        except OSError:
            self.close()
            raise

    def attach(self, pid: int) -> None:
        self._write("cgroup.procs", pid)

    def passed(self) -> bool:
        killed = re.search(r"^oom_kill (\d+)", self._events.read_text(), re.M)
        return killed is not None and int(killed[1]) > 0

    def close(self) -> None:
        _sweep(self._path.parent)
        for _ in range(100):
            try:
                self._path.rmdir()
            except FileNotFoundError:
                return
            except OSError:
                # The last process is gone, but the kernel still counts it for a moment.
                time.sleep(0.01)
            else:
                return

    def _write(self, name: str, value: int, *, optional: bool = False) -> None:
        with contextlib.suppress(FileNotFoundError) if optional else contextlib.nullcontext():
            # Not write_text: that would make an ordinary file of a missing one.
            descriptor = os.open(self._path / name, os.O_WRONLY)
            try:
                os.write(descriptor, str(value).encode())
            finally:
                os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what processes left that were killed; one that is in use cannot be removed."""
    with contextlib.suppress(OSError):  # no more files can be opened: then with the next
        for left in folder.glob("treetune-*-*"):
            if not os.path.exists(f"/proc/{left.name.split('-')[1]}"):
                with contextlib.suppress(OSError):
                    left.rmdir()


def _candidates(memberships: str, mounts: str) -> list[Parent]:
    """The cgroups to try, from the contents of /proc/self/cgroup and /proc/self/mountinfo."""
    found = []
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        root, point = fields.split()[3:5]
        kind, flags = rest.split()[0], rest.split()[-1].split(",")
        if kind not in ("cgroup", "cgroup2") or (kind == "cgroup" and "memory" not in flags):
            continue
        own = _own_path(memberships, "" if kind == "cgroup2" else "memory")
        if own is None or not own.is_relative_to(root):
            continue
        place = Path(point) / own.relative_to(root)
        if kind == "cgroup":
            found.append(Parent(str(place), 1))
            continue
        beside = place.parent if place != Path(point) else place
        if "memory" in _text(beside / "cgroup.subtree_control").split():
            found.append(Parent(str(beside), 2))
    return found


def _own_path(memberships: str, controller: str) -> Path | None:
    for line in memberships.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path(path)
    return None


def _text(path: Path | str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
