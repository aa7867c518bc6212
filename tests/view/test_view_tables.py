"""Groups, rollouts, one rollout and its tokens, as the viewer tells them."""

from __future__ import annotations

import json

import pytest
from made_runs import make_run
from viewing import viewing

from treetune.evaluation import remember
from treetune.runs.run import Run


@pytest.fixture(scope="module")
def run(viewed):
    return Run(viewed / "a")


# Groups


def test_groups_are_sorted_and_come_in_parts(server):
    whole = server.ask("groups", run=0, sort="variance", descending=True, count=1000)
    assert whole["total"] == len(whole["rows"]) == 30
    known = [row["variance"] for row in whole["rows"] if row["variance"] is not None]
    assert known == sorted(known, reverse=True)
    assert all(row["variance"] is None for row in whole["rows"][len(known) :])  # what all failed stands last
    parts = [server.ask("groups", run=0, sort="variance", descending=True, start=at, count=7) for at in range(0, 30, 7)]
    assert [row["uid"] for part in parts for row in part["rows"]] == [row["uid"] for row in whole["rows"]]


@pytest.mark.parametrize("sort", ["mean", "task", "rollouts", "source", "failed", "seconds"])
def test_groups_are_sorted_by_what_is_asked(server, sort):
    rows = server.ask("groups", run=0, sort=sort, count=1000)["rows"]
    values = {
        "mean": lambda row: row["mean"],
        "task": lambda row: row["task"],
        "source": lambda row: row["source"],
        "rollouts": lambda row: len(row["cells"]),
        "failed": lambda row: sum(cell["reward"] is None for cell in row["cells"]),
        "seconds": lambda row: None,
    }
    found = [value for row in rows if (value := values[sort](row)) is not None]
    assert found == sorted(found)


def test_a_query_shows_whole_groups_and_says_which_rollouts_fit(server, run):
    found = server.ask("groups", run=0, query='source=sums & reward>0 "slowly"', count=1000)
    fitting = [cell["at"] for row in found["rows"] for cell in row["cells"] if cell["fits"]]
    assert len(fitting) == found["matching_rollouts"] == len(run.select('source=sums & reward>0 "slowly"'))
    assert all(row["source"] == "sums" and len(row["cells"]) == 4 for row in found["rows"])
    for at in fitting:
        said = server.ask("rollout", run=0, at=at)["trace"]["turns"]
        assert "slowly" in json.dumps(said)


def test_a_group_has_the_question_in_short(server):
    rows = server.ask("groups", run=0, sort="task", count=3)["rows"]
    assert rows[0]["question"].startswith("What is $")
    assert rows[2]["question"] == "Which colour has this picture? One word."
    assert [cell["rollout"] for cell in rows[0]["cells"]] == [0, 1, 2, 3]


def test_equal_tasks_are_groups_of_their_own(tmp_path):
    from made_runs import make_trace

    from treetune.evaluation import EvalConfig, read_config
    from treetune.runs.folder import TRACES, RunFolder

    what = read_config({"taskset": {"id": "arithmetic"}, "model": "m"}, EvalConfig)
    with RunFolder.create(tmp_path / "run", TRACES, what) as folder:
        for occurrence in (0, 1):
            for rollout in (0, 1):
                folder.append(make_trace(7, rollout, float(occurrence), occurrence=occurrence))
    with viewing(tmp_path / "run") as server:
        rows = server.ask("groups", run=0)["rows"]
        assert [(row["occurrence"], row["mean"]) for row in rows] == [(0, 0.0), (1, 1.0)]
        (pair,) = server.ask("pair", runs=[0], uid=rows[1]["uid"], occurrence=1)
        assert [one["at"] for one in pair["rollouts"]] == [2, 3]


@pytest.mark.parametrize(
    ("call", "body", "says"),
    [
        ("groups", {"sort": "varience"}, "did you mean 'variance'"),
        ("rollouts", {"sort": "tokenz"}, "did you mean 'tokens'"),
        ("groups", {"query": "rewrd<1"}, "did you mean 'reward'"),
        ("groups", {"query": "(reward<1"}, "query"),
        ("rollouts", {"query": 'reward<1 "open'}, "query"),
    ],
)
def test_what_cannot_be_meant_is_said(server, call, body, says):
    assert says in server.refused(call, run=0, **body)


# Rollouts


