"""Public agents, and tasks that they play on machines that reach nothing but the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treetune import Taskset, Trace, build_taskset
from treetune.core.agent import AgentRun, Assignment
from treetune.core.policy import Sampling
from treetune.gateway import AgentPolicy
from treetune.gateway.prompts import TokenModel
from treetune.play.rollout import run_rollout

PROGRAMS = Path(__file__).parents[1] / "agents" / "programs"
SCRIPTS = {
    "openai": ("openai_sdk.py", "openai"),
    "openai, streamed": ("openai_sdk.py --stream", "openai"),
    "anthropic": ("anthropic_sdk.py", "anthropic"),
    "anthropic, streamed": ("anthropic_sdk.py --stream", "anthropic"),
    "openai-agents, a sub-agent": ("openai_agents.py", "openai-agents"),
    "langgraph": ("langgraph_react.py", "langgraph"),
    "pydantic-ai": ("pydantic_ai_agent.py", "pydantic-ai-slim"),
    "claude-agent-sdk": ("claude_agent_sdk_query.py", "claude-agent-sdk"),
}
"""Agents that are scripts around a library: the file, and the package whose version counts."""


class AgentBefore(AgentPolicy):
    """An agent in front of this model, as a trainer has it."""

    def __init__(self, agent: dict[str, Any], model: TokenModel) -> None:
        super().__init__(agent)
        self._given = model

    async def play(self, assignment: Assignment) -> AgentRun:
        return await self.play_behind(self._given, assignment)


async def play(
    name: str, python: Path, model: TokenModel, taskset: Taskset, sampling: Sampling | None = None, **settings: Any
) -> Trace:
    """Have an agent play the first task. `python` is the interpreter of the scripts."""
    agent = {"name": name, **settings}
    if name in SCRIPTS:
        file, *options = SCRIPTS[name][0].split()
        agent |= {"command": [str(python), str(PROGRAMS / file), *options], "env": {"IS_SANDBOX": "1"}}
    policy = AgentBefore(agent, model)
    try:
        return await run_rollout(taskset, taskset[0], policy, sampling=sampling or Sampling())
    finally:
        await policy.close()


def count_files(folder: Path) -> tuple[Taskset, list[str]]:
    """A question of os-interaction, and the commands that answer it."""
    files = "mkdir -p /var/data; touch /var/data/{1..7}.txt /var/data/x.md"
    sample = {
        "description": "How many files in /var/data end in .txt? Answer with the number alone.",
        "create": {"local": "default", "init": {"code": files}},
        "evaluation": {"match": "7"},
    }
    (folder / "samples.json").write_text(json.dumps([sample]))
    keys = {"data": str(folder / "samples.json"), "command_seconds": 60}
    return build_taskset({"id": "os-interaction", **keys}), ["ls /var/data", "ls /var/data/*.txt | wc -l"]


def greet(folder: Path) -> tuple[Taskset, list[str]]:
    """A task of Harbor, and the commands that do it."""
    test = "diff greetings.txt <(sed 's/.*/Hello, &!/' names.txt) && echo 1 >/logs/verifier/reward.txt"
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Greet everybody in names.txt, in greetings.txt.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\nCOPY names.txt .\n",
        "environment/names.txt": "Ada\nAlan\n",
        "tests/test.sh": f"#!/bin/bash\n{test}\n",
    }.items():
        (folder / "greet" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "greet" / name).write_text(text)
    commands = ["cat names.txt", "sed 's/.*/Hello, &!/' names.txt > greetings.txt; echo done"]
    return build_taskset({"id": "harbor", "folder": str(folder / "greet")}), commands
