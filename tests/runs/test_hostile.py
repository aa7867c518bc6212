"""Runs that anyone may have written, opened by the library and by every verb that takes a run."""

from __future__ import annotations

import json
import os

import pytest
from hostile_runs import SEVEN, write_hostile
from made_runs import make_run
from raising import raises_code

from treetune.evaluation import EvalConfig, read_config
from treetune.runs import discovery
from treetune.runs.discovery import open_run, runs_below
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.plain_files import bring_back
from treetune.runs.run import Run, read_summary

LINE = '{"input": "?", "output": "3", "score": 1.0, "step": 1}\n'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    write_hostile(folder)
    return folder


def test_opening_them_says_why_they_are_not_read(hostile):
    found = {place.path.name: place for place in runs_below(hostile)}
    assert len(found) == len(SEVEN)
    for place in found.values():
        if place.fault:
            with raises_code("usage", "pipe.json"):
                place.open()
            continue
        run = place.open()
        assert len(run) == 0
        assert "cannot be read" in run.warnings[0]


@pytest.mark.parametrize("verb", ["show", "convert", "compare"])
def test_every_verb_that_takes_a_run_names_what_is_wrong_with_one(hostile, tmp_path, treetune, verb):
    make_run(tmp_path / "good", [[1.0]])
    more = {"show": [], "convert": [tmp_path / "out.jsonl", "--force"], "compare": [tmp_path / "good"]}[verb]
    cache = str(tmp_path / "own cache")
    said = treetune(verb, hostile / "deep.json", *more, TREETUNE_TASK_CACHE_DIR=cache)
    assert "deep.json: it is nested too deeply" in " ".join(said.err.split())
    said = treetune(verb, hostile / "bomb.eval", *more, TREETUNE_TASK_CACHE_DIR=cache)
    assert "unpacks to more than" in " ".join(said.err.split())


def test_one_bad_file_of_a_run_spoils_only_its_own_rollouts(tmp_path):
    for step in (1, 3):
        (tmp_path / f"{step}.jsonl").write_text(LINE)
    (tmp_path / "2.jsonl").write_text('{"input": ' + "[" * 100_000 + "]" * 100_000 + "}\n" + LINE)
    os.mkfifo(tmp_path / "4.jsonl")
    with pytest.warns(UserWarning, match="2 of the records cannot be read.*2.jsonl.*nested too deeply"):
        assert len(open_run(tmp_path)) == 3


def test_a_link_out_of_the_run_is_not_followed(tmp_path):
    (tmp_path / "secret.jsonl").write_text(LINE)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "1.jsonl").write_text(LINE)
    (tmp_path / "run" / "2.jsonl").symlink_to(tmp_path / "secret.jsonl")
    (tmp_path / "run" / "3.jsonl").symlink_to("1.jsonl")
    with pytest.warns(UserWarning, match="2.jsonl is a link to a file outside of"):
        assert len(open_run(tmp_path / "run")) == 2


def test_a_folder_within_folders_without_end_is_not_walked_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery, "_DEEPEST", 4)
    make_run(tmp_path / "a" / "b" / "near", [[1.0]])
    make_run(tmp_path / "a" / "b" / "c" / "d" / "e" / "far", [[1.0]])
    assert [place.path.name for place in runs_below(tmp_path)] == ["near"]


# Runs of our own form


def test_an_image_that_leads_out_of_the_run_is_not_shown(tmp_path):
    name = "0" * 32 + ".png"
    (tmp_path / "secret").write_text("a key")
    (tmp_path / "run" / "images").mkdir(parents=True)
    (tmp_path / "run" / "images" / name).symlink_to(tmp_path / "secret")
    line = f'{{"image":"images/{name}"}}'.encode()
    assert bring_back(line, tmp_path / "run") == line
    (tmp_path / "run" / "images" / name).unlink()
    (tmp_path / "run" / "images" / name).write_text("a picture")
    assert b"base64" in bring_back(line, tmp_path / "run")


def test_a_record_that_shows_an_image_very_often_stays_small(tmp_path):
    name = "0" * 32 + ".png"
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / name).write_bytes(bytes(8 << 20))
    line = b"[" + b",".join([f'"images/{name}"'.encode()] * 1000) + b"]"
    shown = bring_back(line, tmp_path)
    assert shown.count(b"base64") == 8
    assert shown.count(b'"images/') == 992


@pytest.mark.parametrize("name", ["traces.jsonl", "index.jsonl"])
def test_nothing_is_written_through_a_link(tmp_path, name):
    make_run(tmp_path / "run", [[1.0, 0.0]])
    (tmp_path / "elsewhere").write_text("mine\n")
    (tmp_path / "run" / name).unlink()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    what = read_config({"taskset": {"id": "arithmetic"}, "model": "made"}, EvalConfig)
    with raises_code("storage", name):
        RunFolder.resume(tmp_path / "run", TRACES, what)
    assert (tmp_path / "elsewhere").read_text() == "mine\n"


def test_a_summary_or_config_without_end_is_not_read(tmp_path):
    make_run(tmp_path / "run", [[1.0]])
    for name, size in (("summary.json", 1 << 40), ("config.yaml", 1 << 30)):
        with open(tmp_path / "run" / name, "wb") as file:
            file.truncate(size)  # it takes no room on the disk
    run = Run(tmp_path / "run")
    assert read_summary(run.folder) is None
    with raises_code("taskset", "1,048,576 bytes"):
        assert run.config


def test_an_index_that_says_what_no_trace_can_be_is_not_believed(tmp_path):
    make_run(tmp_path / "run", [[1.0, 0.0], [1.0, 1.0]])
    index = tmp_path / "run" / "index.jsonl"
    for at, value in ((1, -5), (1, 1 << 40), (2, -1), (5, 1 << 90), (3, 10**400)):
        lines = [json.loads(line) for line in (index.read_text().splitlines())]
        kept, lines[1][at] = index.read_bytes(), value
        index.write_text("".join(json.dumps(line) + "\n" for line in lines))
        run = Run(tmp_path / "run")
        assert [entry.reward for entry in run.columns.entries] == [1.0, 0.0, 1.0, 1.0]
        assert run.warnings == []
        index.write_bytes(kept)


def test_a_trace_with_numbers_or_metrics_beyond_all_measure_does_not_spoil_the_others(tmp_path):
    make_run(tmp_path / "run", [[1.0]])
    many = {f"metric {number}": 1.0 for number in range(20_000)}
    with open(tmp_path / "run" / "traces.jsonl", "a") as file:
        file.write(json.dumps({"task": {"idx": 1}, "uid": "a", "occurrence": 1 << 80, "reward": 1.0}) + "\n")
        file.write(json.dumps({"task": {"idx": 2}, "uid": "b", "reward": 0.0, "metrics": many}) + "\n")
    run = Run(tmp_path / "run")
    assert (len(run), run.mean_reward, len(run.columns.metrics)) == (2, 0.5, 1000)
    assert "1 line of traces.jsonl cannot be read" in run.warnings[0]
