"""`treetune list`: shows what is installed, what can be configured, and what works where."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from rich.text import Text

from treetune.chat.tokens import NO_IMAGES
from treetune.cli import options
from treetune.cli.options import Json, option
from treetune.cli.output import make_table, print_json
from treetune.config.plugins import Registry, environments, find_ready, find_ready_file, ready_names, tasksets, tools
from treetune.config.structs import defaults_of, field_docs, load_yaml
from treetune.config.trust import USER
from treetune.core.agent import OWN_HARNESSES, OWN_LOOP
from treetune.core.contract import ONE_REWARD, SCORED_ALONE
from treetune.core.from_config import taskset_class
from treetune.data.rows.formats import IN_PARQUET
from treetune.errors import TreetuneError, format_error
from treetune.models import SPELLINGS
from treetune.system.screen import Screen
from treetune.tasksets.target import NEEDS_TASKS
from treetune.trainers.verifiers import ALREADY_THERE, ONE_ADVANTAGE


def list_command(
    name: Annotated[
        str | None, options.target("A taskset, to show its config keys, or a ready set, to show its file.")
    ] = None,
    register: Annotated[str | None, option("List the servers in this register: a folder or a URL.")] = None,
    servers: Annotated[
        bool, option("List the servers in the register that TREETUNE_SERVERS names.", "--servers")
    ] = False,
    matrix: Annotated[bool, option("Show what works where: targets, tasks, verbs, trainers.", "--matrix")] = False,
    timeout: Annotated[float, option("Timeout for each server's answer, in seconds.", min=0.01)] = 2.0,
    json: Json = False,
) -> None:
    """List what is installed: tasksets, ready-made sets, environments, tools, models. With a NAME, show the config keys
    of that taskset, or the file of that ready set.

    With --register FOLDER_OR_URL, list running servers and their health.
    """
    if register is not None or servers:
        from treetune.cli.servers import list_servers

        return list_servers(register or name, timeout, json)
    if matrix:
        return print_json(cells()) if json else print(as_text())
    if name is not None:
        return (_describe_ready if find_ready(name) else _describe)(name, json)
    found = {
        "tasksets": _installed(tasksets),
        "ready": {name: _describe_set(name) for name in ready_names() if not tasksets.has(name)},
        "environments": _installed(environments),
        "tools": _installed(tools),
        "models": {spelling: {"about": about} for spelling, about in SPELLINGS.items()},
    }
    if json:
        return print_json(found)
    screen = Screen()
    for kind, entries in found.items():
        table = make_table((id, entry["about"], *_origin(entry)) for id, entry in sorted(entries.items()))
        table.title, table.title_justify, table.title_style = kind, "left", "bold"
        screen.print(table)
    return screen.say("treetune list NAME shows a taskset's keys; treetune show NAME its tasks", style="dim")


def _origin(entry: Mapping[str, str]) -> tuple[str, ...]:
    """Its origin; for data, also its licence."""
    if "licence" in entry:
        return entry["licence"], entry["source"].removeprefix("https://")
    return (entry.get("from", "").removeprefix("built in"),)


def _describe_set(name: str) -> dict[str, str]:
    """The description in the file of a ready set. A file that cannot be read must not break the list."""
    file = str(find_ready_file(name))
    try:
        data = load_yaml(file)
    except TreetuneError as error:
        data = {"about": f"cannot be read: {error}"}
    said = {key: " ".join(str(data.get(key) or "").split()) for key in ("about", "licence", "source", "convention")}
    return {**said, "file": file}


def _installed(registry: Registry) -> dict[str, dict[str, str]]:
    return {id: {"from": origin, "about": _about(registry, id)} for id, origin in registry.names().items()}


def _about(registry: Registry, id: str) -> str:
    """The first line of the docstring of the class or its module, and the extra that is missing."""
    try:
        cls = registry.resolve(id, USER)
    except Exception as error:  # another, broken package must not break the list
        return f"cannot be loaded: {format_error(error.__cause__ or error)}"
    doc = inspect.getdoc(cls) if cls.__doc__ else None
    doc = doc or inspect.getdoc(inspect.getmodule(cls)) or ""
    extra = missing_extra(cls)
    missing = f" Not installed: pip install 'treetune[{extra}]'" if extra else ""
    return doc.partition("\n")[0] + missing


def missing_extra(cls: type) -> str | None:
    """The extra that a taskset's class names as `EXTRA`, if it is not installed."""
    extra: str | None = getattr(cls, "EXTRA", None)
    return extra if extra is not None and find_spec(extra.replace("-", "_")) is None else None


def _describe_ready(name: str, json: bool) -> None:
    about = _describe_set(name)
    if json:
        return print_json({"id": name, **about})
    screen = Screen()
    screen.say(about["file"], style="dim")
    return screen.say(Path(about["file"]).read_text(encoding="utf-8").rstrip())


def _describe(name: str, json: bool) -> None:
    cls: Any = taskset_class({"id": name})
    docs, defaults = field_docs(cls.config_type), defaults_of(cls.config_type)
    keys: dict[str, dict[str, Any]] = {
        key: {"default": defaults.get(key), "required": key not in defaults, "about": docs.get(key, "")}
        for key in cls.config_type.__struct_fields__
        if key != "extra"
    }
    flags = {flag: getattr(cls, flag) for flag in ("INFINITE", "NEEDS_CONTAINER")}
    about = _about(tasksets, name)
    if json:
        return print_json({"id": name, "about": about, "flags": flags, "config": keys})
    screen = Screen()
    screen.print(Text(about))
    screen.say("  ".join(f"{flag}: {value}" for flag, value in flags.items()), style="dim")
    rows = []
    for key, entry in keys.items():
        shown = "required" if entry["required"] else str(entry["default"])
        rows.append((f"--taskset.{'shuffle.seed' if key == 'shuffle' else key}", shown, entry["about"]))
    return screen.print(make_table(rows, ("key", "default", "meaning")))


