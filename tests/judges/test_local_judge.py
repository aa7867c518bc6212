"""A real small model (SmolLM2-135M) as judge: what it says is a verdict or a failure, never a silent 0."""

from __future__ import annotations

import json

import pytest
import venvs
from test_runs import traces_in, write_tasks

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verdict_cache")]
WHATEVER_THE_CODE = "import subprocess, sys; subprocess.run([sys.executable, '-m', 'treetune', *sys.argv[1:]])"
"""A run whose rollouts fail ends with 1."""


def test_a_local_model_judges_and_what_cannot_be_read_is_a_failure(tmp_path):
    sampling = {"temperature": 0.0, "max_tokens": 48}
    scorer = {"model": f"local:{venvs.smollm2()}", "sampling": sampling, "retries": 1, "max_concurrent": 1}
    write_tasks(tmp_path, scorer, ["Paris", "Rome"])
    command = ["eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run", "--json"]
    printed = venvs.run(venvs.venv(*venvs.MODELS), "-c", WHATEVER_THE_CODE, *command, cwd=tmp_path)
    summary, traces = json.loads(printed), traces_in(tmp_path / "run")
    assert len(traces) == 2
    for trace in traces:
        last = trace["judgements"][-1]
        assert last["answer"]
        assert last["usage"]["prompt_tokens"] > 100
        assert last["usage"]["completion_tokens"] > 0
        assert (trace["reward"] is None) == (last["verdict"] is None)
        assert (trace["outcome"] == "environment_error") == (last["verdict"] is None)
    assert summary["judge_completion_tokens"] == sum(
        call["usage"]["completion_tokens"] for trace in traces for call in trace["judgements"]
    )
    assert summary["completion_tokens"] == 0
