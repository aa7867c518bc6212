"""`treetune gateway -w 2`: several processes behind one address."""

from __future__ import annotations

import os
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from gateway_playing import check_exact
from openai import APIStatusError, OpenAI
from test_command import ask, gateway

from treetune.chat.tokens import TokenSequence

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def pool(engine):
    engine.script("plain")
    with gateway("--upstream", engine.url, "-m", "plain", "-w", 2) as found:
        yield found["url"]


def open_session(url):
    session = ask(f"{url}/sessions", "secret", "POST", {})
    return session, OpenAI(base_url=session["environment"]["OPENAI_BASE_URL"], api_key=session["key"], max_retries=0)


def say(client):
    return client.chat.completions.create(model="m", messages=HI).choices[0].message.content


def sampled_of(trace):
    tokens = [sequence["tokens"] for sequence in trace["sequences"]]
    return [TokenSequence(**{name: one[name] for name in ("ids", "mask", "logprobs")}) for one in tokens]


def test_sessions_are_spread_over_processes_and_shown_at_one_address(engine, pool):
    opened = [open_session(pool) for _ in range(4)]
    ports = [session["url"].split("/")[2] for session, _ in opened]
    assert sorted(map(ports.count, set(ports))) == [2, 2]
    assert pool.split("/")[2] not in ports
    for session, client in opened:
        assert say(client)
        # At the address of the pool, too: in the path, or as an API key.
        assert say(OpenAI(base_url=f"{pool}/sessions/{session['key']}/v1", api_key="any", max_retries=0))
        assert say(OpenAI(base_url=f"{pool}/v1", api_key=session["key"], max_retries=0))
    found = ask(f"{pool}/sessions", "secret")
    assert {one["key"] for one in found["sessions"]} == {session["key"] for session, _ in opened}
    assert found["counts"]["calls"] == 12
    assert ask(f"{pool}/health", "") == {"status": "ok", "sessions": 4, "workers": 2}
    request = urllib.request.Request(f"{pool}/metrics", headers={"Authorization": "Bearer secret"})
    with urllib.request.urlopen(request) as answer:
        assert "treetune_gateway_calls_total 12.0" in answer.read().decode().splitlines()
    sequences = [
        one for session, _ in opened for one in sampled_of(ask(f"{pool}/sessions/{session['key']}", "secret", "DELETE"))
    ]
    check_exact(engine, sequences, 12)
    session, client = opened[0]
    for base in (f"{pool}/sessions/{session['key']}/v1", session["environment"]["OPENAI_BASE_URL"]):
        with pytest.raises(APIStatusError) as over:
            say(OpenAI(base_url=base, api_key="any", max_retries=0))
        assert over.value.status_code == 410
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(f"{pool}/sessions", "wrong")
    with pytest.raises(APIStatusError) as unknown:
        say(OpenAI(base_url=f"{pool}/v1", api_key="wrong", max_retries=0))
    assert unknown.value.status_code == 401


def test_a_process_that_dies_is_replaced_and_the_others_go_on(engine, pool):
    (lost, client), (kept, other) = open_session(pool), open_session(pool)
    assert ask(f"{pool}/weights", "secret", "POST", {"version": 3}) == {"idle": True}
    assert say(client)
    assert say(other)
    os.kill(pid_of(lost["url"]), signal.SIGKILL)
    assert say(other)
    ends = time.monotonic() + 30
    while ask(f"{pool}/health", "")["sessions"] == 2:
        assert time.monotonic() < ends, "the death was not noticed"
    # At its own address, and at that of the pool: the reason, once the process is replaced.
    for base in (lost["environment"]["OPENAI_BASE_URL"], f"{pool}/sessions/{lost['key']}/v1"):
        with pytest.raises(APIStatusError, match="killed by signal 9") as over:
            say(OpenAI(base_url=base, api_key="any", max_retries=0))
        assert over.value.status_code == 410
    opened = [open_session(pool) for _ in range(2)]
    assert {session["url"].split("/")[2] for session, _ in opened} >= {lost["url"].split("/")[2]}
    assert all(say(client) for _, client in opened)
    assert say(other)
    assert ask(f"{pool}/sessions", "secret")["counts"]["replaced_workers"] == 1
    trace = ask(f"{pool}/sessions/{kept['key']}", "secret")
    check_exact(engine, sampled_of(trace), 3)


def pid_of(url):
    """The process that listens at the port of a url, other than the pool, which holds its socket too."""
    port = int(url.split("/")[2].rpartition(":")[2])
    listening = {
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()
        if line.split()[1].endswith(f":{port:04X}") and line.split()[3] == "0A"
    }
    holders = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if holds(pid, listening)]
    return max(holders, key=lambda pid: parent_of(pid) in holders)


def holds(pid, sockets):
    try:
        found = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
    except OSError:
        return False
    return any(f"socket:[{inode}]" in found for inode in sockets)


def parent_of(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
