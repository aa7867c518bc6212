"""`treetune build TARGET`: any taskset as rows, which are scored from themselves alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from treetune.trainers.verl import compute_score

DOUBLES = """
from treetune import Task, Taskset
from half import half

class Doubles(Taskset):
    def load_tasks(self):
        for n in range(6):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)}, extra_info={"n": n})

    def reward(self, task, answer):
        return float(answer.strip() == task.ground_truth and half(int(answer)) == task.extra_info["n"])

    def gold(self, task):
        return task.ground_truth

class Endless(Doubles):
    INFINITE = True

    def load_tasks(self):
        while True:
            yield from super().load_tasks()

class Together(Doubles):
    def score_group(self, task, traces):
        return [trace.reward / len(traces) for trace in traces]

class OnlyTogether(Taskset):
    def load_tasks(self):
        return [Task(prompt="?")]

    def score_group(self, task, traces):
        return [1.0 for trace in traces]
"""
HALF = "def half(number):\n    return number // 2\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "doubles.py").write_text(DOUBLES)
    (tmp_path / "half.py").write_text(HALF)
    return tmp_path


def built(treetune: Any, *arguments: str) -> list[dict[str, Any]]:
    done = treetune("build", *arguments, "--json")
    assert done.code == 0, done.err
    (path,) = done.json["train_files"]
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def score(row: dict[str, Any], answer: str) -> float:
    """As verl's reward manager asks for it."""
    return compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])["score"]


def test_a_python_task_becomes_rows_that_verl_scores_as_the_task_says(treetune, folder):
    rows = built(treetune, "doubles.py:Doubles", "--format", "verl")
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": f"Double {n}."}] for n in range(6)]
    assert [score(row, row["reward_model"]["ground_truth"]) for row in rows] == [1.0] * 6
    assert [score(row, "7") for row in rows] == [0.0] * 6


def test_an_infinite_taskset_needs_a_number(treetune, folder):
    done = treetune("build", "doubles.py:Endless")
    assert done.code == 2
    assert "INFINITE" in done.err
    assert "-n" in done.err
    assert [row["extra_info"]["n"] for row in built(treetune, "doubles.py:Endless", "-n", "8")] == [*range(6), 0, 1]
    assert len(built(treetune, "arithmetic", "-n", "3", "--taskset.level", "2")) == 3


def test_each_row_of_a_mixture_is_scored_by_its_own_source(treetune, folder):
    (folder / "both.yaml").write_text(
        "taskset:\n  id: mixture\n  sources:\n  - {id: 'doubles.py:Doubles'}\n  - {id: reverse-text}\n"
    )
    rows = built(treetune, "both.yaml", "-n", "10")
    of_doubles = [row for row in rows if row["data_source"] == "Doubles"]
    others = [row for row in rows if row["data_source"] != "Doubles"]
    assert of_doubles
    assert others
    assert {score(row, row["reward_model"]["ground_truth"]) for row in [*of_doubles, *others]} == {1.0}
    assert {score(row, "7") for row in of_doubles} == {0.0}


def test_rows_are_scored_where_only_the_cache_is_shared(treetune, folder):
    (row, *_) = built(treetune, "doubles.py:Doubles")
    scorer = json.loads(row["extra_info"]["scorer"])
    assert scorer["custom_cls"]["path"].startswith("cache://")
    assert str(folder) not in row["extra_info"]["scorer"]
    for name in ("doubles.py", "half.py"):
        (folder / name).unlink()
    from treetune.formats.scorer import _taskset_of

    _taskset_of.cache_clear()
    assert (score(row, "0"), score(row, "7")) == (1.0, 0.0)


def test_a_taskset_that_scores_groups_says_that_rows_do_not(treetune, folder):
    done = treetune("build", "doubles.py:Together")
    assert done.code == 0
    assert "score_group() is not called" in done.err
    done = treetune("build", "doubles.py:OnlyTogether")
    assert done.code == 2
    assert "only scores groups" in done.err
    assert "treetune serve" in done.err


def test_episodes_of_several_turns_are_refused_for_verl(treetune, folder):
    done = treetune("build", "alphabet-sort", "-n", "3")
    assert done.code == 2
    assert "several turns" in done.err
    assert "SkyRL" in done.err
    assert len(built(treetune, "alphabet-sort", "-n", "3", "--format", "skyrl")) == 3
