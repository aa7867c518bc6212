"""`serve --supervise`: a server that crashes or hangs is started again, at the same place in the order."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from pathlib import Path

from raising import raises_code
from serve_process import serve

from treetune.cli import supervise
from treetune.cli.supervise import Supervisor
from treetune.serve.zmq.client import EnvClient


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_a_killed_server_comes_back_where_it_was_and_ends_when_it_is_told(tmp_path, sockets):
    address = f"ipc://{sockets}/server"

    async def use(pid):
        async with EnvClient(address) as client:
            before = [await client.sample() for _ in range(3)]
            os.kill(*children(pid), signal.SIGKILL)
            after = [await client.sample() for _ in range(3)]
            return [task.idx for task in before + after], (await client.run_rollout(before[0])).reward

    with serve(tmp_path, "arithmetic", "--zmq", address, "-m", "scripted:gold", "--supervise") as server:
        assert server.report["pid"] == server.process.pid
        order, reward = run(use(server.process.pid))
        told = server.stop()
    assert order == list(range(6))
    assert reward == 1.0  # its seal is still known
    assert server.process.returncode == 0
    assert "the server crashed (signal 9 (SIGKILL)), 1 of 5 times; it is started again in 0.5 s" in told
    assert "the next index is 6" in told


def test_a_server_stops_where_its_supervisor_was_killed(tmp_path, sockets):
    with serve(tmp_path, "arithmetic", "--zmq", f"ipc://{sockets}/server", "--state", "kept", "--supervise") as server:
        (child,) = children(server.process.pid)
        server.process.kill()
        wait_until(lambda: not lives(child))


def test_a_server_that_crashes_at_every_start_is_given_up_with_the_cause(tmp_path, treetune_process):
    (tmp_path / "broken.py").write_text(
        "from treetune import Taskset\n"
        "class Broken(Taskset):\n"
        "    def load_tasks(self):\n"
        "        open('starts', 'a').write('x')\n"
        "        raise RuntimeError('the disk is gone')\n"
    )
    result = treetune_process("serve", "broken.py:Broken", "--supervise", "--max-crashes", "2", "--json")
    assert result.code == 3
    assert "the server crashed 2 times within 10 minutes, the last time with exit code 3" in result.json["error"]
    assert "the disk is gone" in result.json["error"]
    assert (tmp_path / "starts").read_text() == "xx"


def test_wrong_usage_is_not_tried_again(treetune):
    result = treetune("serve", "arithmetic", "--engine", "nonsense", "--supervise", "--json")
    assert result.code == 2
    assert "unknown engine 'nonsense'" in result.json["error"]
    assert "started again" not in result.err
    result = treetune("serve", "arithmetic", "--port", "0", "--supervise")
    assert result.code == 2
    assert "name a port" in result.err


READY = "import os, time; os.write(int(os.environ['TREETUNE_SUPERVISED']), b'{}\\n'); "


def supervise_program(program, max_crashes=2):
    supervisor = Supervisor([], max_crashes, lambda found: None)
    supervisor.command = [sys.executable, "-c", program]
    return supervisor.run()


def test_a_server_that_hangs_is_killed_and_started_again(monkeypatch, caplog):
    monkeypatch.setattr(supervise, "STUCK_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING), raises_code("failed", "0.2"):
        supervise_program(READY + "print('still here', flush=True); time.sleep(600)")
    assert "the server crashed (no heartbeat for 0.2 seconds), 1 of 2 times" in caplog.text


def test_pauses_grow_and_old_crashes_are_forgotten(monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(supervise, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(supervise, "LONGEST_PAUSE", 0.02)
    with caplog.at_level(logging.WARNING), raises_code("failed", "4"):
        supervise_program("raise SystemExit(7)", max_crashes=4)
    assert [line.rpartition(" in ")[2] for line in caplog.messages] == ["0.01 s", "0.02 s", "0.02 s"]
    monkeypatch.setattr(supervise, "WINDOW_SECONDS", 0.0)
    program = f"import os; n = len(os.listdir({str(tmp_path)!r})); open(f'{tmp_path}/{{n}}', 'w'); exit(7 * (n < 6))"
    assert supervise_program(program, max_crashes=2) == 0
