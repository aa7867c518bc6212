"""`treetune view` itself on a long run, asked over HTTP as its pages ask.

with Served(folder) as served:
    served.ask("groups", run=0, sort="variance", descending=True)      # a Cost of the server's CPU
    served.megabytes()
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from benchmarks.measure import Cost

_TICKS = os.sysconf("SC_CLK_TCK")


class Served:
    def __init__(self, folder: Path) -> None:
        self._began = time.perf_counter()
        command = [sys.executable, "-m", "treetune", "view", str(folder), "--no-browser", "--port", "0", "--json"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        told = b""
        while not told.endswith(b"}\n"):
            told += self._process.stdout.readline()
        self._host = urlsplit(json.loads(told)["address"]).netloc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.communicate()

    def ask(self, call: str, **body: Any) -> Cost:
        """What the server spends on one call."""
        cpu, wall = self._cpu(), time.perf_counter()
        connection = http.client.HTTPConnection(self._host)
        connection.request("POST", f"/api/{call}", json.dumps(body))
        reply = connection.getresponse()
        self.answer = json.loads(reply.read())
        assert reply.status == 200, self.answer
        connection.close()
        return Cost(self._cpu() - cpu, time.perf_counter() - wall)

    def since_start(self) -> Cost:
        """From the command on."""
        return Cost(self._cpu(), time.perf_counter() - self._began)

    def megabytes(self) -> float:
        """The most that it had."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1000

    def _cpu(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS
