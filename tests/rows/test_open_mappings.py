"""Mappings whose keys are data, such as ids: one column of JSON in the file, a mapping for whoever scores or plays."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from treetune import Task
from treetune.data.datasets.task_lists import load_task
from treetune.data.rows import read_rows, read_tasks
from treetune.data.rows.formats import task_to_play
from treetune.data.rows.growing_parquet import GrowingParquet
from treetune.data.rows.parquet import MOST_KEYS, table_of
from treetune.data.rows.writing import write_file
from treetune.trainers.trl.columns import score_rows
from treetune.trainers.verl.reward import compute_score

SCORER = """
from treetune_verl.tasks import Task

class ByIds(Task):
    def reward(self, task, answer):
        ids = task.extra_info["ids"]
        return float(isinstance(ids, dict) and ids.get(answer) == len(ids))
"""


def ids_of(number: int) -> dict[str, int]:
    """Of 200 rows each has one to three ids that no other has."""
    return {f"id_{number}_{part}": number % 3 + 1 for part in range(number % 3 + 1)}


ROWS = [{"q": f"Which of row {number}?", "a": str(number), "ids": ids_of(number)} for number in range(200)]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture
def node(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "by_ids.py").write_text(SCORER)
    return {
        "custom_cls": {"path": str(tmp_path / "by_ids.py"), "name": "ByIds"},
        "loading_params": {"args": ["json"], "kwargs": {"data_files": str(tmp_path / "rows.jsonl"), "split": "train"}},
        "prompt_template": "{q}",
        "ground_truth": "a",
        "extra_fields": ["ids"],
    }


@pytest.fixture
def build(node):
    return lambda format, **keys: load_task({**node, **keys}).get_parquet_path(format=format)


def rows_of_trainer(path):
    """As trainers read them."""
    from datasets import load_dataset

    return list(load_dataset("parquet", data_files=str(path), split="train"))


@pytest.mark.parametrize("format", ["verl", "skyrl", "trl"])
def test_ids_are_one_column_and_read_as_the_mapping(build, format):
    path = build(format)
    extra = pq.read_schema(path).field("extra_info").type
    assert extra.field("ids").type == pa.string()
    assert [row["extra_info"]["ids"] for row in read_rows(path)] == [row["ids"] for row in ROWS]
    assert [task.extra_info["ids"] for task in read_tasks(path)] == [row["ids"] for row in ROWS]


def test_verl_scores_by_the_mapping(build):
    for row in rows_of_trainer(build("verl"))[:3]:
        number = row["extra_info"]["index"]
        truth = row["reward_model"]["ground_truth"]
        score = compute_score(row["data_source"], f"id_{number}_0", truth, row["extra_info"])
        assert score["score"] == 1.0


def test_skyrl_plays_a_task_with_the_mapping(build):
    row = rows_of_trainer(build("skyrl"))[2]
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    assert task_to_play(row["env_class"], row["prompt"], extras).extra_info["ids"] == ids_of(2)


def test_trl_scores_by_the_mapping(build):
    rows = rows_of_trainer(build("trl"))[:3]
    columns = {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}
    answers = [[{"role": "assistant", "content": f"id_{number}_0"}] for number in range(3)]
    assert score_rows([row["prompt"] for row in rows], answers, **columns) == [1.0] * 3


def test_show_and_eval_give_the_mapping(node, tmp_path, treetune):
    (tmp_path / "tasks.yaml").write_text(json.dumps({"train_tasks": [node]}))
    shown = treetune("show", "tasks.yaml", "-n", "2", "--json")
    assert [task["extra_info"]["ids"] for task in shown.json["tasks"]] == [ids_of(0), ids_of(1)]


def test_a_row_function_sees_the_keys_of_its_row_alone(node, tmp_path):
    (tmp_path / "sees.py").write_text(
        "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        return lambda row, index: {**make(row, index), 'extra_info': {'keys': len(row['ids'])}}\n"
    )
    task = load_task({**node, "custom_cls": {"path": str(tmp_path / "sees.py")}, "filter": "len(ids) < 3"})
    assert [one.extra_info["keys"] for one in task.select_tasks()] == [
        number % 3 + 1 for number in range(200) if number % 3 < 2
    ]


def test_as_many_keys_as_the_bound_are_columns(tmp_path):
    keys = {f"key_{number}": number for number in range(MOST_KEYS)}
    for count, kind in ((MOST_KEYS, "struct"), (MOST_KEYS + 1, "string")):
        tasks = [Task(prompt="p", extra_info={"wide": keys}), Task(prompt="q", extra_info={"wide": {"key_1": 1}})]
        if count > MOST_KEYS:
            tasks[1].extra_info["wide"]["another"] = 2
        write_file(tasks, tmp_path / "rows.parquet", "verl", scorer="rule")
        extra = pq.read_schema(tmp_path / "rows.parquet").field("extra_info").type
        assert str(extra.field("wide").type).startswith(kind)
        assert [task.extra_info["wide"] for task in read_tasks(tmp_path / "rows.parquet")] == [
            task.extra_info["wide"] for task in tasks
        ]


@pytest.mark.parametrize("exact", [True, False])
def test_a_mapping_that_opens_batch_by_batch_becomes_json(tmp_path, exact):
    rows = [
        {"extra_info": {"ids": {f"id_{number}": {"n": number}}, "deep": [{"x": {f"id_{number}": 1}}]}}
        for number in range(100)
    ]
    with GrowingParquet(tmp_path / "rows.parquet", exact=exact) as writer:
        for first in range(0, 100, 20):
            writer.write(table_of(rows[first : first + 20]))
    assert writer.json_fields == {"extra_info.ids", "extra_info.deep"}
    assert list(read_rows(tmp_path / "rows.parquet")) == rows


def test_a_list_of_tasks_has_ids_in_one_and_few_keys_in_another(node, tmp_path, treetune):
    """The files of one list are joined by the trainer."""
    (tmp_path / "few.jsonl").write_text("".join(json.dumps({**row, "ids": {"only": 1}}) + "\n" for row in ROWS[:5]))
    few = {
        **node,
        "loading_params": {"args": ["json"], "kwargs": {"data_files": str(tmp_path / "few.jsonl"), "split": "train"}},
    }
    (tmp_path / "tasks.yaml").write_text(json.dumps({"train_tasks": [node, {**few, "join": True}]}))
    built = treetune("build", "tasks.yaml", "--json")
    assert built.code == 0, built.err
    from datasets import concatenate_datasets, load_dataset

    paths = built.json["train_files"]
    joined = concatenate_datasets([load_dataset("parquet", data_files=path, split="train") for path in paths])
    assert len(joined) == 205
    assert [row["extra_info"]["ids"] for path in paths for row in read_rows(path)][200:] == [{"only": 1}] * 5
