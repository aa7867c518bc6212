"""Public agents, unchanged, on machines that reach nothing but the gateway. Each plays a task of os-interaction and one
of Harbor, in front of a scripted model that works with whatever tools they offer.

    pytest -m agents                        # all of them, with a table at the end; three are in the slow suite too
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import npm_agents
import pytest
import venvs
from gateway_playing import check_exact, format_of, running_engine
from scripted_engine import make_tokenizer

from treetune import build_taskset
from treetune.gateway import AgentPolicy, HttpSampler
from treetune.gateway.agent import known_agents
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.play.rollout import run_rollout
from treetune.sandbox import probe

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not probe(shell=True).available, reason="no sandbox can start here"),
    pytest.mark.filterwarnings("ignore:.*replaces the tasks' images"),
]
TOKENIZER = "calls:hermes"
PROGRAMS = Path(__file__).parent / "programs"
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
KINDS = {
    "openai-agents, a sub-agent": {"sub-agent", "main"},
    "claude-agent-sdk": {"side", "main"},  # a title for the session
    "opencode": {"side", "main"},
}
IN_CI = ("openai, streamed", "mini-swe-agent", "claude-code")
EACH_STEP_ANEW = ("smolagents",)
"""Agents that change what the model has said."""


@pytest.fixture(scope="module")
def python():
    """Installs the agents, and puts them on the PATH."""
    if shutil.which("npm") is None:
        pytest.skip("no npm")
    python = venvs.venv(*venvs.AGENTS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(npm_agents.install()), str(python.parent), os.environ["PATH"]]))
        yield python


@pytest.fixture(scope="module")
def engine():
    with running_engine() as engine:
        yield engine


class AgentBefore(AgentPolicy):
    """An agent in front of this model, as a trainer has it."""

    def __init__(self, agent, model):
        super().__init__(agent)
        self._given = model

    async def play(self, assignment):
        return await self.play_behind(self._given, assignment)


def config_of(name, python):
    """The settings of an agent: a script's, or the name of a known one."""
    if name not in SCRIPTS:
        return name
    file, *options = SCRIPTS[name][0].split()
    return {"name": name, "command": [str(python), str(PROGRAMS / file), *options], "env": {"IS_SANDBOX": "1"}}


def version_of(name, python):
    if name not in SCRIPTS:
        return re.split("@|==", known_agents()[name].install.strip("'"))[-1]
    code = f"from importlib.metadata import version; print(version({SCRIPTS[name][1]!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


async def play(engine, agent, taskset, commands):
    engine.script(TOKENIZER, commands=commands, context=200_000)
    sampler = HttpSampler(engine.url, "policy")
    policy = AgentBefore(agent, TokenModel(Prompts(make_tokenizer(TOKENIZER), "keep", format_of(TOKENIZER)), sampler))
    try:
        return await run_rollout(taskset, taskset[0], policy)
    finally:
        await policy.close()
        sampler.close()


def count_files(folder):
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


def greet(folder):
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


@pytest.mark.parametrize("task", [count_files, greet])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else ()) for name in [*SCRIPTS, *known_agents()]],
)
def test_an_agent_earns_its_reward_and_each_sample_is_trained_once(name, task, python, engine, tmp_path, table):
    taskset, commands = task(tmp_path)
    began = time.monotonic()
    trace = asyncio.run(play(engine, config_of(name, python), taskset, commands))
    seconds = time.monotonic() - began
    assert trace.failure is None
    assert trace.agent is not None
    shape = [(each.kind, len(each.trained)) for each in trace.agent.lineage]
    print(trace.answer, trace.warnings, trace.agent.notes, shape, file=sys.stderr)
    assert trace.reward == 1.0
    assert trace.agent.on_machine
    sides = sum(count for kind, count in shape if kind == "side")
    trained = check_exact(engine, trace.tokens.sequences, trace.agent.counts["calls"] - sides)
    assert sides + trained == len(engine.memory()["sampled"])
    kinds = [kind for kind, _ in shape]
    assert set(kinds) == KINDS.get(name, {"main"})
    if name not in EACH_STEP_ANEW:
        assert len(kinds) == len(set(kinds)), "one sequence for each conversation"
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    calls = str(trace.agent.counts["calls"])
    exact = f"{trained} of {trained + sides}" if sides else str(trained)
    row = (name, version_of(name, python), task.__name__, f"{trace.reward:g}", calls, counts, exact, f"{seconds:.1f}")
    table.append(row)
