"""The same build on a Ray cluster that `ray start` made gives the same rows."""

from __future__ import annotations

import json
import os
import subprocess

import pyarrow.parquet as pq
import pytest
import venvs
from ray_start import RayCluster

pytestmark = pytest.mark.slow
ENGINES = ("local", "ray")
TASKS = """train_tasks:
  - loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}
    prompt_template: '{q}'
    ground_truth: a
"""


def write_own(folder, row):
    """A task whose own function makes each row."""
    (folder / "mine.py").write_text(
        "import time\nfrom treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        f"        return lambda row, index: {row}\n"
    )
    (folder / "tasks.yaml").write_text(TASKS + "    custom_cls: {path: mine.py}\n")


def test_ray_builds_the_same_rows_in_the_same_order(tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"q": f"{n}?", "a": str(n) if n % 7 else ""}) + "\n" for n in range(45_000))
    )
    write_own(tmp_path, "{**make(row, index), 'ability': 'math'}")
    python = venvs.venv(*venvs.RAY)
    with RayCluster(python, cpus=1) as cluster:
        cluster.add_node(cpus=1)
        for engine in ENGINES:
            command = ["build", "tasks.yaml", "--engine", engine, "--cache-dir", engine, "--json"]
            environment = {**cluster.environment, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(
                [python, "-m", "treetune", *command], capture_output=True, text=True, cwd=tmp_path, env=environment
            )
            assert done.returncode == 0, done.stderr
    here, there = ([pq.read_table(path) for path in (tmp_path / engine).rglob("*.parquet")] for engine in ENGINES)
    assert there[0].num_rows == 45_000 - 6429
    assert there[0].equals(here[0])
    assert set(there[0]["ability"].to_pylist()) == {"math"}


HOLD = """
import sys, time
from treetune.system.processes import join_cluster
ray = join_cluster()
@ray.remote(num_cpus=1)
class Holder:
    def hold(self): return "held"
holder = Holder.remote()
print(ray.get(holder.hold.remote()), flush=True)
sys.stdin.readline()
"""


def test_a_build_that_finds_no_free_cpu_says_so_and_goes_on_when_there_is_one(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "1?", "a": "1"}\n')
    (tmp_path / "tasks.yaml").write_text(TASKS)
    python = venvs.venv(*venvs.RAY)
    with RayCluster(python, cpus=1) as cluster:
        environment = {**cluster.environment, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([python, "-c", HOLD], env=environment, **pipes) as holder:
            assert holder.stdout.readline() == "held\n"
            command = [python, "-m", "treetune", "build", "tasks.yaml", "--engine", "ray", "--cache-dir", "cache"]
            with subprocess.Popen(
                command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment
            ) as build:
                told = iter(build.stderr.readline, "")
                assert next(line for line in told if "no CPU of the Ray cluster is free" in line)
                holder.communicate("done\n", timeout=60)
                build.communicate(timeout=120)
    assert build.returncode == 0
    assert len(list((tmp_path / "cache").rglob("*.parquet"))) == 1


def test_a_build_that_holds_all_cpus_itself_blames_nobody(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "1?", "a": "1"}\n')
    write_own(tmp_path, "(time.sleep(13), make(row, index))[1]")
    python = venvs.venv(*venvs.RAY)
    with RayCluster(python, cpus=1) as cluster:
        environment = {**cluster.environment, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
        command = [python, "-m", "treetune", "build", "tasks.yaml", "--engine", "ray", "--cache-dir", "cache"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "no CPU of the Ray cluster" not in done.stderr


def test_a_cluster_that_does_not_answer_is_told_by_the_address_that_was_given(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"q": "1?", "a": "1"}\n')
    (tmp_path / "tasks.yaml").write_text(TASKS)
    python = venvs.venv(*venvs.RAY)
    command = [python, "-m", "treetune", "build", "tasks.yaml", "--engine", "ray", "--cache-dir", "cache"]
    environment = {**os.environ, "PYTHONPATH": str(venvs.ROOT / "src"), "RAY_ADDRESS": "127.0.0.1:1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 3
    assert "no Ray cluster can be joined: nothing answers at 127.0.0.1:1" in done.stderr
    assert "ray start --head" in done.stderr
