"""Decides whether a run folder may be continued: its `config.yaml` determines what runs, and anyone may have written
it.

    remember(Path("runs/x"))                  # `eval`: its config is this user's
    take_up(Path("runs/x"), trust=False)      # `eval --resume`: raises if it is not, and would call a model

Whatever the config names is checked where it is read and loaded (`config/trust.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treetune.config.code_reference import find_file, find_reference
from treetune.config.structs import convert, load_yaml
from treetune.config.trust import (
    CONFIG,
    Origin,
    is_own_config,
    is_run_config,
    origin_of,
    own_names,
    refusal,
    remember_config,
    remember_names,
)
from treetune.core.mixture import owner_of
from treetune.core.task import Task, own_values
from treetune.core.taskset import Taskset
from treetune.models import EndpointConfig, check_script, endpoint_of, is_behind_endpoint
from treetune.runs.run import load_config, no_run


def remember(run: Path) -> None:
    """Marks the config of a run folder as this user's. If the cache cannot be written, `--trust` is needed later."""
    remember_config(load_yaml(run / CONFIG))


class TaskCode:
    """The code that recorded tasks of a run name. A config of this user does not make the traces theirs: only code that
    tasks of this user have named is trusted."""

    def __init__(self, run: Path, trust: bool = False) -> None:
        self._config = load_config(run)
        self._what = f"a task of {run}"
        self._trust = trust
        self.own = bool(self._config) and is_own_config(self._config)
        """Whether this user's `eval` wrote the config."""
        self._known = own_names(self._config) if self.own else set()

    def origin_of(self, task: Task) -> Origin:
        return Origin.of_data(self._what, self._trust or (self.own and _names_in(task) <= self._known))

    def remember(self, taskset: Taskset[Any, Any], task: Task) -> None:
        """Trusts the code that a just played task names, if this user chose the taskset."""
        if not (new := _names_in(task) - self._known):
            return
        self._known |= new
        if self.own and owner_of(taskset, task)[0].tasks_origin.trusted:
            remember_names(self._config, new)


def _names_in(task: Task) -> set[str]:
    fields = [value for value in own_values(task).values() if isinstance(value, str) and _is_code(value)]
    return {name for name in (task.env_class, *task.tools) if name is not None and ":" in name}.union(fields)


def _is_code(text: str) -> bool:
    return find_file(text) is not None or find_reference(text) is not None


def take_up(run: Path, trust: bool) -> tuple[str, dict[str, str]]:
    """Returns the TARGET for resuming a run folder, and its overrides."""
    target = str(run / CONFIG)
    if not is_run_config(target):
        raise no_run(run, own=True)
    refuse_foreign_model(target, trust)
    return target, ({"taskset.trust": "true"} if trust else {})


def refuse_foreign_model(target: str, trust: bool = False) -> None:
    """Raises if the model of someone else's run would be downloaded or started, would be called at an unusual address,
    or is code. Any other TARGET is the user's."""
    if not is_run_config(target):
        return
    data: dict[str, Any] = load_yaml(target)
    origin, run = origin_of(target, data, trust), Path(target).parent
    if origin.trusted:
        return
    model = str(data.get("model", ""))
    kind, _, named = model.partition(":")
    if kind == "vllm" or (kind == "local" and not Path(named).expanduser().exists()):
        raise refusal(run, f"would download or start a model: {model}")
    check_script(model, origin)
    if is_behind_endpoint(model):
        _, endpoint = endpoint_of(model, convert(data.get("endpoint"), EndpointConfig, path="endpoint"))
        if (endpoint.base_url, endpoint.api_key_env) != (EndpointConfig().base_url, None):
            raise refusal(run, f"would call a server: {endpoint.base_url}")
