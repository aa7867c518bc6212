"""Tasks with weights are one mixture: the same draws in files, plans, packages, saved runs and live."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from pass_rates import write_rates
from raising import raises_code

from treetune import load_taskset
from treetune.data.rows import read_tasks
from treetune.tasksets.target import read_target
from treetune.trainers.skyrl.tasks import resolve_tasks_into_config as resolve_for_skyrl
from treetune.trainers.verifiers import export_package
from treetune.trainers.verifiers import package as exported
from treetune_verl.tasks import get_dataset_paths, resolve_tasks_into_config

SIZES = {"add": 30, "sub": 40}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for name, size in SIZES.items():
        rows = [
            {"question": f"{name} {n}?", "answer": str(n), "steps": [str(n)] * (name == "sub")} for n in range(size)
        ]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write({"weight": 3}, {"weight": 1, "extra_fields": ["steps"], "shuffle": {"seed": 5}})
    return tmp_path


def node(name: str, **keys) -> dict:
    return {
        "loading_params": {"args": ["json"], "kwargs": {"data_files": f"{name}.jsonl", "split": "train"}},
        "prompt_template": "{question}", "ground_truth": "answer", "data_source": name, **keys,
    }  # fmt: skip


def write(first: dict, second: dict) -> list[dict]:
    nodes = [node("add", **first), node("sub", **second)]
    Path("blend.yaml").write_text(yaml.safe_dump({"train_tasks": nodes}))
    return nodes


def drawn(taskset, count: int = 70) -> list[str]:
    return [task.uid for task in taskset.draw(count)]


def in_file(path: str) -> list[str]:
    return [task.uid for task in read_tasks(path)]


def test_the_files_of_every_trainer_have_the_draws_that_others_take_live(treetune):
    live = load_taskset("blend.yaml")
    wanted = drawn(live)
    counts = Counter(task.data_source for task in live.draw(400))
    assert abs(counts["add"] - 300) <= 2
    for format in ("verl", "skyrl", "trl"):
        (path,) = treetune("build", "blend.yaml", "--format", format, "--json").json["train_files"]
        assert in_file(path) == wanted
    (path,) = resolve_tasks_into_config({**yaml.safe_load(Path("blend.yaml").read_text()), "data": {}})["data"][
        "train_files"
    ]
    assert in_file(path) == wanted
    (path,) = resolve_for_skyrl({"data": {}}, "blend.yaml")["data"]["train_data"]
    assert in_file(path) == wanted
    assert in_file(get_dataset_paths(write({"weight": 3}, {"weight": 1, "shuffle": {"seed": 5}}))[0]) == wanted


def test_build_and_the_plan_print_the_size_and_the_shares(treetune):
    built = treetune("build", "blend.yaml", "--json").json
    (task,) = built["tasks"]
    assert task["rows"] == 70
    assert [(share["name"], share["weight"], share["rows"]) for share in task["shares"]] == [
        ("add", 3, 30),
        ("sub", 1, 40),
    ]
    assert sum(share["draws"] for share in task["shares"]) == 70
    printed = treetune("build", "blend.yaml")
    assert "70 rows  hit" in printed.out
    assert "its 30 rows 1.8 times (weight 3)" in printed.out
    assert "of its 40 rows (weight 1)" in printed.out
    assert treetune("build", "blend.yaml", "-n", 40, "--json").json["tasks"][0]["rows"] == 40
    for trainer in ("verl", "skyrl"):
        told = treetune("train", trainer, "blend.yaml", "--dry-run", "--json").json["data"]
        parts = [in_file(path) for split in ("train", "val") for path in told[split]]
        assert set(parts[0]).isdisjoint(parts[1]), "a task to validate with is trained on"
        told = treetune("train", trainer, "blend.yaml", "--val", "0", "--dry-run", "--json").json
        (path,) = told["data"]["train"]
        assert pq.read_metadata(path).num_rows == 70
        assert told["data"]["train_mixture"].startswith("70 rows: add 5")
        assert "train_mixture: 70 rows: add" in treetune("train", trainer, "blend.yaml", "--val", "0", "--dry-run").out


def test_without_weights_each_task_has_a_file(treetune):
    nodes = write({}, {})
    built = treetune("build", "blend.yaml", "--json").json
    assert [pq.read_metadata(path).num_rows for path in built["train_files"]] == [30, 40]
    assert get_dataset_paths(nodes) == built["train_files"]
    assert "weights" in treetune("build", "blend.yaml", "-n", 5).err


def test_a_saved_run_and_a_package_keep_the_weights(treetune, folder):
    assert treetune("eval", "blend.yaml", "-m", "scripted:gold", "-n", 8, "-o", "run").code == 0
    saved = read_target("run/config.yaml", {})["taskset"]
    assert [source["weight"] for source in saved["sources"]] == [3, 1]
    resumed = treetune("eval", "--resume", "-o", "run", "-n", 12)
    assert resumed.code == 0, resumed.err
    assert treetune("rescore", "run", "--json").json["changed"] == 0
    assert drawn(load_taskset("run/config.yaml")) == drawn(load_taskset("blend.yaml"))
    export_package("blend.yaml", folder / "blend")
    packed = exported.open_taskset(folder / "blend" / "blend" / "taskset.yaml", {})
    assert packed.weights == [3, 1]
    assert drawn(packed) == drawn(load_taskset("blend.yaml"))


def test_pass_rates_of_one_task_are_part_of_the_draw(treetune, folder):
    nodes = write({"weight": 3}, {"weight": 1})
    rates = {task.uid: number / 30 for number, task in enumerate(load_taskset_of(nodes[0]))}
    write_rates(folder / "rates.jsonl", rates)
    write({"weight": 3, "profile": {"path": str(folder / "rates.jsonl"), "schedule": {"kind": "pools"}}}, {"weight": 1})
    (path,) = treetune("build", "blend.yaml", "--json").json["train_files"]
    assert in_file(path) == drawn(load_taskset("blend.yaml"))


def load_taskset_of(node: dict):
    Path("one.yaml").write_text(yaml.safe_dump({"train_tasks": [node]}))
    return load_taskset("one.yaml").draw()


def test_a_taskset_of_another_kind_has_a_weight_too(folder):
    Path("mine.py").write_text(
        "from treetune import Task, Taskset\nclass Mine(Taskset):\n"
        "    def load_tasks(self):\n        return [Task(prompt=f'mine {n}?') for n in range(5)]\n"
        "    def reward(self, task, answer):\n        return 1.0\n"
    )
    nodes = [node("add", weight=1), {"id": "mine.py:Mine", "max_rows": 4, "weight": 1}]
    (path,) = get_dataset_paths(nodes)
    prompts = [task.messages[-1]["content"].split()[0] for task in read_tasks(path)]
    assert (len(prompts), Counter(prompts)) == (34, {"add": 17, "mine": 17})
    with raises_code("config", "tasks[1].weight"):
        get_dataset_paths([nodes[0], {**nodes[1], "weight": -1}])
