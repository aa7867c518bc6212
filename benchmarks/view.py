"""What it takes to look at a run of 100,000 rollouts, 2 GB of traces, beside Inspect's list of as many samples.

    python -m benchmarks.view [--tasks 12500] [--folder FOLDER]       # the made run is kept in FOLDER for the next time

Each figure is of a process of its own, which holds the run as the viewer does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.made_run import RARE, ROLLOUTS, WORD, make_run
from benchmarks.measure import Cost, cost, show
from benchmarks.rollouts import ROLLOUTS as EVALUATED
from benchmarks.rollouts import ours as evaluate
from benchmarks.view_server import Served
from treetune.core.trace import decode_trace, encode_trace
from treetune.runs.folder import CONFIG, TRACES
from treetune.runs.index import IndexWriter
from treetune.runs.run import Run

TESTS = Path(__file__).parents[1] / "tests" / "support"


# In a process of its own


def open_run(folder: Path) -> list[Any]:
    run: list[Run] = []
    return [cost(lambda: run.append(_opened(folder)), repeat=1), len(run[0].columns), megabytes()]


def open_partly(folder: Path) -> list[Any]:
    run: list[Run] = []
    return [cost(lambda: run.append(_opened(folder, 0.5)), repeat=1), len(run[0].columns), megabytes()]


def use(folder: Path) -> dict[str, Any]:
    """What is asked of a run once it is open."""
    run = _opened(folder)

    def sort() -> None:
        run.columns._groups = None
        np.argsort(-run.groups().variance, kind="stable")

    asked: dict[str, Callable[[], Any]] = {
        "sort groups by variance": sort,
        "filter: reward<0.5 & source=gsm8k": lambda: run.fits("reward<0.5 & source=gsm8k"),
        "filter: answer~17, or mixed": lambda: run.fits("answer~17 | mixed"),
        f"search: {WORD}": lambda: run.fits(f'"{WORD}"'),
        f"search: {RARE}": lambda: run.fits(f'"{RARE}"'),
        "search: a word that nobody says": lambda: run.fits('"incontrovertible"'),
    }
    found = {name: cost(work) for name, work in asked.items()}
    return {"costs": found, "megabytes": megabytes()}


def _opened(folder: Path, seconds: float | None = None) -> Run:
    run = Run(folder, seconds)
    run.groups()
    return run


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


CHILDREN: dict[str, Callable[[Path], Any]] = {"open": open_run, "partly": open_partly, "use": use}


def ask(what: str, folder: Path) -> Any:
    command = [sys.executable, "-m", "benchmarks.view", "--child", what, "--folder", str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


# Here


def without_index(folder: Path, beside: Path) -> Path:
    """The same run without its index."""
    beside.mkdir(exist_ok=True)
    for file in (TRACES.file, CONFIG):
        if not (beside / file).exists():
            os.link(folder / file, beside / file)
    return beside


def index_cost(folder: Path) -> Cost:
    """Of one rollout, as an evaluation writes it."""
    with open(folder / TRACES.file, "rb") as file:
        traces = [decode_trace(line) for line, _ in zip(file, range(2000), strict=False)]
    for trace in traces:
        trace.tokens, trace.turns = None, trace.turns[:1]  # as those of the evaluation beside it
    lines = [encode_trace(trace) + b"\n" for trace in traces]
    with tempfile.TemporaryDirectory() as other:

        def write() -> None:
            writer = IndexWriter(Path(other))
            for trace, line in zip(traces, lines, strict=True):
                writer.add(trace, 0, line)
            writer.close()

        return cost(write, repeat=100, per=len(traces))


def inspect_list(folder: Path) -> tuple[Cost, str] | str:
    """Inspect's list of as many samples, and its memory; or why it cannot be told."""
    sys.path.insert(0, str(TESTS))
    import venvs

    side, log = Path(__file__).parent / "inspect_log.py", folder / "inspect.eval"
    try:
        python = venvs.venv(*venvs.INSPECT)
        if not log.exists():
            subprocess.run([python, side, "write", folder / TRACES.file, log], check=True, capture_output=True)
        told = subprocess.run([python, side, "read", log], check=True, capture_output=True, text=True).stdout
    except Exception as error:
        log.unlink(missing_ok=True)
        return f"{type(error).__name__}: {str(getattr(error, 'stderr', '') or error)[-300:]}"
    cpu, wall, number, memory = json.loads(told)
    return Cost(cpu, wall), f"inspect-ai: read_eval_log_sample_summaries, {number:,} samples, {memory:.0f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=12_500, help=f"of {ROLLOUTS} rollouts each")
    parser.add_argument("--folder", type=Path, help="where the run is kept, else it is made in a temporary folder")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(CHILDREN[asked.child](asked.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.folder or Path(temporary)) / f"made-{asked.tasks}"
        if not folder.exists():
            print(f"making a run of {asked.tasks * ROLLOUTS:,} rollouts", flush=True)
            make_run(folder, asked.tasks)
        measure(folder)


def measure(folder: Path) -> None:
    size = (folder / TRACES.file).stat().st_size
    theirs = inspect_list(folder)
    if isinstance(theirs, str):
        print(f"without a comparison with inspect view: {theirs}")
    spent, number, memory = ask("open", folder)
    what = f"view: {number:,} rollouts, {size / 1e9:.1f} GB"
    beside = (theirs[1], theirs[0]) if isinstance(theirs, tuple) else ()
    show(f"{what}, opened by the index, groups", Cost(*spent), *beside, target="2 s", note=f"{memory:.0f} MB")
    bare = without_index(folder, folder.with_name(f"{folder.name}-bare"))
    spent, part, _ = ask("partly", bare)
    show("view: a first part without an index", Cost(*spent), target="1 s", note=f"{part:,} rollouts")
    spent, _, memory = ask("open", bare)
    show("view: all of it without an index", Cost(*spent), target="3.5 CPU s", note=f"{memory:.0f} MB")
    used = ask("use", folder)
    targets = {"sort": "100 ms", "filter": "50 ms", "search": "1 CPU s"}
    for name, spent in used["costs"].items():
        show(f"view: {name}", Cost(*spent), target=targets[name.split()[0].rstrip(":")])
    print(f"the process that holds the run: {used['megabytes']:.0f} MB at most, target 200 MB")
    measure_server(folder)
    written, whole = index_cost(folder), cost(evaluate, repeat=5, per=EVALUATED)
    share = f"{written.cpu / whole.cpu:.1%} of a rollout's {whole.cpu * 1e6:.0f} us, by CPU"
    show("view: the index, written for one rollout", written, target="2 %", note=share)


def measure_server(folder: Path) -> None:
    """What a page waits for."""
    by_variance = {"run": 0, "sort": "variance", "descending": True, "count": 100}
    with Served(folder) as served:
        served.ask("groups", **by_variance)
        show("view: from the command to the first groups in a page", served.since_start(), target="2 s")
        asked: dict[str, tuple[str, dict[str, Any]]] = {
            "groups by variance, a hundred": ("groups", by_variance),
            "groups of a filter": ("groups", {**by_variance, "query": "reward<0.5 & source=gsm8k"}),
            "the page of a run": ("run", {"run": 0}),
            "one rollout": ("rollout", {"run": 0, "at": 5000}),
            f"the rollouts that say {RARE}": ("rollouts", {"run": 0, "query": f'"{RARE}"'}),
            "what is suspicious, a first look": ("suspicious", {"run": 0}),
        }
        for name, (call, body) in asked.items():
            show(f"view: {name}, over HTTP", min(served.ask(call, **body) for _ in range(3)))
        print(f"the server of the viewer: {served.megabytes():.0f} MB at most, target 200 MB")


if __name__ == "__main__":
    main()
