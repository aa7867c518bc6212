"""What a sandbox costs: a one-shot command, a shell cold and warm, a command in it, beside a plain process; a copy of
one, beside another shell, and a command on a copy, beside one on the machine itself.

python -m benchmarks.sandbox [ROOTFS]

On a busy machine run it as root with `chrt -f 20` before it: what else runs then hardly counts. As root the CPU is that
of this process and of all that it starts, counted by a cgroup. Else it is that of the processes that somebody waited
for, which is not all: bubblewrap does not wait for its own where it is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import Cost, show
from treetune.sandbox import Bubblewrap, SandboxLimits
from treetune.sandbox.machines import ShellPool
from treetune.sandbox.shell import Shell

ROUNDS = 30


async def median(work: Callable[[], Awaitable[Any]], after: Callable[[Any], Awaitable[Any]] | None = None) -> Cost:
    """The median wall time; `after` is not in it, but its CPU is."""
    spent = []
    began_cpu = cpu_seconds()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        result = await work()
        spent.append(time.perf_counter() - began)
        if after is not None:
            await after(result)
    return Cost((cpu_seconds() - began_cpu) / ROUNDS, statistics.median(spent))


def enter_cgroup() -> Path | None:
    """A file that counts the CPU of this process and of all that it starts."""
    for folder, name in (("/sys/fs/cgroup/cpuacct", "cpuacct.usage"), ("/sys/fs/cgroup", "cpu.stat")):
        cgroup = Path(folder) / f"benchmark-{os.getpid()}"
        with contextlib.suppress(OSError):
            cgroup.mkdir()
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            return cgroup / name
    return None


COUNTED = enter_cgroup()


def cpu_seconds() -> float:
    if COUNTED is not None:
        content = COUNTED.read_text().split()
        return int(content[0]) / 1e9 if len(content) == 1 else int(content[1]) / 1e6
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


async def main() -> None:
    async def start_plain() -> None:
        await asyncio.to_thread(subprocess.run, ["bash", "-c", "/bin/true"], check=True)

    plain = ("bash -c, no sandbox", await median(start_plain))
    sandbox = Bubblewrap()
    show("sandbox: one-shot command", await median(lambda: sandbox.run(["true"])), *plain)
    show("sandbox: shell, cold", await median(Shell.open, Shell.close), *plain, target="80 ms")
    if len(sys.argv) > 1:
        show(
            f"sandbox: shell, cold, on {sys.argv[1]}", await median(lambda: Shell.open(rootfs=sys.argv[1]), Shell.close)
        )
    pool = ShellPool(SandboxLimits(), size=2)
    await pool.fill()

    async def give_back(shell: Shell) -> None:
        await shell.close()
        await pool.fill()

    show("sandbox: shell, warm", await median(pool.take, give_back), *plain, target="5 ms")
    async with await pool.take() as shell:
        show("sandbox: builtin in the shell", await median(lambda: shell.execute("true")), *plain)
        show("sandbox: command in the shell", await median(lambda: shell.execute("/bin/true")), *plain, target="6 ms")
        show("sandbox: command beside the shell", await median(lambda: shell.run(["true"])), *plain)
    await pool.close()
    await copies()


async def copies() -> None:
    command = ["bash", "-c", "ls /srv | wc -l"]

    async def run_on_copy(shell: Shell) -> None:
        async with await shell.copy() as copy:
            await copy.run(command)

    async with await Shell.open() as shell:
        cold = ("another shell, cold", await median(Shell.open, Shell.close))
        show("sandbox: copy of a shell", await median(shell.copy, Shell.close), *cold, target="50 ms")
        beside = ("on the machine itself", await median(lambda: shell.run(command)))
        show("sandbox: command on a copy", await median(lambda: run_on_copy(shell)), *beside, target="80 ms")
        await shell.run(["sh", "-c", "cd /srv && seq 1000 | xargs touch && head -c 32M /dev/zero > much"])
        show("sandbox: copy, 1,000 files and 32 MB more", await median(shell.copy, Shell.close), *cold)


if __name__ == "__main__":
    asyncio.run(main())
