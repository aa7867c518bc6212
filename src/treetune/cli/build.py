"""`treetune build`: any target to a trainer's rows, in cached parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treetune.cli.arguments import TRUST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from treetune.datasets.taskset import DatasetTaskset


def build_command(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            help="A YAML file with train_tasks and val_tasks (a hydra recipe will do), an id, config.yaml, "
            "file.py:Name, module:Name, or rows: a file, a folder or a hub name."
        ),
    ],
    format: Annotated[str, typer.Option(help="verl, skyrl or trl.")] = "verl",
    num_tasks: Annotated[
        int | None, typer.Option("-n", "--num-tasks", min=1, help="How many tasks; an infinite taskset needs it.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Build again what is cached.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Else TREETUNE_TASK_CACHE_DIR, else ~/.cache/treetune/tasks.")
    ] = None,
    max_prompt_length: Annotated[
        int | None, typer.Option(min=1, help="Drop rows whose prompt has more tokens; needs --tokenizer.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer that counts: a folder or a name.")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray to build on a Ray cluster.")] = "local",
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Build any tasks into a trainer's rows, in cached parquet, and print where they are; for SkyRL, also the overrides
    that make it train on them.

    Keys are overridden with dots: --train_tasks[0].max_rows 100, --taskset.level 2. Of a YAML file with train_tasks and
    val_tasks only these are looked at, so a trainer's own config can hold them.
    """
    from treetune.cli.output import console_for, print_json
    from treetune.errors import UsageError
    from treetune.rows.formats import format_named
    from treetune.target import refuse_server

    refuse_server(target, "build")
    format_named(format)
    if engine not in ("local", "ray"):
        raise UsageError(f"unknown engine {engine!r}", remedy="use local, ray")
    limits = {"max_prompt_length": max_prompt_length, "tokenizer": tokenizer}
    further = {key: value for key, value in limits.items() if value is not None}
    console = console_for(json)
    if _declares_lists(target):
        if num_tasks is not None:
            raise UsageError("-n is for a single taskset", remedy="set --train_tasks[0].max_rows instead")
        entries = _build_lists(context, console, target, format, force, cache_dir, further, engine)
    else:
        if further or engine != "local":
            raise UsageError(
                "--max-prompt-length, --tokenizer and --engine are for dataset tasks",
                remedy="declare train_tasks in YAML",
            )
        entries = [_build_target(context, console, target, format, num_tasks, force, cache_dir, trust)]
    from treetune.rows.kept_code import pop_kept_files

    for file in pop_kept_files():
        console_for(True).print(
            f"{file} scores these rows, and is kept in the cache: other nodes need the cache folder "
            "(TREETUNE_TASK_CACHE_DIR), or the class in an installed package",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    paths = {split: [e["path"] for e in entries if e["split"] == split] for split in ("train", "val")}
    report: dict[str, Any] = {f"{split}_files": files for split, files in paths.items()}
    if format == "skyrl":
        from treetune.trainers.skyrl.tasks import cli_overrides, shell_words

        report["overrides"] = cli_overrides(paths)
    if json:
        print_json({**report, "tasks": entries})
        return
    for entry in entries:
        took = f"built in {entry['seconds']:.1f} s"
        state = {True: "hit", False: f"miss, {took}", None: took}[entry["hit"]]
        say = f"{entry['split']:<5}  {entry['name']:<20} {entry['rows']:>10,} rows  {state}\n       {entry['path']}"
        console.print(say, markup=False, soft_wrap=True)
        for reason, count in entry["dropped"].items():
            if count:
                console.print(f"       {count:,} rows dropped: {reason}", markup=False, soft_wrap=True)
    if format == "skyrl":
        console.print(f"for SkyRL: {shell_words(report['overrides'])}", markup=False, highlight=False, soft_wrap=True)


def _declares_lists(target: str) -> bool:
    from treetune.config import load_yaml
    from treetune.datasets.declared import declares_tasks

    if Path(target).suffix not in (".yaml", ".yml"):
        return False
    # What else may be wrong with the file is reported by whoever reads it for its tasks.
    data = load_yaml(target)
    return declares_tasks(data) or "taskset" not in data


def _build_lists(
    context: typer.Context,
    console: Any,
    config: str,
    format: str,
    force: bool,
    cache_dir: Path | None,
    further: dict[str, Any],
    engine: str,
) -> list[dict[str, Any]]:
    from treetune.cli.arguments import read_overrides
    from treetune.datasets.declared import check_columns, read_declared
    from treetune.datasets.join import join_files
    from treetune.rows.formats import format_named
    from treetune.trainers.verl import Scoring, scoring_of, warn_of_unscored

    overrides = read_overrides(context, ("train_tasks", "val_tasks"))
    declared = read_declared(config, overrides, cache_dir=cache_dir, further=further)
    elsewhere = scoring_of(declared.config) is Scoring.OTHER
    _check_environments(declared.lists, format, config, scored=not elsewhere)
    if format_named(format).one_answer:
        warn_of_unscored(declared.config, declared.lists)
    check_columns(declared.lists, format, force=force, source=config)
    entries: list[dict[str, Any]] = []
    for split, tasks in declared.lists.items():
        files = join_files(tasks, [_build(console, task, format, force, engine) for task in tasks])
        entries += [_entry(split, task.name, *file) for task, file in zip(tasks, files, strict=True)]
    return entries


def _build_target(
    context: typer.Context,
    console: Any,
    target: str,
    format: str,
    num_tasks: int | None,
    force: bool,
    cache_dir: Path | None,
    trust: bool,
) -> dict[str, Any]:
    """One taskset, as the list to train on."""
    from treetune.cli.arguments import read_overrides, trusted
    from treetune.datasets.build import build_rows
    from treetune.datasets.taskset import DatasetTaskset
    from treetune.evaluation.config import refuse_unknown_keys
    from treetune.target import build_taskset, read_target

    overrides = read_overrides(context, ["taskset"]) | trusted(trust)
    data = read_target(target, overrides)
    refuse_unknown_keys(data, target)
    taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    if isinstance(taskset, DatasetTaskset) and num_tasks is None:
        if cache_dir is not None:
            taskset.cache_dir = cache_dir.expanduser().absolute()
        _check_environments({"taskset": [taskset]}, format, target)
        return _entry("train", taskset.name, *_build(console, taskset, format, force, "local"))
    sidecar, path = build_rows(taskset, format, num_tasks, cache_dir)
    return _entry("train", taskset.name, sidecar, path, None)  # its rows are made anew each time


def _check_environments(
    lists: Mapping[str, Sequence[DatasetTaskset]], format: str, source: str, *, scored: bool = True
) -> None:
    """Those that are not known, and those that the trainer cannot play; `scored`: nothing of the user's own scores."""
    from treetune.datasets.declared import check_environments, check_single_turns
    from treetune.rows.formats import format_named

    rows_format = format_named(format)
    # The trainer's own environments need not be known here.
    check_environments(lists, known=not rows_format.has_environments, source=source)
    if rows_format.one_answer and scored:
        check_single_turns(lists, source=source)


def _entry(split: str, name: str, sidecar: Any, path: Path, hit: bool | None) -> dict[str, Any]:
    return {
        "split": split,
        "name": name,
        "path": str(path),
        "hit": hit,
        "rows": sidecar.rows,
        "dropped": sidecar.dropped,
        "seconds": 0.0 if hit else sidecar.seconds,
    }


def _build(console: Any, task: DatasetTaskset, format: Any, force: bool, engine: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task(f"building {task.name}", total=None, speed="")

        def on_rows(done: int, total: int | None) -> None:
            speed = progress.tasks[0].speed
            shown = f"{speed:,.0f} rows/s" if speed else ""
            progress.update(bar, completed=done, total=total, speed=shown)

        return task.build(format, force=force, engine=engine, on_rows=on_rows)
