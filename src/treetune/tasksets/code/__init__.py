"""Runs a policy's Python code in a sandbox or not at all.

    result = await run_python(b"print(6 * 7)")
    result.text   # "42\\n"

It runs without the user's packages and settings, with at most as many programs at a time as this process has cores.
"""

from __future__ import annotations

from treetune.errors import EnvironmentFault
from treetune.sandbox import Bubblewrap, Ended, Result, SandboxLimits
from treetune.sandbox.limits import DEFAULT_LIMITS
from treetune.system.threads import limit_to_cores


async def run_python(code: bytes, *, stdin: bytes = b"", limits: SandboxLimits = DEFAULT_LIMITS) -> Result:
    """Run a program in a fresh sandbox; its streams are UTF-8."""
    sandbox = Bubblewrap()
    command = [sandbox.python, "-I", "-X", "utf8", "main.py"]
    async with limit_to_cores():
        result = await sandbox.run(command, stdin=stdin, files={"main.py": code}, limits=limits)
    if result.ended is Ended.KILLED:
        raise EnvironmentFault("a sandbox was ended from outside", remedy="run the episode again")
    return result
