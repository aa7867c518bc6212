"""`treetune serve` as a process of its own, for the tests that run it as a user does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager


class Running:
    def __init__(self, process, report):
        self.process, self.report, self.address = process, report, report["address"]

    def stop(self, number=signal.SIGTERM):
        """Ends it; gives what it said on standard error."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[1].decode()


@contextmanager
def serve(folder, *arguments, python=sys.executable, **environment):
    """`treetune serve`, once it is ready."""
    process = subprocess.Popen(
        [python, "-m", "treetune", "serve", *map(str, arguments), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env={**os.environ, **environment},
    )
    try:
        lines = b""
        while not lines.endswith(b"}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read().decode()
            lines += line
        yield Running(process, json.loads(lines))
    finally:
        process.kill()
        process.communicate()


def resident(pid):
    """Megabytes."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def post(url, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)
