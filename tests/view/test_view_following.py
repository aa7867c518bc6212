"""Runs that change while somebody looks at them: growing, resumed, removed, damaged, long."""

from __future__ import annotations

import json
import os
import shutil
import time

import msgspec
import pytest
from made_runs import make_run, make_trace
from viewed_run import viewed_traces
from viewing import viewing

from treetune.core.trace import encode_trace
from treetune.evaluation import EvalConfig, read_config
from treetune.runs.folder import TRACES, RunFolder

WHAT = {"taskset": {"id": "arithmetic"}, "model": "made"}


def create(folder):
    return RunFolder.create(folder, TRACES, read_config(WHAT, EvalConfig))


def test_a_run_that_is_being_written_is_followed(tmp_path):
    traces = viewed_traces(6, 4)
    with create(tmp_path / "run") as run:
        run.append(next(traces))
        with viewing(tmp_path) as server:
            (row,) = server.rows()
            assert (row["rollouts"], row["live"]) == (1, True)
            assert server.ask("groups", run=0)["rows"][0]["cells"]
            assert server.ask("changes", runs={"0": 1}) == {"changed": [], "new_runs": False}
            for number in range(2, 25):
                run.append(next(traces))
                assert server.ask("changes", runs={"0": number - 1})["changed"] == [0]
                assert server.ask("rollouts", run=0)["total"] == number
            (row,) = server.rows()
            assert (row["rollouts"], row["tasks"]) == (24, 6)
            assert server.ask("rollout", run=0, at=23)["entry"]["task"] == 5


def test_a_run_that_nobody_writes_is_not_live(tmp_path):
    make_run(tmp_path / "run", [[1.0]])
    with viewing(tmp_path) as server:
        assert server.rows()[0]["live"] is False
        with RunFolder.resume(tmp_path / "run", TRACES, read_config(WHAT, EvalConfig)):
            assert server.rows()[0]["live"] is True
        assert server.rows()[0]["live"] is False


def test_half_a_line_is_not_shown(tmp_path):
    make_run(tmp_path / "run", [[1.0]])
    line = encode_trace(make_trace(1, 0, 0.0)) + b"\n"
    with viewing(tmp_path / "run") as server, open(tmp_path / "run" / "traces.jsonl", "ab", buffering=0) as file:
        file.write(line[:100])
        assert server.ask("rollouts", run=0)["total"] == 1
        assert server.rows()[0]["rollouts"] == 1
        file.write(line[100:])
        assert server.ask("changes", runs={"0": 1})["changed"] == [0]
        assert server.ask("rollouts", run=0)["total"] == 2


def wait_for_new(server):
    until = time.monotonic() + 30
    while not server.ask("changes", runs={})["new_runs"]:
        assert time.monotonic() < until
        time.sleep(0.05)


def test_new_runs_are_found(tmp_path):
    make_run(tmp_path / "first", [[1.0]])
    with viewing(tmp_path) as server:
        assert len(server.rows()) == 1
        make_run(tmp_path / "deep" / "er" / "second", [[0.0]])
        wait_for_new(server)
        names = {row["id"]: row["name"] for row in server.rows()}
        assert names == {0: "first", 1: os.path.join("deep", "er", "second")}
        assert server.ask("changes", runs={"0": 1, "1": 1}) == {"changed": [], "new_runs": False}


def test_a_folder_without_runs_waits_for_them(tmp_path):
    with viewing(tmp_path) as server:
        assert server.ask("runs") == {"place": str(tmp_path), "runs": [], "curve": None}
        make_run(tmp_path / "run", [[1.0]])
        wait_for_new(server)
        assert len(server.rows()) == 1


def test_a_run_that_is_removed_is_gone_and_the_others_stay(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, [[1.0, 0.0]])
    with viewing(tmp_path) as server:
        assert len(server.rows()) == 2
        server.ask("groups", run=0)
        shutil.rmtree(tmp_path / "a")
        for call in ("run", "groups", "rollouts", "suspicious"):
            assert "is gone" in server.refused(call, run=0)
        for call in ("rollout", "tokens"):
            assert server.refused(call, run=0, at=0)
        assert server.ask("changes", runs={"0": 2, "1": 2})["changed"] == [0]
        assert [row["id"] for row in server.rows()] == [1]
        assert server.ask("groups", run=1)["total"] == 1
        make_run(tmp_path / "a", [[1.0], [0.0], [0.0]])  # another takes its place
        assert server.ask("rollouts", run=0)["total"] == 3


