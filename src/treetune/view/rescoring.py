"""A preview of `treetune rescore`: what scorers, as they are now, say of recorded answers. Nothing is written.

    Rescoring().preview(Path("runs/x"), "source=gsm8k")["changed"]

It is the verb itself, in a process of its own: so the code of the task is loaded as it is now, however often it is
edited while somebody looks, and whatever it does it cannot harm the server.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import TreetuneError, UsageError

MOST = 1000
"""Rollouts of a preview."""
_SECONDS = 600.0


def refusal(why: str) -> dict[str, Any]:
    return {"rows": [], "changed": 0, "failed": 0, "left": 0, "refused": why}


class Rescoring:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()

    def preview(self, run: Path, query: str) -> dict[str, Any]:
        command = [sys.executable, "-P", "-m", "treetune", "rescore", str(run), "--dry-run", "-n", str(MOST), "--json"]
        command += ["--where", query] if query.strip() else []
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with self._lock:
            self._children.add(child)
        try:
            said, complaints = child.communicate(timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            raise UsageError(f"it took more than {_SECONDS:g} s", remedy="select fewer rollouts by a query") from None
        finally:
            child.kill()
            with self._lock:
                self._children.discard(child)
        try:
            found: dict[str, Any] = msgspec.json.decode(said)
        except msgspec.MsgspecError:
            raise TreetuneError(f"rescore failed: {complaints.decode(errors='replace')[-2000:]}") from None
        if "error" in found:
            why = found["error"] + (f" ({found['remedy']})" if found.get("remedy") else "")
            return refusal(why)
        return {**found, "refused": None}

    def close(self) -> None:
        with self._lock:
            for child in self._children:
                child.kill()
