"""How sandboxes are started on this machine: the programs, the user they run as, what holds their memory.

    launcher = Launcher(tools=Tools.find(), interpreter=Interpreter.find(), memory=HeldBy.WATCHED)
    launcher.execute(["true"])

Root becomes an ordinary user before it starts anything: a process limit never counts for root, and what is inside
should not be root outside either.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import threading
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path

import msgspec

from treetune.errors import UsageError
from treetune.sandbox.cgroup import Parent
from treetune.sandbox.diagnose import explained
from treetune.sandbox.execution import Execution, Stop
from treetune.sandbox.filesystem import OWN_ETC, SECCOMP, is_passable, options, placed
from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.memory import Memory, PerProcess, Watched, allowed
from treetune.sandbox.protocol import DEFAULT_LIMITS, NO_FILES, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.seccomp import program

FIRST_UID = 1_900_000_000
"""Root's sandboxes run as the user with this number plus that of their thread: one that no other run has."""
LAST_THREAD = 1 << 22
GATE = 'echo && read -r go && exec "$@"'
"""Runs the command only when told to, so that a sandbox whose owner died while it started runs nothing."""
ENTER = 'echo 0 > "$0" && exec "$@"'
"""Into a cgroup."""
STAGE = 'mount --bind "$0" /tmp && exec "$@"'
"""Shows a folder that only root may reach to the user that root becomes; in a mount namespace of its own."""


class HeldBy(StrEnum):
    CGROUP = "cgroup"
    """The kernel counts all processes together."""
    WATCHED = "watched"
    """Treetune counts them, twenty times a second."""
    PROCESS = "process"
    """Each has its limit; nothing counts them together."""


class Tools(msgspec.Struct, frozen=True):
    """Programs of the host; `prlimit` also runs inside."""

    bwrap: str
    prlimit: str
    setpriv: str
    unshare: str

    @classmethod
    def find(cls) -> Tools:
        found = {name: shutil.which(name, path="/usr/bin:/bin:/usr/local/bin:/usr/sbin:/sbin") for name in cls.names()}
        missing = [name for name, path in found.items() if path is None]
        if missing:
            package = "bubblewrap" if "bwrap" in missing else "util-linux"
            raise SandboxUnavailable(
                f"{', '.join(missing)} not installed: code of a task runs in bubblewrap or not at all",
                remedy=f"apt-get install {package}, or the package of that name of your system",
            )
        return cls(**{name: str(path) for name, path in found.items()})

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return cls.__struct_fields__


class Launcher(msgspec.Struct, frozen=True):
    tools: Tools
    interpreter: Interpreter
    becomes_user: bool
    """Root gives up being root before bubblewrap starts."""
    held_by: HeldBy
    parent: Parent | None = None

    def execute(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = NO_FILES,
        limits: SandboxLimits = DEFAULT_LIMITS,
        writable_root: bool = False,
        stop: Stop | None = None,
    ) -> Result:
        """Run one command in a fresh sandbox; call it from a thread that does nothing else meanwhile."""
        if not command or not all(map(is_passable, command)):
            raise UsageError(f"{list(command)!r} is no command", remedy="pass a program and its arguments, as text")
        user = FIRST_UID + threading.get_native_id() if self.becomes_user else None
        staged = user is not None and self.interpreter.private
        data = {**OWN_ETC, **placed(files, limits)}
        if calls := program():
            data[SECCOMP] = calls
        try:
            memory = self._memory(limits)
            return Execution(
                before=self._before(user, staged, memory.entrance),
                options=partial(
                    options,
                    self.interpreter,
                    limits,
                    prefix_at="/tmp" if staged else None,
                    writable_root=writable_root,
                ),
                data=data,
                command=["sh", "-c", GATE, "sandbox", *self._within(limits), *command],
                stdin=stdin,
                limits=limits,
                memory=memory,
                user=user,
                stop=stop,
            ).run()
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise UsageError("the command is too long", remedy="pass long code as a file") from error
            raise explained(SandboxUnavailable(f"a sandbox could not be set up: {error}")) from error
        except SandboxUnavailable as error:
            raise explained(error) from error

    def _before(self, user: int | None, staged: bool, entrance: str | None) -> list[str]:
        """What becomes bubblewrap in the end, as the right user."""
        chain = [self.tools.bwrap]
        if user is not None:
            chain = [self.tools.setpriv, f"--reuid={user}", f"--regid={user}", "--clear-groups", *chain]
        if staged:
            chain = [self.tools.unshare, "--mount", "--", "sh", "-c", STAGE, str(self.interpreter.prefix), *chain]
        return chain if entrance is None else ["sh", "-c", ENTER, entrance, *chain]

    def _within(self, limits: SandboxLimits) -> list[str]:
        """Limits are set inside: there the user namespace makes the process limit count this sandbox alone."""
        wanted = {
            # The reaper that bubblewrap leaves as process 1 is one of them.
            "nproc": limits.processes + 1,
            # RLIMIT_AS would be stricter, but programs that reserve much and use little (Java) could not start.
            "data": limits.memory_mb << 20,
            "fsize": limits.disk_mb << 20,
            "nofile": 1024,
            "core": 0,
        }
        return [self.tools.prlimit, *(f"--{name}={_at_most(name, value)}" for name, value in wanted.items()), "--"]

    def _memory(self, limits: SandboxLimits) -> Memory:
        if self.parent is not None:
            return self.parent.hold(allowed(limits))
        return Watched(allowed(limits)) if self.held_by is HeldBy.WATCHED else PerProcess()


def _at_most(name: str, value: int) -> int:
    """A hard limit can only be lowered."""
    _, hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def may_become_user() -> bool:
    """Whether this is root with users to become; root of a small user namespace is an ordinary user to the kernel."""
    if os.geteuid() != 0:
        return False
    ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    return any(first <= FIRST_UID and first + count > FIRST_UID + LAST_THREAD for first, _, count in ranges)
