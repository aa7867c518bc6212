"""`treetune convert RUN OUT`: a run, of whichever program, as a log of Inspect or as traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treetune.cli.output import print_json
from treetune.core.trace import encode_trace
from treetune.errors import UsageError
from treetune.runs.discovery import find_run, open_run
from treetune.runs.eval_log import ENDING, write_eval_log
from treetune.runs.run import Run
from treetune.system.folders import aside
from treetune.system.screen import Screen

_LINES = ".jsonl"


def convert_run(sources: Sequence[str], out: Path, where: str | None, as_json: bool) -> None:
    """By the ending of the file that is written."""
    if out.suffix not in (ENDING, _LINES):
        remedy = f"pass --to FORMAT for rows of tasks; a run is written to a file that ends with {ENDING} or {_LINES}"
        raise UsageError(f"how to write {out} is not said", remedy=remedy)
    if len(sources) > 1:
        raise UsageError(f"{len(sources)} runs are no run", remedy="convert one at a time")
    if find_run(sources[0]) is None and not Path(sources[0]).is_dir():
        raise UsageError(f"{sources[0]} is no run", remedy="pass --to FORMAT, if these are tasks")
    run = open_run(sources[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    write = write_eval_log if out.suffix == ENDING else _write_traces
    count = write(run, out, where or "")
    if as_json:
        return print_json({"path": str(out), "run": str(run.path), "kind": run.kind, "rollouts": count})
    screen = Screen()
    screen.say(f"{count:,} rollouts of {run.path}: {out}")
    if out.suffix == ENDING:
        screen.say(f"look at them: inspect view start --log-dir {out.parent}", style="dim")
    return None


def _write_traces(run: Run, out: Path, where: str) -> int:
    """A line each, images included."""
    count, temporary = 0, aside(out)
    try:
        with open(temporary, "wb") as file:
            for trace in run.traces(where):
                file.write(encode_trace(trace) + b"\n")
                count += 1
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return count