def test_rollouts_are_sorted_by_any_column_and_come_in_parts(server, run):
    for sort in ("reward", "tokens", "seconds", "answer", "length", "advantage", "source"):
        rows = server.ask("rollouts", run=0, sort=sort, descending=True, count=1000)["rows"]
        assert len(rows) == 120
        values = [row["metrics"].get("length") if sort == "length" else row[sort] for row in rows]
        known = [value for value in values if value is not None]
        assert known == sorted(known, reverse=True)
        assert values[len(known) :] == [None] * (120 - len(known))
    part = server.ask("rollouts", run=0, query="reward<1", start=10, count=5)
    assert part["total"] == len(run.select("reward<1"))
    assert [row["at"] for row in part["rows"]] == run.select("reward<1").rows[10:15].tolist()


def test_the_line_of_a_rollout_is_what_the_index_knows(server, run):
    row = server.ask("rollouts", run=0, query="failed", count=1)["rows"][0]
    entry = run.columns.entries[row["at"]]
    for name in ("rollout", "uid", "source", "outcome", "reward", "turns", "failure", "answer", "retries"):
        assert row[name] == getattr(entry, name)
    assert (row["task"], row["advantage"], row["mark"]) == (entry.idx, None, None)


# One rollout


def test_a_rollout_is_told_whole_but_for_its_tokens(server, run, viewed):
    lines = (viewed / "a" / "traces.jsonl").read_bytes().splitlines()
    for at in (0, 7, 50, 119):
        told, kept = server.ask("rollout", run=0, at=at), json.loads(lines[at])
        tokens = kept.pop("tokens")
        assert told["has_tokens"] == (tokens is not None)
        if kept["task"]["data_source"] != "pictures":
            assert told["trace"] == kept
        assert told["entry"]["at"] == told["at"] == at
        assert told["truth"] == kept["task"]["reward_spec"].get("ground_truth")
        assert at in [one["at"] for one in told["group"]]
        assert {"at", "rollout", "reward", "outcome"} <= told["group"][0].keys()


def test_images_are_in_the_trace_itself(server, run):
    at = int(run.select("source=pictures").rows[0])
    text = json.dumps(server.ask("rollout", run=0, at=at)["trace"])
    assert "data:image/png;base64," in text
    assert "images/" not in text


def test_a_rollout_is_found_by_its_name(server, run):
    entry = run.columns.entries[17]
    for name in (f"{entry.uid}/{entry.rollout}", f"{entry.uid[:8]}/{entry.rollout}", f"{entry.idx}/{entry.rollout}"):
        assert server.ask("rollout", run=0, name=name)["at"] == 17
    assert "no rollout 999/0" in server.refused("rollout", run=0, name="999/0")
    assert "does not name a rollout" in server.refused("rollout", run=0, name="../../etc/passwd")
    assert "no rollout is named" in server.refused("rollout", run=0)
    assert "no rollout 120" in server.refused("rollout", run=0, at=120)


def test_fields_of_a_tasks_own_class_are_shown(tmp_path):
    from treetune.core.trace import Trace
    from treetune.evaluation import EvalConfig, read_config
    from treetune.runs.folder import TRACES, RunFolder
    from treetune.tasksets.alphabet_sort import AlphabetSortTask

    task = AlphabetSortTask(idx=0, rounds=[["Zoe", "Ada"]])
    with RunFolder.create(
        tmp_path / "run", TRACES, read_config({"taskset": {"id": "alphabet-sort"}, "model": "m"}, EvalConfig)
    ) as run:
        run.append(Trace(task=task, uid=task.uid, reward=1.0))
    with viewing(tmp_path / "run") as server:
        assert server.ask("rollout", run=0, at=0)["trace"]["task"]["rounds"] == [["Zoe", "Ada"]]


def test_hostile_text_comes_as_it_was_said(server, run):
    from viewed_run import HOSTILE

    rows = server.ask("rollouts", run=0, query="task=3 | task=20", count=100)["rows"]
    texts = [json.dumps(server.ask("rollout", run=0, at=row["at"])["trace"], ensure_ascii=False) for row in rows]
    together = "".join(texts)
    assert json.dumps(HOSTILE[0], ensure_ascii=False)[1:-1] in together
    assert "window.hacked" in together


def test_an_environment_draws_its_own_rollouts(server, run, viewed):
    at = int(run.select("source=walk & scored").rows[0])
    assert server.ask("rollout", run=0, at=at)["rendered"] is None  # whose code it is is not known here
    remember(viewed / "a")
    told = server.ask("rollout", run=0, at=at)
    assert (told["rendered"]["kind"], told["not_rendered"]) == ("shell", None)
    assert told["rendered"]["text"].startswith("turn 0\n@ . . .")
    other = int(run.select("source=sums").rows[0])
    assert server.ask("rollout", run=0, at=other)["rendered"] is None


