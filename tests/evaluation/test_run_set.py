"""Several models, or several tasksets, in one `treetune eval`: a run each, and the comparison."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

import treetune as tt

pytestmark = pytest.mark.usefixtures("verdict_cache")

SLOW = """
import time
from treetune import Task, Taskset

class Slow(Taskset):
    def load_tasks(self):
        return [Task(prompt=str(n)) for n in range(40)]

    def reward(self, task, answer):
        time.sleep(0.03)
        return float(answer == task.prompt)
"""


def test_two_models_are_a_run_each_and_are_compared(treetune, tmp_path):
    models = ["-m", "scripted:p=0.2", "-m", "scripted:p=0.9"]
    found = treetune("eval", "arithmetic", *models, "-n", 40, "-r", 2, "-o", "both", "--json")
    assert found.code == 0, found.err
    before, after = found.json["runs"]
    assert (before["model"], after["model"]) == ("scripted:p=0.2", "scripted:p=0.9")
    runs = [tt.Run(tmp_path / each["run_dir"]) for each in (before, after)]
    assert [run.path.parent.name for run in runs] == ["both", "both"]
    assert [run.mean_reward for run in runs] == [before["mean_reward"], after["mean_reward"]]
    (comparison,) = found.json["comparisons"]
    assert comparison["scored"]["difference"] == pytest.approx(after["mean_reward"] - before["mean_reward"])
    assert comparison["scored"]["difference"] == tt.compare(*runs).scored.difference > 0.4
    assert comparison["is_loss"] is False
    shown = treetune("eval", "arithmetic", *models, "-n", 40)
    assert shown.code == 0
    assert "The second is better" in shown.out
    assert (tmp_path / "runs").exists()


def test_every_target_is_played_by_every_model(treetune):
    models = ["-m", "scripted:gold", "-m", "scripted:echo", "-m", "scripted:gold"]
    found = treetune("eval", "arithmetic", "reverse-text", *models, "-n", 4, "-o", "all", "--json").json
    assert [run["taskset"] for run in found["runs"]] == ["arithmetic"] * 3 + ["reverse-text"] * 3
    assert [run["mean_reward"] for run in found["runs"]] == [1.0, 0.0, 1.0] * 2
    assert len({run["run_dir"] for run in found["runs"]}) == 6
    compared = [(each["models"], each["over_all"]["difference"]) for each in found["comparisons"]]
    assert [models for models, _ in compared] == [["scripted:gold", "scripted:echo"], ["scripted:gold"] * 2] * 2
    assert [difference for _, difference in compared] == [-1.0, 0.0, -1.0, 0.0]
    alone = treetune("eval", "arithmetic", "reverse-text", "-m", "scripted:gold", "-n", 4, "--json").json
    assert (len(alone["runs"]), alone["comparisons"]) == (2, [])


def test_an_interrupted_set_goes_on_by_its_folder_alone(treetune, tmp_path):
    (tmp_path / "slow.py").write_text(f"{SLOW}\n    def gold(self, task):\n        return None\n")
    models = ["-m", "scripted:echo", "-m", "scripted:p=1.0"]
    arguments = ["eval", "slow.py:Slow", *models, "-c", "2", "-o", "both", "--json"]
    traces = tmp_path / "both" / "Slow--scripted-echo" / "traces.jsonl"
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", *arguments], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not traces.exists() or traces.read_bytes().count(b"\n") < 4):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    said = json.loads(out)
    assert (said["interrupted"], len(said["runs"]), said["comparisons"]) == (True, 1, [])
    assert b"treetune eval --resume -o both" in err
    again = treetune("eval", "--resume", "-o", "both", "--json")
    assert again.code == 1  # the second has no gold answer to give: its rollouts fail
    assert [run["rollouts"] for run in again.json["runs"]] == [40, 40]
    assert [run["scored"] for run in again.json["runs"]] == [40, 0]
    assert [each["over_all"]["difference"] for each in again.json["comparisons"]] == [-1.0]
    assert len(tt.Run(tmp_path / "both" / "Slow--scripted-echo")) == 40


def test_a_set_may_grow(treetune):
    treetune("eval", "arithmetic", "-m", "scripted:gold", "-m", "scripted:echo", "-n", 3, "-o", "set")
    grown = treetune("eval", "arithmetic", "-m", "scripted:p=0.5", "-n", 3, "-o", "set", "--resume", "--json")
    assert (grown.code, len(grown.json["runs"]), len(grown.json["comparisons"])) == (0, 1, 2)
    more = treetune("eval", "--resume", "-o", "set", "-n", 5, "--json")
    assert [run["rollouts"] for run in more.json["runs"]] == [5, 5, 5]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["arithmetic", "-m", "scripted:gold", "-m", "scripted:gould", "-n", 1], "did you mean 'gold'"),
        (["arithmetic", "-m", "scripted:gold", "-m", "local:nowhere", "-n", 1], "nowhere"),
        (["arithmetic", "absent.yaml", "-m", "scripted:gold", "-n", 1], "absent.yaml"),
        (["reverse-text", "arithmetic", "-m", "scripted:gold"], "--num-tasks"),
        (["arithmetic", "-m", "scripted:gold", "-m", "scripted:echo", "-n", 1, "--resume", "-o", "new"], "no runs"),
    ],
)
def test_nothing_is_played_where_one_of_them_cannot_be(treetune, tmp_path, arguments, said):
    result = treetune("eval", *arguments)
    assert result.code == 2
    assert said in result.err
    assert not (tmp_path / "runs").exists()
    assert not (tmp_path / "new").exists()


def test_a_set_and_a_run_are_not_mixed(treetune):
    both = ["arithmetic", "-m", "scripted:gold", "-m", "scripted:echo", "-n", 2]
    assert treetune("eval", *both, "-o", "set").code == 0
    assert "--resume" in treetune("eval", *both, "-o", "set").err
    assert "already contains runs" in treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 2, "-o", "set").err
    assert "TARGET" in treetune("eval", "--resume", "-o", "set", "-m", "scripted:gold").err
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 2, "-o", "run").code == 0
    assert "contains a single run" in treetune("eval", *both, "-o", "run", "--resume").err


def test_a_dry_run_shows_each(treetune, tmp_path):
    both = ["arithmetic", "-m", "scripted:gold", "-m", "scripted:echo", "-n", 2]
    shown = treetune("eval", *both, "--dry-run", "--json").json["runs"]
    assert [run["config"]["model"] for run in shown] == ["scripted:gold", "scripted:echo"]
    assert not (tmp_path / "runs").exists()
