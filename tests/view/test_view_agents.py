"""A rollout that an agent played: its calls, in the lanes of their conversations, in the browser and the terminal."""

from __future__ import annotations

import math

import pytest
from agent_runs import make_agent_run
from view_page import Page, view
from viewing import viewing

from treetune.runs.push import write_rollouts
from treetune.runs.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents") / "runs"
    make_agent_run(folder / "agent")
    return folder


def test_conversations_have_names_in_the_order_of_their_sequences(folder):
    with viewing(folder) as server:
        found = server.ask("rollout", run=0, at=0)
        lines = found["trace"]["agent"]["lineage"]
        assert found["conversations"] == ["main 1", "sub-agent", "main 2", "side"]
        assert len(lines) == 1 + len(server.ask("tokens", run=0, at=0)["sequences"])
        assert server.ask("rollout", run=0, at=1)["conversations"] == []


def test_the_number_of_calls_is_a_column_of_the_run(folder, tmp_path):
    run = Run(folder / "agent")
    assert run.table()["agent_calls"].tolist() == pytest.approx([7, math.nan], nan_ok=True)
    (found,) = run.select("agent_calls>3")
    assert found.agent_calls == 7
    for name in ("traces.jsonl", "config.yaml"):  # without its index
        (tmp_path / name).write_bytes((folder / "agent" / name).read_bytes())
    assert [entry.agent_calls for entry in Run(tmp_path).columns.entries] == [7, None]


def test_a_table_of_the_run_has_the_main_conversation(folder, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    run = Run(folder / "agent")
    write_rollouts(run.traces(), run.columns.metrics, tmp_path / "run.parquet")
    agent, other = pq.read_table(tmp_path / "run.parquet").to_pylist()
    assert (agent["agent_calls"], other["agent_calls"]) == (7, None)
    assert [message["content"] for message in agent["messages"]][-2:] == ["And again?", "Then it is 7."]


def test_the_terminal_shows_calls_indented_by_conversation(folder, treetune):
    shown = treetune("show", folder / "agent", "--rollout", "0/0").out
    lines = shown.splitlines()
    assert [line.strip() for line in lines if line.strip().startswith("call ")] == [
        "call 1  side",
        "call 2  main 1",
        "call 3  main 1",
        "call 4  sub-agent",
        "call 5  sub-agent",
        "call 6  main 2  after call 2, whose history was changed",
        "call 7  main 2",
    ]
    assert "add({" in shown
    assert next(line for line in lines if "Yes, five." in line).startswith(" " * 6)
    assert next(line for line in lines if "It is 5." in line).startswith("  It")
    assert shown.index("what the agent handed in:") > shown.index("call 7")
    assert "calls: 7" in shown
    assert "session ended" not in shown, "no limit ended it"


@pytest.mark.slow
def test_a_page_shows_the_calls_of_an_agent_in_lanes(browser, folder):
    with view("runs", folder=folder.parent) as address, Page(browser, address) as page:
        page.go("/run/0/at/0", until=".agent-call")
        numbers = [f"call {at}" for at in range(1, 8)]
        assert page.texts(".agent .turn-number") == numbers
        names = ["side", "main 1", "main 1", "sub-agent", "sub-agent", "main 2", "main 2"]
        assert page.texts(".agent .turn-end .badge:nth-child(2)") == names
        assert page.text("#call-1 .call .result") == "→\n5"
        assert page.text("#call-2") == "assistant\nIt is 5.\n" + page.text("#call-2 .turn-end")
        assert page.texts(".agent .break") == ["The agent changed its history after call 2, so a new sequence begins."]
        assert "It is fabricated." in page.text("#call-5")
        lanes = """return [...document.querySelectorAll(".track-lines")]
            .map(each => [...each.children].findIndex(line => line.className === "here"))"""
        assert page.runs(lanes) == [1, 0, 0, 1, 1, 0, 0]
        page.click(".agent .chip", "sub-agent")
        page.waits(lambda: page.texts(".agent .turn-number") == ["call 4", "call 5"], "the calls of the sub-agent")
        page.sees(".facts", "Agent.*adder")
        page.go("/run/0/at/0/tokens", until=".sequence")
        assert page.texts(".sequence header .badge:not(.warn)") == ["main 1", "sub-agent", "main 2"]
        assert "trains calls 2, 3" in page.texts(".sequence header")[0]
        assert page.texts(".sequence .break") == [
            "The agent changed its history after call 2, so a new sequence begins."
        ]
        page.go("/run/0/at/1", until=".turn")
        assert page.all(".agent") == []
        assert page.complaints() == []
