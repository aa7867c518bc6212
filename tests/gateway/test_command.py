"""`treetune gateway`, as a user starts it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import venvs
from gateway_playing import check_exact
from openai import AsyncOpenAI

from treetune.chat.tokens import TokenSequence

SUPPORT = Path(__file__).parents[1] / "support"


@contextlib.contextmanager
def gateway(*arguments, token="secret", python=sys.executable, **more):
    """The command in a process of its own; gives what it printed with --json, and stops it with SIGTERM."""
    path = os.pathsep.join(map(str, [SUPPORT / "gateway_stand_ins", SUPPORT, SUPPORT.parents[1] / "src"]))
    environment = {**os.environ, **more, "PYTHONPATH": path, **({"TREETUNE_TOKEN": token} if token else {})}
    command = [python, "-m", "treetune", "gateway", "--http", ":0", "--json", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            lines: list[str] = []
            while not lines or lines[-1] != "}\n":
                lines.append(process.stdout.readline())
                assert lines[-1], "it ended"
            yield json.loads("".join(lines))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def ask(url, token, method="GET", body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Authorization": f"Bearer {token}"}, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_an_agent_in_front_of_an_engine(engine):
    engine.script("plain", context=5000)
    settings = ["--limits.calls", "2", "--sampling.temperature", "0.9"]
    with gateway("--upstream", engine.url, "-m", "plain", *settings, token=None) as found:
        session = ask(f"{found['url']}/sessions", found["token"], "POST", {})
        environment = session["environment"]

        async def play():
            client = AsyncOpenAI(
                base_url=environment["OPENAI_BASE_URL"], api_key=environment["OPENAI_API_KEY"], max_retries=0
            )
            messages = [{"role": "user", "content": "hi"}]
            said = await client.chat.completions.create(model="any", messages=messages)
            messages += [said.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "And?"}]
            async with client.chat.completions.stream(model="any", messages=messages) as events:
                await events.get_final_completion()
            with pytest.raises(Exception, match="its 2 calls are spent"):
                await client.chat.completions.create(model="any", messages=messages)

        asyncio.run(play())
        asked = engine.memory()["begun"]
        assert [(one["temperature"], one["model"]) for one in asked] == [(0.9, "policy")] * 2
        assert asked[0]["max_tokens"] == 5000 - len(asked[0]["prompt"])
        trace = ask(f"{found['url']}/sessions/{session['key']}", found["token"], "DELETE")
        (sequence,) = trace["sequences"]
        tokens = {name: sequence["tokens"][name] for name in ("ids", "mask", "logprobs")}
        check_exact(engine, [TokenSequence(**tokens)], 2)
        assert sequence["kind"] == "main"


def test_an_engine_that_is_not_there_yet_is_a_warning(engine):
    engine.script("plain", fault="no models")
    with gateway("--upstream", engine.url, "-m", "plain") as found:
        assert "token" not in found, "the user knows it"
        assert ask(f"{found['url']}/health", "")["status"] == "ok"
        engine.script("plain")
        session = ask(f"{found['url']}/sessions", "secret", "POST", {})
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        assert ask(f"{session['url']}/v1/chat/completions", "any", "POST", body)["choices"]


def test_what_is_wrong_is_told_before_it_starts(treetune):
    for arguments, code in (
        (["-m", "x", "--upstream", "ftp://here/v1"], "usage"),
        (["-m", "x", "--upstream", "http://127.0.0.1:1/v1", "--limits.cals", "3"], "unknown-key"),
        (["-m", "x", "--upstream", "http://127.0.0.1:1/v1", "--rewrites", "both"], "usage"),
        (["-m", "x", "--upstream", "http://127.0.0.1:1/v1", "--api-key-env", "NOT_SET"], "usage"),
        (["-m", "no/model"], "missing-extra"),
    ):
        result = treetune("gateway", *arguments, "--json")
        assert result.code == 2 or code == "missing-extra", result.err
        assert result.json["code"] == code, result.out


@pytest.mark.slow
def test_a_local_model_is_recorded_with_its_own_logprobs():
    seen = json.loads(venvs.run(venvs.venv(*venvs.MODELS), SUPPORT / "gateway_model.py", venvs.smollm2(), timeout=900))
    assert seen["calls"] == seen["trained"] == 6
    assert seen["sampled"] > 60
    assert seen["difference"] < 1e-3, seen


@pytest.mark.slow
def test_random_agents_over_the_tokenizers_and_templates_of_real_models():
    names = ["qwen2.5", "qwen3", "qwen3.5", "deepseek-v3", "deepseek-r1", "llama3.2", "mistral-tools", "smollm2"]
    venvs.smollm2()
    side = SUPPORT / "random_agents.py"
    seen = json.loads(venvs.run(venvs.venv(*venvs.MODELS), side, 4, *names, timeout=1800))
    for name in names:
        assert seen[name]["delivered"] > 40, name
