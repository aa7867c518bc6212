"""Dataset tasks by their hub name, against a local server that speaks the hub's API (the hub itself cannot be here)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from hub import Hub, make_gsm8k

from treetune.data.datasets.taskset import DatasetTaskset

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


@pytest.mark.thorough
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


def test_what_the_library_changes_in_files_of_the_hub_is_said_with_where_they_are(tmp_path):
    (tmp_path / "hub" / "org" / "days").mkdir(parents=True)
    lines = "".join(json.dumps({"q": f"day {n}?", "a": f"2024-01-0{n}"}) + "\n" for n in range(1, 4))
    (tmp_path / "hub" / "org" / "days" / "train.jsonl").write_text(lines)
    config = {
        "loading_params": {"args": ["org/days"], "kwargs": {"split": "train"}},
        "prompt_template": "{q}",
        "ground_truth": "a",
    }
    with Hub(tmp_path / "hub") as hub:
        done = subprocess.run(
            [sys.executable, "-c", BUILD, json.dumps(config), str(tmp_path / "cache")],
            capture_output=True, text=True, env={**os.environ, **hub.environment(tmp_path / "home")}, timeout=60,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "3 rows whose a differs from the file; row 0: '2024-01-01' in the file, read as timestamp" in done.stderr
    place = re.search(r"write args: \[json\], kwargs: \{data_files: (.*?)\}", done.stderr)[1]
    config["loading_params"] = {"args": ["json"], "kwargs": {"data_files": place, "split": "train"}}
    truths = [task.ground_truth for task in DatasetTaskset(config, cache_dir=tmp_path / "cache")]
    assert truths == ["2024-01-01", "2024-01-02", "2024-01-03"]
