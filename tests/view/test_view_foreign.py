"""Runs of other programs in the viewer, as they wrote them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from viewing import viewing

RECORDED = Path(__file__).parents[1] / "runs" / "recorded"
KINDS = {"verl", "trl", "skyrl", "inspect", "atif"}


@pytest.fixture
def recorded(tmp_path):
    shutil.copytree(RECORDED, tmp_path / "recorded")
    return tmp_path / "recorded"


def test_they_are_listed_beside_ours_and_opened(recorded, viewed):
    shutil.copytree(viewed / "a", recorded / "ours")
    with viewing(recorded) as server:
        rows = server.rows()
        assert {row["kind"] for row in rows} >= KINDS | {"treetune"}
        for row in rows:
            run = server.ask("run", run=row["id"])
            assert run["rollouts"] == row["rollouts"] > 0
            groups = server.ask("groups", run=row["id"], sort="variance", descending=True, count=1000)
            assert sum(len(group["cells"]) for group in groups["rows"]) == row["rollouts"]
            told = server.ask("rollout", run=row["id"], at=0)
            assert told["trace"]["turns"] or told["has_tokens"]  # SkyRL's training batches have no more than tokens
            assert told["show"].startswith("treetune show ")
            server.ask("tokens", run=row["id"], at=0)
            server.ask("suspicious", run=row["id"])
            if row["kind"] != "treetune":
                assert told["again"] is None
                assert row["kind"] in server.ask("rescore", run=row["id"])["refused"]


def test_marks_stand_beside_them_and_are_no_runs(recorded):
    for other in ("skyrl", "inspect", "harbor"):
        shutil.rmtree(recorded / other)
    with viewing(recorded) as server:
        rows = server.rows()
        for row in rows:
            server.ask("mark", run=row["id"], at=0, mark="look", comment="hm")
            server.ask("tag", run=row["id"], tags=["theirs"])
        for row in rows:
            assert server.ask("rollouts", run=row["id"], query="mark=look")["total"] == 1
    with viewing(recorded) as server:
        again = server.rows()
        assert [(row["path"], row["kind"], row["rollouts"]) for row in again] == [
            (row["path"], row["kind"], row["rollouts"]) for row in rows
        ]
        assert all(row["tags"] == ["theirs"] for row in again)


def test_one_that_goes_on_is_followed(tmp_path):
    line = '{{"input": "What is {0}?", "output": "{0}", "gts": "{0}", "score": {1}, "step": {2}}}\n'
    (tmp_path / "dump").mkdir()
    (tmp_path / "dump" / "1.jsonl").write_text(line.format(3, 1.0, 1) + line.format(3, 0.0, 1))
    with viewing(tmp_path / "dump") as server:
        (row,) = server.rows()
        assert (row["kind"], row["rollouts"], row["mean"], row["steps"]) == ("verl", 2, 0.5, True)
        assert server.ask("changes", runs={"0": 2})["changed"] == []
        (tmp_path / "dump" / "2.jsonl").write_text(line.format(4, 1.0, 2) * 2)
        assert server.ask("changes", runs={"0": 2})["changed"] == [0]
        assert server.ask("rollouts", run=0)["total"] == 4
        assert [step["mean"] for step in server.ask("run", run=0)["steps"]] == [0.5, 1.0]
        assert server.rows()[0]["rollouts"] == 4
        shutil.rmtree(tmp_path / "dump")
        assert "is gone" in server.refused("groups", run=0)


def test_what_could_not_be_read_is_told(tmp_path):
    (tmp_path / "1.jsonl").write_text('{"input": "?", "output": "3", "score": 1.0, "step": 1}\nno line\n')
    with viewing(tmp_path) as server:
        assert "cannot be read" in server.ask("run", run=0)["warnings"][0]
