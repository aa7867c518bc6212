"""A Ray cluster as a user starts one: `ray start --head`, and `ray start --address` for each further node.

    with RayCluster(python, folder) as cluster:
        node = cluster.add_node(cpus=2)
        subprocess.run([...], env=cluster.environment)
        node.kill()                                     # as when a machine is lost

It has ports, a home with a token, and a folder of its own, so clusters of others on the machine do not matter.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from venvs import ROOT

_IP = "127.0.0.1"


class RayNode:
    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )
        self.log = log

    def wait_until_ready(self) -> None:
        end = time.monotonic() + 90
        while "Ray runtime started" not in self.log.read_text():
            ended = self.process.poll() is not None or time.monotonic() > end
            assert not ended, self.log.read_text()
            time.sleep(0.1)

    def kill_raylet(self) -> None:
        """The raylet alone: its workers notice, and say so."""
        for pid in _descendants(self.process.pid):
            if "raylet" in _command_line(pid).partition("\0")[0]:
                os.kill(pid, signal.SIGKILL)

    def kill(self) -> None:
        """The raylet and all that runs under it, at once."""
        family = _descendants(self.process.pid)
        for pid in family:
            if "raylet" in _command_line(pid).partition("\0")[0]:
                os.kill(pid, signal.SIGKILL)
        for pid in family:
            _kill(pid)
        self.process.wait()


class RayCluster:
    def __init__(self, python: Path, *, cpus: int) -> None:
        # Paths of sockets have at most 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self._ray = str(python.parent / "ray")
        given = filter(None, [os.environ.get("PYTHONPATH")])
        path = os.pathsep.join([*given, str(ROOT / "src"), str(ROOT / "tests" / "support")])
        usual = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        self._environment = {
            **usual,
            "HOME": str(self.folder),
            "PYTHONPATH": path,
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        }
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        # What `ray.init()` of any program does for its user once, and what a cluster is then protected by.
        subprocess.run(
            [self._ray, "get-auth-token", "--generate"], env=self._environment, check=True, capture_output=True
        )
        self.nodes: list[RayNode] = []
        self._start({}, "--head", "--port", str(port), "--temp-dir", f"{self.folder}/t", "--num-cpus", str(cpus))
        self.address = f"{_IP}:{port}"
        self.environment = {**self._environment, "RAY_ADDRESS": self.address}

    def add_node(self, cpus: int) -> RayNode:
        # A second node does not look for the token unless it is told to.
        return self._start({"RAY_AUTH_MODE": "token"}, "--address", self.address, "--num-cpus", str(cpus))

    def _start(self, environment: dict[str, str], *options: str) -> RayNode:
        dashboard = ["--include-dashboard", "false"] if "--head" in options else []
        node = RayNode(
            [self._ray, "start", *options, *dashboard, "--node-ip-address", _IP, "--disable-usage-stats", "--block"],
            {**self._environment, **environment},
            self.folder / f"node-{len(self.nodes)}.log",
        )
        self.nodes.append(node)
        node.wait_until_ready()
        return node

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in reversed(self.nodes):
            node.kill()
        for entry in os.listdir("/proc"):  # what outlived its parent
            if entry.isdigit() and str(self.folder) in _command_line(int(entry)):
                _kill(int(entry))
        shutil.rmtree(self.folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        except OSError:
            continue
    return found


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
