"""`treetune export`: a TARGET as a package of another ecosystem's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treetune.cli import options
from treetune.cli.options import TASKS, Json, option, read_overrides
from treetune.cli.output import print_json
from treetune.errors import plural
from treetune.system.screen import Screen

export_app = typer.Typer(help="Write a TARGET as a package that another ecosystem loads.")


@export_app.callback()
def export_command() -> None:
    """Write a TARGET as a package that another ecosystem loads."""


@export_app.command("verifiers")
def verifiers_command(
    context: typer.Context,
    target: options.TasksTarget,
    to: Annotated[Path, option("The folder to write; its name becomes that of the package.", "--to")],
    name: Annotated[str | None, option("The name of the package, where the folder's will not do.", "--name")] = None,
    split: options.Split = None,
    force: Annotated[bool, option("Write over a folder that is another export, or was changed.", "--force")] = False,
    json: Json = False,
) -> None:
    """Write a TARGET as an installable package of verifiers: vf-eval, verifiers' environment server and prime-rl's
    orchestrator load it as it is. Tasks, order and rewards are those of `treetune eval`.

    Keys are overridden with dots, and are part of the package: --taskset.level 2. Code and data files of your own are
    copied into it. Needs no verifiers; where the package runs, Treetune and verifiers must be installed.
    """
    from treetune.trainers.verifiers import export_package

    written = export_package(target, to, read_overrides(context, TASKS), name=name, split=split, force=force)
    if json:
        return print_json(
            {
                "folder": str(written.folder),
                "id": written.id,
                "infinite": written.infinite,
                "num_tasks": written.num_tasks,
                "files": written.files,
            }
        )
    screen = Screen()
    number = "tasks without end" if written.num_tasks is None else plural(written.num_tasks, "task")
    screen.say(f"{written.folder}: {number}, {len(written.files)} files")
    screen.say(f"install it:    pip install -e {to}")
    screen.say(
        f"try it:        vf-eval {written.id} -n 4 -m MODEL --no-push --client.base-url http://127.0.0.1:8000/v1 "
        "--client.api-key-var NO_KEY"
    )
    return screen.say(f'in prime-rl:   [orchestrator.train.source.env.taskset] id = "{written.id}"')
