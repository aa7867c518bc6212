"""Reads runs of other programs in a process of its own, within limits: a hostile file can harm only that process.

    ask_reader(Asked("outputs/rollout_data", "verl", top="outputs", folder=..., seconds=0.5))        # waits

The process reads what is new (`KeptRun.take`) and keeps it as traces, which the caller reads. It stays for the next
request. Only one runs at a time, so several hostile runs take no more memory than one.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from treetune.errors import UsageError

if TYPE_CHECKING:
    from treetune.system.worker_process import Workers

_DEEPEST = 400
"""Calls within each other: less than where the traces are read again, so that these are never too deep there."""
_LARGE = 200 << 20
"""Bytes after which a process is not used again."""
_one = threading.Lock()


class Asked(msgspec.Struct):
    """Which run is to be taken up."""

    path: str
    kind: str
    top: str
    """The folder that no file may lie outside of."""
    folder: str
    """Where it is kept."""
    seconds: float
    """For about how long it is read; the rest is another request."""


def ask_reader(asked: Asked) -> None:
    """Returns once it is done. Raises `UsageError` where the process failed or was ended."""
    with _one:
        replies = _workers().ask(msgspec.to_builtins(asked), 1)
    fault = replies[0] if replies else "reading it took more memory or time than a run of its size may"
    if fault:
        raise UsageError(f"{asked.path} cannot be read: {fault}", remedy="remove it, or read it where it was written")


@cache
def _workers() -> Workers:
    from treetune.system.worker_process import Workers

    return Workers(__name__, "the reader of runs", "reinstall Treetune", flags=("-P", "-m"))


def main() -> None:
    """Reads an `Asked` a line, and writes null or what is wrong."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the other ones reserve more than may be taken
    from treetune.runs.foreign import KINDS
    from treetune.runs.foreign.kept import KeptRun
    from treetune.runs.foreign.limits import explain

    sys.setrecursionlimit(_DEEPEST)
    kinds = {kind.name: kind for kind in KINDS}
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        asked, fault = msgspec.json.decode(line, type=Asked), None
        try:
            KeptRun(Path(asked.path), kinds[asked.kind], Path(asked.top), Path(asked.folder)).take(asked.seconds)
        except Exception as error:
            fault = explain(error)
        print(json.dumps(fault), file=replies, flush=True)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > _LARGE:
            return  # what it has left of its memory may be too little for the next one


if __name__ == "__main__":
    main()
