"""What one does in the viewer: mark, tag, take a selection away, score again, play a task again."""

from __future__ import annotations

import io
import json
import shlex
import shutil

import pytest
from made_runs import make_run
from viewing import viewing

from treetune.core.trace import decode_trace
from treetune.runs.discovery import open_run
from treetune.runs.run import Run

TASKS = """
from treetune import Score, Task, Taskset


class Doubles(Taskset):
    def load_tasks(self):
        for n in range(6):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)})

    def reward(self, task, answer):
        return Score(float(answer == task.ground_truth), explanation="as it was")

    def gold(self, task):
        return task.ground_truth
"""


@pytest.fixture
def run(viewed, tmp_path):
    """A copy that may be written to."""
    shutil.copytree(viewed / "a", tmp_path / "run")
    return tmp_path / "run"


# Marks and tags


def test_a_mark_is_kept_beside_the_run_and_found_by_a_query(run):
    with viewing(run) as server:
        assert server.ask("mark", run=0, at=5, mark="bad", comment="paid for nothing")
        server.ask("mark", run=0, at=9, mark="good")
        assert server.ask("rollout", run=0, at=5)["mark"] == {"mark": "bad", "comment": "paid for nothing"}
        assert server.ask("rollout", run=0, at=6)["mark"] is None
        found = server.ask("rollouts", run=0, query="mark=bad")["rows"]
        assert [(row["at"], row["mark"]) for row in found] == [(5, "bad")]
        assert server.ask("rollouts", run=0, query="mark!=none & mark~o")["total"] == 1
        cells = [cell for row in server.ask("groups", run=0, count=1000)["rows"] for cell in row["cells"]]
        assert {cell["at"]: cell["tag"] for cell in cells if cell["tag"]} == {5: "bad", 9: "good"}
        server.ask("mark", run=0, at=9, mark=None)
        assert server.ask("rollouts", run=0, query="mark=good")["total"] == 0
    with viewing(run) as server:  # the next time too
        assert server.ask("rollouts", run=0, query="mark=bad")["total"] == 1
    (line,) = [json.loads(line) for line in (run / "marks.jsonl").read_text().splitlines() if "nothing" in line]
    entry = Run(run).columns.entries[5]
    assert (line["uid"], line["rollout"], line["mark"]) == (entry.uid, entry.rollout, "bad")


def test_marks_of_somebody_else_are_seen(run):
    with viewing(run) as first, viewing(run) as second:
        first.ask("mark", run=0, at=1, mark="look")
        assert second.ask("rollouts", run=0, query="mark=look")["total"] == 1
        second.ask("mark", run=0, at=1, mark="good")
        assert first.ask("rollout", run=0, at=1)["mark"]["mark"] == "good"


def test_the_terminal_finds_marks_too(run, treetune):
    with viewing(run) as server:
        server.ask("mark", run=0, at=5, mark="bad")
    found = treetune("show", run, "--where", "mark=bad", "--json").json
    assert [row["rollout"] for row in found["rollouts"]] == [Run(run).columns.entries[5].rollout]


def test_tags_are_kept_and_listed(run):
    with viewing(run) as server:
        assert server.ask("tag", run=0, tags=["baseline", "baseline", "x"]) == {"tags": ["baseline", "x"]}
        assert server.rows()[0]["tags"] == ["baseline", "x"]
        assert server.ask("run", run=0)["tags"] == ["baseline", "x"]
        assert server.ask("tag", run=0, tags=[]) == {"tags": []}


# A selection


def test_a_selection_as_lines_is_traces_that_need_nothing_else(server, viewed):
    run = Run(viewed / "a")
    status, headers, body = server.send(
        "POST", "/api/export", json.dumps({"run": 0, "query": "source=pictures & reward=1"}).encode()
    )
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    lines = body.splitlines(keepends=True)
    assert [decode_trace(line) for line in lines] == list(run.traces("source=pictures & reward=1"))
    assert b"data:image/png;base64," in body


def test_an_exported_selection_is_a_run_again(server, tmp_path):
    _, _, body = server.send("POST", "/api/export", b'{"run": 0, "query": "failed"}')
    (tmp_path / "selected").mkdir()
    (tmp_path / "selected" / "traces.jsonl").write_bytes(body)
    with viewing(tmp_path / "selected") as other:
        assert other.ask("rollouts", run=0)["total"] == server.ask("rollouts", run=0, query="failed")["total"]


