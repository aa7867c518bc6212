"""A real small model (SmolLM2-135M, from a PyPI package) evaluated in process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import venvs

pytestmark = pytest.mark.slow

RESCORE = """
import json, sys, torch
from treetune.models.local import LocalPolicy

policy = LocalPolicy(sys.argv[1])
differences = []
for line in open(sys.argv[2]):
    for sequence in json.loads(line)["tokens"]["sequences"]:
        with torch.inference_mode():
            logits = policy.model(torch.tensor([sequence["ids"]])).logits[0].double()
        logprobs = logits.log_softmax(-1)
        for at in range(1, len(sequence["ids"])):
            if sequence["mask"][at]:
                differences.append(abs(float(logprobs[at - 1, sequence["ids"][at]]) - sequence["logprobs"][at]))
print(json.dumps({"sampled": len(differences), "largest": max(differences)}))
"""


@pytest.fixture(scope="module")
def python() -> Path:
    return venvs.venv(*venvs.MODELS)


@pytest.fixture(scope="module")
def model() -> Path:
    return venvs.smollm2()


def test_its_traces_hold_the_tokens_it_sampled_with_their_logprobs(python, model, tmp_path):
    printed = venvs.run(
        python, "-m", "treetune", "eval", "arithmetic", "-m", f"local:{venvs.gguf()}", "-n", 5,
        "--sampling.max_tokens", 24, "--sampling.temperature", 0.8, "--sampling.top_p", 0.95, "--sampling.seed", 1,
        "-o", tmp_path / "run", "--json",
    )  # fmt: skip
    summary = json.loads(printed)
    assert (summary["rollouts"], summary["errors"]) == (5, 0)
    traces = [json.loads(line) for line in (tmp_path / "run" / "traces.jsonl").read_text().splitlines()]
    for trace in traces:
        (sequence,) = trace["tokens"]["sequences"]
        assert len(sequence["ids"]) == len(sequence["mask"]) == len(sequence["logprobs"])
        assert sum(sequence["mask"]) == trace["usage"]["completion_tokens"] > 0
    scored = json.loads(venvs.run(python, "-c", RESCORE, model, tmp_path / "run" / "traces.jsonl"))
    assert scored["sampled"] >= 5
    assert scored["largest"] < 1e-3


def test_a_seed_makes_its_rollouts_repeatable_and_different_from_each_other(python, model, tmp_path):
    def texts(folder: str) -> list[str]:
        venvs.run(
            python, "-m", "treetune", "eval", "arithmetic", "-m", f"local:{model}", "-n", 1, "-r", 3,
            "--sampling.max_tokens", 12, "--sampling.seed", 5, "--sampling.temperature", 1.5, "-o", tmp_path / folder,
        )  # fmt: skip
        traces = [json.loads(line) for line in (tmp_path / folder / "traces.jsonl").read_text().splitlines()]
        return [trace["turns"][0]["message"]["content"] for trace in sorted(traces, key=lambda t: t["rollout"])]

    once = texts("one")
    assert texts("two") == once
    assert len(set(once)) > 1


def test_show_renders_and_counts_with_a_tokenizer(python, model):
    printed = venvs.run(python, "-m", "treetune", "show", "reverse-text", "-n", 1, "--tokenizer", model, "--json")
    (task,) = json.loads(printed)["tasks"]
    assert task["rendered"].endswith("<|im_start|>assistant\n")
    assert 20 < task["prompt_tokens"] < 80


def test_it_calls_tools_by_its_chat_template_and_is_trained_on_what_it_sampled(python, model, tmp_path):
    side = venvs.ROOT / "tests" / "support" / "local_tools_side.py"
    found = json.loads(venvs.run(python, side, model, tmp_path, OMP_NUM_THREADS="1").splitlines()[-1])
    assert found["sequences"] == 1
    assert found["sampled"] > 100
