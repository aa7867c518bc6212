"""What a sandbox costs: a one-shot command, a shell cold and warm, a command in it, beside a plain process.

python benchmarks/sandbox.py
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from typing import Any

from treetune.sandbox import Bubblewrap, SandboxLimits
from treetune.sandbox.shell import Shell
from treetune.sandbox.shell_pool import ShellPool
from treetune.sandbox.shell_probe import probe_shell

ROUNDS = 30


async def median(work: Callable[[], Awaitable[Any]], after: Callable[[Any], Awaitable[Any]] | None = None) -> float:
    """Milliseconds of wall time; `after` is not measured."""
    spent = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = await work()
        spent.append(time.perf_counter() - began)
        if after is not None:
            await after(result)
    return statistics.median(spent) * 1000


def show(what: str, milliseconds: float, target: str = "") -> None:
    print(f"{what:<44} {milliseconds:8.2f} ms" + (f"   target {target}" if target else ""))


async def main() -> None:
    print(await probe_shell())
    sandbox = Bubblewrap()
    show("one-shot command", await median(lambda: sandbox.run(["true"])))
    show("shell, cold", await median(Shell.open, Shell.close), "80 ms")
    pool = ShellPool(SandboxLimits(), size=2)
    await pool.fill()

    async def give_back(shell: Shell) -> None:
        await shell.close()
        await pool.fill()

    show("shell, warm", await median(pool.take, give_back), "5 ms")
    async with await pool.take() as shell:
        show("builtin in the shell", await median(lambda: shell.execute("true")))
        show("command in the shell", await median(lambda: shell.execute("/bin/true")), "6 ms")
        show("command beside the shell", await median(lambda: shell.run(["true"])))
    await pool.close()

    async def plain() -> None:
        await asyncio.to_thread(subprocess.run, ["bash", "-c", "/bin/true"], check=True)

    show("  beside: bash -c, no sandbox", await median(plain))


if __name__ == "__main__":
    asyncio.run(main())
