"""What this machine can do for sandboxes with a shell, beside what `probe.py` says of one-shot commands.

    print(await probe_shell())     # as text
    await require_shell()          # the same, or SandboxUnavailable with cause and remedy

A real one is started once per process. As root it has users of its own; where that cannot be done, one user as
for ordinary users.
"""

from __future__ import annotations

import asyncio
import os
import time

import msgspec

from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.launcher import may_become_user
from treetune.sandbox.probe import probe, required
from treetune.sandbox.protocol import SandboxLimits, SandboxUnavailable
from treetune.sandbox.shell_start import Start, Users

CAN = {
    Users.RANGE: "users of its own: useradd, chown and su work, and everything in /usr and /etc can be changed",
    Users.SINGLE: "one user: files in /usr can be added and removed but not changed; no su, no chown to others",
}


class ShellCapability(msgspec.Struct, frozen=True, kw_only=True):
    """What `probe_shell` found."""

    start: Start | None = None
    """How they are started here; None: they are not."""
    start_seconds: float = 0.0
    cause: str = ""
    """Why none can start, or why it has one user only although Treetune is root."""
    remedy: str = ""

    @property
    def available(self) -> bool:
        return self.start is not None

    def __str__(self) -> str:
        if self.start is None:
            return f"no sandbox with a shell can start: {self.cause}\n  -> {self.remedy}"
        lines = [f"shell: started in {self.start_seconds * 1000:.0f} ms", CAN[self.start.users]]
        lines += [f"why not more: {self.cause}"] if self.cause else []
        return "\n".join(lines)


_found: dict[int, ShellCapability] = {}
"""By process: a forked one may be another user."""


async def probe_shell() -> ShellCapability:
    """Start one to see what can be done; the answer is kept for the life of the process."""
    if (found := _found.get(os.getpid())) is None:
        found = _found[os.getpid()] = await _probe()
    return found


async def require_shell() -> Start:
    capability = await probe_shell()
    if capability.start is None:
        raise SandboxUnavailable(capability.cause, remedy=capability.remedy)
    return capability.start


async def _probe() -> ShellCapability:
    from treetune.sandbox.shell import BubblewrapCarrier

    fault: SandboxUnavailable | None = None
    try:
        launcher = required(await asyncio.to_thread(probe))
        as_root = may_become_user()
        for users in (Users.RANGE, Users.SINGLE) if as_root else (Users.SINGLE,):
            start = Start(launcher.tools, Interpreter.find(), users, as_root, launcher.held_by, launcher.parent)
            began = time.perf_counter()
            try:
                carrier = await BubblewrapCarrier.open(start, SandboxLimits())
            except SandboxUnavailable as error:
                fault = error
                continue
            seconds = time.perf_counter() - began
            await carrier.close()
            return ShellCapability(start=start, start_seconds=seconds, cause=fault.message if fault else "")
        assert fault is not None
    except SandboxUnavailable as error:
        fault = error
    return ShellCapability(cause=fault.message, remedy=fault.remedy or "see docs/sandbox.md")
