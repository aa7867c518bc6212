"""Files that live on from one command to the next, although each command has a sandbox of its own.

    workspace = Workspace(Bubblewrap())
    await workspace.run(["sh", "-c", "echo hi > /app/note"], cwd="/app")
    (await workspace.run(["cat", "/app/note"])).text    # "hi\\n"

Between commands the files are a tar in memory, made and unpacked inside only: nothing of it touches the host's disk,
and the sandbox's `disk_mb` limits it. Processes, variables and the current folder do not live on, nor changes of /etc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType

import msgspec

from treetune.sandbox.filesystem import SYSTEM_FOLDERS, WORK
from treetune.sandbox.protocol import DEFAULT_LIMITS, Ended, Sandbox, SandboxLimits
from treetune.sandbox.workspace_runner import END

LEFT_OUT = ("/usr", "/etc", "/proc", "/dev", WORK, *(f"/{folder}" for folder in SYSTEM_FOLDERS))
"""Made anew for each command."""
RUNNER = "workspace_runner.py"
AROUND_SECONDS = 60.0
"""For putting files back and packing them again."""
READ_BYTES = 1 << 16
"""The most that is read of a file."""
NOTHING: Mapping[str, str] = MappingProxyType({})
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
CAUSES = {
    Ended.TIMEOUT: "it kept the sandbox from ending in time",
    Ended.MEMORY: "it used more memory than it may",
    Ended.OUTPUT: "its files are more than can be kept",
}


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one command ended."""

    exit_code: int | None
    """As in a shell; None where its time was over."""
    output: bytes = b""
    """Standard output and standard error as they came; of too much the beginning and the end."""
    omitted: int = 0
    """Bytes of output that were left out in the middle."""
    contents: dict[str, bytes | None] = {}
    """The files that were to be read; None for one that is not there."""
    problem: str | None = None
    """Why the files are still as they were before the command; None: what it changed is kept."""

    @property
    def text(self) -> str:
        return self.output.decode(errors="replace")


class Workspace:
    def __init__(self, sandbox: Sandbox, *, limits: SandboxLimits = DEFAULT_LIMITS, state: bytes = b"") -> None:
        self._sandbox, self._limits = sandbox, limits
        self.state = state
        """The files, as a tar with paths from `/` on."""

    async def run(
        self,
        command: Sequence[str],
        *,
        cwd: str = "/",
        env: Mapping[str, str] = NOTHING,
        files: Mapping[str, bytes] = NO_FILES,
        remove: Sequence[str] = (),
        read: Sequence[str] = (),
        limits: SandboxLimits | None = None,
    ) -> Outcome:
        """Run a command among the files: `remove` paths first, write `files`, and `read` some after, all by paths from
        `/` on. `limits` are those of the command; absent: the workspace's own."""
        limits = limits or self._limits
        # Half as much again, for packed a file may be more than its pages; beyond are holes, or floods of empty files.
        keep = (limits.disk_mb << 20) * 3 // 2
        request = {
            "command": list(command),
            "cwd": cwd,
            "env": dict(env),
            "seconds": limits.seconds,
            "state_bytes": len(self.state),
            "files": [(path, len(content)) for path, content in files.items()],
            "remove": list(remove),
            "read": list(read),
            "read_bytes": READ_BYTES,
            "output_bytes": limits.output_kb << 10,
            "keep_bytes": keep,
            "left_out": LEFT_OUT,
        }
        result = await self._sandbox.run(
            [self._sandbox.python, "-I", "-S", RUNNER],
            stdin=msgspec.json.encode(request) + b"\n" + self.state + b"".join(files.values()),
            files={RUNNER: _runner()},
            limits=msgspec.structs.replace(
                limits,
                seconds=limits.seconds + AROUND_SECONDS,
                # A tar is padded at its end; the rest is for what is read and the first line.
                output_kb=limits.output_kb + (keep >> 10) + (len(read) * READ_BYTES >> 10) + 64,
            ),
            writable_root=True,
        )
        reply, _, rest = result.stdout.partition(b"\n")
        try:
            said = _decoder.decode(reply)
        except msgspec.MsgspecError:
            problem = CAUSES.get(result.ended, "it ended the sandbox")
            return Outcome(exit_code=result.exit_code, output=result.stderr, problem=problem)
        return self._kept(said, rest, read)

    def _kept(self, said: _Reply, rest: bytes, read: Sequence[str]) -> Outcome:
        output, rest = rest[: said.output], rest[said.output :]
        contents: dict[str, bytes | None] = {}
        for path, size in zip(read, said.contents, strict=False):
            contents[path] = None if size is None else rest[:size]
            rest = rest[size or 0 :]
        problem = said.problem
        if problem is None and not rest.endswith(END):
            problem = "its files could not be packed"
        if problem is None:
            self.state = rest.removesuffix(END)
        return Outcome(
            exit_code=said.exit_code,
            output=output,
            omitted=max(0, said.written - len(output)),
            contents=contents,
            problem=problem,
        )


class _Reply(msgspec.Struct):
    exit_code: int | None
    output: int
    written: int
    contents: list[int | None]
    problem: str | None


_decoder = msgspec.json.Decoder(_Reply)


@cache
def _runner() -> bytes:
    return Path(__file__).with_name(RUNNER).read_bytes()