class TargetKind(StrEnum):
    """What a verb accepts as its target."""

    ID = "id"
    CONFIG = "config.yaml"
    PYTHON = "file.py:Name"
    ROWS = "rows"
    MIXTURE = "mixture"
    INFINITE = "infinite"
    VERIFIERS = "verifiers:ID"
    OPENENV = "openenv:URL"
    ORS = "ors:URL"
    SERVER = "server"


class TaskKind(StrEnum):
    """How a task is played and scored."""

    RULE = "ground truth"
    SCORER = "scorer"
    JUDGE = "judge"
    REWARD = "own reward"
    ENVIRONMENT = "environment, one turn"
    MULTI_TURN = "environment, several turns"
    TOOLS = "tools"
    IMAGES = "images"


class ContractKind(StrEnum):
    """What holds for an episode wherever it is played."""

    MANY_TURNS = "more than 10 turns"
    TURN_REWARDS = "rewards by turn"
    ONCE = "one rollout counts once"
    TURN_CREDIT = "credit by turn"
    DISCOUNT = "discount"
    GROUP_SCORE = "group score"
    METRICS = "own metrics"
    WEIGHTS = "mixture weights"
    AGENTS = "agents"


VERBS = (
    "show",
    "validate",
    "audit",
    "eval",
    "profile",
    *(f"build {format}" for format in IN_PARQUET),
    "convert",
    "serve",
    "train",
    "export",
)
BY_ADDRESS = ("show", "audit", "eval", "profile", "train")
"""The verbs that take the address of a server: `train` for trainers that play on one, TRL and AReaL."""
DOORS = ("ZMQ", "HTTP", "MCP", "OpenEnv", "ORS")
"""The protocols of `serve`."""
TRAINERS = ("verl", "SkyRL", "AReaL", "TRL", "TRL async", "slime", "verifiers")
PLAYERS = ("eval", *DOORS, *TRAINERS)
NO_PROMPT = "empty-prompt"
"""Tasks on other servers show their prompt when an episode starts: `build` starts one for each task, `convert` does
not."""


BY_CLIENTS = "clients play the episodes, so the agent is theirs"
NO_DISCOUNT = "the protocol has no field for it: rewards are as the task gives them"


def cells() -> dict[str, dict[str, dict[str, bool | str]]]:
    """By table, row and column: True, or a part of the error message."""

    def table(rows: type[StrEnum], columns: Sequence[str], refused: Mapping[Any, str]) -> Any:
        return {str(row): {column: refused.get((row, column), True) for column in columns} for row in rows}

    not_there = {(TargetKind.SERVER, verb): NEEDS_TASKS for verb in VERBS if verb not in BY_ADDRESS}
    not_there[TargetKind.VERIFIERS, "export"] = ALREADY_THERE
    for kind in (TargetKind.OPENENV, TargetKind.ORS):
        not_there[kind, "convert"] = NO_PROMPT
    refused = {
        (TaskKind.IMAGES, "AReaL"): NO_IMAGES,
        (TaskKind.IMAGES, "TRL async"): NO_IMAGES,
        (TaskKind.IMAGES, "slime"): NO_IMAGES,
    }
    lost = {(ContractKind.TURN_REWARDS, place): ONE_REWARD for place in TRAINERS if place not in ("verl", "SkyRL")}
    lost[ContractKind.TURN_CREDIT, "verifiers"] = ONE_ADVANTAGE
    alone = (*(door for door in DOORS if door != "ZMQ"), "SkyRL", "AReaL", "slime", "verifiers")
    lost |= {(ContractKind.GROUP_SCORE, place): SCORED_ALONE for place in alone}
    lost |= {(ContractKind.DISCOUNT, place): NO_DISCOUNT for place in ("MCP", "OpenEnv", "ORS")}
    lost |= {(ContractKind.AGENTS, door): BY_CLIENTS for door in DOORS if door != "ZMQ"}
    lost |= {(ContractKind.AGENTS, "SkyRL"): OWN_LOOP, (ContractKind.AGENTS, "verifiers"): OWN_HARNESSES}
    return {
        "target": table(TargetKind, VERBS, not_there),
        "task": table(TaskKind, PLAYERS, refused),
        "contract": table(ContractKind, PLAYERS, lost),
    }


def as_text() -> str:
    """The tables as Markdown, each followed by what is refused and the error."""
    parts = []
    for table, rows in cells().items():
        lines = [[table, *next(iter(rows.values()))]]
        lines += [[row, *("yes" if cell is True else "no" for cell in found.values())] for row, found in rows.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        parts.append("\n".join(f"| {' | '.join(map(str.ljust, line, widths))} |" for line in lines))
        refused: dict[tuple[str, str], list[str]] = {}
        for row, found in rows.items():
            for column, words in found.items():
                if isinstance(words, str):
                    refused.setdefault((row, words), []).append(column)
        parts += [f"- {row}: {', '.join(columns)}: {words}" for (row, words), columns in refused.items()]
    return "\n\n".join(parts)
