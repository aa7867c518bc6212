"""Sets that are ready by name: a YAML file each, in the folder of the package or in one of the user's own.

    find("gsm8k")            # .../ready/gsm8k.yaml: what `treetune eval gsm8k` reads
    names()                  # ["aime24", "arc", ...]

A file declares `train_tasks` and `val_tasks` as any config does. Beside them it says what the set is (`about`), where
it comes from (`source`), under which `licence`, and whose prompt and number of examples it keeps to (`convention`).
"""

from __future__ import annotations

import os
from pathlib import Path

from treetune.config.builtin import tables

FOLDERS = "TREETUNE_READY"
"""The variable that names folders of the user's own, separated as in PATH."""


def folders() -> list[Path]:
    """Where the files lie, the first that has a name wins: the user's own folders, then the package's."""
    named = [folder for folder in os.environ.get(FOLDERS, "").split(os.pathsep) if folder]
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config")
    places = [*map(Path, named), home / "treetune" / "ready"]
    return [*(place.expanduser() for place in places), tables["READY"]]


def find(name: str) -> Path | None:
    """The file of a set, or None where no set has this name."""
    if not name.replace("-", "").replace("_", "").isalnum():  # a path, a module or an address
        return None
    return next((file for folder in folders() if (file := folder / f"{name}.yaml").is_file()), None)


def names() -> list[str]:
    """Every set there is, by name."""
    return sorted({file.stem for folder in folders() for file in folder.glob("*.yaml")})
