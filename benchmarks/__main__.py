"""Runs the benchmarks, each in a process of its own.

    python -m benchmarks                    # all of them, in sizes that take minutes
    python -m benchmarks serve sandbox      # some
    python -m benchmarks --full --save      # in the sizes of the docs; writes docs/benchmarks.md

A benchmark whose data or program is not here says so and is left out.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import RESULTS, readable

QUICK = {
    "order": [],
    "draw": [],
    "startup": [],
    "rollouts": [],
    "view": ["--tasks", "625"],
    "trajectory": [],
    "environments": [],
    "textarena_episodes": [],
    "build": ["--scale", "5"],
    "validate": ["--scale", "5", "--repeat", "1"],
    "scorers": [],
    "prompt_dataset": ["--scale", "5"],
    "verl_loop": [],
    "sandbox": [],
    "serve": ["sample", "rollouts"],
    "http_steps": ["step"],
    "http_client": [],
    "gateway": ["--calls", "800"],
    "openenv": ["--repeat", "2"],
    "floods": ["--seconds", "3"],
}
"""Every benchmark, with the arguments that make it quick."""

TABLE = Path(__file__).parents[1] / "docs" / "benchmarks.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(QUICK)}")
    parser.add_argument("--full", action="store_true", help="in the sizes of the docs (GSM8K x100)")
    parser.add_argument("--save", action="store_true", help=f"write {TABLE.relative_to(TABLE.parents[1])}")
    asked = parser.parse_args()
    if unknown := set(asked.names).difference(QUICK):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(QUICK)}")
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.jsonl"
        results.touch()
        for name in asked.names or QUICK:
            print(f"--- {name}", flush=True)
            command = [sys.executable, "-m", f"benchmarks.{name}", *([] if asked.full else QUICK[name])]
            if subprocess.run(command, env={**os.environ, RESULTS: str(results)}).returncode:
                failed.append(name)
        if asked.save:
            TABLE.write_text(table([json.loads(line) for line in results.read_text().splitlines()]))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        "# What hot paths cost",
        "",
        f"Measured on {datetime.date.today()} on a machine with {os.cpu_count()} cores ({platform.machine()}, Python",
        f"{platform.python_version()}) by `python -m benchmarks --save`.",
        "CPU time is what counts: wall time depends on what else runs there. With `--full` the data are 20 times",
        "as large, and imports, which are a second of each build here, no longer show.",
        "",
        "| what | CPU | wall | | beside | its CPU | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results:
        ratio = f"{one['ratio']:.1f}x" if "ratio" in one else ""
        other = readable(one["other_cpu"]) if "other_cpu" in one else ""
        ours = (one["what"], readable(one["cpu"]), readable(one["wall"]), one["note"])
        cells = (*ours, one.get("other", ""), other, ratio)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
