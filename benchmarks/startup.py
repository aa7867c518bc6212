"""What `import treetune` and `treetune --help` cost beyond the interpreter. Run: python -m benchmarks.startup"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from benchmarks.measure import Cost, show


def process(*arguments: str) -> Cost:
    """CPU and wall time of a process of its own, the best of five."""
    best = Cost(float("inf"), float("inf"))
    for _ in range(5):
        before, began = _children(), time.perf_counter()
        subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
        best = min(best, Cost(_children() - before, time.perf_counter() - began))
    return best


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    bare = process("-c", "pass")
    show("startup: import treetune", process("-c", "import treetune"), "python -c pass", bare, target="0.25 s")
    show("startup: treetune --help", process("-m", "treetune", "--help"), "python -c pass", bare, target="0.5 s")


if __name__ == "__main__":
    main()
