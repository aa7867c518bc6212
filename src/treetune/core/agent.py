"""An `Agent` plays a whole episode by itself. It is a program with a loop of its own, and calls its model as it likes.

    run = await agent.play(Assignment(problem="How many files are in /tmp?", task=task, machine=machine))
    run.answer, run.tokens

An environment says what an agent gets (`problem`, `machine`) and how its answer is handed in (`hand_in`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from treetune.chat.tokens import Tokens
from treetune.core.policy import Completion, Request, Sampling, Usage
from treetune.core.task import Task
from treetune.core.trace import AgentRecord, Trace
from treetune.errors import UsageError

AGENTS_ON_SERVERS = "on a task server, an agent plays only tasks with one answer: the machines of the others are there"
OWN_LOOP = "SkyRL's own loop asks the model, and has no place for an agent"
OWN_HARNESSES = "verifiers starts agents itself, with its own harnesses"
"""Why agents do not play everywhere."""


class AgentNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent needs of the machine of an episode. The environment gets it before its start."""

    shown: tuple[tuple[str, str], ...] = ()
    """Files and folders of this host that the agent can read, and where they appear on the machine."""
    memory_mb: int = 0
    """The least memory, number of processes and disk space; a task may have more."""
    processes: int = 0
    disk_mb: int = 0


class AgentMachine(NamedTuple):
    """The machine of an episode, as an agent uses it."""

    shell: Any
    """A `treetune.sandbox.shell.Shell`."""
    folder: str = "/root"
    env: Mapping[str, str] = {}
    seconds: float | None = None
    """The time limit that the task sets for an agent."""
    python: str = "python3"
    """The Python of the machine."""


class Assignment(NamedTuple):
    """What an agent is given."""

    problem: str
    task: Task
    machine: AgentMachine | None = None
    sampling: Sampling = Sampling()
    """The settings of the run, which override what the agent asks for."""
    key: str = ""
    """Identifies the rollout, as in `Request`."""
    weights: Any = None
    """The `play.weights.Weights` of the run, if they change while agents play."""


class AgentRun(msgspec.Struct, kw_only=True):
    """What came of it. A crash of the agent is part of it; only a failure of the model or the machine is raised."""

    answer: str = ""
    record: AgentRecord
    tokens: Tokens | None = None
    """The tokens of all its conversations; None if the model returns none."""
    usage: Usage = msgspec.field(default_factory=Usage)
    warnings: list[str] = []
    truncated: bool = False
    """Whether a limit of the run ended it."""
    forfeit: str | None = None
    """Why it earns nothing, if it left nothing that could be scored: it has brought down its machine."""

    def write_to(self, trace: Trace) -> None:
        """Copy the run into the trace of the episode."""
        trace.agent, trace.tokens, trace.usage = self.record, self.tokens, self.usage
        trace.warnings += self.warnings
        versions = [one for each in self.tokens.sequences for one in each.versions if one >= 0] if self.tokens else []
        if versions:
            trace.version, trace.last_version = min(versions), max(versions)


class Agent(ABC):
    """A policy that plays whole episodes."""

    name: str
    needs = AgentNeeds()

    @abstractmethod
    async def play(self, assignment: Assignment) -> AgentRun: ...

    async def complete(self, request: Request) -> Completion:
        raise UsageError(f"{self.name} is an agent: it plays whole episodes, and answers no single prompt")

    async def close(self) -> None:
        return None
