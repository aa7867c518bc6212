"""The tools `python` and `shell`: a model's code runs in a sandbox, or not at all.

    tools: [python, {shell: {seconds: 30, memory_mb: 1024}}]        # settings are those of SandboxLimits

If no sandbox can start, the episode fails before it begins, and the error says why.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from treetune.core.task import Task
from treetune.core.tool import Tool, ToolSource, tool
from treetune.errors import ToolError, UsageError
from treetune.sandbox import Ended, Result, SandboxLimits, require
from treetune.sandbox.shell import SandboxGone, Shell
from treetune.tasksets.code import run_python

GRACE_SECONDS = 20.0
"""Extra seconds for a sandbox to start and end, beyond the time of what runs in it."""
_STOPPED = {
    Ended.TIMEOUT: "stopped: it took longer than {limits.seconds:g} seconds",
    Ended.MEMORY: "stopped: it used more than {limits.memory_mb} MB of memory",
    Ended.OUTPUT: "stopped: it wrote more than {limits.output_kb} KB",
    Ended.KILLED: "stopped",
}


class _Sandboxed(ToolSource):
    def __init__(self, task: Task, **settings: Any) -> None:
        super().__init__(task)
        try:
            self.limits = msgspec.convert(settings, SandboxLimits)
        except msgspec.ValidationError as error:
            known = ", ".join(SandboxLimits.__struct_fields__)
            raise UsageError(
                f"tools: {type(self).__name__.lower()}: {error}", remedy=f"its settings: {known}"
            ) from None

    async def open(self) -> list[Tool]:
        await asyncio.to_thread(require, shell=isinstance(self, ShellTool))
        tools = await super().open()
        for one in tools:
            one.timeout = self.limits.seconds + GRACE_SECONDS
        return tools

    def describe(self, result: Result) -> str:
        """Return the model's view of a run."""
        parts = [result.text, result.error_text]
        if result.ended is not Ended.COMPLETED:
            parts.append(f"[{_STOPPED[result.ended].format(limits=self.limits)}]")
        elif result.exit_code:
            parts.append(f"[exit code {result.exit_code}]")
        if result.restarted:
            parts.append("[the shell was started anew: its variables and its folder are gone, its files are not]")
        return "\n".join(part.strip("\n") for part in parts if part.strip()) or "[no output]"


class PythonTool(_Sandboxed):
    """A Python program, in a fresh sandbox each time."""

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program and get what it prints. Each call starts afresh, without files or network.

        code: the whole program; print what you want to see.
        """
        return self.describe(await run_python(code.encode("utf-8", "surrogatepass"), limits=self.limits))


class ShellTool(_Sandboxed):
    """A shell in a sandbox that lives for the episode; it is started by the first command."""

    def __init__(self, task: Task, **settings: Any) -> None:
        super().__init__(task, **settings)
        self._shell: Shell | None = None
        self._starting = asyncio.Lock()

    @tool
    async def shell(self, command: str) -> str:
        """Run a command in a Linux shell that lives on: files, variables and the current folder stay. No network.

        command: one or several lines of bash.
        """
        async with self._starting:
            if self._shell is None or not self._shell.alive:
                self._shell = await Shell.open(self.limits)
        try:
            return self.describe(await self._shell.execute(command))
        except SandboxGone as error:
            raise ToolError(f"the machine has ended, the next command gets a fresh one: {error.message}") from error

    async def close(self) -> None:
        async with self._starting:
            if self._shell is not None:
                await self._shell.close()
