"""Rows as a TARGET: their tasks come back whole, with what scores them, and are read on demand."""

from __future__ import annotations

import json
import pickle

import pytest
from kinds import ENVIRONMENTS, TRUTHS, write_targets
from raising import raises_code

from treetune import Task
from treetune.data.validate import write_tasks
from treetune.tasksets.target import load_taskset, read_target


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_names_rows_is_told_from_what_names_a_taskset(folder):
    (folder / "data").mkdir()
    (folder / "arithmetic").mkdir()
    (folder / "data" / "a.jsonl").write_bytes((folder / "truths.jsonl").read_bytes())
    for target in ("truths.jsonl", "data", "data/*.jsonl", "gone.parquet", "someone/data@main:test", "~/x.jsonl.gz"):
        assert read_target(target)["taskset"] == {"id": "rows", "files": [target]}
    for target in ("arithmetic", "kinds_of.py:Doubles", "sub/kinds_of.py:Doubles", "treetune.core.mixture:Union"):
        assert read_target(target)["taskset"] == {"id": target}


def test_rows_of_any_layout_and_file_are_one_taskset(folder):
    tasks = [Task(prompt="1 + 1?", env_class="gsm8k", reward_spec={"ground_truth": "2"}, data_source="a")]
    for name in ("verl.parquet", "skyrl.json", "trl.jsonl"):
        write_tasks(tasks, folder / "mixed" / name, name.partition(".")[0])
    taskset = load_taskset("mixed")
    assert taskset.count() == 3
    in_order, anywhere = list(taskset.draw()), [taskset[position] for position in (2, 0, 1)]
    assert [task.idx for task in in_order] == [0, 1, 2]
    assert sorted(anywhere, key=lambda task: task.idx) == in_order
    assert {task.uid for task in in_order} == {tasks[0].uid}
    assert [taskset.gold(task) for task in in_order] == ["#### 2"] * 3
    assert pickle.loads(pickle.dumps(taskset))[1] == in_order[1]


def test_rows_of_csv_are_read(folder, treetune):
    messages = json.dumps([{"role": "user", "content": "1 + 2?"}]).replace('"', '""')
    (folder / "rows.csv").write_text(
        f'\ufeffprompt,ground_truth,extra_info.level\n"{messages}",3,\n"[1, 2]: which, of them, is more?",2,hard\n'
    )
    first, second = load_taskset("rows.csv").draw()
    assert (first.messages, first.ground_truth, first.extra_info) == (
        [{"role": "user", "content": "1 + 2?"}],
        "3",
        {},
    )
    assert (second.prompt, second.extra_info) == ("[1, 2]: which, of them, is more?", {"level": "hard"})
    assert treetune("eval", "rows.csv", "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    assert treetune("convert", "rows.csv", "rows.parquet", "--to", "skyrl").code == 0
    written = treetune("convert", "rows.parquet", "other.csv", "--to", "trl")
    assert (written.code, "trainers read neither CSV" in written.err) == (2, True)
    (folder / "bad.csv").write_text("prompt,ground_truth\none, two,3\n")
    bad = treetune("show", "bad.csv")
    assert "bad.csv, row 0: 3 cells, but only 2 columns have a name" in bad.err
    for name in ("rows.csv", "bad.csv"):
        judged = treetune("validate", name)
        assert (judged.code, "trainers do not read CSV" in judged.out) == (1, True), judged.out


def test_shuffled_rows_come_in_an_order_of_their_own(folder):
    taskset = load_taskset("truths.jsonl", {"taskset.shuffle.seed": "1"})
    assert sorted(task.idx for task in taskset.draw()) == [0, 1, 2, 3]
    assert [task.idx for task in taskset.draw()] != [0, 1, 2, 3]


def test_files_that_a_yaml_names_are_beside_it(folder, monkeypatch):
    (folder / "rows.yaml").write_text("taskset: {id: rows, files: [truths.jsonl]}\n")
    monkeypatch.chdir("/")
    assert load_taskset(str(folder / "rows.yaml")).count() == 4


def test_a_row_that_does_not_say_how_it_is_scored_is_told(folder, treetune):
    lines(folder / "bare.jsonl", {"prompt": [{"role": "user", "content": "Hello"}]})
    lines(folder / "theirs.jsonl", {**ENVIRONMENTS[0], "env_class": "theirs"})
    for name in ("bare.jsonl", "theirs.jsonl"):
        shown = treetune("show", name, "--json")
        assert shown.json["tasks"][0]["gold"] is None, shown.err
    assert "unknown environment 'theirs'" in treetune("eval", "theirs.jsonl", "-m", "scripted:echo").err
    result = treetune("eval", "bare.jsonl", "-m", "scripted:echo")
    assert result.code != 0
    assert "does not say how it is scored" in result.out + result.err


def test_code_that_rows_name_runs_only_where_it_is_trusted(folder, treetune):
    (folder / "foreign.py").write_text("from pathlib import Path\nPath('ran').touch()\nfrom kinds_of import *\n")
    row = {**ENVIRONMENTS[0], "env_class": "foreign.py:Countdown"}
    by_taskset = {**TRUTHS[0], "extra_info": {"scorer": '{"custom_cls":{"path":"foreign.py","name":"Doubles"}}'}}
    lines(folder / "env.jsonl", row)
    lines(folder / "scorer.jsonl", by_taskset)
    for name in ("env.jsonl", "scorer.jsonl"):
        assert treetune("show", name).code == 0
        refused = treetune("eval", name, "-m", "scripted:echo")
        assert refused.code != 0
        assert "--trust" in refused.out + refused.err
        assert not (folder / "ran").exists()
        trusted = treetune("eval", name, "-m", "scripted:gold", "--trust", "--json")
        assert trusted.json["mean_reward"] == 1.0, trusted.err
        (folder / "ran").unlink()


def test_trust_is_for_rows(treetune):
    result = treetune("show", "arithmetic", "--trust")
    assert (result.code, "taskset.trust" in result.err) == (2, True)


def test_a_folder_without_rows_is_told(folder):
    (folder / "empty").mkdir()
    with raises_code("usage", "empty", ".jsonl"):
        load_taskset("empty").count()
