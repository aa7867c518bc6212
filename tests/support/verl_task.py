"""A task in a few lines of Python, and how a training that needs a GPU ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import venvs

DOUBLES = """
from treetune import Task, Taskset

class Doubles(Taskset):
    def load_tasks(self):
        for n in range(100):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)})

    def reward(self, task, answer):
        return float(answer.strip() == task.ground_truth)
"""


def ended(command: list[str | Path], *, log: Path, seconds: float, **environment: str) -> tuple[int, str]:
    """The exit code of a program run from the repository, and what it printed. One that hangs is killed with all that
    it started."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=venvs.ROOT,
            env={**os.environ, "PYTHONPATH": f"{venvs.ROOT}/src", "HF_HUB_OFFLINE": "1", **environment},
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"no end after {seconds} seconds:\n{log.read_text()[-6000:]}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    # Ray colours what its workers print, and verl prints its config over many lines.
    return code, re.sub(r"\x1b\[[0-9;]*m", "", log.read_text())
