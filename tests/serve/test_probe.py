"""`treetune probe` tells good task servers, minimal ones, faulty ones and absent ones apart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import task_servers
from serve_process import serve
from task_servers import scripted

from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.probe import probe


def states(report):
    return {check.name: check.state for check in report.checks}


def probed(faults=None, features=None, **options):
    async def play():
        async with scripted(features=features) as server:
            server.faults = faults or {}
            return await probe(server.url, **options), server

    return asyncio.run(play())


def test_a_server_that_does_all_is_good():
    report, server = probed()
    assert report.good
    assert set(states(report).values()) == {"good"}
    assert report.rewards == [0.0, 0.0, 1.0]
    assert report.finished
    assert len(server.played) == 3


@pytest.mark.parametrize("options", [{"turns": 1}, {"turns": 5}])
def test_no_episode_is_left_behind(options):
    report, server = probed(**options)
    assert report.good
    assert set(server.turns.values()) == {3}, "each is over, or was cancelled"


FAULTS = {
    "health": ({"health": [{"status": 500}]}, "health"),
    "info": ({"info": [{"body": b"[]"}]}, "info"),
    "start": ({"start": [{"body": b'{"observation": "x"}'}]}, "start"),
    "step": ({"step": [{"body": b'{"observation": "x", "done": false}'}]}, "step"),
    "reward": ({"step": [{"body": b'{"observation": "x", "reward": NaN, "done": false}'}]}, "step"),
    "lost": ({"step": ["drop"]}, "step"),
    "repeat": ({"step": [None, None, None, {"body": b'{"observation": "x", "reward": 0, "done": true}'}]}, "repeat"),
    "cancel": ({"cancel": [{"status": 500, "text": "Traceback"}]}, "cancel"),
    "unknown": ({"step": [None] * 5 + [{"status": 200, "body": b"{}"}]}, "unknown episode"),
}


@pytest.mark.parametrize(("faults", "where"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_told_where_it_is(faults, where):
    report, _ = probed(faults)
    assert not report.good
    assert states(report)[where] == "fault"
    assert where in report.verdict


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "no name, an unknown number of tasks"),
        ({"num_tasks": 1}, "1 task;"),
        ({"num_tasks": None}, "endless"),
        ({"num_tasks": "many"}, "many tasks"),
    ],
)
def test_whatever_a_server_says_of_its_tasks_is_told(info, said):
    report, _ = probed({"info": [{"body": json.dumps(info).encode()}]})
    assert said in next(check.detail for check in report.checks if check.name == "info")


def test_a_minimal_server_is_good_and_what_it_lacks_is_said(treetune):
    with task_servers.minimal() as (url, _):
        result = treetune("probe", url, "--action", "4", "--task-index", "4", "--json")
    assert result.code == 0, result.err
    assert result.json["rewards"] == [1.0]
    assert {check["name"]: check["state"] for check in result.json["checks"]} == {
        "health": "absent",
        "info": "absent",
        "start": "good",
        "step": "good",
        "repeat": "absent",
        "cancel": "absent",
    }
    assert "not numbered" in result.json["verdict"]


def test_a_server_that_is_not_there_is_told_and_ends_with_3(treetune):
    result = treetune("probe", f"127.0.0.1:{task_servers.free_port()}", "--json")
    assert result.code == 3
    assert "running there" in result.json["remedy"]


def test_a_wrong_token_is_a_fault(treetune):
    async def play():
        async with scripted(token="secret") as server:
            good = await asyncio.to_thread(treetune, "probe", server.url, "--token", "secret")
            bad = await asyncio.to_thread(treetune, "probe", server.url, TREETUNE_TOKEN="wrong")
            return good, bad

    good, bad = asyncio.run(play())
    assert good.code == 0, good.out + good.err
    assert bad.code == 1
    assert "token" in bad.out


def test_our_own_server_says_where_its_token_is_taken_from(treetune, tmp_path):
    with serve(tmp_path, "arithmetic", "--http", ":0", "--token", "secret") as server:
        assert "TREETUNE_TOKEN" in treetune("probe", server.report["http"]).out


def test_our_own_server_is_good_in_every_point_and_its_cursor_does_not_move(treetune):
    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    with task_servers.process(
        "-m", "treetune", "serve", "arithmetic", "--http", f":{port}", url=url, path="/api/health"
    ):
        result = treetune("probe", url, "--json")
        assert task_servers.read_json(f"{url}/api/task/info")["cursor"] == 0
    assert result.code == 0, result.out + result.err
    assert {check["state"] for check in result.json["checks"]} == {"good"}
    assert {"turn", "request_id"} <= set(result.json["features"])
    assert json.loads(result.out)["good"] is True


def test_a_server_written_from_the_docs_alone_is_good_in_every_point(treetune):
    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    with task_servers.process(str(Path(__file__).parents[1] / "support" / "stdlib_server.py"), str(port), url=url):
        told = treetune("probe", url, "--json")

        async def play():
            async with TaskServerClient(url) as client, await client.start(3) as episode:
                steps = [await episode.step(word) for word in ("one", "two", "three")]
                return episode.info, [(step.reward, step.done) for step in steps], steps[-1].info

        played = asyncio.run(asyncio.wait_for(play(), 30))
    assert told.code == 0
    assert {check["state"] for check in told.json["checks"]} == {"good"}
    assert told.json["finished"]
    assert played == ({"task_index": 3}, [(0.0, False), (0.0, False), (1.0, True)], {"success": True})
