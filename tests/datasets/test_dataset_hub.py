"""Dataset tasks by their hub name, against a local server that speaks the hub's API (the hub itself cannot be here)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
from hub import Hub, make_gsm8k

BUILD = """
import json, sys
from treetune_verl.tasks import Task
task = Task(json.loads(sys.argv[1]), cache_dir=sys.argv[2])
sidecar, path, hit = task.build()
print(json.dumps({"path": str(path), "hit": hit, "revision": sidecar.revision, "rows": sidecar.rows}))
"""


def test_gsm8k_is_built_by_its_hub_name_and_the_revision_is_kept(tmp_path):
    train = [{"question": f"{n} + 1?", "answer": f"so\n#### {n + 1}"} for n in range(12)]
    make_gsm8k(tmp_path / "hub", train, train[:3])
    config = {
        "loading_params": {"args": ["openai/gsm8k"], "kwargs": {"name": "main", "split": "train"}},
        "prompt_template": "{question}",
        "ground_truth": {"column": "answer", "pattern": "#### (.+)"},
        "data_source": "openai/gsm8k",
    }
    with Hub(tmp_path / "hub") as hub:

        def build():
            done = subprocess.run(
                [sys.executable, "-c", BUILD, json.dumps(config), str(tmp_path / "cache")],
                capture_output=True, text=True, env={**os.environ, **hub.environment(tmp_path / "home")}, timeout=60,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            return json.loads(done.stdout)

        first = build()
        asked = len(hub.requests)
        second = build()
        assert (first["hit"], second["hit"]) == (False, True)
        assert len(hub.requests) == asked  # a hit asks nobody
        assert first["revision"] == hub.commit
    rows = pq.read_table(first["path"]).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == [str(n + 1) for n in range(12)]
    assert [row["prompt"][0]["content"] for row in rows] == [row["question"] for row in train]


def test_rows_of_the_hub_are_a_target(tmp_path):
    row = {"prompt": "1 + 1?", "env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}}
    make_gsm8k(tmp_path / "hub", [row] * 3, [row])
    with Hub(tmp_path / "hub") as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "home"), "TREETUNE_TASK_CACHE_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "treetune", "eval", "openai/gsm8k@main:train", "-m", "scripted:gold", "--json"],
            capture_output=True, text=True, env=environment, timeout=60, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mean_reward"] == 1.0
