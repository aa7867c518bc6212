"""Treetune's tasks in a SkyRL config, and SkyRL's training with them.

    run_with_tasks(config, "tasks.yaml")
    resolve_tasks_into_config(config, "tasks.yaml").data.train_data     # ["...parquet"]

All faults of all tasks are found before the first is built, and unknown environments before Ray starts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.datasets.resolve import LISTS, load_tasks, refuse_clashes
from treetune.errors import ConfigError, MissingExtraError, UnknownNameError
from treetune.plugins import absolute_spec, folders_of
from treetune.target import missing_values
from treetune.trainers.skyrl_registry import register, registry

if TYPE_CHECKING:
    from treetune.datasets.taskset import DatasetTaskset

_DATA = {"train": "train_data", "val": "val_data"}
"""The keys of SkyRL's `data` by the names of our lists."""

Tasks = str | Path | Mapping[str, Any] | None


def run_with_tasks(
    config: Any,
    tasks: Tasks = None,
    *,
    replace: bool = False,
    cache_dir: str | Path | None = None,
) -> Any:
    """Resolve the tasks into a SkyRL config and start SkyRL's own training with it.

    The config is a `SkyRLTrainConfig`, or a mapping of its keys. `tasks` is a YAML file or a mapping with `train_tasks`
    and `val_tasks`; without it they are keys of the config. Every environment that the rows name is known where
    SkyRL runs; of those that skyrl-gym has too, its own are used, unless `replace`.
    """
    used = _resolve(config, tasks, cache_dir)
    specs = _specs(used, replace)
    try:
        import ray
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.utils import validate_cfg
        from skyrl.train.utils.utils import initialize_ray
    except ImportError as error:
        raise MissingExtraError(f"SkyRL cannot be imported: {error}", remedy="install skyrl") from error
    if isinstance(config, Mapping):
        from omegaconf import OmegaConf

        own: Any = OmegaConf.create(config)  # type: ignore[call-overload]
        plain: Any = OmegaConf.to_container(own, resolve=True)
        config = SkyRLTrainConfig.from_dict_config(
            OmegaConf.create({key: value for key, value in plain.items() if key not in LISTS})
        )
    validate_cfg(config)
    initialize_ray(config)
    return ray.get(ray.remote(num_cpus=1)(_train).remote(config, specs))


def resolve_tasks_into_config(config: Any, tasks: Tasks = None, *, cache_dir: str | Path | None = None) -> Any:
    """Put the paths of the tasks into `config.data.train_data` and `.val_data`; nothing else is touched."""
    _resolve(config, tasks, cache_dir)
    return config


def cli_overrides(files: Mapping[str, list[str]]) -> list[str]:
    """SkyRL's arguments for files by list, as a program receives them: `data.train_data=['train.parquet']`."""
    return [f"data.{_DATA[name]}=[{', '.join(map(_quoted, paths))}]" for name, paths in files.items() if paths]


def _quoted(path: str) -> str:
    """As SkyRL reads it: a value in YAML, in which OmegaConf takes `${` for an interpolation."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", path)
    return "'" + escaped.replace("'", "''") + "'"


def shell_words(overrides: list[str]) -> str:
    """Overrides to paste into a shell."""
    words = []
    for override in overrides:
        key, _, value = override.partition("=")
        plain = not set('"$`\\!') & set(value)
        words.append(f'{key}="{value}"' if plain else shlex.quote(override))
    return " ".join(words)


def _train(config: Any, specs: Mapping[str, Any]) -> None:
    """The entry-point task: what SkyRL's own does, with the environments known."""
    from skyrl.train.entrypoints.main_base import BasePPOExp

    registry().update(specs)
    BasePPOExp(config).run()


def _specs(used: Mapping[str, str], replace: bool) -> dict[str, Any]:
    """skyrl-gym's entries of the environments that rows name; an unknown one is told before anything starts."""
    known = registry()
    register(replace=replace)
    for id, named in used.items():
        if ":" in id:
            register(named, id=id, replace=True)
        elif id not in known:
            raise UnknownNameError.of(
                "environment", id, known, remedy="env_class may also be file.py:Class or module:Class"
            )
    return {id: known[id] for id in used}


def _resolve(config: Any, tasks: Tasks, cache_dir: str | Path | None) -> dict[str, str]:
    """Sets the paths; gives the environments that the rows name, with files where they are found."""
    lists = _declared(config, tasks, cache_dir)
    used: dict[str, str] = {}
    folders = [Path(tasks).expanduser().resolve().parent] if isinstance(tasks, str | Path) else []
    for name, tasksets in lists.items():
        built = [taskset.built("skyrl") for taskset in tasksets]
        refuse_clashes([taskset.name for taskset in tasksets], [sidecar for sidecar, _, _ in built])
        _set(config, _DATA[name], [str(path) for _, path, _ in built])
        for taskset, (_, path, _) in zip(tasksets, built, strict=True):
            places = [*folders, *folders_of(type(taskset)), Path.cwd()]
            used |= {id: absolute_spec(id, places) for id in _environments_in(path)}
    return used


def _declared(config: Any, tasks: Tasks, cache_dir: str | Path | None) -> dict[str, list[DatasetTaskset]]:
    if isinstance(tasks, str | Path):
        from treetune.datasets.declared import read_declared

        return read_declared(str(tasks), {}, cache_dir=cache_dir).lists
    holder = config if tasks is None else tasks
    faults = [fault for name in LISTS if _is_missing(holder, name) for fault in missing_values("???", name)]
    lists = {
        name.removesuffix("_tasks"): load_tasks(nodes, cache_dir, path=name, faults=faults)
        for name in LISTS
        if (nodes := holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None))
    }
    if not lists and not faults:
        faults.append(("train_tasks", "is required, or val_tasks: the tasks to train with"))
    if faults:
        raise ConfigError(faults)
    return lists


def _is_missing(holder: Any, name: str) -> bool:
    """Whether an OmegaConf node holds `???` there, which it hides from `get`."""
    if not isinstance(holder, Mapping) or isinstance(holder, dict):
        return False
    from omegaconf import OmegaConf

    return OmegaConf.is_missing(holder, name)


def _environments_in(path: Path) -> list[str]:
    import pyarrow.parquet as pq

    found: list[str] = pq.read_table(path, columns=["env_class"])["env_class"].unique().to_pylist()
    return found


def _set(config: Any, key: str, paths: list[str]) -> None:
    if isinstance(config, dict):
        config.setdefault("data", {})[key] = paths
    elif isinstance(config, Mapping):
        from omegaconf import OmegaConf

        OmegaConf.update(config, f"data.{key}", paths, force_add=True)  # type: ignore[arg-type]
    else:
        setattr(config.data, key, paths)
