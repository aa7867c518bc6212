"""Public agents, unchanged, on machines that reach nothing but the gateway. Each plays a task of os-interaction and one
of Harbor, in front of a scripted model that works with whatever tools they offer.

    pytest -m agents                        # all of them, with a table at the end; three are in the slow suite too
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
import time

import npm_agents
import pytest
import venvs
from agent_playing import SCRIPTS, count_files, greet, play
from gateway_playing import check_exact, format_of, running_engine
from scripted_engine import make_tokenizer

from treetune.chat.tokens import ChatTokens
from treetune.gateway import HttpSampler
from treetune.gateway.agent import known_agents
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.sandbox import probe

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not probe(shell=True).available, reason="no sandbox can start here"),
    pytest.mark.filterwarnings("ignore:.*replaces the tasks' images"),
]
TOKENIZER = "calls:hermes"
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


def version_of(name, python):
    if name not in SCRIPTS:
        return re.split("@|==", known_agents()[name].install.strip("'"))[-1]
    code = f"from importlib.metadata import version; print(version({SCRIPTS[name][1]!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


async def play_scripted(engine, name, python, taskset, commands):
    engine.script(TOKENIZER, commands=commands, context=200_000)
    sampler = HttpSampler(engine.url, "policy")
    try:
        model = TokenModel(Prompts(ChatTokens(make_tokenizer(TOKENIZER), call_format=format_of(TOKENIZER))), sampler)
        return await play(name, python, model, taskset)
    finally:
        sampler.close()


@pytest.mark.parametrize("task", [count_files, greet])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in IN_CI else ()) for name in [*SCRIPTS, *known_agents()]],
)
def test_an_agent_earns_its_reward_and_each_sample_is_trained_once(name, task, python, engine, tmp_path, table):
    taskset, commands = task(tmp_path)
    began = time.monotonic()
    trace = asyncio.run(play_scripted(engine, name, python, taskset, commands))
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
    assert kinds[len(trace.tokens.sequences) - 1] == "main", "the last one, for trainers with one row"
    assert set(kinds) == KINDS.get(name, {"main"})
    if name not in EACH_STEP_ANEW:
        assert len(kinds) == len(set(kinds)), "one sequence for each conversation"
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    calls = str(trace.agent.counts["calls"])
    exact = f"{trained} of {trained + sides}" if sides else str(trained)
    row = (name, version_of(name, python), task.__name__, f"{trace.reward:g}", calls, counts, exact, f"{seconds:.1f}")
    table.append(row)
