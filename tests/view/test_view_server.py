"""The viewer's server: its pages, who may ask, and requests that mean harm."""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from viewing import viewing

import treetune.view
from treetune.view.report import page_names, read_page

POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}


def policy_of(headers):
    parts = (part.strip().partition(" ") for part in headers["content-security-policy"].split(";"))
    return {name: value for name, _, value in parts}


# Pages


def test_every_page_is_served_with_its_type_and_a_strict_policy(server):
    types = {"html": "text/html", "js": "text/javascript", "css": "text/css", "txt": "text/plain", "svg": "image/svg"}
    for name in page_names():
        status, headers, body = server.send("GET", f"/page/{name}")
        assert (status, body) == (200, read_page(name))
        assert headers["content-type"].startswith(types[name.rpartition(".")[2]])
        assert policy_of(headers) == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    status, headers, body = server.send("GET", "/")
    assert (status, body) == (200, read_page("index.html"))
    assert server.send("HEAD", "/")[::2] == (200, b"")


def test_pages_hold_no_script_or_style_that_the_policy_forbids():
    page = read_page("index.html").decode()
    assert "<style" not in page
    assert "<script>" not in page
    assert " on" not in page.replace("one", "")
    for name in page_names():
        text = read_page(name).decode()
        if "vendor" not in name:
            assert "https://" not in text or name.endswith(".txt")  # nothing is fetched from elsewhere


def test_all_pages_together_are_small():
    folder = Path(treetune.view.__file__).parent / "page"
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) < 450_000
    assert (folder / "vendor" / "NOTICES.txt").is_file()


@pytest.mark.parametrize(
    "path",
    [
        "/page/../calls.py",
        "/page/%2e%2e/calls.py",
        "/page/..%2fcalls.py",
        "/page/vendor/../../calls.py",
        "/page/....//calls.py",
        "/page//etc/passwd",
        "/page/vendor",
        "/page/",
        "/page",
        "/page/index.html/",
        "/page/index.html%00.js",
        "/page/\\..\\calls.py",
        "/../pyproject.toml",
        "//etc/passwd",
        "/runs/a/traces.jsonl",
        "/api/",
        "/api/../page/app.js",
    ],
)
def test_nothing_else_is_served(server, path):
    status, headers, body = server.send("GET", path)
    assert status in (400, 404, 405), path
    assert b"Calls" not in body
    assert b"root:" not in body
    if status != 400:
        assert policy_of(headers) == POLICY


# Who may ask


def test_with_a_token_pages_are_open_and_answers_are_not(viewed):
    with viewing(viewed, token="secret") as server:
        assert server.send("GET", "/")[0] == 200
        assert server.ask("runs")["runs"]
        for wrong in ("", "Bearer", "Bearer wrong", "Basic secret", "Bearer secrets"):
            for path in ("/api/runs", "/api/rollout", "/api/export", "/api/mark"):
                status, _, body = server.send("POST", path, b"{", {"Authorization": wrong})
                assert status == 401
                assert "token" in json.loads(body)["error"]  # before the body was looked at


def test_a_page_from_elsewhere_is_refused(server):
    for origin in ("http://evil.example", "null", "https://127.0.0.1", f"http://{server.host}.evil.example"):
        assert server.post("runs", {}, {"Origin": origin})[0] == 403
    assert server.post("runs", {}, {"Origin": f"http://{server.host}"})[0] == 200


def test_a_name_that_was_made_to_point_here_is_refused(server):
    for host in ("evil.example", f"evil.example:{server.host.partition(':')[2]}", "127.0.0.1.evil.example"):
        assert server.send("POST", "/api/runs", b"{}", {"Host": host})[0] == 403
        assert server.send("GET", "/", headers={"Host": host})[0] == 403
    assert server.send("POST", "/api/runs", b"{}", {"Host": "localhost:1"})[0] == 200


