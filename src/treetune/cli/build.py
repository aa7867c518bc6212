"""`treetune build`: `train_tasks` and `val_tasks` to cached parquet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from treetune.datasets.taskset import DatasetTaskset


def build_command(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="A YAML file with train_tasks and val_tasks; a hydra recipe will do.")],
    format: Annotated[str, typer.Option(help="verl, skyrl or trl.")] = "verl",
    force: Annotated[bool, typer.Option("--force", help="Build again what is cached.")] = False,
    cache_dir: Annotated[
        Path | None, typer.Option(help="Else TREETUNE_TASK_CACHE_DIR, else ~/.cache/treetune/tasks.")
    ] = None,
    max_prompt_length: Annotated[
        int | None, typer.Option(min=1, help="Drop rows whose prompt has more tokens; needs --tokenizer.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="The tokenizer that counts: a folder or a name.")] = None,
    engine: Annotated[str, typer.Option(help="local, or ray to build on a Ray cluster.")] = "local",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Build the datasets of a config into cached parquet, and print where they are; for SkyRL, also the overrides that
    make it train on them.

    Keys are overridden with dots: --train_tasks[0].max_rows 100. Only train_tasks and val_tasks are looked at, so a
    trainer's own config can hold them.
    """
    from treetune.cli.output import console_for, print_json
    from treetune.cli.overrides import read_overrides
    from treetune.datasets.declared import read_declared
    from treetune.datasets.resolve import refuse_clashes, refuse_unscorable
    from treetune.errors import UsageError

    for name, value, choices in (("format", format, ("verl", "skyrl", "trl")), ("engine", engine, ("local", "ray"))):
        if value not in choices:
            raise UsageError(f"unknown {name} {value!r}", remedy=f"use {', '.join(choices)}")
    limits = {"max_prompt_length": max_prompt_length, "tokenizer": tokenizer}
    further = {key: value for key, value in limits.items() if value is not None}
    overrides = read_overrides(context, ("train_tasks", "val_tasks"))
    declared = read_declared(config, overrides, cache_dir=cache_dir, further=further)
    # SkyRL has environments of its own, which need not be known here.
    refuse_unscorable(declared.config, declared.lists, environments=format != "skyrl", source=config)
    console = console_for(json)
    entries: list[dict[str, Any]] = []
    for split, tasks in declared.lists.items():
        sidecars = []
        for task in tasks:
            sidecar, path, hit = _build(console, task, format, force, engine)
            sidecars.append(sidecar)
            entries.append(
                {
                    "split": split,
                    "name": task.name,
                    "path": str(path),
                    "hit": hit,
                    "rows": sidecar.rows,
                    "dropped": sidecar.dropped,
                    "seconds": 0.0 if hit else sidecar.seconds,
                }
            )
        refuse_clashes([task.name for task in tasks], sidecars)
    files = {f"{split}_files": [e["path"] for e in entries if e["split"] == split] for split in ("train", "val")}
    to_paste = _overrides(entries) if format == "skyrl" else None
    if json:
        print_json({**files, **({"overrides": to_paste} if to_paste is not None else {}), "tasks": entries})
        return
    for entry in entries:
        state = "hit" if entry["hit"] else f"miss, built in {entry['seconds']:.1f} s"
        say = f"{entry['split']:<5}  {entry['name']:<20} {entry['rows']:>10,} rows  {state}\n       {entry['path']}"
        console.print(say, markup=False, soft_wrap=True)
        for reason, count in entry["dropped"].items():
            if count:
                console.print(f"       {count:,} rows dropped: {reason}", markup=False, soft_wrap=True)
    if to_paste is not None:
        from treetune.trainers.skyrl_tasks import shell_words

        console.print(f"for SkyRL: {shell_words(to_paste)}", markup=False, highlight=False, soft_wrap=True)


def _overrides(entries: list[dict[str, Any]]) -> list[str]:
    from treetune.trainers.skyrl_tasks import cli_overrides

    return cli_overrides({split: [e["path"] for e in entries if e["split"] == split] for split in ("train", "val")})


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

        return task.built(format, force=force, engine=engine, on_rows=on_rows)
