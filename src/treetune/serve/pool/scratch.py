"""A folder of this process for what its workers need: their socket, the taskset, their temporary files.

    scratch = ScratchFolder()
    scratch.path / "workers"
    scratch.close()

It is locked as long as its process lives. What a killed process left behind is removed by the next one that makes one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "treetune-pool-"


class ScratchFolder:
    def __init__(self) -> None:
        # Only its owner can reach it. A socket's path has at most 107 characters, which a long TMPDIR exceeds.
        usual = tempfile.gettempdir()
        place = Path(usual if len(usual) <= 64 else "/tmp")
        for left in place.glob(f"{_PREFIX}*"):
            if (lock := _lock(left)) is not None:
                shutil.rmtree(left, ignore_errors=True)
                os.close(lock)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            lock = _lock(self.path)
            if lock is not None and self.path.exists():  # else another process took it for one left behind
                self._lock = lock
                return

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def _lock(folder: Path) -> int | None:
    """Takes the folder; None where a process that lives has it, or it belongs to somebody else."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            # The lock goes with the descriptor, which no child has: spawned ones close it.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None
