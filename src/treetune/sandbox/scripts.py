"""Programs of ours that run inside a sandbox, where there is no package to import from: several files as one script.

join_scripts(Path("time_limit.py"), Path("case_runner.py"))
compile_script(("time_limit.py", "terminal.py", "runner.py"), "/usr/bin/python3")
"""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

FUTURE = "from __future__ import annotations\n"
COMPILE = """
import marshal, sys
from _frozen_importlib_external import MAGIC_NUMBER
code = compile(sys.stdin.buffer.read(), sys.argv[1], "exec", dont_inherit=True)
sys.stdout.buffer.write(MAGIC_NUMBER + bytes(12) + marshal.dumps(code))
"""


def join_scripts(*files: Path) -> bytes:
    return (FUTURE + "\n".join(file.read_text().replace(FUTURE, "") for file in files)).encode()


@cache
def compile_script(names: tuple[str, ...], python: str | None) -> bytes:
    """Scripts of this folder as one, in the bytecode of the Python that runs it: compiling takes longer than starting
    Python. Without a `python`, or where it cannot be compiled, their source. Python distinguishes the two by the
    first bytes."""
    source = join_scripts(*(Path(__file__).with_name(name) for name in names))
    if python is None:
        return source
    command = [python, "-I", "-S", "-c", COMPILE, names[-1]]
    return subprocess.run(command, input=source, capture_output=True, check=False).stdout or source
