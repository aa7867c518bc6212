"""`treetune build TARGET`: any taskset as rows, which are scored from themselves alone."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from raising import raises_code

from treetune import Task
from treetune.data.rows import read_tasks, scorer
from treetune.data.rows.reading import read_rows
from treetune.data.validate import write_tasks
from treetune.errors import UsageError
from treetune.tasksets.target import load_taskset
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
    assert json.loads(row["extra_info"]["scorer"])["custom_cls"]["path"].startswith("cache://")
    assert str(folder) not in row["extra_info"]["scorer"]
    for name in ("doubles.py", "half.py"):
        (folder / name).unlink()
    scorer.taskset_of.cache_clear()
    assert (score(row, "0"), score(row, "7")) == (1.0, 0.0)


def test_a_taskset_that_scores_groups_is_played_by_verls_loop_and_says_that_other_rows_are_scored_alone(
    treetune, folder
):
    for name in ("Together", "OnlyTogether"):
        done = treetune("build", f"doubles.py:{name}", "--json")
        assert (done.code, "score_group() is not called" in done.err) == (0, False), done.err
        assert {row["agent_name"] for row in read_rows(done.json["train_files"][0])} == {"treetune"}
    done = treetune("build", "doubles.py:Together", "--format", "skyrl")
    assert done.code == 0
    assert "score_group() is not called" in done.err
    done = treetune("build", "doubles.py:OnlyTogether", "--format", "skyrl")
    assert done.code == 2
    assert "only scores groups" in done.err
    assert "treetune serve" in done.err


def test_a_task_whose_environment_opens_has_its_opening_as_the_prompt_of_its_row(treetune, folder):
    rows = built(treetune, "alphabet-sort", "--format", "skyrl", "-n", "3")
    assert all(row["prompt"][0]["content"] for row in rows)
    (folder / "rows.json").write_text(json.dumps(rows))
    assert treetune("validate", folder / "rows.json").code == 0
    tasks = load_taskset("alphabet-sort").select_tasks(3)
    assert [(task.uid, None) for task in tasks] == [
        (task.uid, task.prompt) for task in read_tasks(folder / "rows.json")
    ]


def test_rows_of_several_turns_name_the_loop_that_plays_them_in_verl(treetune, folder):
    rows = built(treetune, "alphabet-sort", "-n", "3")
    assert [row["agent_name"] for row in rows] == ["treetune"] * 3
    tasks = load_taskset("alphabet-sort").select_tasks(3)
    for name in ("rows.parquet", "rows.json", "rows.jsonl"):
        assert treetune("convert", "alphabet-sort", name, "--to", "verl", "-n", "3", "--no-check").code == 0
        assert [row["agent_name"] for row in read_rows(folder / name)] == ["treetune"] * 3
        # It follows from the task, and is not a part of it.
        read = list(read_tasks(folder / name))
        assert [task.uid for task in read] == [task.uid for task in tasks]
        assert all(task.extra_info.keys() <= {"scorer"} for task in read)
    assert treetune("convert", "rows.parquet", "again.jsonl", "--to", "verl", "--no-check").code == 0
    assert [row["agent_name"] for row in read_rows(folder / "again.jsonl")] == ["treetune"] * 3
    told = treetune("build", "alphabet-sort", "-n", "3")
    (loops,) = re.findall(r"actor_rollout_ref.rollout.agent.agent_loop_config_path=(\S+)", told.out + told.err)
    assert yaml.safe_load(Path(loops).read_text()) == [
        {"name": "treetune", "_target_": "treetune.trainers.verl.loop.TreetuneLoop"}
    ]
    assert "agent_name" not in built(treetune, "reverse-text", "-n", "3")[0]
    assert "agent_name" not in built(treetune, "alphabet-sort", "-n", "3", "--format", "skyrl")[0]


# What rows may run


EVIL = """
from pathlib import Path
from treetune import Environment, Step, Taskset

Path(__file__).with_name("ran").touch()

class Evil(Taskset):
    def load_tasks(self):
        return []

    def reward(self, task, answer):
        return 1.0

class Bad(Environment):
    def step(self, action):
        return Step(reward=1.0, done=True)
