"""A folder of rows is one of its splits, the same in every place, and as `load_dataset` has it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets.data_files import DataFilesDict, get_data_patterns
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_code

from treetune import load_taskset
from treetune.data.rows import read_rows, read_tasks
from treetune.data.sources.names import find, names_rows, names_taskset
from treetune.data.sources.splits import split_files
from treetune.data.validate import validate
from treetune.trainers.skyrl.tasks import resolve_tasks_into_config


def rows(split: str, count: int) -> list[dict]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{split} {number}?"}],
            "env_class": "gsm8k",
            "reward_spec": {"method": "rule", "ground_truth": str(number)},
        }
        for number in range(count)
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "both"
    folder.mkdir()
    for split, count in {"train": 10, "test": 3}.items():
        pq.write_table(pa.Table.from_pylist(rows(split, count)), folder / f"{split}.parquet")
    return folder


def test_a_folder_is_its_train_split_and_another_is_named(folder, treetune):
    assert len(list(read_rows("both"))) == len(list(read_tasks("both"))) == load_taskset("both").count() == 10
    assert [row["prompt"][0]["content"] for row in read_rows("both:test")] == ["test 0?", "test 1?", "test 2?"]
    assert (names_rows("both:test"), names_taskset("both:test")) == (True, False)
    assert load_taskset("both:test").count() == 3
    assert treetune("show", "both:test", "-n", 1, "--json").json["tasks"][0]["prompt"][0]["content"] == "test 0?"
    assert treetune("convert", "both", "out.jsonl", "--to", "skyrl", "--json").json["rows"] == 10
    config = resolve_tasks_into_config({"data": {}}, "both", val_tasks="both:test")
    assert config["data"]["train_data"] == [str(Path("both") / "train.parquet")]
    assert config["data"]["val_data"] == [str(Path("both") / "test.parquet")]


def test_a_split_that_is_not_there_is_told_with_those_that_are(folder):
    (folder / "train.parquet").unlink()
    for name in ("both", "both:validation"):
        with raises_code("usage", "both:test"):
            list(find(name))


def test_validate_checks_every_split_and_compares_them(folder, treetune):
    assert treetune("validate", "both", "--json").json["rows"] == 13
    assert treetune("validate", "both:test", "--json").json["rows"] == 3
    pq.write_table(pa.Table.from_pylist(rows("train", 3)), folder / "test.parquet")
    assert "train-val-overlap" in {finding.rule for finding in validate("both").findings}


def test_a_config_finds_the_split_of_a_folder_beside_it(folder, monkeypatch, tmp_path):
    (tmp_path / "rows.yaml").write_text("taskset: {id: rows, files: ['both:test']}\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load_taskset(str(tmp_path / "rows.yaml")).count() == 3


def test_a_card_says_which_files_are_which_split(folder):
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: test.parquet\n"
        "  - split: held_out\n    path: 'tr*.parquet'\n---\n# A dataset\n"
    )
    assert [file.path.name for file in find("both")] == ["test.parquet"]
    assert [file.path.name for file in find("both:held_out")] == ["train.parquet"]


NAMES = st.sampled_from(
    "train.jsonl test.jsonl val.jsonl dev-1.jsonl my_train_set.jsonl trains.jsonl a.jsonl eval2.jsonl Train.jsonl "
    "train-test.jsonl train-00000-of-00002.jsonl extra-00000-of-00001.jsonl validation.part.jsonl".split()
)
FOLDERS = st.sampled_from(["", "data/", "train/", "test/", "x/", "x/dev-set/", "data/train/", "pretrain/"])


@settings(max_examples=3 * settings.default.max_examples)
@given(st.sets(st.builds(lambda folder, name: folder + name, FOLDERS, NAMES), min_size=1, max_size=5))
def test_the_splits_are_those_of_load_dataset(names):
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "rows"
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps({"name": name}) + "\n")
        patterns = get_data_patterns(str(folder))
        theirs = DataFilesDict.from_patterns(patterns, str(folder), [".jsonl"])
        ours = split_files(folder, sorted(folder.rglob("*.jsonl")))
        assert {split: set(map(str, files)) for split, files in ours.items()} == {
            str(split): set(files) for split, files in theirs.items()
        }
