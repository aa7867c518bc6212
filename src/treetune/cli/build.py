"""`treetune build`: converts tasks to a trainer's rows, in cached parquet."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from treetune.cli import options
from treetune.cli.options import Json, option, read_overrides
from treetune.cli.output import print_json
from treetune.config.structs import load_yaml, without_none
from treetune.data.datasets.selection import dropped_for
from treetune.data.rows.agent_column import AGENT, LOOP, says_nothing
from treetune.data.rows.code_store import pop_kept_files
from treetune.data.rows.formats import format_named
from treetune.errors import UsageError, plural
from treetune.system.screen import Screen
from treetune.tasksets.target import locate, refuse_server

if TYPE_CHECKING:
    from treetune.data.datasets.list_files import Share
    from treetune.data.datasets.taskset import DatasetTaskset


def build_command(
    context: typer.Context,
    target: Annotated[str, options.target("A YAML file with train_tasks and val_tasks (also hydra's), or any TARGET.")],
    format: options.Format = "verl",
    num_tasks: options.NumTasks = None,
    force: Annotated[bool, option("Build again, even if it is cached.", "--force")] = False,
    cache_dir: options.CacheDir = None,
    max_prompt_length: options.MaxPromptLength = None,
    tokenizer: options.Tokenizer = None,
    engine: Annotated[str, option("Where to build: local, or ray for a Ray cluster.")] = "local",
    trust: options.Trust = False,
    json: Json = False,
) -> None:
    """Build tasks into a trainer's rows, in cached parquet, and print the paths of the files. For SkyRL, also print the
    overrides that make it train on them. A TARGET is an id, config.yaml, file.py:Name, module:Name, or rows.

    Override keys with dots: --train_tasks[0].max_rows 100, --taskset.level 2. In a YAML file with train_tasks and
    val_tasks only these keys are read, so they can be part of a trainer's own config.
    """
    refuse_server(target, "build")
    if engine not in ("local", "ray"):
        raise UsageError(f"unknown engine {engine!r}", remedy="use local, ray")
    further = without_none({"max_prompt_length": max_prompt_length, "tokenizer": tokenizer})
    screen = Screen(json)
    entries = build_target(
        context,
        target,
        format,
        screen,
        num_tasks=num_tasks,
        force=force,
        cache_dir=cache_dir,
        further=further,
        engine=engine,
        trust=trust,
    )
    _report(entries, format, screen, json, cache_dir)


def build_target(
    context: typer.Context,
    target: str,
    format: str,
    screen: Screen,
    *,
    num_tasks: int | None = None,
    force: bool = False,
    cache_dir: Path | None = None,
    further: Mapping[str, Any] = {},
    engine: str = "local",
    trust: bool = False,
) -> list[dict[str, Any]]:
    """Builds a target with its dotted overrides; returns an entry for each file. `further` and `engine` apply to
    dataset tasks."""
    target = locate(target)
    if not format_named(format).in_parquet:
        remedy = f"treetune convert {target} rows{format_named(format).endings[0]} --to {format}"
        raise UsageError(f"{format} does not read parquet, which `build` writes", remedy=remedy)
    build_lists = partial(_build_lists, screen=screen, source=target, format=format, force=force, engine=engine)
    if _declares_lists(target):
        from treetune.data.datasets.list_files import draws_by_weight
        from treetune.data.datasets.task_lists import read_declared

        overrides = read_overrides(context, ("train_tasks", "val_tasks"))
        lists = read_declared(target, overrides, cache_dir=cache_dir, further=further)
        if num_tasks is not None and not draws_by_weight([task.config.weight for task in lists.get("train", [])]):
            remedy = "set --train_tasks[0].max_rows instead"
            raise UsageError("-n applies to a single taskset, or to train_tasks with weights", remedy=remedy)
        entries = build_lists(lists, load_yaml(target), num_draws=num_tasks)
    elif further or engine != "local":
        problem = "--max-prompt-length, --tokenizer and --engine apply only to dataset tasks"
        raise UsageError(problem, remedy="declare train_tasks in YAML")
    else:
        from treetune.data.datasets.build import build_rows
        from treetune.data.datasets.taskset import DatasetTaskset
        from treetune.evaluation import read_taskset

        taskset = read_taskset(target, read_overrides(context, ["taskset"], trust=trust))
        if isinstance(taskset, DatasetTaskset) and num_tasks is None:
            if cache_dir is not None:
                taskset.cache_dir = cache_dir.expanduser().absolute()
            entries = build_lists({"taskset": [taskset]}, {})
        else:
            built = build_rows(taskset, format, num_tasks, cache_dir)
            entries = [_entry("train", taskset.name, *built, None, [])]  # its rows are created again each time
    for file in pop_kept_files():
        Screen(as_json=True).say(
            f"these rows name {file} in the cache: other nodes need the same cache folder (TREETUNE_TASK_CACHE_DIR), "
            "or the code in an installed package"
        )
    return entries


def _declares_lists(target: str) -> bool:
    if Path(target).suffix not in (".yaml", ".yml"):
        return False
    from treetune.data.datasets.task_lists import declares_tasks

    # Other errors in the file are reported when its tasks are read.
    data = load_yaml(target)
    return declares_tasks(data) or "taskset" not in data


def _build_lists(
    lists: Mapping[str, Sequence[DatasetTaskset]],
    config: Any,
    *,
    screen: Screen,
    source: str,
    format: str,
    num_draws: int | None = None,
    **how: Any,
) -> list[dict[str, Any]]:
    """Builds lists of dataset tasks for one trainer; returns an entry of the report for each file. `config` is the
    trainer's config, if there is one: it may name what scores the rows."""
    from treetune.data.datasets.list_files import build_files
    from treetune.data.datasets.task_lists import check_columns, check_environments
    from treetune.trainers.verl import name_agents, warn_of_unscored

    rows_format = format_named(format)
    # Environments of the trainer may be unknown here.
    check_environments(lists, known=not rows_format.has_environments, source=source)
    if rows_format.one_answer:
        warn_of_unscored(config, lists)
    check_columns(lists, format, force=how["force"], source=source)
    agents = name_agents(lists, config) if rows_format.one_answer else {}
    entries: list[dict[str, Any]] = []
    for name, tasks in lists.items():
        build = partial(_build, screen, format=format, how=how)
        draws = num_draws if name == "train" else None
        files = build_files(tasks, format, agents.get(name), num_draws=draws, build=build)
        split = "train" if name == "taskset" else name
        entries += [_entry(split, *file) for file in files]
    return entries