def test_calls_are_posted(server):
    for path in ("/api/runs", "/api/export"):
        status, _, body = server.send("GET", path)
        assert (status, b"POST" in body) == (405, True)


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe",
        b"[",
        b"nope",
        b"[]",
        b"null",
        b'"runs"',
        b'{"run": "0"}',
        b'{"run": -1}',
        b'{"run": 1e300}',
        b'{"run": NaN}',
        b'{"run": 99999999999999999999999999}',
        b'{"run": 0, "unknown": 1}',
        b'{"run": {}}',
        b"{" + b'"a":{' * 10_000,
        b"[" * 200_000,
    ],
)
def test_a_body_that_is_not_what_is_asked_is_refused(server, body):
    for call in ("run", "groups", "rollout", "tokens", "suspicious", "compare", "pair", "rescore", "mark", "tag"):
        status, answer = server.post(call, body)
        assert status in (400, 413, 422), (call, answer)
        assert json.loads(answer)["error"]
    status, answer = server.post("export", body)
    assert status in (400, 413, 422)


def test_values_out_of_range_are_refused(server):
    for call, body in (
        ("groups", {"run": 0, "count": 1001}),
        ("groups", {"run": 0, "count": -1}),
        ("groups", {"run": 0, "start": -1}),
        ("groups", {"run": 0, "query": "x" * 10_001}),
        ("run", {"run": 2}),
        ("run", {"run": 10**9}),
        ("tag", {"run": 0, "tags": ["x" * 61]}),
        ("mark", {"run": 0, "at": 0, "mark": "best"}),
        ("compare", {"runs": list(range(17))}),
        ("compare", {"runs": [0]}),
        ("export", {"run": 0, "format": "exe"}),
        ("changes", {"runs": {"x": 1}}),
    ):
        status, answer = server.post(call, body)
        assert status == 422, (call, body, answer)


@pytest.mark.parametrize(
    "query",
    [
        "(" * 5000,
        "!" * 5000 + "failed",
        '"' + "a" * 9000 + '"',
        "reward<1 & " * 900 + "reward<1",
        "\x00\x01\x02",
        '"\\u0000"',
        "task=99999999999999999999999999999999",
        "reward=inf | reward=-inf | reward=nan",
        "answer~" + "(.+)+" * 200,
        "'; DROP TABLE runs; --",
        "../../etc/passwd",
    ],
)
def test_queries_that_mean_harm_find_something_or_are_refused(server, query):
    for call in ("groups", "rollouts"):
        status, answer = server.post(call, {"run": 0, "query": query})
        assert status in (200, 422), answer[:300]
    assert server.ask("runs")["runs"]


def test_a_body_may_have_a_megabyte(server):
    assert server.post("groups", b'{"query": "' + b"x" * (1 << 21) + b'"}')[0] == 413


def test_a_request_that_never_ends_holds_up_nobody(server):
    host, port = server.host.split(":")
    with socket.create_connection((host, int(port))) as slow:
        slow.sendall(b"POST /api/runs HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{")
        assert server.ask("runs")["runs"]


def test_many_ask_at_once(server):
    calls = [("groups", {"run": run, "query": query}) for run in (0, 1) for query in ("", "failed", '"because"')] * 8

    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda call: server.ask(call[0], **call[1])["total"], calls))
    assert found[:6] * 8 == found


def test_two_who_compare_the_same_runs_never_wait_for_each_other(server):
    with ThreadPoolExecutor(8) as threads:
        pairs = [[0, 1], [1, 0]] * 4
        found = list(threads.map(lambda runs: server.ask("compare", runs=runs)[0]["before"], pairs))
    assert found == [0, 1] * 4


def test_what_nobody_waits_for_any_more_is_not_done(server, monkeypatch):
    from treetune.view import calls

    done, list_groups = [], calls.list_groups
    monkeypatch.setattr(calls, "list_groups", lambda run, *rest: done.append(rest[0]) or list_groups(run, *rest))
    body = b'{"run": 0, "query": "left"}'
    head = f"POST /api/groups HTTP/1.1\r\nHost: {server.host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    host, port = server.host.split(":")
    with server.runs[0].open():  # busy with something that takes long
        with socket.create_connection((host, int(port))) as typed:  # somebody who types another query
            typed.sendall(head + body)
            time.sleep(0.5)
        time.sleep(0.5)
    assert server.ask("groups", run=0, query="failed")["rows"] is not None
    assert done == ["failed"]
