"""Queries over a run find what they say."""

from __future__ import annotations

import re

import pytest
from made_runs import make_run, make_trace

from treetune.errors import UsageError
from treetune.runs import query
from treetune.runs.annotations import write_mark
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    make_run(folder, [[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [None, None]])
    with RunFolder(folder, TRACES) as more:
        more.append(make_trace(4, 0, 0.5, source="other", said='so, Therefore "42" (ü)', metrics={"clicks": 3.0}))
        more.append(make_trace(4, 1, 0.5, source="other", said="no", success=True, retries=2))
        tool = {"type": "function", "function": {"name": "python", "description": "Runs a Program."}}
        answered = make_trace(5, 0, 0.25, said="I asked the ASSISTANT: 31415 \\\\", tools=[tool], retries=27182)
        answered.turns[0].message["tool_calls"] = [{"function": {"name": "grep", "arguments": '{"what": "tabs"}'}}]
        more.append(answered)
    return Run(folder)


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["0/0", "0/1", "1/0", "1/1", "2/0", "2/1", "3/0", "3/1", "4/0", "4/1", "5/0"]),
        ("reward<0.25", ["1/0", "1/1", "2/0"]),
        ("reward < 0.5 & task=2", ["2/0"]),
        ("reward=none", ["3/0", "3/1"]),
        ("reward!=none rollout=1", ["0/1", "1/1", "2/1", "4/1"]),
        ("failed", ["3/0", "3/1"]),
        ("allfailed", ["3/0", "3/1"]),
        ("mixed", ["2/0", "2/1"]),
        ("all0 | all1", ["0/0", "0/1", "1/0", "1/1"]),
        ("solved", ["0/0", "0/1", "2/1", "4/1"]),
        ("scored & !solved", ["1/0", "1/1", "2/0", "4/0", "5/0"]),
        ("source=other", ["4/0", "4/1"]),
        ("source!=other & (mixed | failed)", ["2/0", "2/1", "3/0", "3/1"]),
        ("outcome=environment_error", ["3/0", "3/1"]),
        ("failure~zerodivision", ["3/0", "3/1"]),
        ("clicks>2", ["4/0"]),
        ("retries>0", ["4/1", "5/0"]),
        ("retries>0 retries<10", ["4/1"]),
        ('"therefore"', ["4/0"]),
        ("therefore", ["4/0"]),
        (r'"\"42\""', ["4/0"]),
        ('"Ü"', ["4/0"]),
        ('!"therefore" & source=other', ["4/1"]),
        ('answer~"THEREFORE"', ["4/0"]),
        ('"Problem 4." reward>0', ["4/0", "4/1"]),
        ("assistant", ["5/0"]),  # who also is a role of each
        ("finish_reason", []),  # a name
        ("environment_error", []),  # a word of the format
        ('"reward"', []),
        ('"31415"', ["5/0"]),
        ('"27182"', []),  # a number
        ("grep", ["5/0"]),  # what was called
        ("tabs", ["5/0"]),
        ('"runs a program"', []),  # what could have been
        ("mark=good", []),
    ],
)
def test_a_query_finds(run, query, found):
    assert [f"{entry.idx}/{entry.rollout}" for entry in run.select(query)] == found


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("rewrad<1", "did you mean"),
        ("reward<high", "a number"),
        ("(mixed", "not closed"),
        ("mixed)", "too many"),
        ("| mixed", "missing before"),
        ("mixed &", "missing at its end"),
        ("source<b", "is a text"),
        ("reward~1", "is a number"),
        ('"open', "cannot be parsed"),
    ],
)
def test_a_query_that_is_none_is_told_why(run, query, words):
    with pytest.raises(UsageError, match=words):
        run.select(query)


def test_what_people_noted_can_be_asked_for(tmp_path):
    run = make_run(tmp_path, [[1.0, 0.0], [0.5]])
    write_mark(run.path, run.columns.entries[1], "bad")
    write_mark(run.path, run.columns.entries[2], "good")
    with RunFolder(tmp_path, TRACES) as more:
        more.append(make_trace(9, 0, 1.0))
    run.follow()
    assert [f"{entry.idx}/{entry.rollout}" for entry in run.select("mark=good | mark=bad")] == ["0/1", "1/0"]
    assert len(run.select("mark!=good")) == 3


def test_words_are_looked_for_last_in_what_is_left(run, monkeypatch):
    looked = []
    monkeypatch.setattr(query._Words, "_is_said", lambda self, line: looked.append(line) or False)
    assert len(run.select('(!"therefore" | "so") & task=4')) == 2
    assert len(looked) == 2


def test_marks_may_be_words_in_capitals(run):
    for said, meant in (
        ("reward<0.5 AND source=other", "reward<0.5 & source=other"),
        ("failed OR reward=1", "failed | reward=1"),
        ("NOT failed", "!failed"),
    ):
        assert run.fits(said).tolist() == run.fits(meant).tolist()


def test_a_rollout_is_named_as_lists_name_it(run):
    assert run.fits("1/0").tolist() == run.fits("task=1 & rollout=0").tolist()
    assert run.fits("1/0").sum() == 1


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("reward<", "a value is missing after reward<"),
        ("source:made", "write source=made instead of source:made"),
        ("source=mode", "there is no source 'mode'; did you mean 'made'?"),
        ("comment~Bea", "are texts; comment is not"),
    ],
)
def test_what_is_plainly_meant_otherwise_is_not_looked_for_as_words(run, query, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        run.fits(query)
