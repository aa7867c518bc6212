"""Runs a task's code in isolation from the host's files, network, processes and environment, within limits.

    sandbox = Bubblewrap()
    result = await sandbox.run([sandbox.python, "-c", "print(6 * 7)"], limits=SandboxLimits(seconds=2))
    result.text, result.ended   # "42\\n", Ended.COMPLETED

If no sandbox can start, nothing runs: `SandboxUnavailable` gives the cause and the remedy. `probe()` checks beforehand.
Other packages use what this module exports, `shell.Shell` (a sandbox in which commands share a shell), `machines` (the
machine of an episode, and warm shells on it), `rootfs.build`, and `runtime.join_scripts` with `time_limit` for programs
that run inside. The other modules build sandboxes: `bubblewrap`, `docker`, `mount_root`, `one_shot`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from functools import partial

from treetune.sandbox.bubblewrap import explain_failures, find_tools
from treetune.sandbox.limits import DEFAULT_LIMITS, Ended, Result, SandboxLimits, SandboxUnavailable
from treetune.sandbox.one_shot import run_command
from treetune.sandbox.probe import Capability, probe, require
from treetune.system.threads import call_apart

__all__ = ["Bubblewrap", "Capability", "Ended", "Result", "SandboxLimits", "SandboxUnavailable", "probe", "require"]


class Bubblewrap:
    """Runs each command in a fresh bubblewrap sandbox."""

    @property
    def python(self) -> str:
        """The Python interpreter inside the sandbox, for commands that need one."""
        return find_tools()["python3"]

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits = DEFAULT_LIMITS,
    ) -> Result:
        """Run a command in a working folder that holds `files` (relative paths). Cancelling stops the sandbox first."""
        with explain_failures():
            stop = os.eventfd(0)
        try:
            run = partial(self.run_blocking, command, stdin=stdin, files=files, limits=limits, stop=stop)
            outcome = call_apart(run)  # in a long-lived thread: it is the parent for `--die-with-parent`
            try:
                return await asyncio.shield(outcome)
            except asyncio.CancelledError:
                os.eventfd_write(stop, 1)
                while not outcome.done():
                    # Even after a second cancellation, nothing of it may be left when the caller continues.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([outcome])
                raise
        finally:
            os.close(stop)

    def run_blocking(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] | None = None,
        limits: SandboxLimits = DEFAULT_LIMITS,
        stop: int | None = None,
    ) -> Result:
        """Like `run`, for code without an event loop; the calling thread waits. `stop`: a descriptor that stops the
        command once it is readable."""
        return run_command(require(), command, stdin=stdin, files=files, limits=limits, stop=stop)
