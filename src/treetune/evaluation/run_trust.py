"""Whether a run folder may be taken up: its `config.yaml` says what runs, and anybody may have written it.

    remember(Path("runs/x"))           # `eval`: the config in there is this user's
    refuse_foreign(Path("runs/x"))     # `rescore`, `eval --resume`: raises where it is not, and would run code

A config is known by a mark in the cache folder, made of what could do harm, not by where it lies. One without a mark
runs as far as it names only what is built in or installed, reads no variable and calls no server of its choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from treetune.config import CodeName, convert, declared_keys, load_yaml
from treetune.errors import UsageError
from treetune.plugins import environments, tasksets, tools
from treetune.policies import EndpointConfig, endpoint_of, is_behind_endpoint
from treetune.rows.trust import FILE, check_module, check_spec, code_folders, trusts
from treetune.runs.folder import CONFIG
from treetune.runs.run import no_run
from treetune.target import taskset_class
from treetune.task import Task, digest

_HARMFUL = ("taskset", "model", "endpoint")
_LOOK = "look at its config.yaml and at what that names, then pass --trust"


def remember(run: Path) -> None:
    """Marks the config of a run folder as this user's. Where the cache cannot be written, `--trust` is needed later."""
    mark = _mark_of(load_yaml(run / CONFIG))
    with suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def is_own(run: Path) -> bool:
    return _mark_of(load_yaml(run / CONFIG)).is_file()


def refuse_foreign(run: Path, *, trust: bool = False, calls_model: bool = False) -> None:
    """Raises where the config of a run folder is not this user's and would do more than score answers."""
    data = load_yaml(run / CONFIG)
    if trusts(trust) or _mark_of(data).is_file():
        return
    if any("${" in text for text in _texts_of(data)):
        raise _refusal(run, "reads variables of your environment")
    model = str(data.get("model", ""))
    kind, _, named = model.partition(":")
    if calls_model and (kind == "vllm" or (kind == "local" and not Path(named).expanduser().exists())):
        raise _refusal(run, f"would have a model downloaded or started: {model}")
    if calls_model and is_behind_endpoint(model):
        _, endpoint = endpoint_of(model, convert(data.get("endpoint"), EndpointConfig, path="endpoint"))
        if (endpoint.base_url, endpoint.api_key_env) != (EndpointConfig().base_url, None):
            raise _refusal(run, f"would have a server called: {endpoint.base_url}")
    for text in _texts_of(data.get("taskset")):
        if FILE.fullmatch(text.removeprefix("file://")):
            raise _refusal(run, f"names code: {text}")
        if "://" in text and not text.startswith("pkg://"):  # which would be sent your token
            raise _refusal(run, f"would have a server called: {text}")
    for node in nodes_of(data.get("taskset")):
        if node.get("trust"):
            raise _refusal(run, "has rows run the code that they name")
        for entry in [node["tools"]] if isinstance(node.get("tools"), Mapping) else node.get("tools") or []:
            if not isinstance(entry, str):  # its settings may be a command
                raise _refusal(run, f"has tools of its own: {entry!r:.80}")
            check_spec(entry, tools, what=f"the config of {run}")
        custom = node.get("custom_cls")
        place = str(custom.get("path") or "") if isinstance(custom, Mapping) else ""
        if place:
            check_module(place.removeprefix("pkg://").replace("/", "."), what=f"the config of {run}")
        check_spec(str(node.get("id", "")), tasksets, what=f"the config of {run}")
        if (cls := taskset_class(node)) is not None:  # which is installed
            for key in declared_keys(cls.config_type, CodeName):
                if isinstance(value := node.get(key), str):
                    check_spec(value, environments, what=f"the config of {run}")


def trust_rows(run: Path, trust: bool) -> dict[str, str]:
    """The override that lets the rows of a run name code, where it is a run of rows and they are trusted."""
    node = load_yaml(run / CONFIG).get("taskset")
    return {"taskset.trust": "true"} if trust and isinstance(node, dict) and node.get("id") == "rows" else {}


def take_up(run: Path, trust: bool) -> tuple[str, dict[str, str]]:
    """The TARGET of a run folder that is to be gone on with, and its overrides; refused as `refuse_foreign` does."""
    if not (run / CONFIG).is_file():
        raise no_run(run, own=True)
    refuse_foreign(run, trust=trust, calls_model=True)
    return str(run / CONFIG), trust_rows(run, trust)


def refuse_foreign_code(run: Path, task: Task) -> None:
    """A recorded task may name an environment and tools, of any code."""
    named = [(name, tools) for name in task.tools]
    if task.env_class is not None:
        named.append((task.env_class, environments))
    for name, registry in named:
        if FILE.fullmatch(name):
            raise _refusal(run, f"has a task that names code: {name}")
        check_spec(name, registry, what=f"a task of {run}")


def _refusal(run: Path, what: str) -> UsageError:
    return UsageError(f"{run} was not made by an `eval` of yours, and {what}", remedy=_LOOK)


def _mark_of(data: Mapping[str, Any]) -> Path:
    return code_folders()[0] / "runs" / digest([data.get(key) for key in _HARMFUL])


def _texts_of(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_of(item)


def nodes_of(node: Any) -> Iterator[Mapping[str, Any]]:
    """A taskset's node, and those of the sources that it mixes."""
    if isinstance(node, str):
        node = {"id": node}
    if isinstance(node, Mapping):
        yield node
        for source in node.get("sources") or []:
            yield from nodes_of(source)
