"""`treetune gateway -w 2 --engine ray`: workers are actors of a real cluster, also on its other nodes."""

from __future__ import annotations

import time

import pytest
import venvs
from gateway_playing import check_exact
from ray_start import RayCluster
from test_command import SUPPORT, ask, gateway
from test_workers import open_session, sampled_of, say

pytestmark = pytest.mark.slow


def test_sessions_are_spread_over_actors_and_one_that_is_lost_is_replaced(engine, monkeypatch):
    engine.script("plain")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT / "gateway_stand_ins"))
    with RayCluster(venvs.venv(*venvs.RAY), cpus=1) as cluster:
        node = cluster.add_node(cpus=2)
        options = ["--upstream", engine.url, "-m", "plain", "-w", 2, "--engine", "ray"]
        with gateway(*options, python=venvs.venv(*venvs.RAY), **cluster.environment) as found:
            url = found["url"]
            opened = [open_session(url) for _ in range(4)]
            ports = [session["url"].split("/")[2] for session, _ in opened]
            assert sorted(map(ports.count, set(ports))) == [2, 2]
            assert all(say(client) for _, client in opened)
            sequences = [
                one for session, _ in opened for one in sampled_of(ask(f"{url}/sessions/{session['key']}", "secret"))
            ]
            check_exact(engine, sequences, 4)
            node.kill()
            cluster.add_node(cpus=2)
            until = time.monotonic() + 120
            while ask(f"{url}/health", "")["sessions"] == 4:  # until the loss is noticed
                assert time.monotonic() < until
                time.sleep(0.5)
            while True:
                try:
                    _, client = open_session(url)
                    break
                except OSError:  # the replacement is starting
                    assert time.monotonic() < until
                    time.sleep(0.5)
            assert say(client)
