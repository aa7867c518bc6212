"""Exports tasks and runs: `treetune convert` writes files, `push` writes datasets on the hub, `export` writes packages
for another ecosystem."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from treetune.cli import options
from treetune.cli.options import TARGET, TASKS, Json, option, read_overrides
from treetune.cli.output import print_json
from treetune.data.sources.names import names_taskset
from treetune.errors import UsageError, plural, writing
from treetune.system.folders import aside
from treetune.system.hub import check_repo
from treetune.system.screen import Screen
from treetune.tasksets.target import load_taskset, refuse_server

export_app = typer.Typer(help="Write a TARGET as a package that another ecosystem loads.")


@export_app.callback()
def export_command() -> None:
    """Write a TARGET as a package that another ecosystem loads."""


@export_app.command("verifiers")
def verifiers_command(
    context: typer.Context,
    target: options.TasksTarget,
    to: Annotated[Path, option("The folder to write; its name becomes the name of the package.", "--to")],
    name: Annotated[
        str | None, option("The name of the package; by default, the name of the folder.", "--name")
    ] = None,
    split: options.Split = None,
    force: Annotated[
        bool, option("Overwrite a folder that holds another export, or that was changed.", "--force")
    ] = False,
    json: Json = False,
) -> None:
    """Write a TARGET as an installable package for verifiers: vf-eval, verifiers' environment server and prime-rl's
    orchestrator load it directly. Tasks, order and rewards are the same as in `treetune eval`.

    Keys that you override with dots are part of the package: --taskset.level 2. Your own code and data files are copied
    into it. Writing it does not need verifiers; Treetune and verifiers must be installed where the package runs.
    """
    from treetune.trainers.verifiers import export_package

    written = export_package(target, to, read_overrides(context, TASKS), name=name, split=split, force=force)
    if json:
        return print_json({**written._asdict(), "folder": str(written.folder)})
    screen = Screen()
    number = "tasks without end" if written.num_tasks is None else plural(written.num_tasks, "task")
    screen.say(f"{written.folder}: {number}, {len(written.files)} files")
    screen.say(f"install it:    pip install -e {to}")
    screen.say(
        f"try it:        vf-eval {written.id} -n 4 -m MODEL --no-push --client.base-url http://127.0.0.1:8000/v1 "
        "--client.api-key-var NO_KEY"
    )
    return screen.say(f'in prime-rl:   [orchestrator.train.source.env.taskset] id = "{written.id}"')


def convert_command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="IN... OUT",
            help="Files, folders, globs or hub datasets (name\\[@config]\\[:split]), or one taskset: an id, "
            "config.yaml, file.py:Name or module:Name; then the file to write: .parquet, .json or .jsonl. Or one run "
            "of any program, and a file: .eval for an Inspect log, .jsonl for its traces.",
        ),
    ],
    to: Annotated[
        str | None,
        option("For tasks: the format to write, verl, skyrl, trl or nemo-gym (.jsonl).", "--to", metavar="FORMAT"),
    ] = None,
    from_: Annotated[
        str | None, option("The format of IN; by default, it is detected from the columns.", "--from")
    ] = None,
    where: Annotated[str | None, option("For a run: only the rollouts that match a query.", metavar="QUERY")] = None,
    num_tasks: options.NumTasks = None,
    force: Annotated[bool, option("Overwrite OUT.", "--force")] = False,
    check: Annotated[bool, option("Refuse rows that `validate` reports as errors.", "--check/--no-check")] = True,
    json: Json = False,
) -> None:
    """Write the tasks of IN to OUT as a trainer's rows; converting them back gives equal tasks. Or write a run as an
    Inspect log."""
    from treetune.data.rows.formats import format_named
    from treetune.data.rows.reading import RowTasks, read_tasks
    from treetune.data.validate import write_tasks

    if len(paths) < 2:
        raise UsageError("no output file", remedy="treetune convert IN... OUT --to FORMAT, or RUN OUT.eval")
    *sources, target = paths
    out = Path(target).expanduser()
    if out.is_dir():
        raise UsageError(f"{target} is a folder", remedy=f"name a file in it, such as {out / 'rows.parquet'}")
    if out.exists() and not force:
        raise UsageError(f"{target} exists", remedy="pass --force to overwrite it")
    if to is None:
        return convert_run(sources, out, where, json)
    if where is not None:
        raise UsageError("--where applies to a run, --to to tasks", remedy="leave one of them out")
    for name in (to, from_):
        if name is not None:
            format_named(name)
    for source in sources:
        refuse_server(source, "convert")
    if len(sources) == 1 and names_taskset(sources[0]):
        taskset = load_taskset(sources[0])
        rows = write_tasks(taskset.draw(num_tasks), out, to, scorer=taskset, check=check)
    else:
        rows = write_tasks(RowTasks(islice(read_tasks(sources, from_), num_tasks)), out, to, check=check)
    if json:
        return print_json({"path": str(out), "rows": rows, "from": from_, "to": to})
    return Screen().say(f"{plural(rows, 'row')} as {to}: {out}")


def convert_run(sources: Sequence[str], out: Path, where: str | None, as_json: bool) -> None:
    """Writes one run, of any program, in the format that the file's ending implies."""
    from treetune.runs.discovery import find_run, open_run
    from treetune.runs.export import RunExport

    if out.suffix not in (".eval", ".jsonl"):
        remedy = "pass --to FORMAT for rows of tasks; a run is written to a file that ends with .eval or .jsonl"
        raise UsageError(f"{out}: unknown file type for a run", remedy=remedy)
    if len(sources) > 1:
        raise UsageError(f"only one run can be converted, not {len(sources)}", remedy="convert them one by one")
    if find_run(sources[0]) is None and not Path(sources[0]).is_dir():
        raise UsageError(f"{sources[0]} is not a run", remedy="pass --to FORMAT, if these are tasks")
    run = open_run(sources[0])
    out.parent.mkdir(parents=True, exist_ok=True)
    selection, temporary = RunExport(run, where or "", out.suffix.removeprefix(".")), aside(out)
    try:
        with writing(out, "name another file"):
            selection.write(temporary)
            temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    if as_json:
        return print_json({"path": str(out), "run": str(run.path), "kind": run.kind, "rollouts": len(selection)})
    screen = Screen()
    screen.say(f"{plural(len(selection), 'rollout')} of {run.path}: {out}")
    if out.suffix == ".eval":
        screen.say(f"view them: inspect view start --log-dir {out.parent}", style="dim")
    return None


