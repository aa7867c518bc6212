"""The command line: `main` is the console entry point.

`app` has the table of verbs, and imports only the verb that is called. A verb is a function in the module that the
table names; verbs with common code are in one module. `options` declares the options that several verbs have, `output`
prints JSON, tables and errors, and `flags` explains unknown options.

Exit codes: 0 success, 1 faults found (including rollouts that errored), 2 wrong usage, 3 could not run, 130
interrupted.
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
        from treetune.cli.app import run  # imported here, so that Ctrl-C works from the start
    except KeyboardInterrupt:
        if "--json" in arguments:
            sys.stdout.write('{"error": "interrupted", "interrupted": true}\n')
        sys.exit(130)
    code = run(arguments)
    if "torch" not in sys.modules:
        sys.exit(code)
    # The interpreter is not shut down normally: threads of torch sometimes crash then, and a success would look like a
    # failure.
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