def test_a_resumed_run_is_read_anew(tmp_path):
    make_run(tmp_path / "run", [[None, 1.0], [1.0, None]])
    with viewing(tmp_path / "run") as server:
        assert server.ask("rollouts", run=0, query="failed")["total"] == 2
        what = read_config(WHAT, EvalConfig)
        with RunFolder.resume(tmp_path / "run", TRACES, what) as run:
            run.keep(lambda trace: trace.scored)
            assert server.ask("changes", runs={"0": 4})["changed"] == [0]
            assert server.ask("rollouts", run=0)["total"] == 2
            run.append(make_trace(0, 0, 0.25))
        rows = server.ask("rollouts", run=0)["rows"]
        assert [row["reward"] for row in rows] == [1.0, 1.0, 0.25]
        assert server.ask("rollout", run=0, at=2)["trace"]["reward"] == 0.25


def test_damaged_lines_are_left_out(tmp_path):
    make_run(tmp_path / "run", [[1.0, 0.0], [0.5, 0.5]])
    path = tmp_path / "run" / "traces.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\x00" * (len(lines[1]) - 1) + b"\n"
    lines.insert(3, b'{"no": "trace"}\n')
    path.write_bytes(b"".join(lines))
    (tmp_path / "run" / "index.jsonl").unlink()
    with viewing(tmp_path / "run") as server:
        rows = server.ask("rollouts", run=0)["rows"]
        assert [row["reward"] for row in rows] == [1.0, 0.5, 0.5]
        assert server.ask("suspicious", run=0)["left"] == 0
        assert server.ask("run", run=0)["rollouts"] == 3


def test_a_line_that_was_damaged_since_says_where(tmp_path):
    make_run(tmp_path / "run", [[1.0, 0.0]])
    path = tmp_path / "run" / "traces.jsonl"
    with viewing(tmp_path / "run") as server:
        assert server.ask("rollouts", run=0)["total"] == 2
        with open(path, "r+b") as file:
            file.write(b"#" * 50)
        for call in ("rollout", "tokens"):
            assert "at byte 0 of" in server.refused(call, run=0, at=0)
        assert server.ask("rollout", run=0, at=1)["at"] == 1
        assert server.ask("groups", run=0)["rows"][0]["question"] == ""
        assert server.ask("suspicious", run=0)["checked"] == 2


def test_a_config_that_cannot_be_read_spoils_only_its_own_run(tmp_path):
    for name in ("a", "b"):
        make_run(tmp_path / name, [[1.0]])
    (tmp_path / "a" / "config.yaml").write_text("taskset: [")
    with viewing(tmp_path) as server:
        first, second = server.rows()
        assert "config.yaml" in first["error"]
        assert second["mean"] == 1.0


def test_a_run_without_index_and_config_is_shown(tmp_path):
    make_run(tmp_path / "run", [[1.0, 0.0]])
    for file in ("index.jsonl", "config.yaml", "fingerprint.json"):
        (tmp_path / "run" / file).unlink()
    with viewing(tmp_path / "run") as server:
        row = server.rows()[0]
        assert (row["mean"], row["model"], row["fingerprint"]) == (0.5, "", None)
        run = server.ask("run", run=0)
        assert (run["config"], run["overridden"]) == ("", {})
        assert server.ask("rollout", run=0, at=0)["again"] is None


def test_a_long_run_without_index_is_shown_before_all_of_it_was_read(tmp_path, monkeypatch):
    from treetune.view import run_list

    monkeypatch.setattr(run_list, "_READ_SECONDS", 0.0)
    monkeypatch.setattr(run_list, "_SLICE_SECONDS", 0.0)
    with create(tmp_path / "run") as run:
        trace = next(viewed_traces(1, 1))
        for start in range(0, 16_000, 400):
            lines = [encode_trace(msgspec.structs.replace(trace, rollout=start + at)) + b"\n" for at in range(400)]
            run.append_lines(b"".join(lines))
    (tmp_path / "run" / "index.jsonl").unlink()
    with viewing(tmp_path / "run") as server:
        first = server.ask("rollouts", run=0)["total"]
        assert 0 < first <= 16_000
        until = time.monotonic() + 60
        while server.ask("rollouts", run=0)["total"] < 16_000 and time.monotonic() < until:
            time.sleep(0.05)
        assert server.ask("rollouts", run=0)["total"] == 16_000
        assert server.rows()[0]["read"] == 1.0


