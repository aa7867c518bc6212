"""The Python that code inside a sandbox runs on.

interpreter = Interpreter.find()    # /usr/bin/python3 where there is one, else the Python that runs Treetune
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import msgspec

SYSTEM = "/usr/bin/python3"


class Interpreter(msgspec.Struct, frozen=True):
    path: str
    """The same inside and outside."""
    prefix: str | None = None
    """The folder it lives in, to be shown read-only; None: it is part of /usr."""

    @classmethod
    def find(cls) -> Interpreter:
        return cls(SYSTEM) if os.access(SYSTEM, os.X_OK) else cls.own()

    @classmethod
    def own(cls) -> Interpreter:
        """The Python that runs this, without the packages of its virtual environment."""
        prefix = os.path.realpath(sys.base_prefix)
        path = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        return cls(path, None if Path(prefix).is_relative_to("/usr") else prefix)

    @property
    def private(self) -> bool:
        """Whether a folder above it (/root, say) lets nobody else pass."""
        if self.prefix is None:
            return False
        return not all(os.stat(folder).st_mode & stat.S_IXOTH for folder in Path(self.prefix).parents)
