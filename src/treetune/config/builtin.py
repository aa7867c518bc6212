"""What comes with the package: the tables of `treetune/catalog.py`, and sets that are ready by name.

    tables["TASKSETS"]["arithmetic"]     # where it is defined
    find_ready_file("gsm8k")             # .../ready/gsm8k.yaml: what `treetune eval gsm8k` reads
    ready_names()                        # ["aime24", "arc", ...]

A ready set is a YAML file that declares `train_tasks` and `val_tasks` as any config does. Beside them it says what the
set is (`about`), where it comes from (`source`), under which `licence`, and whose prompt and number of examples it
keeps to (`convention`). Users may have folders of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

tables: dict[str, Any] = {}
"""Filled when `treetune` is imported."""
READY_FOLDERS = "TREETUNE_READY"
"""The variable that names folders of the user's own, separated as in PATH."""


def ready_folders() -> list[Path]:
    """Where the files lie, the first that has a name wins: the user's own folders, then the package's."""
    named = [folder for folder in os.environ.get(READY_FOLDERS, "").split(os.pathsep) if folder]
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    places = [*map(Path, named), home / "treetune" / "ready"]
    return [*(place.expanduser() for place in places), tables["READY"]]


def find_ready_file(name: str) -> Path | None:
    """The file of a set, or None where no set has this name."""
    if not name.replace("-", "").replace("_", "").isalnum():  # a path, a module or an address
        return None
    return next((file for folder in ready_folders() if (file := folder / f"{name}.yaml").is_file()), None)


def ready_names() -> list[str]:
    """Every set there is, by name."""
    return sorted({file.stem for folder in ready_folders() for file in folder.glob("*.yaml")})
