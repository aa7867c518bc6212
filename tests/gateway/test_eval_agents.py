"""`treetune eval --agent`: a program plays the tasks, and the model that `-m` names is behind its SDK."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import pytest
import venvs

from treetune import open_run

AGENT = """
import os, sys
from openai import OpenAI

task = open(os.environ["TREETUNE_TASK"]).read()
client = OpenAI(max_retries=0)
messages = [{"role": "user", "content": task}]
for _ in range(2):
    said = client.chat.completions.create(model="any", messages=messages).choices[0].message
    messages += [said.model_dump(exclude_none=True), {"role": "user", "content": "Are you sure?"}]
print(said.content)
"""
ANTHROPIC = """
import os
from anthropic import Anthropic

task = {"role": "user", "content": open(os.environ["TREETUNE_TASK"]).read()}
with Anthropic().messages.stream(model="any", max_tokens=100, messages=[task]) as events:
    print(events.get_final_text())
"""


@pytest.fixture
def evaluate(treetune, tmp_path):
    """Evaluates an agent on arithmetic; gives the result and the traces."""

    def run(program, *arguments, model="scripted:gold", **environment):
        (tmp_path / "my_agent.py").write_text(program)
        result = treetune(
            "eval", "arithmetic", "--agent", "./my_agent.py", "-m", model, "-n", 2, "-o", "run", *arguments, "--json",
            **environment,
        )  # fmt: skip
        return result, list(open_run(tmp_path / "run").traces())

    return run


@pytest.mark.parametrize("program", [AGENT, ANTHROPIC], ids=["openai", "anthropic"])
def test_an_agent_earns_what_its_answer_is_worth(evaluate, program):
    if program is ANTHROPIC:
        pytest.importorskip("anthropic")
    result, traces = evaluate(program)
    assert result.code == 0, result.err
    assert [trace.reward for trace in traces] == [1.0, 1.0]
    assert all(trace.turns[0].message["content"] == trace.answer for trace in traces)
    assert all(trace.tokens is None and not trace.warnings for trace in traces)


def test_a_crash_is_the_agents_own_and_is_scored(evaluate):
    result, traces = evaluate("import sys; print('I give up'); sys.exit('no idea')")
    assert result.code == 0, result.err
    assert [trace.reward for trace in traces] == [0.0, 0.0]
    assert traces[0].outcome.scored
    assert "the agent ended with exit code 1: no idea" in traces[0].warnings
    assert "the agent did not call the model" in traces[0].warnings


def test_a_crash_without_a_message_is_its_exit_code_alone(evaluate):
    _, traces = evaluate("import sys; sys.exit(3)")
    assert "the agent ended with exit code 3" in traces[0].warnings


BROKEN = """
class Broken:
    name = "broken"
    async def complete(self, request): raise ValueError("out of memory")
    async def close(self): pass
