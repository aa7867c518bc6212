"""Names of ready sets: where their files lie, which wins, what verbs say of them."""

from __future__ import annotations

import json

import pytest

from treetune.config.plugins import find_ready_file, ready_names
from treetune.core.from_config import build_taskset
from treetune.tasksets.target import load_taskset, read_target

OWN = """
about: Sums of my own
source: https://example.org/sums
licence: CC0
val_tasks:
  - loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}}
    prompt_template: "{question}"
    ground_truth: answer
    data_source: sums
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder of sets of one's own, with the data beside the file."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "sums.yaml").write_text(OWN.replace("sums.jsonl", str(folder / "sums.jsonl")))
    (folder / "sums.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    monkeypatch.setenv("TREETUNE_READY", str(folder))
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return folder


NAMES = "aime24 arc gpqa gsm8k humaneval ifeval math500 mbpp mmlu triviaqa".split()


def test_the_package_brings_ten_sets(monkeypatch, tmp_path):
    monkeypatch.delenv("TREETUNE_READY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert ready_names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_file_says_what_its_set_is_and_what_was_not_checked(name):
    text = find_ready_file(name).read_text()
    for key in ("about", "source", "licence", "convention"):
        assert f"\n{key}: " in f"\n{text}"
    assert "revision: " in text or "not checked" in text


def test_a_set_of_ones_own_is_a_yaml_file_in_a_folder(own, treetune):
    summary = treetune("eval", "sums", "-m", "scripted:gold", "--json").json
    assert (summary["tasks"], summary["mean_reward"]) == (1, 1.0)
    assert "1 + 1?" in treetune("show", "sums").out
    assert treetune("validate", "sums").code == 0
    built = treetune("build", "sums", "--format", "verl", "--json").json
    assert len(built["val_files"]) == 1
    assert treetune("convert", "sums", "rows.jsonl", "--to", "verl", "--json").json["rows"] == 1


def test_the_config_folder_of_the_user_is_looked_into_too(tmp_path, monkeypatch):
    monkeypatch.delenv("TREETUNE_READY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert find_ready_file("sums") is None
    (tmp_path / "treetune" / "ready").mkdir(parents=True)
    file = tmp_path / "treetune" / "ready" / "sums.yaml"
    file.write_text(OWN)
    assert find_ready_file("sums") == file


def test_ones_own_file_wins_over_the_packages_and_an_id_over_both(own):
    (own / "gsm8k.yaml").write_text(OWN)
    (own / "arithmetic.yaml").write_text(OWN)
    assert read_target("gsm8k")["taskset"]["data_source"] == "sums"
    assert read_target("arithmetic") == {"taskset": {"id": "arithmetic"}}


def test_a_folder_of_the_same_name_is_rows_only_where_it_is_written_as_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm8k").mkdir()
    assert read_target("gsm8k")["taskset"]["id"] == "dataset"
    assert read_target("./gsm8k")["taskset"] == {"id": "rows", "files": ["./gsm8k"]}


def test_gsm8k_stays_an_environment(tmp_path, treetune):
    row = {"prompt": "1 + 1?", "env_class": "gsm8k", "reward_spec": {"ground_truth": "2"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert treetune("eval", "rows.jsonl", "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0


def test_a_split_and_keys_are_chosen_as_of_any_config():
    train = read_target("gsm8k", {"taskset.max_rows": "3"}, split="train")["taskset"]
    assert (train["loading_params"]["kwargs"]["split"], train["max_rows"]) == ("train", 3)
    assert read_target("gsm8k", usual="train")["taskset"]["loading_params"]["kwargs"]["split"] == "train"


def test_a_misspelt_name_is_told_the_right_one(treetune):
    assert "did you mean 'humaneval'" in treetune("eval", "humanevl", "-m", "scripted:gold").err


def test_list_shows_sets_with_their_licence_and_source(own, treetune):
    found = treetune("list", "--json").json["ready"]
    assert {*NAMES, "sums"} <= found.keys()
    assert (found["sums"]["licence"], found["sums"]["source"]) == ("CC0", "https://example.org/sums")
    shown = treetune("list").out
    assert "Sums of my own" in shown
    assert "example.org/sums" in shown
    assert "about: Sums of my own" in treetune("list", "sums").out
    assert treetune("list", "sums", "--json").json["licence"] == "CC0"


def test_a_file_that_cannot_be_read_does_not_break_the_list(own, treetune):
    (own / "broken.yaml").write_text("about: [")
    assert "cannot be read" in treetune("list", "--json").json["ready"]["broken"]["about"]


@pytest.mark.thorough  # the same is tested of any data set
def test_a_hub_that_is_away_is_told_with_the_remedy(treetune, tmp_path):
    done = treetune(
        "eval", "mmlu", "-m", "scripted:gold",
        HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=str(tmp_path / "home"), TREETUNE_TASK_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.code == 3
    assert "'cais/mmlu' could not be loaded: the hub cannot be reached" in done.err
    assert "HF_ENDPOINT" in done.err


def test_a_set_can_be_a_source_of_a_mixture(own):
    taskset = build_taskset({"id": "union", "sources": [{"id": "sums"}, {"id": "sums", "max_rows": 1}]})
    assert taskset.count() == 2


def test_a_set_is_a_taskset_of_a_config(own, tmp_path):
    (tmp_path / "run.yaml").write_text("taskset: {id: sums, prompt_template: 'Q: {question}'}")
    assert load_taskset(str(tmp_path / "run.yaml"))[0].messages[0]["content"] == "Q: 1 + 1?"


@pytest.mark.parametrize("verb", ["eval", "serve", "show"])
def test_the_help_of_a_verb_says_that_it_takes_a_ready_set(treetune, verb):
    said = " ".join(treetune(verb, "--help").out.replace("│", " ").split())
    assert "a ready set (gsm8k)" in said
