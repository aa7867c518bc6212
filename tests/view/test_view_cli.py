"""`treetune view` as a user starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest
from made_runs import make_run


@contextmanager
def view(*arguments, cwd=None, **environment):
    """The process, and what it has printed once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", "view", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    try:
        yield process, process.stdout.readline().decode()
    finally:
        process.kill()
        process.communicate()


def ask(address, call, token=None):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    request = urllib.request.Request(f"{address}api/{call}", b"{}", headers)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_it_prints_its_address_and_ends_quietly(tmp_path, number):
    make_run(tmp_path / "runs" / "x", [[1.0, 0.0]])
    with view("--no-browser", "--port", 0, cwd=tmp_path) as (process, said):
        address = re.match(r"(http://127\.0\.0\.1:\d+/)   \(Ctrl-C to quit\)", said)[1]
        assert [run["name"] for run in ask(address, "runs")["runs"]] == ["x"]  # ./runs, as nothing was named
        process.send_signal(number)
        out, complaints = process.communicate(timeout=30)
        assert (process.returncode, out, complaints) == (0, b"", b"")


def test_for_others_the_address_has_a_token(tmp_path):
    make_run(tmp_path / "x", [[1.0]])
    with view(tmp_path, "--no-browser", "--port", 0, "--host", "0.0.0.0", "--json") as (process, said):
        while not said.endswith("}\n"):
            said += process.stdout.readline().decode()
        address, token = re.fullmatch(r"http://[^/]+:(\d+)/#token=([\w-]{20,})", json.loads(said)["address"]).groups()
        local = f"http://127.0.0.1:{address}/"
        assert ask(local, "runs", token)["runs"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask(local, "runs")
        with urllib.request.urlopen(local, timeout=30) as page:
            assert page.status == 200


def test_a_second_viewer_takes_another_port(tmp_path):
    make_run(tmp_path / "x", [[1.0]])
    with (
        view(tmp_path, "--no-browser") as (_, first),
        view(tmp_path, "--no-browser") as (_, second),
    ):
        addresses = [re.match(r"http://127.0.0.1:(\d+)/", said)[1] for said in (first, second)]
        assert addresses[0] != addresses[1]


def test_a_port_that_is_taken_is_said(tmp_path):
    make_run(tmp_path / "x", [[1.0]])
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with view(tmp_path, "--no-browser", "--port", port) as (process, nothing):
            assert (nothing, process.wait(30)) == ("", 2)
            assert b"cannot listen" in process.stderr.read()


def test_what_cannot_be_shown_is_said(treetune, tmp_path):
    (tmp_path / "notes.txt").write_text("no run")
    for arguments, says in (
        ((), "no folder `runs` here"),
        (("nowhere",), "there is no nowhere"),
        (("notes.txt",), "notes.txt is not a run"),
        ((".", "--where", "failed"), "--where requires --export"),
        ((".", "--export", "x.html"), "no run to export"),
    ):
        result = treetune("view", *arguments)
        assert (result.code, says in result.err) == (2, True), result.err


def test_a_report_is_written(treetune, tmp_path):
    make_run(tmp_path / "run", [[1.0, 0.0], [None, 1.0]])
    said = treetune("view", "run", "--export", "report.html")
    assert said.code == 0
    assert said.out.startswith("report.html: 4 rollouts")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    some = treetune("view", "run", "--export", "failed.html", "--where", "failed", "--json").json
    assert (some["rollouts"], some["of"]) == (1, 1)
    assert "did you mean" in treetune("view", "run", "--export", "x.html", "--where", "fialed=1").err


def test_its_help_is_worth_reading(treetune):
    text = " ".join(treetune("view", "--help").out.split())
    for word in ("--port", "--host", "--no-browser", "--export", "--where", "--json", "marks.jsonl", "treetune view"):
        assert word in text
    assert "view" in treetune("--help").out


def test_it_loads_nothing_heavy():
    code = "import sys, treetune.cli.view; print(*(name for name in %r if name in sys.modules))"
    heavy = ("torch", "transformers", "datasets", "pandas", "ray", "pyarrow", "matplotlib")
    said = subprocess.run([sys.executable, "-c", code % (heavy,)], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == ""
