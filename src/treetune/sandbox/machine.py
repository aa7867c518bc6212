"""What machine a shell is on: the host's own system, a root file system in a folder, or a container of an image.

    machine = Machine(rootfs="bookworm")               # made by `treetune sandbox build bookworm`
    machine = Machine(image="python:3.12-slim")        # where a Docker engine runs
    shell = await machine.open(SandboxLimits())

`HOST` is what is there without further ado.
"""

from __future__ import annotations

import msgspec

from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.protocol import SandboxLimits
from treetune.sandbox.shell import Shell


class Machine(msgspec.Struct, frozen=True, kw_only=True):
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
