"""Tasks and runs pushed by huggingface_hub's own client to a stand-in of the hub, and read back by `load_dataset`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hub import Hub
from made_runs import make_run
from raising import raises_code

LOAD = """
import json, sys
from datasets import load_dataset
found = load_dataset(sys.argv[1])
print(json.dumps({split: rows.to_list() for split, rows in found.items()}))
"""
TASKS = """
train_tasks:
  - loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}}
    prompt_template: "{question}"
    ground_truth: {column: answer}
    data_source: sums
val_tasks:
  - loading_params: {args: [json], kwargs: {data_files: more.jsonl, split: train}}
    prompt_template: "{question}"
    ground_truth: {column: answer}
    data_source: sums
    scorer: includes
"""


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hub").mkdir()
    with Hub(tmp_path / "hub") as hub:
        yield hub


@pytest.fixture
def push(hub, tmp_path, treetune_process):
    """`treetune push` as somebody who is logged in."""

    def run(*arguments, token=hub.token):
        variables = {**hub.environment(tmp_path / "home"), "TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}
        return treetune_process("push", *arguments, HF_TOKEN=token, **variables)

    return run


@pytest.fixture
def load(hub, tmp_path):
    def run(name):
        environment = {**os.environ, **hub.environment(tmp_path / "reader")}
        done = subprocess.run([sys.executable, "-c", LOAD, name], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_built_tasks_are_a_dataset_with_a_card(push, load, hub, tmp_path, treetune_process):
    for name, numbers in {"sums": range(5), "more": range(5, 7)}.items():
        rows = [json.dumps({"question": f"{n} + 1?", "answer": str(n + 1)}) for n in numbers]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    (tmp_path / "tasks.yaml").write_text(TASKS)
    pushed = push("tasks.yaml", "--repo", "me/sums", "--json")
    assert pushed.code == 0, pushed.err
    assert pushed.json == {
        "repo": "me/sums", "url": f"{hub.url}/datasets/me/sums", "kind": "tasks", "rows": 7, "private": False,
    }  # fmt: skip
    found = load("me/sums")
    assert [row["reward_model"]["ground_truth"] for row in found["train"]] == [str(n + 1) for n in range(5)]
    assert len(found["val"]) == 2
    assert any(method == "PUT" for method, _ in hub.requests)  # parquet goes by git-lfs
    card = (tmp_path / "hub/me/sums/README.md").read_text()
    assert "| train | 5 |" in card
    assert "- the scorer `includes` of Treetune" in card
    assert "- `rule`" in card
    assert "treetune build tasks.yaml --format verl" in card
    again = treetune_process(
        "eval", "me/sums:train", "-m", "scripted:gold", "--json",
        **hub.environment(tmp_path / "home"), TREETUNE_TASK_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert (again.code, again.json["mean_reward"], again.json["rollouts"]) == (0, 1.0, 5), again.err


def test_a_run_is_a_dataset_and_is_still_a_run(push, load, hub, logged_in, tmp_path, treetune):
    run = make_run(tmp_path / "run", [[1.0, None], [0.0, 0.5]], model="a model")
    pushed = push("run", "--repo", "me/run", "--private", "--json")
    assert pushed.code == 0, pushed.err
    assert (pushed.json["kind"], pushed.json["rows"], hub.private) == ("run", 4, {"me/run"})
    rows = load("me/run")["rollouts"]
    assert [row["reward"] for row in rows] == [1.0, None, 0.0, 0.5]
    assert rows[0]["messages"] == [
        {"role": "user", "content": "Problem 0."},
        {"role": "assistant", "content": "answer 0"},
    ]
    assert rows[1]["failure"] == "ZeroDivisionError: division by zero"
    shown = treetune("show", "hub/me/run", "--json").json
    assert [rollout["reward"] for rollout in shown["rollouts"]] == [1.0, None, 0.0, 0.5]
    card = (tmp_path / "hub/me/run/README.md").read_text()
    assert "# arithmetic by a model" in card
    assert f"| {run.summary.mean_reward:.4f} ±" in card
    assert "has no reward" in card
    logged_in(hub.token)
    assert run.push_to_hub("me/run") == pushed.json["url"]  # the same again is not a fault


@pytest.fixture
def logged_in(hub, tmp_path, monkeypatch):
    """The same in this process, for who has this token."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "no-tokens"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
    return lambda token: monkeypatch.setenv("HF_TOKEN", token)


def test_without_a_token_or_a_right_to_write_it_says_what_to_do(hub, logged_in, tmp_path):
    run = make_run(tmp_path / "run", [[1.0]])
    logged_in("")
    with raises_code("usage", "HF_TOKEN"):
        run.push_to_hub("me/run")
    assert hub.requests == []
    for repo, token in (("me/run", "hf_wrong"), ("somebody/run", hub.token)):
        logged_in(token)
        with raises_code("usage", "token"):
            run.push_to_hub(repo)
    with raises_code("usage", "user/name"):
        run.push_to_hub("run")
    assert not (tmp_path / "hub/me/run").exists()


def test_a_hub_that_does_not_answer_is_told_at_once(logged_in, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    logged_in("hf_x")
    with raises_code("network", "HF_ENDPOINT"):
        make_run(tmp_path / "run", [[1.0]]).push_to_hub("me/run")


def test_splits_with_columns_of_other_types_are_refused(push, hub, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "1?", "answer": "1"}\n')
    (tmp_path / "b.jsonl").write_text('{"question": "1?", "answer": ["1", "2"]}\n')
    task = (
        "{split}_tasks:\n  - loading_params: {{args: [json], kwargs: {{data_files: {name}.jsonl, split: train}}}}\n"
        '    prompt_template: "{{question}}"\n    ground_truth: {{column: answer}}\n    scorer: includes\n'
    )
    lists = task.format(split="train", name="a") + task.format(split="val", name="b")
    (tmp_path / "tasks.yaml").write_text(lists)
    refused = push("tasks.yaml", "--repo", "me/both")
    assert refused.code == 2, refused.err
    assert "ground_truth" in refused.err
    assert "one by one" in refused.err
    assert not (tmp_path / "hub/me/both").exists()