"""


def test_a_model_that_fails_is_a_failure_without_a_reward(evaluate, tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    result, traces = evaluate(AGENT, model="scripted:broken.py:Broken")
    assert result.code != 0
    assert [(trace.outcome.value, trace.reward) for trace in traces] == [("policy_error", None)] * 2
    assert "the model failed to answer the agent: ValueError: out of memory" in traces[0].failure.message


def test_an_agent_that_takes_too_long_is_killed_with_all_it_started(evaluate, tmp_path):
    program = (
        "import os, subprocess, time\n"
        f"subprocess.Popen(['sleep', '600'])\nopen({str(tmp_path / 'group')!r}, 'w').write(str(os.getpgid(0)))\n"
        "time.sleep(600)"
    )
    _, traces = evaluate(program, "--limits.timeout", 3)
    assert [trace.outcome.value for trace in traces] == ["timeout"] * 2
    group = int((tmp_path / "group").read_text())
    until = time.monotonic() + 10
    while _is_alive(group):
        assert time.monotonic() < until
        time.sleep(0.05)


def _is_alive(group):
    try:
        os.killpg(group, 0)
        return True
    except ProcessLookupError:
        return False


def test_keys_of_the_user_do_not_reach_the_agent(evaluate):
    program = "import os, json; print(json.dumps(dict(os.environ)))"
    _, traces = evaluate(program, OPENAI_API_KEY="sk-mine", HF_TOKEN="hf-mine", TREETUNE_TOKEN="mine", PLAIN="seen")
    seen = json.loads(traces[0].turns[0].message["content"])
    assert "mine" not in str(seen)
    assert seen["PLAIN"] == "seen"
    assert seen["OPENAI_API_KEY"] in seen["OPENAI_BASE_URL"]


def test_what_an_agent_cannot_play_is_refused_before_it_starts(treetune, tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    for arguments, why in (
        (["arithmetic", "--agent", "./none.py"], "there is no file ./none.py"),
        (["arithmetic", "--agent", "no-such-program --fast"], "no program 'no-such-program'"),
        (["arithmetic", "--agent", "'"], "is not a command"),
        (["alphabet-sort", "--agent", "./my_agent.py"], "several turns"),
    ):
        result = treetune("eval", *arguments, "-m", "scripted:gold", "-n", 1)
        assert result.code == 2, result.err
        assert why in result.err, result.err


def test_settings_stand_next_to_the_name_of_an_agent(evaluate):
    result, traces = evaluate(AGENT, "--agent.limits.calls", 1, "--agent.env.SEEN", "here")
    assert result.code == 0, result.err
    assert [trace.outcome.value for trace in traces] == ["truncated"] * 2
    assert all("its 1 calls are spent" in trace.agent.over for trace in traces)


def test_workers_of_a_server_have_agents_play(treetune, tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    options = ["arithmetic", "--agent", "./my_agent.py", "-m", "scripted:gold", "-n", 2, "--serve", 1, "-o", "run"]
    assert treetune("eval", *options).code == 0
    assert [(trace.reward, len(trace.agent.calls)) for trace in open_run(tmp_path / "run").traces()] == [(1.0, 2)] * 2


def test_the_program_in_another_users_run_is_not_run(treetune, tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    run = tmp_path / "theirs"
    options = ["arithmetic", "-m", "scripted:gold", "-n", 1]
    assert treetune("eval", *options, "-o", run).code == 0
    config = (run / "config.yaml").read_text()
    assert "agent: null" in config
    (run / "config.yaml").write_text(config.replace("agent: null", "agent: python my_agent.py"))
    result = treetune("eval", "--resume", "-o", run)
    assert result.code == 2
    assert "would run a program" in result.err


@pytest.mark.slow
def test_the_tokens_of_an_agent_in_front_of_a_local_model_are_in_its_trace(tmp_path):
    python = venvs.venv(*venvs.MODELS)
    program = AGENT.replace("from openai import OpenAI", "").replace("client = OpenAI(max_retries=0)", "")
    program = re.sub(r"client\.chat.*", "ask()", program)
    program = program.replace("said.model_dump(exclude_none=True)", "said").replace("said.content", "said['content']")
    ask = """
import json, urllib.request
def ask():
    body = json.dumps({"messages": messages, "max_tokens": 20}).encode()
    with urllib.request.urlopen(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body) as answer:
        return json.load(answer)["choices"][0]["message"]
"""
    (tmp_path / "my_agent.py").write_text(program.replace("\ntask =", f"{ask}\ntask ="))
    venvs.run(
        python, "-m", "treetune", "eval", "arithmetic", "--agent", tmp_path / "my_agent.py", "-m",
        f"local:{venvs.smollm2()}", "-n", 2, "-o", tmp_path / "run", "--json", timeout=600,
    )  # fmt: skip
    for trace in open_run(tmp_path / "run").traces():
        assert not trace.warnings
        (sequence,) = trace.tokens.sequences
        assert sum(sequence.mask) == trace.usage.completion_tokens > 2
        assert len(sequence.logprobs) == len(sequence.ids)
    model = venvs.smollm2()
    verify = ["-m", "treetune", "gateway", "verify", tmp_path / "run", "--json"]
    found = json.loads(venvs.run(python, *verify, "-m", model, timeout=600))
    assert found["passed"]
    assert found["trained"] == found["calls"] == 4
    assert found["compared"] == found["sampled"] > 4
    assert found["difference"] < 1e-3
    strict = [*map(str, verify), "-m", str(model), "--tolerance", "0"]
    assert subprocess.run([python, *strict], capture_output=True, check=False).returncode == 1
