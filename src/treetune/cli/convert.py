"""`treetune convert`: the same tasks in another trainer's rows, or in another kind of file."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from treetune.cli.options import Json, NumTasks, option
from treetune.cli.output import Screen, print_json
from treetune.errors import UsageError
from treetune.rows.formats import format_named
from treetune.rows.reading import RowTasks, read_tasks
from treetune.rows.sources import names_taskset
from treetune.target import load_taskset, refuse_server
from treetune.validate import write_tasks


def convert_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="Files, folders, globs or hub datasets (name\\[@config]\\[:split]), or one taskset: an id, "
            "config.yaml, file.py:Name or module:Name; last the file to write: .parquet, .json or .jsonl.",
        ),
    ],
    to: Annotated[str, option("verl, skyrl or trl.", "--to", metavar="FORMAT")],
    from_: Annotated[
        str | None, option("The format of IN; else told by its columns.", "--from", metavar="FORMAT")
    ] = None,
    num_tasks: NumTasks = None,
    force: Annotated[bool, option("Overwrite OUT.", "--force")] = False,
    check: Annotated[
        bool, option("Write nothing that `treetune validate` calls an error.", "--check/--no-check")
    ] = True,
    json: Json = False,
) -> None:
    """Write the tasks of IN to OUT as a trainer's rows. Nothing is lost: converted back, they are equal."""
    if len(paths) < 2:
        raise UsageError("there is nothing to write to", remedy="treetune convert IN... OUT --to FORMAT")
    for name in (to, from_):
        if name is not None:
            format_named(name)
    *sources, target = paths
    out = Path(target).expanduser()
    if out.is_dir():
        raise UsageError(f"{target} is a folder", remedy=f"name a file in it, such as {out / 'rows.parquet'}")
    if out.exists() and not force:
        raise UsageError(f"{target} exists", remedy="pass --force to overwrite it")
    for source in sources:
        refuse_server(source, "convert")
    if len(sources) == 1 and names_taskset(sources[0]):
        taskset = load_taskset(sources[0])
        rows = write_tasks(taskset.draw(num_tasks), out, to, scorer=taskset, check=check)
    else:
        rows = write_tasks(RowTasks(islice(read_tasks(sources, from_), num_tasks)), out, to, check=check)
    if json:
        return print_json({"path": str(out), "rows": rows, "from": from_, "to": to})
    return Screen().say(f"{rows:,} rows as {to}: {out}")
