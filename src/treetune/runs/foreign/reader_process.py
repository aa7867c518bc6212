"""The process that reads runs of other programs: a request a line, which `KeptRun.take` does, a reply a line."""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path

import msgspec

from treetune.runs.foreign.reader import Asked

_DEEPEST = 400
"""Calls within each other: less than where the traces are read again, so that these are never too deep there."""
_LARGE = 200 << 20
"""Bytes after which a process is not used again."""


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
