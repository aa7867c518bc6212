"""What stands in a file is what is trained on: every place finds the values that Python reads in a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import venvs
import yaml
from generated_tables import Table, is_same, write_tables
from packing import MANY

from treetune import Task
from treetune.data.arrow_values import drop_nulls
from treetune.data.datasets.task_lists import load_task
from treetune.data.rows import read_tasks
from treetune.data.rows.formats import FORMATS
from treetune.data.sources.names import find
from treetune.data.validate.files import read_batches

SEEDS = range(40 if MANY else 4)
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def check(table: Table, tasks: list[Any], where: str) -> None:
    """Whether the tasks are those of the rows that have a prompt and a truth."""
    found = {task.extra_info["index"]: task for task in tasks}
    assert found.keys() == table.expected.keys(), (table.name, where)
    for number, (prompt, truth, extra) in table.expected.items():
        task, place = found[number], (table.name, number, where)
        assert task.prompt == [{"role": "user", "content": prompt}], place
        assert drop_nulls(task.ground_truth) == drop_nulls(truth), place
        assert is_same(task.extra_info.get("x"), extra, table.name), (*place, task.extra_info.get("x"), extra)


def uid_of(prompt: str, truth: Any) -> str:
    spec = {"ground_truth": truth, "method": "rule"}
    return Task(prompt=[{"role": "user", "content": prompt}], reward_spec=spec).uid


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.quick_cases(1)
def test_every_verb_finds_what_stands_in_the_file(tmp_path, seed, treetune):
    tables = write_tables(tmp_path, seed, 8)
    by_name = {table.name: table for table in tables}
    for table in tables:
        taskset = load_task(table.entry)
        _, built, _ = taskset.build()
        check(table, list(taskset), "the taskset")
        check(table, list(read_tasks(built)), "the built file")
        rows = [row for batch in read_batches(find(built)) for row in batch.rows]
        check(table, [FORMATS["verl"].task_of_pruned(row) for row in rows], "validate of the built file")
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"train_tasks": [table.entry for table in tables]}))

    def check_all(tasks: list[dict[str, Any]], where: str) -> None:
        sorted_by_file: dict[str, list[Task]] = {name: [] for name in by_name}
        for task in tasks:
            keys = {key: value for key, value in task.items() if key in Task.__struct_fields__}
            sorted_by_file[task["data_source"]].append(Task(**keys))
        for name, of_file in sorted_by_file.items():
            check(by_name[name], of_file, where)

    total = sum(len(table.expected) for table in tables)
    check_all(json.loads(treetune("show", "tasks.yaml", "--json", "-n", total).out)["tasks"], "show")
    played = json.loads(treetune("eval", "tasks.yaml", "-m", "scripted:gold", "--json", "-o", "run").out)
    assert (played["tasks"], played["mean_reward"]) == (total, 1.0)
    check_all([json.loads(line)["task"] for line in Path("run/traces.jsonl").read_text().splitlines()], "eval")
    report = json.loads(treetune("validate", "tasks.yaml", "--json").out)
    results = [json.loads(line) for line in (Path(report["run_dir"]) / "results.jsonl").read_text().splitlines()]
    expected = [uid_of(one.prompt, one.truth) for table in tables for one in table.expected.values()]
    assert sorted(result["uid"] for result in results) == sorted(expected)
    assert {result["gold_reward"] for result in results} == {1.0}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("format", "environment"), [("verl", venvs.VERL), ("skyrl", venvs.SKYRL)])
def test_trainers_find_what_stands_in_the_file(tmp_path, format, environment):
    tables = [table for seed in range(2) for table in write_tables(tmp_path, seed, 8)]
    python = venvs.venv(*environment)
    venvs.run(python, SUPPORT / "tiny_model.py", tmp_path / "model")
    files = {table.name: load_task(table.entry).get_parquet_path(format) for table in tables}
    (tmp_path / "files.json").write_text(json.dumps(files))
    caches = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "theirs"), "HF_HOME": str(tmp_path / "library")}
    side = SUPPORT / "loaded_rows_side.py"
    venvs.run(python, side, format, tmp_path / "model", tmp_path / "files.json", tmp_path / "rows.json", **caches)
    loaded = json.loads((tmp_path / "rows.json").read_text())
    for table in tables:
        check(table, [FORMATS[format].task_of(row) for row in loaded[table.name]], format)