def push_command(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET|RUN", help=f"{TARGET} Or a run folder.")],
    repo: Annotated[str, option("The dataset, user/name; created if it does not exist.", "--repo")],
    private: Annotated[bool, option("Create it as a private dataset.", "--private")] = False,
    format: options.Format = "verl",
    num_tasks: options.NumTasks = None,
    cache_dir: options.CacheDir = None,
    trust: options.Trust = False,
    json: Json = False,
) -> None:
    """Push tasks or a run to the hub, as a dataset that `load_dataset` reads, with a card.

    Tasks are first built as by `treetune build`; override keys with dots: --taskset.level 2. A run has a row for each
    rollout, and its own files. The token comes from HF_TOKEN or `hf auth login`.
    """
    from treetune.cli.build import build_target
    from treetune.data.rows.writing import push_rows
    from treetune.runs.discovery import find_run, open_run

    refuse_server(target, "push")
    check_repo(repo)
    screen = Screen(json)
    if find_run(target) is not None:
        run = open_run(target)
        url = run.push_to_hub(repo, private=private)
        rows, kind = len(run), "run"
    else:
        entries = build_target(context, target, format, screen, num_tasks=num_tasks, cache_dir=cache_dir, trust=trust)
        splits = {
            split: [Path(entry["path"]) for entry in entries if entry["split"] == split]
            for split in dict.fromkeys(entry["split"] for entry in entries)
        }
        words = ["treetune", "build", target, "--format", format, *(["-n", str(num_tasks)] if num_tasks else [])]
        words += [word for key, value in context.obj.items() for word in (f"--{key}", value)]
        title = ", ".join(dict.fromkeys(entry["name"] for entry in entries))
        url = push_rows(splits, repo, title=title, command=shlex.join(words), format=format, private=private)
        rows, kind = sum(entry["rows"] for entry in entries), "tasks"
    if json:
        return print_json({"repo": repo, "url": url, "kind": kind, "rows": rows, "private": private})
    return screen.say(f"{plural(rows, 'row')}: {url}")