"""


@pytest.mark.parametrize(
    "scorer",
    [
        '{"custom_cls":{"path":"FOLDER/evil.py","name":"Evil"}}',
        '{"custom_cls":{"path":"file://FOLDER/evil.py","name":"Evil"}}',
        '{"custom_cls":{"path":"pkg://evil","name":"Evil"}}',
        '{"id":"FOLDER/evil.py:Evil"}',
        '{"id":"evil:Evil"}',
        "env:FOLDER/evil.py:Bad",
        "env:evil:Bad",
    ],
)
def test_code_that_rows_from_elsewhere_name_is_not_run_without_trust(folder, scorer, monkeypatch):
    (folder / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(folder)
    extra = {"scorer": scorer.replace("FOLDER", str(folder))}
    with pytest.raises(UsageError) as error:
        compute_score("d", "x", None, extra)
    assert "--trust" in (error.value.remedy or "")
    assert not (folder / "ran").exists()
    (row,) = written(folder, [Task(prompt="?", extra_info=extra)])
    with pytest.raises(UsageError):  # also after a way through our own files
        compute_score("d", "x", None, row["extra_info"])
    assert not (folder / "ran").exists()
    monkeypatch.setenv("TREETUNE_TRUST", "1")
    assert compute_score("d", "x", None, extra)["score"] == 1.0
    for name in [
        name for name, module in sys.modules.items() if getattr(module, "__file__", "") == f"{folder}/evil.py"
    ]:
        del sys.modules[name]


def written(folder: Path, tasks: Any, **options: Any) -> list[dict[str, Any]]:
    write_tasks(tasks, folder / "in.jsonl", "skyrl", **options)
    write_tasks(read_tasks(folder / "in.jsonl"), folder / "rows.parquet", "verl")
    return pq.read_table(folder / "rows.parquet").to_pylist()


def test_a_file_that_rows_name_as_their_environment_is_not_kept_on_the_way(folder):
    (folder / "evil.py").write_text(EVIL)
    row = {"prompt": [{"role": "user", "content": "?"}], "env_class": f"{folder}/evil.py:Bad", "reward_spec": {}}
    (folder / "theirs.jsonl").write_text(json.dumps(row))
    write_tasks(read_tasks(folder / "theirs.jsonl"), folder / "rows.parquet", "verl", environments=[row["env_class"]])
    (row,) = pq.read_table(folder / "rows.parquet").to_pylist()
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        compute_score("d", "x", None, row["extra_info"])


def test_an_importable_class_is_named_by_its_module(treetune, folder):
    (row, *_) = built(treetune, "alphabet-sort", "-n", "2")
    assert json.loads(row["extra_info"]["scorer"])["custom_cls"] == {
        "path": "pkg://treetune.tasksets.alphabet_sort",
        "name": "AlphabetSort",
    }


def test_rows_on_a_machine_without_the_cache_say_what_is_needed(treetune, folder, monkeypatch):
    (row, *_) = built(treetune, "doubles.py:Doubles")
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(folder / "another"))
    scorer.taskset_of.cache_clear()
    with raises_code("usage", "doubles.py") as error:
        compute_score("d", "x", None, row["extra_info"])
    assert "TREETUNE_TASK_CACHE_DIR" in (error.value.remedy or "")


def test_build_says_what_other_nodes_need(treetune, folder):
    done = treetune("build", "doubles.py:Doubles")
    assert "doubles.py" in done.err
    assert "other nodes" in done.err
    assert "other nodes" not in treetune("build", "reverse-text", "-n", "2").err


# write_tasks


def test_tasks_are_scored_by_the_taskset_that_they_are_drawn_from(folder):
    taskset = load_taskset("doubles.py:Doubles")
    for tasks, options in ((taskset, {}), (taskset.draw(3), {"scorer": taskset})):
        write_tasks(tasks, folder / "rows.parquet", "verl", **options)
        rows = pq.read_table(folder / "rows.parquet").to_pylist()
        assert {score(row, row["reward_model"]["ground_truth"]) for row in rows} == {1.0}
        assert {score(row, "7") for row in rows} == {0.0}


def test_tasks_of_a_taskset_that_is_not_known_are_refused(folder):
    for tasks in (
        load_taskset("doubles.py:Doubles").select_tasks(2),
        [Task(prompt="?", reward_spec={"ground_truth": 1})],
    ):
        with raises_code("taskset", "task 0", "scorer=taskset") as error:
            write_tasks(tasks, folder / "rows.parquet", "verl")
        assert 'scorer="rule"' in (error.value.remedy or "")
        write_tasks(tasks, folder / "rows.parquet", "verl", scorer="rule")
        assert pq.read_table(folder / "rows.parquet").to_pylist()[0]["extra_info"]["scorer"] == "rule"


@pytest.mark.parametrize("path", ["doubled.py", "file://FOLDER/doubled.py", "pkg://doubled", None])
def test_a_class_is_named_as_verl_names_one(treetune, folder, monkeypatch, path):
    monkeypatch.syspath_prepend(folder)
    (folder / "doubled.py").write_text("from treetune_verl.tasks import Task\n\nclass Mine(Task):\n    pass\n")
    (folder / "rows.jsonl").write_text('{"q": "1?", "a": "1"}\n')
    named = {"path": path and path.replace("FOLDER", str(folder)), "name": "Mine" if path else "Task"}
    node = {
        "custom_cls": named,
        "loading_params": {"args": ["json"], "kwargs": {"data_files": str(folder / "rows.jsonl"), "split": "train"}},
        "prompt_template": "{q}",
        "ground_truth": "a",
    }
    (folder / "tasks.yaml").write_text(json.dumps({"train_tasks": [node]}))
    assert [row["prompt"][0]["content"] for row in built(treetune, "tasks.yaml")] == ["1?"]
    assert treetune("show", "tasks.yaml", "--json").json["tasks"][0]["ground_truth"] == "1"
    sys.modules.pop("doubled", None)


def test_rows_of_a_dataset_task_keep_the_contract_that_its_class_declares(treetune, tmp_path):
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 2 + 3?", "answer": "5"}\n')
    (tmp_path / "own.py").write_text(
        """
from treetune import Contract
from treetune_verl.tasks import Task as DatasetTaskset

class Sums(DatasetTaskset):
    CONTRACT = Contract(turn_discount=0.5)
"""
    )
    (tmp_path / "tasks.yaml").write_text(
        """
train_tasks:
- custom_cls: {path: own.py, name: Sums}
  loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}}
  prompt_template: "{question}"
  ground_truth: answer
  data_source: sums
"""
    )
    built = treetune("build", "tasks.yaml", "--format", "verl", "--json")
    assert built.code == 0, built.err
    (row,) = pq.read_table(built.json["train_files"][0]).to_pylist()
    assert compute_score("sums", "5", "5", row["extra_info"])["score"] == 0.5
