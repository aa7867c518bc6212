"""What this machine can do: can a sandbox start, and what enforces its limits.

    print(probe())       # as text
    require()            # the same, or SandboxUnavailable with cause and remedy

A real sandbox is started once per process, in the configuration that all others get.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator

import msgspec

from treetune.sandbox.cgroup import Parent
from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.launcher import HeldBy, Launcher, Tools, may_become_user
from treetune.sandbox.protocol import SandboxLimits, SandboxUnavailable

TRIAL = """
import os, signal
count = 0
try:
    while count < 4:
        if os.fork() == 0:
            signal.pause()
        count += 1
except BlockingIOError:
    pass
print(count)
"""
"""May have two processes, so it can make one."""
TOGETHER = {
    HeldBy.CGROUP: "a cgroup for all together",
    HeldBy.WATCHED: "for all together Treetune looks twenty times a second",
    HeldBy.PROCESS: "nothing for all together",
}


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    """What `probe` found."""

    launcher: Launcher | None = None
    """How sandboxes are started here; None: they are not."""
    start_seconds: float = 0.0
    """What the trial took."""
    cause: str = ""
    """Why no sandbox can start."""
    remedy: str = ""

    @property
    def available(self) -> bool:
        return self.launcher is not None

    @property
    def enforced(self) -> dict[str, str]:
        """Each limit, and what enforces it."""
        if self.launcher is None:
            return {}
        return {
            "seconds": "the pid namespace is killed",
            "memory_mb": f"RLIMIT_DATA for a process; {TOGETHER[self.launcher.held_by]}",
            "processes": "RLIMIT_NPROC in a user namespace of its own",
            "disk_mb": "the size of a tmpfs",
            "output_kb": "reading no more, and killing",
        }

    def __str__(self) -> str:
        if self.launcher is None:
            return f"no sandbox can start: {self.cause}\n  -> {self.remedy}"
        lines = [
            f"bubblewrap: {self.launcher.tools.bwrap}, started in {self.start_seconds * 1000:.0f} ms",
            f"python: {self.launcher.interpreter.path}",
            f"runs as: {'a user of its own for each run' if self.launcher.becomes_user else 'the user that you are'}",
            *(f"{limit}: {by}" for limit, by in self.enforced.items()),
        ]
        return "\n".join(lines)


@functools.cache
def probe() -> Capability:
    """Start a sandbox to see whether it can be done; the answer is kept for the life of the process."""
    return probe_with(Interpreter.find())


def require() -> Launcher:
    return required(probe())


def required(capability: Capability) -> Launcher:
    if capability.launcher is None:
        raise SandboxUnavailable(capability.cause, remedy=capability.remedy)
    return capability.launcher


@functools.cache
def probe_with(interpreter: Interpreter) -> Capability:
    if sys.platform != "linux":
        return Capability(cause=f"bubblewrap needs Linux, this is {sys.platform}", remedy="use a Linux machine")
    fault = None
    try:
        tools = Tools.find()
        for held_by, parent in _holders():
            launcher = Launcher(tools, interpreter, may_become_user(), held_by, parent)
            began = time.perf_counter()
            try:
                _try(launcher)
            except SandboxUnavailable as error:
                fault = error
            else:
                return Capability(launcher=launcher, start_seconds=time.perf_counter() - began)
        assert fault is not None
    except SandboxUnavailable as error:
        fault = error
    return Capability(cause=fault.message, remedy=fault.remedy or "see docs/sandbox.md")


def _holders() -> Iterator[tuple[HeldBy, Parent | None]]:
    """What can hold a sandbox's memory, the best first."""
    if (parent := Parent.find()) is not None:
        yield HeldBy.CGROUP, parent
    yield HeldBy.WATCHED, None
    yield HeldBy.PROCESS, None


def _try(launcher: Launcher) -> None:
    python = launcher.interpreter.path
    result = launcher.execute([python, "-I", "-S", "-c", TRIAL], limits=SandboxLimits(processes=2, seconds=30))
    if not result.ok:
        raise SandboxUnavailable(
            f"{python} does not run in a sandbox: {result.error_text.strip() or result.ended}",
            remedy="apt-get install python3: the system's Python is used where there is one",
        )
    if (made := int(result.text)) > 1:
        raise SandboxUnavailable(
            "the kernel does not count the processes of a sandbox, so that a fork bomb would not end",
            remedy="run Treetune as an ordinary user, or as root outside of a user namespace",
        )
    if made < 1:
        raise SandboxUnavailable(
            "the kernel counts all processes of this user as those of a sandbox", remedy="use Linux 5.14 or newer"
        )
