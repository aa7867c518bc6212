"""The command line: one command, one file per verb.

Exit codes: 0 good, 1 faults found (also rollouts that errored), 2 wrong usage, 3 could not run, 130 interrupted.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys


def main(arguments: list[str] | None = None) -> None:
    """The console entry point."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        from treetune.cli.app import run  # here, so that Ctrl-C is answered from the first moment on
    except KeyboardInterrupt:
        if "--json" in arguments:
            sys.stdout.write('{"error": "interrupted", "interrupted": true}\n')
        sys.exit(130)
    code = run(arguments)
    if "torch" not in sys.modules:
        sys.exit(code)
    # The interpreter is not taken down: threads of torch now and then crash in that, and what went well would look
    # like a fault.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
