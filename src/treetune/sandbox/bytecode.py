"""Our scripts as the bytecode of the Python that runs them: compiling takes longer than starting Python.

    bytecode("shell_runner.py", "/usr/bin/python3")         # compiled once per process by that very Python
    bytecode_file("shell_setup.py", "/usr/bin/python3")     # the same as a descriptor, to be run from /proc/self/fd

Python tells bytecode from source by its first bytes. Where it cannot be compiled it is the source.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

COMPILE = """
import marshal, sys
from _frozen_importlib_external import MAGIC_NUMBER
code = compile(sys.stdin.buffer.read(), sys.argv[1], "exec", dont_inherit=True)
sys.stdout.buffer.write(MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


@cache
def bytecode(script: str, python: str | None) -> bytes:
    """A script of this folder; None: its source."""
    source = Path(__file__).with_name(script).read_bytes()
    if python is None:
        return source
    command = [python, "-I", "-S", "-c", COMPILE, script]
    try:
        done = subprocess.run(command, input=source, capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return source
    return done.stdout or source


def bytecode_file(script: str, python: str) -> int:
    descriptor = os.memfd_create(script)
    os.write(descriptor, bytecode(script, python))
    os.fchmod(descriptor, 0o444)
    return descriptor
