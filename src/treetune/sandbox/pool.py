"""Shells on a machine of one's choice, and shells that are started before they are asked for.

    machine = Machine(rootfs="bookworm")               # made by `treetune sandbox build bookworm`
    machine = Machine(image="python:3.12-slim")        # where a Docker engine runs
    shell = await machine.open(SandboxLimits())

    pool = ShellPool(SandboxLimits(), size=4)
    async with await pool.take() as shell:             # in about a millisecond
        await shell.execute("ls")
    await pool.close()

A sandbox is used once: the next one that is taken is fresh. `share_pool` gives one pool per event loop, limits and
machine.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeAlias
from weakref import WeakKeyDictionary

import msgspec

from treetune.sandbox.launcher import Interpreter
from treetune.sandbox.limits import DEFAULT_LIMITS, SandboxLimits, SandboxUnavailable
from treetune.sandbox.shell import Shell

SIZE = 2
Open: TypeAlias = Callable[[SandboxLimits], Awaitable[Shell]]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The host's own system, unless it says otherwise."""

    rootfs: str | None = None
    """A folder with a system of its own, in the place of the host's."""
    image: str | None = None
    """An image of a Docker engine; then there is no bubblewrap."""

    async def open(self, limits: SandboxLimits) -> Shell:
        if self.image is not None:
            from treetune.sandbox.docker import open_shell

            return await open_shell(self.image, limits)
        return await Shell.open(limits, rootfs=self.rootfs)

    @property
    def python(self) -> str:
        """The Python inside, for commands that want one."""
        return Interpreter.find().path if self.image is None and self.rootfs is None else "python3"


HOST = Machine()


class ShellPool:
    def __init__(self, limits: SandboxLimits = DEFAULT_LIMITS, *, size: int = SIZE, open: Open = Shell.open) -> None:
        self._limits, self._size, self._open = limits, size, open
        self._ready: deque[Shell] = deque()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False
        self.keeper: AsyncGenerator[None, None] | None = None

    async def take(self) -> Shell:
        """A fresh shell; the caller closes it."""
        shell = None
        while self._ready and (shell is None or not shell.alive):
            shell = self._ready.popleft()
        self._refill()
        if shell is not None and shell.alive:
            return shell
        return await self._open(self._limits)

    async def fill(self) -> None:
        """Wait until as many as wanted are ready."""
        self._refill()
        while self._starting:
            await asyncio.gather(*self._starting)

    async def close(self) -> None:
        self._closed = True
        for starting in list(self._starting):
            starting.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(shell.close() for shell in self._ready))
        self._ready.clear()

    def _refill(self) -> None:
        while not self._closed and len(self._ready) + len(self._starting) < self._size:
            task = asyncio.get_running_loop().create_task(self._start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _start(self) -> None:
        # Where none can start, whoever takes one is told so.
        with contextlib.suppress(SandboxUnavailable):
            shell = await self._open(self._limits)
            if self._closed:
                await shell.close()
            else:
                self._ready.append(shell)


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[SandboxLimits, Machine], ShellPool]] = (
    WeakKeyDictionary()
)


def share_pool(limits: SandboxLimits, machine: Machine = HOST) -> ShellPool:
    """The pool of this event loop for such limits and such a machine; it is closed when the loop ends."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    if (pool := pools.get((limits, machine))) is None:
        pool = pools[limits, machine] = ShellPool(limits, open=machine.open)
        pool.keeper = _close_at_end(pool)
        with contextlib.suppress(StopIteration):
            pool.keeper.__anext__().send(None)
    return pool


async def _close_at_end(pool: ShellPool) -> AsyncGenerator[None, None]:
    """Once begun, it is known to the event loop, which ends such generators at its own end."""
    try:
        yield
    finally:
        await pool.close()
