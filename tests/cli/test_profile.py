"""`treetune profile`, and what `build` and `serve` make of it: from rollouts to what is drawn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest
from pass_rates import gaussian_target, total_variation
from serve_process import serve

from treetune import load_taskset
from treetune.serve.zmq.client import EnvClient

TASKS = """
train_tasks:
  - loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}}
    prompt_template: "{question}"
    ground_truth: answer
    data_source: sums
    shuffle: {seed: 7}
"""
SCHEDULED = (
    TASKS
    + """
    profile: {path: rates.jsonl, drop_solved: true, schedule: {kind: gaussian, over: 10000, width: 0.2}, rows: 10000}
"""
)
SLOW = """
import time
from treetune import Task, Taskset
class Slow(Taskset):
    def load_tasks(self):
        return [Task(prompt=str(n), reward_spec={"ground_truth": str(n)}) for n in range(20)]
    def reward(self, task, answer):
        with open("played", "a") as file:
            file.write(f"{task.idx}\\n")
        time.sleep(0.02)
        return float(answer == task.ground_truth)
    def gold(self, task): return task.ground_truth
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"question": f"{n} + {n % 7}?", "answer": str(n + n % 7)} for n in range(60)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tasks.yaml").write_text(TASKS)
    (tmp_path / "scheduled.yaml").write_text(SCHEDULED)
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_models_stand_side_by_side_and_a_model_of_known_strength_has_its_rate(folder, treetune):
    result = treetune("profile", "tasks.yaml", "-m", "scripted:p=0.25", "-m", "scripted:gold", "-r", 8, "--json")
    assert result.code == 0, result.err
    weak, strong = result.json["models"]
    assert abs(weak["mean"] - 0.25) < 3.3 * (0.25 * 0.75 / (60 * 8)) ** 0.5
    assert (strong["mean"], strong["all_1"], strong["histogram"]["1"]) == (1.0, 1.0, 60)
    assert weak["all_0"] + weak["all_1"] + weak["mixed"] == pytest.approx(1)
    lines = read_lines(folder / "rates.jsonl")
    assert {tuple(line) for line in lines} == {("uid", "source", "avg@8_scripted:p=0.25", "avg@8_scripted:gold")}
    assert {line["uid"] for line in lines} == {task.uid for task in load_taskset("tasks.yaml").draw()}
    counts = Counter(line["avg@8_scripted:p=0.25"] for line in lines)
    assert counts.keys() <= {number / 8 for number in range(9)}


def test_asked_for_more_it_goes_on_and_the_column_is_replaced(folder, treetune):
    treetune("profile", "slow.py:Slow", "-m", "scripted:p=0.5", "-r", 2, "-n", 10)
    result = treetune("profile", "slow.py:Slow", "-m", "scripted:p=0.5", "-r", 3, "-n", 10)
    assert result.code == 0, result.err
    assert Counter((folder / "played").read_text().split()) == {str(n): 3 for n in range(10)}
    assert "pass rate of scripted:p=0.5" in result.out
    assert "mixed: " in result.out
    assert {tuple(line) for line in read_lines(folder / "rates.jsonl")} == {("uid", "source", "avg@3_scripted:p=0.5")}


def test_killed_and_run_again_it_goes_on_with_what_is_missing(folder, treetune):
    command = [
        sys.executable,
        "-m",
        "treetune",
        "profile",
        "slow.py:Slow",
        "-m",
        "scripted:p=0.5",
        "-r",
        "4",
        "-c",
        "2",
    ]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    traces = folder / "rates.jsonl.runs"
    while not any(file.stat().st_size > 10_000 for file in traces.glob("*/traces.jsonl")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (folder / "rates.jsonl").exists()
    kept = sum(file.read_bytes().count(b"\n") for file in traces.glob("*/traces.jsonl"))
    before = len((folder / "played").read_text().split())
    result = treetune("profile", "slow.py:Slow", "-m", "scripted:p=0.5", "-r", 4, "-c", 2)
    assert result.code == 0, result.err
    assert len(read_lines(folder / "rates.jsonl")) == 20
    assert 0 < kept < 80
    assert len((folder / "played").read_text().split()) - before == 80 - kept, "what was saved is not played again"


def test_a_key_of_an_endless_taskset_is_profiled_by_its_values(folder, treetune):
    result = treetune(
        "profile", "arithmetic", "--by", "level=1,3,5", "-m", "scripted:gold", "-n", 12, "-r", 2, "--json"
    )
    assert result.code == 0, result.err
    assert Counter(line["level"] for line in read_lines(folder / "rates.jsonl")) == {1: 4, 3: 4, 5: 4}
    for by, problem in (("level", "must be KEY=VALUES"), ("levl=1", "did you mean 'level'"), ("level=9", "<= 5")):
        wrong = treetune("profile", "arithmetic", "--by", by, "-m", "scripted:gold", "-n", 3)
        assert (wrong.code, problem in wrong.err) == (2, True), wrong.err
    keys = ["--taskset.profile.path", "rates.jsonl", "--taskset.profile.parameter", "level"]
    keys += ["--taskset.profile.values", "[1, 3, 5]", "--taskset.profile.schedule.kind", "pools"]
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 10, *keys, "--json").json["mean_reward"] == 1.0


