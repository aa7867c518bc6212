"""The limits of a sandbox, and how a command in it ended.

However the code inside ends, there is a `Result`. Only a sandbox that cannot start raises an exception.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from treetune.errors import TreetuneError

KILLED = 128 + 9
"""The exit code of a killed command, as in a shell."""


class SandboxUnavailable(TreetuneError, code="no-sandbox"):
    """Raised if a sandbox cannot start here; nothing was run."""


class SandboxLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 10.0
    """Seconds from the command's start. Waiting counts by the clock, working by processor time, with at most ten times
    as much clock time. So load on the machine does not decide whether a command finishes in time."""
    memory_mb: Annotated[int, msgspec.Meta(ge=16)] = 512
    """Memory in MB. A process that asks for more gets an error (`MemoryError`). Processes that together exceed
    `memory_mb` + `disk_mb` (files are kept in memory) are killed."""
    processes: Annotated[int, msgspec.Meta(ge=1)] = 64
    """The maximum number of processes and threads at one time."""
    disk_mb: Annotated[int, msgspec.Meta(ge=1)] = 64
    """Space in MB for files in the working folder and `/tmp` together. Shared memory (`/dev/shm`) may hold as much
    again."""
    output_kb: Annotated[int, msgspec.Meta(ge=1)] = 1024
    """Limit in KB for standard output, and the same for standard error; a command that writes more is killed."""

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
