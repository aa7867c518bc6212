"""What the viewer says of runs, against what their traces say."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from itertools import pairwise

import paid_turns
import pytest
from made_runs import make_run, make_trace
from viewing import viewing

from treetune.evaluation import EvalConfig, read_config
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run
from treetune.trainers.credit import turn_advantages


@pytest.fixture(scope="module")
def traces(viewed):
    return list(Run(viewed / "a").traces())


def test_the_list_says_what_each_run_amounts_to(server, viewed, traces):
    server.rows()
    answer = server.ask("runs")
    assert answer["place"] == str(viewed)
    assert [run["name"] for run in answer["runs"]] == ["a", "b"]
    first, summary = answer["runs"][0], json.loads((viewed / "a" / "summary.json").read_text())
    assert first["mean"] == pytest.approx(summary["mean_reward"])
    assert first["stderr"] == pytest.approx(summary["stderr"])
    assert first["pass_at"] == pytest.approx(summary["pass_at_k"])
    assert (first["tasks"], first["rollouts"], first["scored"]) == (30, 120, summary["scored"])
    assert first["outcomes"] == summary["outcomes"]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (
        summary["prompt_tokens"],
        summary["completion_tokens"],
    )
    assert first["retries"] == sum(trace.all_retries for trace in traces)
    began = [trace.timing.began for trace in traces]
    assert first["began"] == pytest.approx(min(began))
    ended = max(trace.timing.began + trace.timing.total for trace in traces)
    assert first["seconds"] == pytest.approx(ended - min(began), abs=0.01)
    assert (first["kind"], first["model"], first["live"], first["tags"]) == ("treetune", "model-a", False, [])
    assert first["fingerprint"] == answer["runs"][1]["fingerprint"]
    assert len(first["spark"]) == 24
    parts = [trace.reward for trace in traces[:5] if trace.reward is not None]
    assert first["spark"][0] == pytest.approx(statistics.mean(parts))


def test_the_page_of_a_run_has_its_parts(server, traces):
    run = server.ask("run", run=0)
    scored = [trace for trace in traces if trace.reward is not None]
    assert sum(run["histogram"]["counts"]) == len(scored)
    assert len(run["histogram"]["edges"]) == len(run["histogram"]["counts"]) + 1

    by_source = defaultdict(list)
    for trace in scored:
        by_source[trace.task.data_source].append(trace.reward)
    assert {one["name"]: one["mean"] for one in run["sources"]} == pytest.approx(
        {name: statistics.mean(rewards) for name, rewards in by_source.items()}
    )
    assert sum(one["rollouts"] for one in run["sources"]) == len(traces)
    assert sum(one["tasks"] for one in run["sources"]) == 30

    lengths = [trace.metrics["length"] for trace in scored]  # as the summary has them
    length = next(metric for metric in run["metrics"] if metric["name"] == "length")
    assert (length["count"], length["low"], length["high"]) == (len(lengths), min(lengths), max(lengths))
    assert length["mean"] == pytest.approx(statistics.mean(lengths))

    turns = Counter(len(trace.turns) for trace in traces)
    assert {one["turns"]: one["rollouts"] for one in run["by_turns"]} == turns
    assert sum(one["rollouts"] for one in run["by_tokens"]) == len(traces)

    failed = Counter(trace.failure.type for trace in traces if trace.failure is not None)
    told = Counter()
    for one in run["failures"]:
        told[one["failure"].partition(" ")[0]] += one["count"]
        example = traces[one["at"]]
        assert example.outcome == one["outcome"]
        assert one["failure"].startswith(example.failure.type)
    assert told == failed

    assert sum(run["group_flags"].values()) == 30
    assert run["warnings"]
    assert "num_tasks: 30" in run["config"]
    assert run["overridden"]["num_rollouts"] == 4


def test_the_timeline_says_when_each_began_and_how_long_it_took(server, traces):
    lines = server.ask("run", run=0)["timeline"]
    assert [line["at"] for line in lines] == list(range(len(traces)))
    first = min(trace.timing.began for trace in traces)
    for line, trace in zip(lines, traces, strict=True):
        assert line["began"] == pytest.approx(trace.timing.began - first, abs=0.01)
        assert line["seconds"] == pytest.approx(trace.timing.total)
        assert (line["outcome"], line["reward"], line["retries"]) == (trace.outcome, trace.reward, trace.retries)
        assert line["policy"] == pytest.approx(trace.timing.policy)


def test_groups_have_flags_by_what_their_rollouts_earned(tmp_path):
    make_run(tmp_path / "run", [[0, 0], [1, 1], [0, 1], [None, None], [0.5, 0.5], [None, 1]])
    with viewing(tmp_path / "run") as server:
        rows = server.ask("groups", run=0, sort="task")["rows"]
        assert [row["flag"] for row in rows] == ["all0", "all1", "mixed", "failed", None, "all1"]
        assert [row["variance"] for row in rows] == [0, 0, 0.25, None, 0, 0]
        assert [cell["advantage"] for cell in rows[2]["cells"]] == [-0.5, 0.5]
        assert [cell["reward"] for cell in rows[5]["cells"]] == [None, 1]
        flags = server.ask("run", run=0)["group_flags"]
        assert flags == {"all0": 1, "all1": 2, "mixed": 1, "failed": 1, "other": 1}


def test_what_failed_everywhere_has_no_mean(tmp_path):
    make_run(tmp_path / "run", [[None], [None]])
    with viewing(tmp_path / "run") as server:
        row = server.rows()[0]
        assert (row["mean"], row["stderr"], row["pass_at"], row["scored"]) == (None, None, {}, 0)
        assert server.ask("run", run=0)["histogram"] == {"edges": [], "counts": []}


def test_an_empty_run_is_shown_as_one(tmp_path):
    what = read_config({"taskset": {"id": "arithmetic"}, "model": "made"}, EvalConfig)
    with RunFolder.create(tmp_path / "run", TRACES, what):
        pass
    with viewing(tmp_path) as server:
        (row,) = server.rows()
        assert (row["rollouts"], row["mean"], row["model"]) == (0, None, "made")
        run = server.ask("run", run=0)
        assert (run["timeline"], run["sources"], run["steps"], run["by_tokens"]) == ([], [], [], [])
        assert server.ask("groups", run=0) == {"total": 0, "matching_rollouts": 0, "rows": [], "read": 1.0}
        assert server.ask("rollouts", run=0, query="failed") == {"total": 0, "rows": [], "read": 1.0}
        assert server.ask("suspicious", run=0)["checked"] == 0


def test_the_turns_of_a_training_show_their_advantages_in_the_group_of_their_step(tmp_path, monkeypatch):
    """A failed rollout is not in the group, nor are those of another step; the discount changes the last turn."""
    paid_turns.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    played = {
        "ByTurn": [*paid_turns.GROUP, None],
        "Discounted": [[1.0, 0.0], [0.0, 1.0]],
        "ByOutcome": [[1.0, 0.0], [0.0, 0.5]],
    }
    for name, group in played.items():
        rollouts = [(2, [9.0]), *((1, rewards) for rewards in group)]
        paid_turns.make_run(tmp_path / "runs" / name, f"paid_turns_tasks.py:{name}", rollouts)
    wanted = {
        "ByTurn": [*turn_advantages(paid_turns.GROUP, credit="turn"), None],
        "Discounted": turn_advantages([[1.0, 0.81 - 1], [0.0, 0.81]], credit="turn", discount=0.5),
        "ByOutcome": [None, None],
    }
    with viewing(tmp_path / "runs") as server:
        for number, row in enumerate(server.rows()):
            found = [server.ask("rollout", run=number, at=at)["advantages"] for at in range(row["rollouts"])]
            lone = None if row["name"] == "ByOutcome" else [0.0]
            assert found == [lone, *(each and pytest.approx(each) for each in wanted[row["name"]])]


def test_a_training_is_a_curve_over_its_steps(tmp_path):
    what = read_config({"taskset": {"id": "arithmetic"}, "model": "m"}, EvalConfig)
    for folder, steps in ((tmp_path / "traces" / "earlier", (0, 1)), (tmp_path / "traces", (2, 3))):
        with RunFolder.create(folder, TRACES, what) as run:
            for step in steps:
                for rollout, source in enumerate(("x", "y")):
                    run.append(make_trace(step, rollout, 0.1 * step + 0.5 * rollout, source=source, step=step))
    with viewing(tmp_path / "traces") as server:
        server.rows()
        answer = server.ask("runs")
        assert [row["name"] for row in answer["runs"]] == ["traces", "earlier"]
        assert [step["step"] for step in answer["curve"]] == [0, 1, 2, 3]
        assert [step["mean"] for step in answer["curve"]] == pytest.approx([0.25, 0.35, 0.45, 0.55])
        assert answer["curve"][3]["sources"] == pytest.approx({"x": 0.3, "y": 0.8})
        assert [step["step"] for step in server.ask("run", run=0)["steps"]] == [2, 3]


def test_a_run_without_steps_has_no_curve(server):
    assert server.ask("runs")["curve"] is None


def test_many_rollouts_are_chosen_evenly_for_the_timeline(tmp_path):
    make_run(tmp_path / "run", [[1.0] * 50] * 50)
    with viewing(tmp_path / "run") as server:
        places = [line["at"] for line in server.ask("run", run=0)["timeline"]]
        assert len(places) == 2000
        assert max(b - a for a, b in pairwise(places)) == 2