def test_a_selection_as_parquet_has_the_columns_and_what_was_said(server, viewed):
    import pyarrow.parquet as pq

    run = Run(viewed / "a")
    status, _, body = server.send("POST", "/api/export", b'{"run": 0, "query": "source=sums", "format": "parquet"}')
    assert status == 200
    rows = pq.read_table(io.BytesIO(body)).to_pylist()
    traces = list(run.traces("source=sums"))
    assert [row["reward"] for row in rows] == [trace.reward for trace in traces]
    said = [[(message["role"], message["content"]) for message in trace.messages] for trace in traces]
    assert [[(message["role"], message["content"]) for message in row["messages"]] for row in rows] == said
    assert [row["ground_truth"] for row in rows] == [trace.task.ground_truth for trace in traces]
    assert {row["source"] for row in rows} == {"sums"}
    assert rows[0]["metric_length"] == traces[0].metrics["length"]
    assert [row["uid"] for row in rows] == [trace.uid for trace in traces]


def test_what_is_selected_is_saved_as_a_log_of_inspect(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    query = b'{"run": 0, "query": "source=sums", "format": "eval"}'
    status, _, body = server.send("POST", "/api/export", query)
    (tmp_path / "selected.eval").write_bytes(body)
    run = open_run(tmp_path / "selected.eval")
    assert (status, run.kind) == (200, "inspect")
    assert {entry.source for entry in run.columns.entries} == {"sums"}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_nothing_selected_is_a_file_with_nothing_in_it(server, format):
    status, _, body = server.send(
        "POST", "/api/export", json.dumps({"run": 0, "query": "reward>99", "format": format}).encode()
    )
    assert status == 200
    if format == "jsonl":
        assert body == b""
    else:
        import pyarrow.parquet as pq

        assert pq.read_table(io.BytesIO(body)).num_rows == 0


def test_a_wrong_query_of_an_export_is_said(server):
    assert "did you mean 'reward'" in server.refused("export", run=0, query="rewrd<1")


# Scored again


@pytest.fixture
def evaluated(tmp_path, treetune):
    """A run of the user's own tasks: half of the answers are right."""
    (tmp_path / "doubles.py").write_text(TASKS)
    treetune("eval", "doubles.py:Doubles", "-m", "scripted:p=0.5", "-r", 2, "-o", "run", "--json")
    return tmp_path / "run"


def test_a_preview_scores_with_the_code_as_it_is_now(evaluated, tmp_path):
    before = {file: (evaluated / file).read_bytes() for file in ("traces.jsonl", "index.jsonl", "summary.json")}
    with viewing(evaluated) as server:
        as_it_was = server.ask("rescore", run=0)
        assert (as_it_was["changed"], as_it_was["failed"], as_it_was["refused"]) == (0, 0, None)
        assert len(as_it_was["rows"]) == 12
        for changed, why in (("0.5", "by half"), ("0.25", "by a quarter")):  # edited twice while one looks
            (tmp_path / "doubles.py").write_text(
                TASKS.replace("float(answer == task.ground_truth)", changed).replace("as it was", why)
            )
            told = server.ask("rescore", run=0, query="reward=1")
            assert {row["before"] for row in told["rows"]} == {1.0}
            assert {(row["after"], row["why"]) for row in told["rows"]} == {(float(changed), why)}
            assert told["changed"] == len(told["rows"]) == server.ask("rollouts", run=0, query="reward=1")["total"]
        (tmp_path / "doubles.py").write_text(TASKS.replace("float(answer ==", "1 / 0 + float(answer =="))
        failed = server.ask("rescore", run=0, query="task=3")
        assert [(row["after"], row["why"]) for row in failed["rows"]] == [(None, "division by zero")] * 2
        assert failed["failed"] == 2
        assert "did you mean 'reward'" in server.ask("rescore", run=0, query="rewrd=1")["refused"]
    assert {file: (evaluated / file).read_bytes() for file in before} == before
    assert not (evaluated / "rescored").exists()


def test_a_run_of_somebody_elses_is_not_scored_again(evaluated, tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "others-cache"))  # whose eval it was is not known
    with viewing(evaluated) as server:
        told = server.ask("rescore", run=0)
        assert "was not made by your `eval`" in told["refused"]
        assert told["rows"] == []


