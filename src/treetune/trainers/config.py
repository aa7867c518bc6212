"""Reads and writes a trainer's config of any kind: a mapping, an OmegaConf node, or an object with attributes.

get_value(config, "environment.env_class")
set_value(config, "data.train_files", ["train.parquet"])
load_lists(config, None, faults)       # the tasksets of its train_tasks and val_tasks
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from treetune.config.interpolation import escape_texts
from treetune.config.structs import missing_values
from treetune.data.datasets.task_lists import LISTS, load_tasks
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.errors import Faults, gather_faults


def get_value(config: Any, path: str) -> Any:
    """Return the value at a dotted path: None if it is missing, `???` if OmegaConf marks it as missing."""
    from omegaconf import OmegaConf

    for name in path.split("."):
        if not isinstance(config, Mapping):
            config = getattr(config, name, None)
        elif OmegaConf.is_config(config) and OmegaConf.is_missing(config, name):
            return "???"
        else:
            config = config.get(name)
    return config


def set_value(config: Any, path: str, value: Any) -> None:
    *above, key = path.split(".")
    if isinstance(config, dict):
        for name in above:
            if config.get(name) is None:
                config[name] = {}
            config = config[name]
        config[key] = value
    elif isinstance(config, Mapping):
        from omegaconf import OmegaConf

        OmegaConf.update(config, path, escape_texts(value), merge=False, force_add=True)  # type: ignore[arg-type]
    else:
        setattr(get_value(config, ".".join(above)), key, value)


def load_lists(
    config: Any, cache_dir: str | Path | None, faults: Faults, *, of_any_class: bool = False
) -> dict[str, list[DatasetTaskset]]:
    """Load the tasksets of `train` and `val`; errors are added to `faults`. `of_any_class` also allows tasksets that
    are not dataset tasks."""
    lists = {}
    for name in LISTS:
        if (nodes := get_value(config, name)) == "???":
            faults += missing_values(nodes, name)
        elif nodes:
            with gather_faults(faults):
                lists[name.removesuffix("_tasks")] = load_tasks(nodes, cache_dir, path=name, of_any_class=of_any_class)
    return lists