def test_a_config_names_its_file_and_is_profiled_as_if_it_had_none(folder, treetune):
    (folder / "mine.yaml").write_text(SCHEDULED.replace("rates.jsonl", "mine.jsonl"))
    result = treetune("profile", "mine.yaml", "-m", "scripted:p=0.5", "-r", 2, "--json")
    assert result.code == 0, result.err
    assert result.json["path"] == "mine.jsonl"
    assert len(read_lines(folder / "mine.jsonl")) == 60
    assert treetune("build", "mine.yaml", "--json").json["tasks"][0]["rows"] == 10_000


def test_a_file_of_another_taskset_is_not_mixed_up(folder, treetune):
    assert treetune("profile", "reverse-text", "-m", "scripted:gold", "-r", 1).code == 0
    other = treetune("profile", "slow.py:Slow", "-m", "scripted:gold", "-r", 1)
    assert other.code == 2
    assert "another -o" in other.err
    assert "--rescore" not in other.err
    no_model = treetune("profile", "reverse-text")
    assert (no_model.code, "no model given" in no_model.err) == (2, True)


def test_failed_rollouts_leave_a_task_unrated_and_are_told(folder, treetune):
    (folder / "broken.py").write_text(
        SLOW.replace("with open", "if task.idx < 5: raise ValueError('no')\n        with open")
    )
    result = treetune("profile", "broken.py:Slow", "-m", "scripted:gold", "-r", 2, "--json")
    assert result.code == 1
    assert (result.json["models"][0]["tasks"], result.json["models"][0]["unrated"]) == (15, 5)
    assert len(read_lines(folder / "rates.jsonl")) == 15
    assert "5 tasks have no scored rollout" in treetune("profile", "broken.py:Slow", "-m", "scripted:gold", "-r", 2).out


@pytest.mark.thorough
def test_what_was_profiled_is_built_and_served_by_its_schedule_also_after_a_kill(folder, treetune):
    """The whole way: the histogram of 10,000 draws is the target, in a file and from a server that is killed."""
    assert treetune("profile", "tasks.yaml", "-m", "scripted:p=0.5", "-r", 8).code == 0
    rates = {line["uid"]: line["avg@8_scripted:p=0.5"] for line in read_lines(folder / "rates.jsonl")}
    known = {rate for rate in rates.values() if rate < 1}
    target = gaussian_target(known, 10_000, start=0.8, end=0.2, width=0.2, over=10_000)

    report = treetune("build", "scheduled.yaml", "--json").json["tasks"][0]
    built = [row["uid"] for row in pq.read_table(report["path"])["extra_info"].to_pylist()]
    assert total_variation([rates[uid] for uid in built], target) < 0.005

    async def draw(address, count):
        async with EnvClient(address) as client:
            uids = []
            for _ in range(count // 500):
                uids += [task.uid for task in await asyncio.gather(*(client.sample() for _ in range(500)))]
            return uids

    options = ["scheduled.yaml", "--zmq", "tcp://127.0.0.1:0", "--state", "state"]
    served = []
    for count in (6_000, 4_000):
        with serve(folder, *options) as server:
            served += asyncio.run(draw(server.address, count))
            server.process.kill()
    assert served == built
