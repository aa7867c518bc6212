"""Tasks on a machine: OS interaction (`taskset`, `environment`, `sample`), tasks for AgentBench's worker
(`agentbench`), and what they share with Harbor's tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from treetune.chat.message import text_of
from treetune.core.agent import AgentMachine
from treetune.errors import EnvironmentFault
from treetune.sandbox.limits import Ended, Result, SandboxLimits
from treetune.sandbox.machines import Machine
from treetune.sandbox.shell import Shell
from treetune.tasksets.turns import TurnEnvironment

SETUP_SECONDS = 60.0
OUT_OF_MEMORY = "it took more memory than there is, and ended the machine"
FENCE = re.compile(r"(`{3,})[ \t]*(?:bash|sh|shell)?[ \t]*")


class Unservable(ValueError):
    """Raised for a task that needs something that is missing here; the message says what."""


class ShellEnvironment(TurnEnvironment):
    """Episodes in a shell, which a subclass opens in `start`."""

    MULTI_TURN = True

    _shell: Shell | None = None
    _machine: Machine

    @property
    def shell(self) -> Shell:
        assert self._shell is not None
        return self._shell

    def problem(self) -> str:
        """The last message of the prompt: those before it have the rules for actions."""
        return text_of(self.task.messages[-1].get("content")) or ""

    @property
    def machine(self) -> AgentMachine:
        return AgentMachine(self.shell, python=self._machine.python)

    def widen(self, limits: SandboxLimits) -> SandboxLimits:
        """Return the limits of the machine, with what an agent needs if one plays."""
        if (needs := self.agent) is None:
            return limits
        least = {
            name: max(getattr(limits, name), getattr(needs, name)) for name in ("memory_mb", "processes", "disk_mb")
        }
        return replace(limits, **least, shown=needs.shown)

    async def close(self) -> None:
        if self._shell is not None:
            await self._shell.close()

    async def run(self, command: Sequence[str], *, seconds: float = SETUP_SECONDS, **settings: Any) -> Result:
        """Run a program outside the shell."""
        return require_machine(await self.shell.run(command, seconds=seconds, **settings))

    def describe(self, result: Result, seconds: float, chars: int, *notes: str) -> str:
        """Return a result as the policy sees it: at most `chars` characters, and notes on how it ended."""
        text = require_machine(result).text.strip("\r\n")
        if len(text) > chars or result.omitted:
            half = min(chars, len(text)) // 2
            omitted = len(text) + result.omitted - 2 * half
            text = f"{text[:half]}\n[... {omitted} characters left out ...]\n{text[-half:]}"
        said = [f"stopped after {round(seconds, 2):g} seconds"] if result.ended is Ended.TIMEOUT else list(notes)
        said += ["the shell was restarted"] if result.restarted else []
        said += ["no output"] if not text and not said else []
        return f"{text}\n({'; '.join(said)})".lstrip("\n") if said else text


def require_machine(result: Result) -> Result:
    """Return the result. Raises if the machine was ended from outside, which says nothing about the policy."""
    if result.ended is Ended.KILLED:
        raise EnvironmentFault("the sandbox was ended from outside", remedy="run the episode again")
    return result


def list_blocks(text: str) -> list[str]:
    """Return the contents of an answer's code blocks. A block ends with at least as many backticks as it began with."""
    blocks: list[list[str]] = []
    fence = None
    for line in text.splitlines():
        marks = line.strip()
        if fence is not None and marks.startswith(fence) and not marks.strip("`"):
            fence = None
        elif fence is not None:
            blocks[-1].append(line)
        elif found := FENCE.fullmatch(marks):
            fence = found[1]
            blocks.append([])
    # A block without an end was cut off: half a command is not run.
    return ["\n".join(lines) for lines in (blocks if fence is None else blocks[:-1])]
