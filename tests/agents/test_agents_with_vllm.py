"""Public agents in front of a real vLLM on a CPU. Its model is too small to be of use to them; the tokens are exact."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import venvs
from vllm_server import vllm_server

from treetune.sandbox import probe

pytestmark = [
    pytest.mark.agents,
    pytest.mark.skipif(not probe(shell=True).available, reason="no sandbox can start here"),
]
CALLING = ("openai, streamed", "anthropic, streamed", "mini-swe-agent")
"""A grammar has the model call their shell."""
ANSWERING = ("openai-agents",)
SIDE = Path(venvs.__file__).with_name("vllm_agents_side.py")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    python, agents, model = venvs.vllm_verl(), venvs.venv(*venvs.AGENTS), venvs.smollm2()
    with vllm_server(python, model, tmp_path_factory.mktemp("vllm") / "log", context=8192) as url:
        path = os.pathsep.join([str(agents.parent), os.environ["PATH"]])
        said = venvs.run(python, SIDE, f"{url}/v1", model, agents, *CALLING, *ANSWERING, timeout=1800, PATH=path)
    return dict(map(json.loads, said.splitlines()))


@pytest.mark.parametrize("name", CALLING)
def test_an_agent_has_one_sequence_until_its_calls_are_spent(seen, name):
    found = seen[name]
    assert found["same"], found
    assert (found["kinds"], found["sampled"], found["over"]) == (["main"], 6, "its 6 calls are spent")


@pytest.mark.parametrize("name", ANSWERING)
def test_logprobs_are_those_of_a_fresh_pass(seen, name):
    found = seen[name]
    assert found["same"], found
    assert found["sampled"] >= 1
    assert found["worst"] < 1e-3
