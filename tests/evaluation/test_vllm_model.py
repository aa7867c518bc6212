"""`-m vllm:MODEL`: a server that runs is found, else one is started, and ends with the evaluation."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import venvs
import vllm_server
from task_servers import free_port
from vendor_endpoint import vendor, vllm_program

from treetune.models import vllm


@pytest.fixture
def port(monkeypatch) -> int:
    """Where vLLM is looked for: not where somebody else's may run."""
    port = free_port()
    monkeypatch.setattr(vllm, "PORT", port)
    return port


@pytest.fixture
def program(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where its log is
    (tmp_path / "bin").mkdir()
    return vllm_program(tmp_path / "bin")


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return f"{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]}" != "Z"
    return False


ARGUMENTS = ("eval", "reverse-text", "-n", 2, "-o", "run")


@pytest.mark.parametrize("more", [(), ("--serve", 1)])
def test_a_server_is_started_and_ends_with_the_evaluation(treetune, tmp_path, port, program, more):
    result = treetune(*ARGUMENTS, "-m", "vllm:org/model", *more)
    assert result.code == 0, result.err
    assert "starting vLLM" in result.err
    assert not is_running(int((tmp_path / "bin" / "pid").read_text()))
    traces = [json.loads(line) for line in (tmp_path / "run" / "traces.jsonl").read_text().splitlines()]
    assert {trace["model"] for trace in traces} == {"vllm:org/model"}
    asked = [json.loads(line) for line in (tmp_path / "bin" / "requests.jsonl").read_text().splitlines()]
    assert {request["body"]["model"] for request in asked if request["body"]} == {"org/model"}
    assert "127.0.0.1" not in (tmp_path / "run" / "config.yaml").read_text()  # the next time it may be elsewhere


def test_a_server_that_runs_is_found_and_left_running(treetune, tmp_path, port, monkeypatch):
    with vendor(tmp_path, models=["org/model"]) as server:
        monkeypatch.setattr(vllm, "PORT", int(server.url.rpartition(":")[2]))
        assert treetune(*ARGUMENTS, "-m", "vllm:org/model").code == 0
        assert "starting" not in treetune(*ARGUMENTS[:-1], "run2", "-m", "vllm:org/model").err
        assert len(server.asked("/chat/completions")) == 4
        at = ("--endpoint.base_url", f"{server.url}/v1")
        assert treetune(*ARGUMENTS[:-1], "run3", "-m", "vllm:org/model", *at).code == 0
        elsewhere = treetune(*ARGUMENTS[:-1], "run4", "-m", "vllm:other", *at)
        assert elsewhere.code == 3
        assert "has the model 'other'" in elsewhere.err


def test_where_there_is_none_the_command_is_told(treetune, tmp_path, port, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = treetune(*ARGUMENTS, "-m", "vllm:org/model", "--endpoint.vllm_args=--max-model-len 4096")
    assert result.code == 2
    assert f"vllm serve org/model --port {port} --max-model-len 4096" in result.err
    assert not (tmp_path / "run").exists()


def test_one_that_cannot_start_says_why(treetune, tmp_path, port, program):
    vllm_program(program.parent, "sys.exit('no such model on the hub')")
    result = treetune(*ARGUMENTS, "-m", "vllm:org/model")
    assert result.code == 3
    assert "no such model on the hub" in result.err
    assert not (tmp_path / "run").exists()


def test_the_cause_is_told_though_the_end_of_the_log_is_about_what_it_caused(treetune, port, program):
    log = ["INFO starting", "(EngineCore pid=7) ValueError: too little memory on node 0", *["  frame"] * 40]
    log += ["RuntimeError: Engine core initialization failed. See root cause above."]
    lines = "".join(f"echo '{line}'\n" for line in log)
    program.write_text(f"#!/bin/sh\n{lines}exit 1\n")
    told = treetune(*ARGUMENTS, "-m", "vllm:org/model").err
    assert "vLLM ended before it served anything: ValueError: too little memory on node 0" in told


def test_a_killed_evaluation_leaves_no_server_behind(tmp_path, program):
    vllm_program(program.parent, "time.sleep(600)")
    command = [sys.executable, "-m", "treetune", "eval", "reverse-text", "-m", "vllm:org/unheard-of", "-o", "run"]
    evaluation = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    try:
        while not (pid := program.with_name("pid")).exists() or not pid.read_text():
            assert evaluation.poll() is None
            time.sleep(0.05)
        served = int(pid.read_text())
        assert is_running(served)
    finally:
        evaluation.send_signal(signal.SIGKILL)
        evaluation.wait()
    while is_running(served):
        time.sleep(0.05)


@pytest.mark.slow
def test_the_real_one_is_started_and_plays(tmp_path):
    """On a CPU, with a real small model: most of its time are vLLM's imports."""
    arguments = "--dtype float32 --max-model-len 512 --max-num-seqs 8 --enforce-eager"
    printed = venvs.run(
        venvs.vllm_verl(), "-m", "treetune", "eval", "arithmetic", "-m", f"vllm:{venvs.smollm2()}", "-n", 3,
        "--sampling.max_tokens", 8, f"--endpoint.vllm_args={arguments}", "-o", tmp_path / "run", "--json",
        "--sampling.extra", "{return_token_ids: true}", **vllm_server.ENVIRONMENT,
    )  # fmt: skip
    summary = json.loads(printed)
    assert (summary["rollouts"], summary["errors"]) == (3, 0)
    traces = [json.loads(line) for line in (tmp_path / "run" / "traces.jsonl").read_text().splitlines()]
    assert all(sum(trace["tokens"]["sequences"][0]["mask"]) == trace["usage"]["completion_tokens"] for trace in traces)
