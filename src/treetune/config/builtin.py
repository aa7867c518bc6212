"""The built-in components: the tables of `treetune/catalog.py`, and the ready-made task sets.

    tables["TASKSETS"]["arithmetic"]     # where it is defined
    find_ready_file("gsm8k")             # .../ready/gsm8k.yaml, which `treetune eval gsm8k` reads
    ready_names()                        # ["aime24", "arc", ...]

A ready-made set is a YAML file that declares `train_tasks` and `val_tasks` like any config. It also states what the set
is (`about`), where it comes from (`source`), its `licence`, and whose prompt and number of examples it follows
(`convention`). Users may have their own folders of such files.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

tables: dict[str, Any] = {}
"""Filled when `treetune` is imported."""
READY_FOLDERS = "TREETUNE_READY"
"""The environment variable that lists the user's own folders, separated as in PATH."""


def ready_folders() -> list[Path]:
    """The folders with ready-made sets, in order of precedence: the user's own, then the package's."""
    from pathlib import Path  # 3 ms, which `import treetune` does not pay

    named = [folder for folder in os.environ.get(READY_FOLDERS, "").split(os.pathsep) if folder]
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    places = [*map(Path, named), home / "treetune" / "ready"]
    return [*(place.expanduser() for place in places), Path(tables["READY"])]


def find_ready_file(name: str) -> Path | None:
    """The file of a ready-made set, or None if there is no set of this name."""
    if not name.replace("-", "").replace("_", "").isalnum():  # a path, module or address
        return None
    return next((file for folder in ready_folders() if (file := folder / f"{name}.yaml").is_file()), None)


def ready_names() -> list[str]:
    """The names of all ready-made sets."""
    return sorted({file.stem for folder in ready_folders() for file in folder.glob("*.yaml")})
