"""Python code of a policy, in a sandbox or not at all.

    await require_sandbox()
    result = await run_python({"main.py": b"print(6 * 7)"})
    result.text   # "42\\n"

No more run at a time than this process has cores: code that waits for a core would lose against its clock.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping

from treetune.errors import EnvironmentFault
from treetune.sandbox import Bubblewrap, Ended, Result, SandboxLimits, require
from treetune.threads import call

MAIN = "main.py"

_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def require_sandbox() -> None:
    """`SandboxUnavailable`, with cause and remedy, where code cannot run."""
    async with _slot():
        await call(require)


async def run_python(files: Mapping[str, bytes], *, stdin: bytes = b"", limits: SandboxLimits | None = None) -> Result:
    """Run `main.py` in a fresh sandbox, without the user's packages and settings; its streams are UTF-8."""
    sandbox = Bubblewrap()
    command = [sandbox.python, "-I", "-X", "utf8", MAIN]
    async with _slot():
        result = await sandbox.run(command, stdin=stdin, files=files, limits=limits or SandboxLimits())
    if result.ended is Ended.KILLED:
        raise EnvironmentFault("a sandbox was ended from outside", remedy="run the episode again")
    return result


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _slots:
        _slots[loop] = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    return _slots[loop]
