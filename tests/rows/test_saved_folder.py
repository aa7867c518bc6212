"""Folders of `save_to_disk` as sources: with their splits, and noticed when they change."""

from __future__ import annotations

import pytest
from raising import raises_code

from treetune.data.datasets.task_lists import load_task

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


def rows(*numbers):
    return datasets.Dataset.from_list([{"q": f"{number}?", "a": str(number)} for number in numbers])


def truths(folder, **kwargs):
    node = {"loading_params": {"args": [str(folder)], "kwargs": kwargs}, "prompt_template": "{q}", "ground_truth": "a"}
    return [task.ground_truth for task in load_task(node).select_tasks()]


@pytest.fixture
def one(tmp_path):
    rows(0, 1, 2).save_to_disk(tmp_path / "one")
    return tmp_path / "one"


@pytest.fixture
def several(tmp_path):
    datasets.DatasetDict(train=rows(0, 1, 2, 3), test=rows(8, 9)).save_to_disk(tmp_path / "several")
    return tmp_path / "several"


def test_a_dataset_is_read_as_it_was_saved(one):
    assert truths(one) == ["0", "1", "2"]
    assert truths(one, split="train[:2]") == ["0", "1"]


@pytest.mark.parametrize(
    ("split", "found"),
    [("test", "89"), ("train[1:3]", "12"), ("train[-1:]", "3"), ("train[:50%]+test", "0189"), ("test[1:]", "9")],
)
def test_splits_are_those_of_load_dataset(several, split, found):
    assert truths(several, split=split) == list(found)


def test_several_splits_must_be_chosen_from(several):
    with raises_code("usage", "loading_params.kwargs.split", "train, test"):
        truths(several)
    with raises_code("usage", "'valid'", "train, test"):
        truths(several, split="valid")
    with raises_code("usage", "data_files", "save_to_disk"):
        truths(several, data_files="x.json")


def test_what_is_saved_anew_is_built_anew(one, tmp_path):
    assert truths(one) == ["0", "1", "2"]
    rows(7).save_to_disk(tmp_path / "other")
    one.rename(tmp_path / "gone")
    (tmp_path / "other").rename(one)
    assert truths(one) == ["7"]
