"""How often each task was solved, by uid: what a dataset task's `filter` can select by.

{"uid": "...", "pass_rate": 0.25, "rollouts": 4}
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec

from treetune.evaluation.run_folder import TRACES, write_whole


def write_pass_rates(run: Path, out: Path, threshold: float) -> int:
    """Write the rates of a run's scored rollouts; gives the number of tasks."""
    passes: dict[str, list[bool]] = defaultdict(list)
    for trace in TRACES.read(run):
        if trace.outcome.scored:
            passes[trace.uid].append(trace.passed(threshold))
    lines = [
        msgspec.json.encode({"uid": uid, "pass_rate": sum(tries) / len(tries), "rollouts": len(tries)})
        for uid, tries in passes.items()
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, b"".join(line + b"\n" for line in lines))
    return len(lines)
