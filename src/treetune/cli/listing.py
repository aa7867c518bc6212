"""`treetune list`: what is installed, and what can be configured."""

from __future__ import annotations

from typing import Annotated, Any

import typer


def list_command(
    name: Annotated[
        str | None, typer.Argument(help="A taskset: show what its config takes. With --servers: a register.")
    ] = None,
    servers: Annotated[
        bool,
        typer.Option(
            "--servers", help="The running servers in a register, a folder or URL (default: TREETUNE_SERVERS)."
        ),
    ] = False,
    matrix: Annotated[
        bool, typer.Option("--matrix", help="What works where: targets by verbs, kinds of tasks by trainers.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds that each of the --servers has to answer.")] = 2.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """What is installed: tasksets, environments, models. With a NAME: the keys of that taskset's config.

    treetune list --servers FOLDER_OR_URL shows the servers that run, and how they are.
    """
    from treetune.cli.output import console_for, print_json
    from treetune.plugins import environments, tasksets
    from treetune.policies import KINDS

    if servers:
        from treetune.cli.register import list_servers

        return list_servers(name, timeout, json)
    if matrix:
        from treetune.cli.matrix import as_text, cells

        return print_json(cells()) if json else print(as_text())
    if name is not None:
        return _describe(name, json)
    found = {
        "tasksets": {id: {"from": origin, "about": _about(tasksets, id)} for id, origin in tasksets.names().items()},
        "environments": {
            id: {"from": origin, "about": _about(environments, id)} for id, origin in environments.names().items()
        },
        "models": {kind: {"about": about} for kind, about in KINDS.items()},
    }
    if json:
        return print_json(found)
    from rich.table import Table
    from rich.text import Text

    console = console_for(False)
    for kind, entries in found.items():
        table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=kind, title_justify="left")
        table.title_style = "bold"
        for id, entry in sorted(entries.items()):
            origin = entry.get("from", "")
            table.add_row(id, Text(entry["about"]), Text("" if origin == "built in" else origin))
        console.print(table)
    console.print("[dim]treetune list NAME shows a taskset's keys; treetune show NAME its tasks[/dim]")
    return None


def _about(registry: Any, id: str) -> str:
    """The first line of the module's docstring."""
    import importlib
    import inspect

    from treetune.cli.requirements import missing_extra

    try:
        cls = registry.resolve(id)
    except Exception as error:  # a broken package of somebody else must not break the list
        return f"cannot be loaded: {error}"
    doc = inspect.getdoc(cls) if cls.__doc__ else None
    doc = doc or inspect.getdoc(importlib.import_module(cls.__module__)) or ""
    extra = missing_extra(cls)
    missing = f" Not installed: pip install 'treetune[{extra}]'" if extra else ""
    return doc.partition("\n")[0] + missing


def _describe(name: str, json: bool) -> None:
    from treetune.cli.output import console_for, print_json
    from treetune.config import defaults_of, field_docs
    from treetune.plugins import tasksets
    from treetune.target import taskset_class

    cls: Any = taskset_class({"id": name})
    docs = field_docs(cls.config_type)
    defaults = defaults_of(cls.config_type)
    keys: dict[str, dict[str, Any]] = {
        key: {"default": defaults.get(key), "required": key not in defaults, "about": docs.get(key, "")}
        for key in cls.config_type.__struct_fields__
        if key != "extra"
    }
    flags = {flag: getattr(cls, flag) for flag in ("INFINITE", "NEEDS_CONTAINER")}
    if json:
        return print_json({"id": name, "about": _about(tasksets, name), "flags": flags, "config": keys})
    from rich.table import Table
    from rich.text import Text

    console = console_for(False)
    console.print(Text(_about(tasksets, name)))
    console.print(Text("  ".join(f"{flag}: {value}" for flag, value in flags.items()), style="dim"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("key", "default", "meaning"):
        table.add_column(heading)
    for key, entry in keys.items():
        name = "shuffle.seed" if key == "shuffle" else key
        table.add_row(
            f"--taskset.{name}", Text("required" if entry["required"] else str(entry["default"])), Text(entry["about"])
        )
    console.print(table)
    return None
