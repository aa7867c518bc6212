"""Provides our workflow under `areal.workflow.task_server`, a name that AReaL's users may know, as a file with one
import.

    python -m treetune.trainers.areal.alias [FOLDER]

So workflows written for that name run unchanged, in all of AReaL's processes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from treetune.errors import MissingExtraError, TreetuneError, UsageError

CONTENT = """\"\"\"Treetune's workflow, under a name of AReaL's.\"\"\"

from treetune.trainers.areal import TaskServerWorkflow

__all__ = ["TaskServerWorkflow"]
"""


def write_alias(folder: str | None = None) -> Path:
    """Write `task_server.py` into the folder, `areal/workflow` by default. A file with other content is kept."""
    path = Path(folder or _workflow_folder()) / "task_server.py"
    if not path.parent.is_dir():
        raise UsageError(f"{path.parent} is not a folder", remedy="python -m treetune.trainers.areal.alias [FOLDER]")
    if path.exists() and path.read_text() != CONTENT:
        raise UsageError(
            f"{path} exists already, and Treetune did not write it", remedy="name another folder, or remove it"
        )
    path.write_text(CONTENT)
    return path


def _workflow_folder() -> str:
    try:
        import areal.workflow
    except ImportError as error:
        problem = f"AReaL cannot be imported: {error}"
        raise MissingExtraError(problem, remedy="install areal as its guide describes, or name a folder") from error
    return str(areal.workflow.__path__[0])


if __name__ == "__main__":
    try:
        print(f"wrote {write_alias(*sys.argv[1:2])}")
    except TreetuneError as error:
        sys.exit(str(error))
