"""Marks of rollouts and tags of a run, which stand beside it."""

from __future__ import annotations

import os

import pytest
from made_runs import make_run
from raising import raises_code

from treetune.runs.annotations import MARKS, TAGS, key_of, read_marks, read_tags, write_mark, write_tags


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", [[0.0, 1.0], [1.0, None]])


def test_the_last_mark_of_a_rollout_counts(run):
    first, second = run.select()[:2]
    write_mark(run.path, first, "bad", "why?")
    write_mark(run.path, second, "good")
    write_mark(run.path, first, "look", "the format, perhaps")
    marks = read_marks(run.path)
    assert (marks[key_of(first)].mark, marks[key_of(first)].comment) == ("look", "the format, perhaps")
    assert marks[key_of(second)].mark == "good"
    write_mark(run.path, first, None)
    assert set(read_marks(run.path)) == {key_of(second)}


def test_a_comment_may_stand_alone(run):
    entry = run.select()[0]
    write_mark(run.path, entry, None, "a remark")
    assert read_marks(run.path)[key_of(entry)].comment == "a remark"
    with raises_code("usage", "10,000 characters"):
        write_mark(run.path, entry, None, "x" * 10_001)


def test_lines_that_are_no_marks_are_passed_over(run):
    write_mark(run.path, run.select()[0], "good")
    with open(run.path / MARKS, "ab") as file:
        file.write(b'not a mark\n{"uid": 3}\n\xff\xfe\n{"uid": "cut sho')
    assert [mark.mark for mark in read_marks(run.path).values()] == ["good"]


def test_tags_are_kept_once_each(run):
    assert read_tags(run.path) == []
    assert write_tags(run.path, ["baseline", " a  b ", "", "baseline"]) == ["baseline", "a b"]
    assert read_tags(run.path) == ["baseline", "a b"]
    with raises_code("usage", "32 tags"):
        write_tags(run.path, ["x" * 61])
    (run.path / TAGS).write_bytes(b"{")
    assert read_tags(run.path) == []


def test_of_a_single_file_they_stand_beside_it(run, tmp_path):
    log = tmp_path / "log.eval"
    log.touch()
    entry = run.select()[0]
    write_mark(log, entry, "bad")
    write_tags(log, ["mine"])
    assert list(read_marks(log)) == [key_of(entry)]
    assert (tmp_path / f"log.eval.{TAGS}").exists()


@pytest.mark.parametrize("name", [MARKS, TAGS])
def test_neither_is_written_through_a_link(run, tmp_path, name):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine\n")
    (run.path / name).symlink_to(elsewhere)
    if name == MARKS:
        with raises_code("storage", "marks.jsonl"):
            write_mark(run.path, run.select()[0], "good")
    else:
        write_tags(run.path, ["mine"])  # takes the place of the link
        assert read_tags(run.path) == ["mine"]
    assert elsewhere.read_text() == "mine\n"


def test_marks_are_not_read_through_a_link_out_of_the_run(run, tmp_path):
    write_mark(run.path, run.select()[0], "good")
    (run.path / MARKS).rename(tmp_path / "elsewhere")
    (run.path / MARKS).symlink_to(tmp_path / "elsewhere")
    assert read_marks(run.path) == {}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_of_somebody_elses_cannot_be_marked(run):
    run.path.chmod(0o555)
    try:
        with raises_code("storage"):
            write_mark(run.path, run.select()[0], "good")
    finally:
        run.path.chmod(0o755)
