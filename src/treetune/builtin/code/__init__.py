"""Python code of a policy, in a sandbox or not at all.

await require_sandbox()
result = await run_python({"main.py": b"print(6 * 7)"})
result.text   # "42\\n"
"""

from __future__ import annotations

from collections.abc import Mapping

from treetune.errors import EnvironmentFault
from treetune.sandbox import Bubblewrap, Ended, Result, SandboxLimits, require
from treetune.threads import call, limit_to_cores

MAIN = "main.py"


async def require_sandbox() -> None:
    """`SandboxUnavailable`, with cause and remedy, where code cannot run."""
    async with limit_to_cores():
        await call(require)


async def run_python(files: Mapping[str, bytes], *, stdin: bytes = b"", limits: SandboxLimits | None = None) -> Result:
    """Run `main.py` in a fresh sandbox, without the user's packages and settings; its streams are UTF-8."""
    sandbox = Bubblewrap()
    command = [sandbox.python, "-I", "-X", "utf8", MAIN]
    async with limit_to_cores():
        result = await sandbox.run(command, stdin=stdin, files=files, limits=limits or SandboxLimits())
    if result.ended is Ended.KILLED:
        raise EnvironmentFault("a sandbox was ended from outside", remedy="run the episode again")
    return result
