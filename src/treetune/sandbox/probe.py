"""Checks whether a bubblewrap sandbox can start on this machine, and what enforces its limits.

    print(probe())                  # for one-shot commands, as text
    print(probe(shell=True))        # for shells
    require()                       # the Launcher that works, or SandboxUnavailable with cause and remedy

A real sandbox is started once per process and user, in the configuration of all later ones. As root, a shell has its
own range of users; if that is impossible, it has one user, as for an ordinary user.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from treetune.sandbox.bubblewrap import FIRST_UID, LAST_THREAD, Launcher, find_tools
from treetune.sandbox.limits import DEFAULT_LIMITS, CgroupParent, SandboxLimits, SandboxUnavailable
from treetune.sandbox.one_shot import run_command
from treetune.sandbox.runtime import BubblewrapRuntime

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
"""It may have two processes, so that it can start one."""
OWN_USERS = "its own users: useradd, chown and su work, and everything in /usr and /etc can be changed"
ONE_USER = "one user: files in /usr can be added and removed but not changed; no su, no chown to others"


class Capability(msgspec.Struct, frozen=True, kw_only=True):
    launcher: Launcher | None = None
    """How sandboxes are started here; None if they cannot be."""
    cause: str = ""
    """Why no sandbox can start, or why a shell has only one user although Treetune is root."""
    remedy: str = ""
    shell: bool = False

    @property
    def available(self) -> bool:
        return self.launcher is not None

    @property
    def enforced(self) -> dict[str, str]:
        """Each limit, and what enforces it."""
        if self.launcher is None:
            return {}
        looks = "Treetune checks twenty times a second" if self.launcher.looks else "nothing"
        counted_by = looks if self.launcher.parent is None else "a cgroup"
        return {
            "seconds": "the pid namespace is killed",
            "memory_mb": f"RLIMIT_DATA for a process; {counted_by} for all together",
            "processes": "RLIMIT_NPROC in its own user namespace",
            "disk_mb": "the size of a tmpfs",
            "output_kb": "Treetune stops reading and kills the command",
        }

    def __str__(self) -> str:
        if self.launcher is None:
            what = "no sandbox with a shell" if self.shell else "no sandbox"
            return f"{what} can start: {self.cause}\n  -> {self.remedy}"
        if self.shell:
            users = OWN_USERS if self.launcher.own_users else ONE_USER
            return f"{users}\nwhy not more: {self.cause}" if self.cause else users
        owner = "a separate user for each run" if self.launcher.becomes_user else "your own user"
        tools = [f"bubblewrap: {self.launcher.tools['bwrap']}", f"python: {self.launcher.tools['python3']}"]
        return "\n".join([*tools, f"runs as: {owner}", *(f"{limit}: {by}" for limit, by in self.enforced.items())])


def probe(*, shell: bool = False) -> Capability:
    """Start a sandbox to see whether that works; the answer is cached. Do not call it in an event loop's thread."""
    # A forked process may have a different user.
    return probe_as(os.geteuid(), shell)


def require(*, shell: bool = False) -> Launcher:
    capability = probe(shell=shell)
    if capability.launcher is None:
        raise SandboxUnavailable(capability.cause, remedy=capability.remedy)
    return capability.launcher


@cache
def probe_as(user: int, shell: bool) -> Capability:
    if sys.platform != "linux":
        return Capability(cause=f"bubblewrap needs Linux, this is {sys.platform}", remedy="use a Linux machine")
    fault = None
    try:
        for launcher in _list_shell_launchers() if shell else _list_launchers():
            try:
                asyncio.run(_try_shell(launcher)) if shell else _try_command(launcher)
            except SandboxUnavailable as error:
                fault = error
            else:
                return Capability(launcher=launcher, cause=fault.message if fault and shell else "", shell=shell)
    except SandboxUnavailable as error:
        fault = error
    assert fault is not None
    return Capability(cause=fault.message, remedy=fault.remedy or "see docs/sandbox.md", shell=shell)


def _list_launchers() -> Iterator[Launcher]:
    """Yield the ways to limit a sandbox's memory, best first."""
    tools, becomes_user = find_tools(), _may_become_user()
    if (parent := CgroupParent.find()) is not None:
        yield Launcher(tools, becomes_user, parent)
    yield Launcher(tools, becomes_user)
    yield Launcher(tools, becomes_user, looks=False)


def _list_shell_launchers() -> Iterator[Launcher]:
    launcher = require()
    if launcher.becomes_user:
        yield msgspec.structs.replace(launcher, own_users=True)
    yield launcher


def _may_become_user() -> bool:
    """Whether this is root with users to switch to; for the kernel, root of a small user namespace is an ordinary
    user."""
    if os.geteuid() != 0:
        return False
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= FIRST_UID and first + count > FIRST_UID + LAST_THREAD for first, _, count in ranges)


def _try_command(launcher: Launcher) -> None:
    python, limits = launcher.tools["python3"], SandboxLimits(processes=2, seconds=30)
    result = run_command(launcher, [python, "-I", "-S", "-c", TRIAL], limits=limits)
    if not result.ok:
        why = f"{python} does not run in a sandbox: {result.error_text.strip() or result.ended}"
        raise SandboxUnavailable(why, remedy="apt-get install python3: the system's Python is used")
    if int(result.text) != 1:
        why = "the kernel does not count the processes of a sandbox separately, so a fork bomb would not end"
        remedy = "run Treetune as an ordinary user, or as root outside of a user namespace; use Linux 5.14 or newer"
        raise SandboxUnavailable(why, remedy=remedy)


async def _try_shell(launcher: Launcher) -> None:
    await (await BubblewrapRuntime.open(launcher, DEFAULT_LIMITS)).close()