# Tokens


def test_tokens_are_those_of_the_trace(server, run):
    at = next(at for at in range(len(run)) if run.columns.entries[at].tokens)
    told = server.ask("tokens", run=0, at=at)
    kept = run.trace(run.columns.entries[at]).tokens.sequences
    assert [one["ids"] for one in told["sequences"]] == [one.ids for one in kept]
    for name in ("mask", "logprobs", "versions", "breaks_history", "realigned"):
        assert [one[name] for one in told["sequences"]] == [getattr(one, name) for one in kept]
    assert (told["tokenizer"], told["sequences"][0]["texts"]) == (None, None)


def test_a_rollout_without_tokens_has_none(server, run):
    at = next(at for at in range(len(run)) if not run.columns.entries[at].tokens)
    assert server.ask("tokens", run=0, at=at) == {"sequences": [], "tokenizer": None}


def test_tokens_have_texts_where_a_tokenizer_is_named(viewed, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(151_000)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    with viewing(viewed / "a", tokenizer=str(tmp_path / "model")) as server:
        told = server.ask("tokens", run=0, at=0)
        assert told["tokenizer"] == str(tmp_path / "model")
        first = told["sequences"][0]
        assert first["texts"] == [f"w{number}" for number in first["ids"]]


def test_a_tokenizer_that_cannot_be_read_is_said_where_it_was_asked_for(viewed, tmp_path):
    make_run(tmp_path / "run", [[1.0]], model=f"local:{tmp_path}")
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    with viewing(tmp_path / "run") as server:
        assert server.ask("tokens", run=0, at=0)["tokenizer"] is None
    with viewing(viewed / "a", tokenizer=str(tmp_path)) as server:
        assert server.refused("tokens", run=0, at=0)


def test_words_of_queries_are_told_for_completion(server):
    words = server.ask("words")
    assert {"reward", "turns", "tokens"} <= set(words["numbers"])
    assert {"source", "outcome", "mark"} <= set(words["texts"])
    assert {"failed", "mixed", "all0"} <= set(words["words"])
    assert words["metrics"]["0"] == ["format", "length", "__proto__"]


# Several runs


def test_runs_are_compared_as_the_terminal_compares_them(server, viewed):
    from treetune.evaluation import compare

    (told,) = server.ask("compare", runs=[0, 1])
    found = compare(Run(viewed / "a"), Run(viewed / "b"))
    assert (told["before"], told["after"], told["verdict"]) == (0, 1, found.verdict)
    assert told["comparison"]["scored"]["difference"] == pytest.approx(found.scored.difference)
    assert told["comparison"]["over_all"]["p_value"] == pytest.approx(found.over_all.p_value)
    kinds = [task["kind"] for task in told["tasks"]]
    counts = {kind: kinds.count(kind) for kind in ("fixed", "broken", "unchanged")}
    assert counts == {"fixed": len(found.fixed), "broken": len(found.broken), "unchanged": found.unchanged}
    (back,) = server.ask("compare", runs=[1, 0])
    assert back["comparison"]["scored"]["difference"] == pytest.approx(-found.scored.difference)


def test_a_query_chooses_tasks_by_both_runs(tmp_path):
    make_run(tmp_path / "a", [[0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    make_run(tmp_path / "b", [[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    with viewing(tmp_path) as server:
        (told,) = server.ask("compare", runs=[0, 1], query="task=0 | (task=1 & reward=0)")
        assert sorted(task["task"] for task in told["tasks"]) == [0, 1]
        assert told["comparison"]["over_all"]["difference"] == 0.0


def test_runs_without_a_common_task_are_not_compared(tmp_path):
    make_run(tmp_path / "a", [[0.0]])
    make_run(tmp_path / "b", [[0.0]], source="other")
    with viewing(tmp_path) as server:
        assert server.refused("compare", runs=[0, 1], query="task=7").endswith("no task in common")
        assert "2" in server.refused("compare", runs=[0])


def test_answers_to_one_task_stand_side_by_side(server, viewed):
    uid = server.ask("groups", run=0, sort="task", count=1)["rows"][0]["uid"]
    pair = server.ask("pair", runs=[0, 1], uid=uid, occurrence=0)
    assert [one["run"] for one in pair] == [0, 1]
    assert [len(one["rollouts"]) for one in pair] == [4, 4]
    said = [one["said"] for one in pair[0]["rollouts"]]
    assert any("Answer:" in text for text in said)
    assert server.ask("pair", runs=[0], uid="unknown", occurrence=0) == [{"run": 0, "rollouts": []}]
