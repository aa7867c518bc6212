"""What this machine offers for sandboxes, as `treetune sandbox check` shows it.

    found = await survey()
    found.good, [(part.name, part.works, part.text) for part in found.parts]

Each part is tried, not guessed.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from treetune.sandbox.docker import Engine, socket_path
from treetune.sandbox.probe import probe
from treetune.sandbox.protocol import SandboxUnavailable
from treetune.sandbox.shell import Shell
from treetune.sandbox.shell_probe import probe_shell


class Part(msgspec.Struct, frozen=True):
    name: str
    works: bool
    text: str
    """What enforces its limits, or why it does not work and what to do."""


class Survey(msgspec.Struct, frozen=True):
    parts: list[Part]
    good: bool
    """Whether code of tasks can be run here."""


async def survey(rootfs: str | None = None) -> Survey:
    commands = await asyncio.to_thread(probe)
    shells = await probe_shell()
    parts = [Part("commands", commands.available, str(commands)), Part("shells", shells.available, str(shells))]
    if rootfs is not None:
        parts.append(await _rootfs(rootfs))
    good = all(part.works for part in parts)
    return Survey([*parts, await _docker()], good)


async def _rootfs(folder: str) -> Part:
    began = time.perf_counter()
    try:
        async with await Shell.open(rootfs=folder) as shell:
            spent = time.perf_counter() - began
            system = (await shell.execute(". /etc/os-release && echo $PRETTY_NAME; python3 --version")).text.split("\n")
    except SandboxUnavailable as error:
        return Part("rootfs", False, str(error))
    return Part("rootfs", True, f"{folder}: {', '.join(filter(None, system))}; started in {spent * 1000:.0f} ms")


async def _docker() -> Part:
    try:
        said = await Engine(socket_path()).call("GET", "/version")
    except SandboxUnavailable as error:
        return Part("docker", False, f"{error}\nonly tasks with an image of their own need it")
    return Part("docker", True, f"engine {said.get('Version')}, API {said.get('ApiVersion')}")
