"""The pipes and files between a sandbox and its host.

output = Capture(pipe, limit)
output.register(poll)
output.serve(ready, poll)    # after each poll, with the descriptors that were ready
"""

from __future__ import annotations

import fcntl
import os
import select
from collections.abc import Collection
from io import FileIO

CHUNK = 1 << 16


class Feed:
    """Writes what a command is to read, as it reads, and closes the pipe after."""

    def __init__(self, pipe: FileIO, content: bytes) -> None:
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._left = memoryview(content)

    def register(self, poll: select.poll) -> None:
        poll.register(self._pipe, select.POLLOUT)

    def serve(self, ready: Collection[int], poll: select.poll) -> None:
        if self._pipe.closed or self._pipe.fileno() not in ready:
            return
        try:
            self._left = self._left[os.write(self._pipe.fileno(), self._left[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._left = self._left[:0]  # it will read no more
        if not self._left:
            poll.unregister(self._pipe)
            self._pipe.close()


class Capture:
    """Keeps what a command writes up to a limit, and never more than that in memory."""

    def __init__(self, pipe: FileIO, limit: int) -> None:
        self.pipe = pipe
        self._limit = limit
        self.content = bytearray()
        self.truncated = False

    def register(self, poll: select.poll) -> None:
        poll.register(self.pipe, select.POLLIN)

    def serve(self, ready: Collection[int], poll: select.poll) -> None:
        if self.pipe.fileno() in ready and not self._read():
            poll.unregister(self.pipe)

    def drain(self) -> None:
        """Read what is left when all that could write are gone."""
        while not self.truncated and self._read():
            pass

    def _read(self) -> bool:
        read = os.read(self.pipe.fileno(), CHUNK)
        room = self._limit - len(self.content)
        self.content += read[:room]
        self.truncated = self.truncated or len(read) > room
        return bool(read)


def readable(descriptor: FileIO | int, seconds: float) -> bool:
    """Wait until there is something to read, or the end of it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def sealed_file(content: bytes) -> FileIO:
    """A file in memory that whoever gets it can only read."""
    file = FileIO(os.memfd_create("sandbox", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC), "w+")
    left = memoryview(content)
    while left:
        left = left[os.write(file.fileno(), left) :]
    file.seek(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(file.fileno(), fcntl.F_ADD_SEALS, seals)
    return file
