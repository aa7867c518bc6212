"""What a sandbox may use, and how a command in it ended.

Every end of the code inside is a `Result`. Only a sandbox that cannot start is an exception.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from treetune.errors import TreetuneError

KILLED = 128 + 9
"""The exit code of a killed command, as in a shell."""


class SandboxUnavailable(TreetuneError):
    """A sandbox that cannot start here; nothing was run."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """From when the command starts: by the clock while it waits, by its processor time while it works, and at most ten
    times as long by the clock. So load on the machine does not decide whether a command ends in time."""
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] = 512
    """Memory: a process that asks for more is refused it (a `MemoryError`); processes that together pass
    `memory_mb` + `disk_mb` (files are kept in memory) are killed."""
    processes: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Processes and threads at one time."""
    disk_mb: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Files in the working folder and `/tmp` together. Shared memory (`/dev/shm`) may hold as much again."""
    output_kb: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Standard output, and as much standard error; a command that writes more is killed."""

    @property
    def all_memory(self) -> int:
        """Bytes of all processes together. Files are kept in memory, so they are part of it."""
        return (self.memory_mb + self.disk_mb) << 20


DEFAULT_LIMITS = SandboxLimits()


class Ended(StrEnum):
    COMPLETED = "completed"
    """The command ended by itself, well or badly: `exit_code` says which."""
    TIMEOUT = "timeout"
    """Its seconds were over, as `SandboxLimits.seconds` counts them."""
    MEMORY = "memory"
    """Its processes together used more memory than they may."""
    OUTPUT = "output"
    """It wrote more than it may."""
    KILLED = "killed"
    """Something outside ended it: the host, an operator."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    exit_code: int
    """As in a shell: 128 + n where signal n ended it (137 where a limit did), 127 where there is no such command."""
    stdout: bytes = b""
    """Of a command in a shell what the terminal showed, errors too."""
    stderr: bytes = b""
    omitted: int = 0
    """Bytes that are missing in the middle of `stdout`: a shell keeps the beginning and the end."""
    ended: Ended
    """In a shell `memory` and `killed` mean that the sandbox has ended too."""
    restarted: bool = False
    """The shell itself ended (`exit`, `exec`, a deadline that it ignored) and was started anew: files and background
    processes are still there, variables and the current folder are not."""
    seconds: float
    """Wall-clock time of the command, without the sandbox's own start."""

    @property
    def ok(self) -> bool:
        return self.ended is Ended.COMPLETED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are no UTF-8 become U+FFFD."""
        return self.stdout.decode(errors="replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode(errors="replace")
