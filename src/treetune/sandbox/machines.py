"""The machine of an episode: its kinds, and shells on it that are started in advance.

    class MyConfig(MachineConfig, frozen=True, kw_only=True): ...        # has the keys `sandbox` and `rootfs`
    async with await Machine.of(task.extra_info).open(SandboxLimits()) as shell: ...
    await share_pool(SandboxLimits(), Machine()).take()                  # one that was started before

To add a kind, write a module that opens it (such as `docker.py`), and add its name to `KindName`, a case to
`Machine.open` and, if it has images, its name to `WITH_IMAGES`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Mapping
from pathlib import Path
from typing import Any, Literal, Self
from weakref import WeakKeyDictionary

import msgspec

from treetune.config.structs import FileName
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import ConfigError
from treetune.sandbox import docker
from treetune.sandbox.bubblewrap import find_tools
from treetune.sandbox.limits import DEFAULT_LIMITS, SandboxLimits, SandboxUnavailable
from treetune.sandbox.probe import probe
from treetune.sandbox.rootfs import Root
from treetune.sandbox.shell import Shell

KindName = Literal["bubblewrap", "docker"]
WITH_IMAGES = ("docker",)
"""The kinds whose machines are created from an image. The others use the host's system or a folder."""


class MachineConfig(TasksetConfig, frozen=True, kw_only=True):
    """The config of a taskset whose episodes have a machine."""

    sandbox: KindName = "bubblewrap"
    """The kind of machine: a bubblewrap sandbox, or a container of a Docker engine with the task's image."""
    rootfs: FileName | None = None
    """A folder with a root file system (`treetune sandbox build`), used instead of the host's."""

    @property
    def has_images(self) -> bool:
        return self.sandbox in WITH_IMAGES

    def describe_machine(self, image: str | None = None) -> dict[str, str]:
        """Return what a task records of its `Machine`; empty for the host's own system."""
        named = {"sandbox": self.sandbox, "rootfs": self.rootfs, "image": image if self.has_images else None}
        return {name: value for name, value in named.items() if value and value != getattr(HOST, name)}

    def resolve(self) -> Self:
        """Return it with an absolute `rootfs`, so that runs can be resumed from another folder. Raises `ConfigError` if
        it does not describe a machine."""
        if self.rootfs is None:
            return self
        if self.has_images:
            raise ConfigError([("taskset.rootfs", f"applies only to bubblewrap; with {self.sandbox}, set `image`")])
        rootfs = str(Path(self.rootfs).expanduser().resolve())
        try:
            Root.of_folder(rootfs)
        except SandboxUnavailable as error:
            raise ConfigError([("taskset.rootfs", str(error))]) from error
        return msgspec.structs.replace(self, rootfs=rootfs)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a machine, by default the host's own system in bubblewrap. A task has it in its `extra_info`."""

    sandbox: KindName = "bubblewrap"
    rootfs: str | None = None
    """A folder with a system to use instead of the host's."""
    image: str | None = None
    """The image, for kinds that have images."""

    @classmethod
    def of(cls, extra_info: Mapping[str, Any]) -> Machine:
        # Tasks of earlier versions name only an image.
        return msgspec.convert({"sandbox": "docker", **extra_info} if "image" in extra_info else dict(extra_info), cls)

    async def open(self, limits: SandboxLimits) -> Shell:
        match self.sandbox:
            case "docker":
                return await docker.open_shell(self.image or "", limits)
            case "bubblewrap":
                return await Shell.open(limits, rootfs=self.rootfs)

    @property
    def has_images(self) -> bool:
        return self.sandbox in WITH_IMAGES

    @property
    def python(self) -> str:
        """The Python inside the machine, for commands that need one."""
        return "python3" if self.has_images or self.rootfs is not None else find_tools()["python3"]


HOST = Machine()


class SurveyPart(msgspec.Struct, frozen=True):
    name: str
    works: bool
    text: str
    """What enforces its limits, or why it does not work and what to do."""


async def survey(rootfs: str | None = None) -> tuple[bool, list[SurveyPart]]:
    """Return whether sandboxes start here, and a report of each part. Each part is tried."""
    parts = []
    for name, shell in (("commands", False), ("shells", True)):
        found = await asyncio.to_thread(probe, shell=shell)
        parts.append(SurveyPart(name, found.available, str(found)))
    if rootfs is not None:
        parts.append(await _try("rootfs", _describe_rootfs(rootfs)))
    good = all(part.works for part in parts)
    parts.append(await _try("docker", docker.describe_engine(), "\nonly tasks with their own image need it"))
    return good, parts


async def _try(name: str, trial: Awaitable[str], note: str = "") -> SurveyPart:
    try:
        return SurveyPart(name, True, await trial)
    except SandboxUnavailable as error:
        return SurveyPart(name, False, f"{error}{note}")


async def _describe_rootfs(folder: str) -> str:
    async with await Shell.open(rootfs=folder) as shell:
        system = (await shell.execute(". /etc/os-release && echo $PRETTY_NAME; python3 --version")).text.split("\n")
    return f"{folder}: {', '.join(filter(None, system))}"


class ShellPool:
    """Starts shells before they are needed. Each is used once."""

    def __init__(self, limits: SandboxLimits = DEFAULT_LIMITS, machine: Machine = HOST, *, size: int = 2) -> None:
        self._limits, self._machine, self._size = limits, machine, size
        self._starting: deque[asyncio.Task[Shell]] = deque()
        """Includes shells that have started."""
        self.keeper: AsyncGenerator[None, None] | None = None

    async def take(self) -> Shell:
        """Return a fresh shell; the caller closes it."""
        self._refill()
        if self._starting:
            started = self._starting.popleft()
            self._refill()
            # If it could not start, or has died since, another one may start.
            with contextlib.suppress(SandboxUnavailable):
                if (shell := await started).alive:
                    return shell
        return await self._machine.open(self._limits)

    async def fill(self) -> None:
        """Wait until the desired number of shells is ready."""
        self._refill()
        await asyncio.gather(*self._starting, return_exceptions=True)

    async def close(self) -> None:
        starting, self._starting, self._size = self._starting, deque(), 0
        for start in starting:
            start.cancel()
        shells = await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(shell.close() for shell in shells if isinstance(shell, Shell)))

    def _refill(self) -> None:
        while len(self._starting) < self._size:
            self._starting.append(asyncio.ensure_future(self._machine.open(self._limits)))


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[SandboxLimits, Machine], ShellPool]] = (
    WeakKeyDictionary()
)


def share_pool(limits: SandboxLimits, machine: Machine) -> ShellPool:
    """Return this event loop's pool for these limits and this machine; it is closed when the loop ends."""
    pools = _pools.setdefault(asyncio.get_running_loop(), {})
    if (pool := pools.get((limits, machine))) is None:
        pool = pools[limits, machine] = ShellPool(limits, machine)
        pool.keeper = _close_at_end(pool)
        with contextlib.suppress(StopIteration):
            pool.keeper.__anext__().send(None)
    return pool


async def _close_at_end(pool: ShellPool) -> AsyncGenerator[None, None]:
    """Closes the pool at the end: an event loop then closes generators that have started."""
    try:
        yield
    finally:
        await pool.close()
