"""Searches with a regular expression that may take for ever, in a process of its own: a worker, run as a program.

It reads `[pattern, flags, group, text, seconds, clock seconds]` a line and writes a list of what the group matched, as
JSON. It needs nothing of Treetune. Past its time it is ended by a timer of the kernel.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys

MEMORY = 1 << 30
"""The most bytes of a worker."""


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
