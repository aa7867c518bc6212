"""Rows of parquet that are read on demand: a row group at a time."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raising import raises_code

from treetune.core.task import Task
from treetune.data.rows import read_rows, row_store
from treetune.data.rows.row_store import ParquetRows
from treetune.data.validate import write_tasks
from treetune.tasksets.target import load_taskset

# Not ru_maxrss, which begins with what the parent had.
MEASURED = """
import atexit, pathlib, runpy
status = pathlib.Path("/proc/self/status")
peak = lambda: next(line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM"))
atexit.register(lambda: pathlib.Path("peak").write_text(peak()))
runpy.run_module("treetune", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "extra_info": {"n": n if n % 3 else None}}
        for n in range(200)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=10)
    return tmp_path / "rows.parquet"


def test_rows_come_in_any_order_as_they_are_read_in_order(file):
    rows, expected = ParquetRows(file), list(read_rows(file))
    assert len(rows) == 200
    assert [rows[number] for number in range(200)] == expected
    anywhere = [random.Random(0).randrange(200) for _ in range(300)]
    assert [rows[number] for number in anywhere] == [expected[number] for number in anywhere]
    with pytest.raises(IndexError):
        rows[200]


def test_only_a_few_row_groups_are_kept(file, monkeypatch):
    monkeypatch.setattr(row_store, "KEPT", 1)
    rows = ParquetRows(file)
    for number in (0, 55, 199, 3):
        rows[number]
        assert len(rows.groups) == 1


def test_a_row_that_was_changed_is_not_given_again(file):
    rows = ParquetRows(file)
    for _ in range(2):
        for number in range(3):
            rows[number]["prompt"][0]["content"] += " changed"
    assert rows[1]["prompt"][0]["content"] == "1?"


def test_rows_are_read_by_threads_and_by_a_copy(file):
    rows, expected = ParquetRows(file), list(read_rows(file))
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rows.__getitem__, range(200))) == expected
    assert pickle.loads(pickle.dumps(rows))[7] == expected[7]


def test_json_text_is_parsed(tmp_path):
    tasks = [Task(prompt="a", extra_info={"level": "hard"}), Task(prompt="b", extra_info={"level": 3})]
    write_tasks(tasks, tmp_path / "rows.parquet", "verl", check=False)
    rows = ParquetRows(tmp_path / "rows.parquet")
    assert [rows[number]["extra_info"]["level"] for number in range(2)] == ["hard", 3]


def test_rows_of_json_come_in_any_order_with_their_exact_values(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    numbers = ["1", "NaN", "18446744073709551616000", "2.5", '"text"', "[1, null]"]
    rows = "".join(f'{{"prompt": "{n}?", "ground_truth": "a", "n": {number}}}\n' for n, number in enumerate(numbers))
    (tmp_path / "rows.jsonl").write_text(rows)
    taskset = load_taskset(str(tmp_path / "rows.jsonl"))
    in_order = {task.idx: repr(task) for task in taskset}
    assert {position: repr(taskset[position]) for position in (5, 0, 3, 1, 4, 2)} == in_order
    source = taskset.source()
    (tmp_path / "rows.jsonl").write_text(rows.replace("2.5", "3.5"))
    changed = load_taskset(str(tmp_path / "rows.jsonl"))
    assert (changed[3].extra_info["n"], changed.source() == source) == (3.5, False)


def test_a_file_that_is_gone_or_none_is_told(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"no rows")
    for name in ("bad.parquet", "gone.parquet"):
        with raises_code("storage", name):
            len(ParquetRows(tmp_path / name))


def test_a_dataset_task_is_no_table_in_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(row_store, "KEPT", 1)
    lines = "".join(f'{{"question": "{n}?", "answer": "{n}"}}\n' for n in range(5000))
    (tmp_path / "rows.jsonl").write_text(lines)
    (tmp_path / "tasks.yaml").write_text(
        "val_tasks: [{loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}, "
        "prompt_template: '{question}', ground_truth: answer}]\n"
    )
    monkeypatch.chdir(tmp_path)
    taskset = load_taskset("tasks.yaml")
    assert [taskset[position].ground_truth for position in (0, 4999, 2500)] == ["0", "4999", "2500"]
    (kept,) = taskset._rows.groups.values()
    assert kept.num_rows <= 2000


@pytest.mark.slow
def test_gsm8k_a_hundred_times_needs_400_mb(gsm8k, tmp_path):
    (tmp_path / "tasks.yaml").write_text(
        "val_tasks: [{loading_params: {args: [json], kwargs: {data_files: "
        f"{gsm8k / 'train.jsonl'}, split: train}}}}, "
        "prompt_template: '{question}', ground_truth: {column: answer, pattern: '#### (.+)'}, repeat: 100}]\n"
    )
    environment = {"PATH": "", "TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}
    for verb, *further in (["show"], ["eval", "-m", "scripted:gold", "-n", "500"], ["validate", "-n", "500"]):
        command = [sys.executable, "-c", MEASURED, verb, "tasks.yaml", *further]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert int((tmp_path / "peak").read_text()) < 400 << 10, verb