# Many runs


@pytest.fixture
def many(tmp_path):
    """A folder of a hundred runs."""
    make_run(tmp_path / "runs" / "run-0", [[1.0, 0.0], [None, 1.0]])
    for number in range(1, 100):
        shutil.copytree(tmp_path / "runs" / "run-0", tmp_path / "runs" / f"run-{number}")
    return tmp_path / "runs"


def test_hundreds_of_runs_are_listed_and_remembered(many, monkeypatch):
    from treetune.view import run_list

    read = []
    make = run_list.overview
    monkeypatch.setattr(run_list, "overview", lambda run: read.append(run.path) or make(run))
    with viewing(many) as server:
        rows = server.ask("runs")["runs"]
        assert len(rows) == 100  # each is there at once, though perhaps not yet with its figures
        rows = server.rows()
        assert all(row["mean"] == pytest.approx(2 / 3) for row in rows)
        assert len(read) == 100
        server.rows()
        assert len(read) == 100
        with open(many / "run-7" / "traces.jsonl", "ab") as file:
            file.write(encode_trace(make_trace(9, 0, 0.0)) + b"\n")
        known = {str(row["id"]): row["rollouts"] for row in rows}
        changed = server.ask("changes", runs=known)["changed"]
        assert [rows[id]["name"] for id in changed] == ["run-7"]
        assert {row["name"]: row["rollouts"] for row in server.rows()}["run-7"] == 5
        assert len(read) == 101
    with viewing(many) as server:  # the next time nothing is read
        assert all(row["tasks"] >= 2 for row in server.rows())
    assert len(read) == 101


def test_what_is_remembered_is_only_of_the_same_files(tmp_path):
    make_run(tmp_path / "runs" / "a", [[1.0]])
    with viewing(tmp_path / "runs") as server:
        assert server.rows()[0]["mean"] == 1.0
    shutil.rmtree(tmp_path / "runs" / "a")
    make_run(tmp_path / "runs" / "a", [[0.0]])
    with viewing(tmp_path / "runs") as server:
        assert server.rows()[0]["mean"] == 0.0
    for file in (tmp_path / "cache" / "views").iterdir():
        file.write_bytes(b"{")
    with viewing(tmp_path / "runs") as server:
        assert server.rows()[0]["mean"] == 0.0


def test_only_the_last_runs_stay_open(tmp_path, monkeypatch):
    from treetune.view import run_list

    monkeypatch.setattr(run_list, "_MOST_ROLLOUTS", 5)
    for name in "abc":
        make_run(tmp_path / name, [[1.0, 0.0]])
    runs = run_list.RunList([tmp_path])
    for id in (0, 1, 2):
        with runs[id].open() as run:
            assert len(run) == 2
    runs[2]
    assert [shown.rollouts for shown in runs] == [None, 2, 2]


def test_summaries_stand_in_for_figures_until_these_are_there(many, monkeypatch):
    from treetune.view import run_list

    monkeypatch.setattr(run_list, "_WAIT_SECONDS", 0.0)
    monkeypatch.setattr(run_list.Overviews, "_work", lambda self: None)
    (many / "run-0" / "summary.json").write_text(json.dumps({"mean_reward": 0.75, "tasks": 2, "scored": 3}))
    with viewing(many) as server:
        first, second = server.ask("runs")["runs"][:2]
        assert (first["pending"], first["mean"], first["tasks"], first["rollouts"]) == (True, 0.75, 2, 0)
        assert (second["pending"], second["mean"]) == (True, None)
        assert server.ask("changes", runs={"0": 0})["changed"] == [0]
        assert server.ask("run", run=1)["mean"] == pytest.approx(2 / 3)
