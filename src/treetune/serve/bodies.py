"""The memory that bodies under way may take, of all connections of this process together.

    held = Holding()
    if not held.add(len(part)): ...         # all of them would take too much
    held.release()

Each body is bounded on its own as well. Without a common bound a thousand of them could take 8 GB.
"""

from __future__ import annotations

MOST_BYTES = 256 << 20
"""Of bodies that are arriving or whose request is not answered yet, of WebSocket messages, of large ZMQ frames."""

_used = 0


class Holding:
    """What one request or connection has of it."""

    __slots__ = ("bytes",)

    def __init__(self) -> None:
        self.bytes = 0

    def add(self, size: int) -> bool:
        """False where all together would have too much."""
        global _used
        if _used + size > MOST_BYTES:
            return False
        _used += size
        self.bytes += size
        return True

    def release(self, size: int | None = None) -> None:
        """Gives back some of it, or all."""
        global _used
        size = self.bytes if size is None else size
        _used -= size
        self.bytes -= size
