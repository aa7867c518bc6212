"""`treetune sandbox`: shows which sandboxes this machine supports, and builds root file systems for them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.filesize import decimal
from rich.markup import escape

from treetune.cli.options import Json, option
from treetune.cli.output import print_json
from treetune.errors import UsageError
from treetune.system.screen import Screen

sandbox_app = typer.Typer()


@sandbox_app.command("build")
def build_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to create; it must not exist yet.")],
    suite: Annotated[str, option("The Debian release.")] = "bookworm",
    include: Annotated[str, option("Additional packages: gcc,git,...")] = "",
    variant: Annotated[str, option("The size of the system: minbase, important, standard.")] = "minbase",
    mirror: Annotated[str | None, option("The mirror of packages. Default: Debian's own.")] = None,
    json: Json = False,
) -> None:
    """Build a root file system in a folder, with Debian's mmdebstrap.

    Use it with `--taskset.rootfs DIR` (os-interaction) or `Shell.open(rootfs=DIR)`. The folder appears when it is
    complete; if the build is interrupted, start it again.
    """
    from treetune.sandbox.rootfs import Recipe, build

    wanted = {"suite": suite, "include": [name for name in include.split(",") if name], "variant": variant}
    try:
        recipe = msgspec.convert({**wanted, "mirror": mirror}, Recipe)
    except msgspec.ValidationError as error:
        raise UsageError(str(error), remedy="name suites, variants and packages as Debian does") from error
    screen = Screen(json)
    with screen.status(f"{suite}: starting") as status:

        def say(line: str) -> None:
            status.update(f"{suite}: {escape(line[:200])}")
            if not screen.is_terminal:
                screen.say(line)

        built = build(folder, recipe, say=say)
    screen.say(f"{built.folder}: {built.suite}, {built.files} files, {decimal(built.size)}, made by {built.tool}")
    if json:
        print_json(built)


@sandbox_app.command("check")
def check_command(
    rootfs: Annotated[Path | None, option("A root file system to test.")] = None, json: Json = False
) -> int:
    """Show what this machine supports: one-shot commands, shells, a Docker engine, and what enforces each limit.

    Exit code 0: sandboxes start here; 1: they do not.
    """
    from treetune.sandbox.machines import survey

    good, parts = asyncio.run(survey(None if rootfs is None else str(rootfs)))
    screen = Screen(json)
    for part in parts:
        colour, word = ("green", "yes") if part.works else ("yellow", "no")
        screen.print(f"[bold]{part.name}[/]: [{colour}]{word}[/]")
        for line in part.text.splitlines():
            screen.say(f"  {line}")
    if json:
        print_json({"good": good, "parts": parts})
    return 0 if good else 1