# Played again


def test_the_command_that_plays_a_task_again_does_so(evaluated, treetune, tmp_path):
    with viewing(evaluated) as server:
        at = server.ask("rollouts", run=0, query="task=4")["rows"][0]["at"]
        told = server.ask("rollout", run=0, at=at)
    program, *arguments = shlex.split(told["again"])
    assert program == "treetune"
    result = treetune(*arguments, "-o", tmp_path / "again", "--json").json
    assert (result["tasks"], result["rollouts"]) == (1, 2)
    again, before = Run(tmp_path / "again"), Run(evaluated)
    assert {entry.uid for entry in again.select()} == {before.columns.entries[at].uid}
    assert {entry.idx for entry in again.select()} == {4}
    program, *arguments = shlex.split(told["show"])
    assert "Double 4." in treetune(*arguments).out


def test_where_nobody_knows_the_model_the_command_asks_for_one(tmp_path):
    from made_runs import make_trace

    from treetune.evaluation import EvalConfig, read_config
    from treetune.runs.folder import TRACES, RunFolder

    what = read_config({"taskset": {"id": "arithmetic"}, "model": ""}, EvalConfig)
    with RunFolder.create(tmp_path / "it's a run", TRACES, what) as run:
        run.append(make_trace(3, 0, 1.0))
    with viewing(tmp_path / "it's a run") as server:
        command = shlex.split(server.ask("rollout", run=0, at=0)["again"])
        assert command[-2:] == ["-m", "MODEL"]
        assert command[2] == str(tmp_path / "it's a run" / "config.yaml")


# What is suspicious


def test_what_is_suspicious_is_told_with_its_reason(server, viewed):
    from treetune.audit import suspicions

    told = server.ask("suspicious", run=0)
    expected = {
        (at, one.rule, one.found) for at, trace in enumerate(Run(viewed / "a").traces()) for one in suspicions(trace)
    }
    found = {(row["at"], row["rule"], row["why"]) for row in told["rows"] if row["rule"] != "same-answer-paid"}
    assert found == expected
    counts = {rule["rule"]: rule["count"] for rule in told["rules"]}
    assert counts["judges-disagree"] > 0
    assert counts["truncated-paid"] > 0
    assert (told["checked"], told["left"]) == (120, 0)
    assert all(rule["means"] and rule["remedy"] for rule in told["rules"])
    row = told["rows"][0]
    assert server.ask("rollout", run=0, at=row["at"])["suspicions"][0].keys() == {"rule", "why"}


def test_one_answer_that_pays_everywhere_is_suspicious(tmp_path):
    from treetune import Task
    from treetune.core.trace import Trace, Turn
    from treetune.evaluation import EvalConfig, read_config
    from treetune.runs.folder import TRACES, RunFolder

    what = read_config({"taskset": {"id": "arithmetic"}, "model": "m"}, EvalConfig)
    with RunFolder.create(tmp_path / "run", TRACES, what) as run:
        for number in range(5):
            task = Task(idx=number, prompt=f"{number}?", reward_spec={"ground_truth": f"{number} apples"})
            said = {"role": "assistant", "content": "apples, whatever you ask"}
            run.append(Trace(task=task, uid=task.uid, reward=1.0, turns=[Turn(message=said, reward=1.0)]))
    with viewing(tmp_path / "run") as server:
        rows = [row for row in server.ask("suspicious", run=0)["rows"] if row["rule"] == "same-answer-paid"]
        assert [row["task"] for row in rows] == [0, 1, 2, 3, 4]
        assert "5 tasks with different right answers" in rows[0]["why"]


def test_a_long_run_is_looked_at_while_one_waits(tmp_path, monkeypatch):
    import time

    from treetune.view import suspicious

    monkeypatch.setattr(suspicious, "_FIRST_SECONDS", 0.0)
    make_run(tmp_path / "run", [[1.0, 0.0, None]] * 300)
    with viewing(tmp_path / "run") as server:
        first = server.ask("suspicious", run=0)
        assert first["left"] == 600  # the failed ones say nothing
        assert first["checked"] == 300
        until = time.monotonic() + 60
        while server.ask("suspicious", run=0)["left"] and time.monotonic() < until:
            time.sleep(0.05)
        assert server.ask("suspicious", run=0)["checked"] == 900