def _build(screen: Screen, task: DatasetTaskset, format: str, how: dict[str, Any]) -> Any:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with screen.progress(*columns, TaskProgressColumn(show_speed=True), TimeRemainingColumn()) as progress:
        bar = progress.add_task(f"building {task.name}", total=None)
        return task.build(format, on_rows=lambda done, total: progress.update(bar, completed=done, total=total), **how)


def _entry(
    split: str, name: str, sidecar: Any, path: Path, hit: bool | None, shares: Sequence[Share]
) -> dict[str, Any]:
    figures = {"rows": sidecar.rows, "dropped": sidecar.dropped, "flaws": sidecar.flaws}
    figures["seconds"] = 0.0 if hit else sidecar.seconds
    named = AGENT in sidecar.schema
    drawn = {"shares": [msgspec.to_builtins(share) for share in shares]} if shares else {}
    return {"split": split, "name": name, "path": str(path), "hit": hit, **figures, **drawn, "agent": named}


def _report(
    entries: list[dict[str, Any]], format: str, screen: Screen, json: bool, cache_dir: Path | None = None
) -> None:
    played = [entry.pop("agent") for entry in entries]
    paths = {split: [e["path"] for e in entries if e["split"] == split] for split in ("train", "val")}
    report: dict[str, Any] = {f"{split}_files": files for split, files in paths.items()}
    if format == "skyrl":
        from treetune.trainers.skyrl import cli_overrides, shell_words

        report["overrides"] = cli_overrides(paths)
    elif format == "verl":
        from treetune.trainers.verl import DEFAULT_LOOP, LOOPS, write_loops

        silent = any(says_nothing(entry["path"]) for entry in entries)
        if silent or any(played):
            report["overrides"] = [f"{LOOPS}={write_loops(cache_dir=cache_dir)}"]
        if silent:  # verl uses the default if rows name no loop
            report["overrides"].append(f"{DEFAULT_LOOP}={LOOP}")
    if json:
        return print_json({**report, "tasks": entries})
    for entry in entries:
        took = f"built in {entry['seconds']:.1f} s"
        state = {True: "hit", False: f"miss, {took}", None: took}[entry["hit"]]
        rows = f"{entry['rows']:>10,} {'row ' if entry['rows'] == 1 else 'rows'}"
        screen.say(f"{entry['split']:<5}  {entry['name']:<20} {rows}  {state}")
        screen.say(f"       {entry['path']}")
        for share in entry.get("shares", ()):
            draws, rows = share["draws"], share["rows"]
            which = f"{draws:,} of its {rows:,} rows" if draws < rows else f"its {rows:,} rows {draws / rows:.1f} times"
            screen.say(
                f"       {share['name']:<20} {draws / entry['rows']:>10.1%}  {which} (weight {share['weight']:g})"
            )
        warned = {flaw.what for flaw in entry["flaws"]}
        for reason, count in entry["dropped"].items():
            if count and (what := dropped_for(reason)) not in warned:
                screen.say(f"       {plural(count, 'row')} {what}")
    if format == "skyrl":
        screen.say(f"for SkyRL: {shell_words(report['overrides'])}")
    elif "overrides" in report:
        screen.say(
            f"for verl, which plays these rows with the agent loop `treetune`: {shlex.join(report['overrides'])}"
        )
    return None
