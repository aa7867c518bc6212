"""Runs, as a separate process, regular expressions that may take forever. This module is the worker program.

It reads `[pattern, flags, group, text, seconds, clock seconds]` from each line and writes a JSON list of what the group
matched. It does not import Treetune. When its time is up, a kernel timer kills it.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys

MEMORY = 1 << 30
"""The memory limit of a worker in bytes."""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    print("ready", flush=True)
    for line in sys.stdin:
        pattern, flags, group, text, seconds, clock_seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, clock_seconds)
        try:
            found = [match[group] or "" for match in re.compile(pattern, flags).finditer(text)]
        except (re.error, IndexError, MemoryError):
            found = []
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
