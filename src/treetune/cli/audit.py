"""`treetune audit`: checks whether a task is worth training on."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TextColumn, TimeElapsedColumn
from rich.text import Text

from treetune import audit, evaluation
from treetune.cli import options
from treetune.cli.options import Json, Target, option, read_overrides
from treetune.cli.output import make_table, print_json
from treetune.config.interpolation import with_overrides
from treetune.config.structs import convert, load_yaml, to_plain, without_none
from treetune.core.finding import print_findings
from treetune.core.taskset import Taskset
from treetune.errors import UsageError, plural
from treetune.models import EndpointConfig, check_reachable, load_policy
from treetune.models.scripted import Echo
from treetune.play.host import LocalHost, always
from treetune.play.protocol import Host
from treetune.system.screen import Screen
from treetune.tasksets.target import is_server

_PLAIN_SECONDS = 5.0
"""How often the progress is logged."""


def audit_command(
    context: typer.Context,
    target: Target,
    num_tasks: Annotated[int, option("How many tasks to try.", "-n", "--num-tasks", min=1)] = 50,
    model: Annotated[
        str,
        option(
            "Also check rollouts of this model: any model of `eval`, or one that the tcp:// server serves.",
            "-m",
            "--model",
        ),
    ] = "",
    num_rollouts: Annotated[int, option("Rollouts of the model per task.", "-r", "--num-rollouts", min=1)] = 4,
    max_concurrent: Annotated[int, option("Concurrent rollouts.", "-c", "--max-concurrent", min=1)] = 16,
    seed: Annotated[int, option("The seed for choosing tasks and for random policies.")] = 0,
    split: options.Split = None,
    val: Annotated[str | None, option("The other split: a TARGET that must not share any task with this one.")] = None,
    rules: Annotated[list[str] | None, option("Try only these rules or families. Repeatable.", metavar="NAME")] = None,
    skip: Annotated[list[str] | None, option("Skip these rules or families. Repeatable.", metavar="NAME")] = None,
    html: Annotated[Path | None, option("Also write the report as an HTML page.", metavar="FILE")] = None,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Check whether a task is worth training on: play gold answers and policies that solve nothing, and look for leaks.

    Families of rules: solvable, not-free, no-leak, spread (with -m), costs; docs/audit.md explains each rule. Only
    `spread` needs a model. Every finding has a rule, a severity, tasks, evidence and a remedy. The exit code is 1 if
    there are errors; warnings and notes do not count. If a config has train_tasks and val_tasks, `train` is audited
    and compared with `val`.
    """
    overrides = read_overrides(context, trust=trust)
    own = {key: raw for key, raw in overrides.items() if key.split(".")[0] in ("sampling", "limits", "endpoint")}
    of_taskset = {key: raw for key, raw in overrides.items() if key not in own}
    split, other_split = _splits(target, split)
    taskset = evaluation.read_taskset(target, of_taskset, split)
    settings = _read_settings(own)
    config = convert(
        {
            "target": target,
            "num_tasks": num_tasks,
            "num_rollouts": num_rollouts,
            "max_concurrent": max_concurrent,
            "seed": seed,
            "model": model,
            "rules": rules or [],
            "skip": skip or [],
            **without_none({"sampling": settings.get("sampling"), "limits": settings.get("limits")}),
        },
        audit.AuditConfig,
    )
    audit.choose(config.rules, config.skip)  # raises for an unknown name before anything is played
    other = _read_other(target, of_taskset, val, other_split)
    endpoint = convert(settings.get("endpoint", {}), EndpointConfig)
    screen = Screen(json)
    served = evaluation.find_served(taskset)
    if served is not None:
        asyncio.run(evaluation.ask_server(served))
        if val is not None:
            raise UsageError("--val cannot compare the tasks of a server", remedy="pass the taskset that it serves")
        evaluation.refuse_unserved(model, served.models)
    else:
        evaluation.refuse_unservable(taskset)
        evaluation.check_judges(taskset)
    if model and (served is None or served.models is None):
        check_reachable(model, endpoint)
    report = asyncio.run(_audit(taskset, config, other, endpoint, screen))
    if html is not None:
        audit.write_page(report, html)
    if json:
        plain = {**to_plain(report), "findings": list(map(audit.finding_to_json, report.findings))}
        del plain["chosen"]
        print_json({"sound": report.ok, **plain, "by_rule": report.by_rule})
    else:
        _print(report, screen)
        if html is not None:
            screen.say(f"page: {html}")
    return 0 if report.ok else 1


def _splits(target: str, split: str | None) -> tuple[str | None, str | None]:
    """For a config with two lists: the list to audit, and the list to compare it with."""
    if is_server(target) or Path(target).suffix not in (".yaml", ".yml"):
        return split, None
    lists = [name for name in ("train", "val") if load_yaml(target).get(f"{name}_tasks")]
    if len(lists) < 2:
        return split, None
    chosen = split or "train"
    return chosen, next((name for name in lists if name != chosen), None)


def _read_other(
    target: str, overrides: dict[str, str], val: str | None, split: str | None
) -> tuple[Taskset[Any, Any], str] | None:
    if val is not None:
        return evaluation.read_taskset(val, {}), val
    return None if split is None else (evaluation.read_taskset(target, overrides, split), split)


def _read_settings(overrides: dict[str, str]) -> dict[str, dict[str, Any]]:
    return with_overrides({"sampling": {}, "limits": {"max_turns": 100, "timeout": 120.0}, "endpoint": {}}, overrides)


async def _audit(
    taskset: Taskset[Any, Any],
    config: audit.AuditConfig,
    other: tuple[Taskset[Any, Any], str] | None,
    endpoint: EndpointConfig,
    screen: Screen,
) -> audit.AuditReport:
    next_line = time.monotonic() + _PLAIN_SECONDS

    def show(stage: str, done: int) -> None:
        nonlocal next_line
        progress.update(bar, description=stage, completed=done)
        if not screen.is_terminal and time.monotonic() >= next_line:
            next_line = time.monotonic() + _PLAIN_SECONDS
            print(f"{stage}: {done:,} rollouts so far", file=sys.stderr, flush=True)

    columns = TextColumn("{task.description}: {task.completed:,} rollouts"), TimeElapsedColumn()
    with screen.progress(*columns) as progress:
        bar = progress.add_task("beginning", total=None)
        auditor = audit.Auditor(
            taskset,
            config,
            other=other[0] if other else None,
            other_name=other[1] if other else "",
            elsewhere=evaluation.find_served(taskset) is not None,
            on_progress=show,
        )
        async with _open_host(taskset, config, endpoint) as host:
            return await auditor.run(host)


@asynccontextmanager
async def _open_host(
    taskset: Taskset[Any, Any], config: audit.AuditConfig, endpoint: EndpointConfig
) -> AsyncIterator[Host]:
    """The host that has the tasks and plays the model: this process, or a pull server with models."""
    async with AsyncExitStack() as opened:
        if (served := evaluation.find_served(taskset)) is not None:
            await opened.enter_async_context(aclosing(served))
            await served.learn()
            if served.models is not None:
                yield served.client
                return
        policy = load_policy(config.model, taskset, endpoint) if config.model else Echo()
        opened.push_async_callback(policy.close)
        host = await LocalHost.open(taskset, always(policy), config.limits)
        opened.push_async_callback(host.close)
        yield host


def _print(report: audit.AuditReport, screen: Screen) -> None:
    of = "of no end" if report.num_tasks is None else f"of {report.num_tasks:,}"
    screen.say(f"{report.name}: {plural(len(report.tasks), 'task')} {of}, seed {report.seed}, {report.seconds:.1f} s")
    print_findings(report.findings, screen)
    for _, headings, rows in audit.list_tables(report):
        screen.print(make_table(rows, headings, right=audit.NUMBERS))
    if report.not_tried:
        by_cause: dict[str, list[str]] = {}
        for rule, why in report.not_tried.items():
            by_cause.setdefault(why, []).append(rule)
        for why, names in by_cause.items():
            screen.say(f"not tried, {why}: {', '.join(names)}", style="dim")
    screen.print(Text(report.verdict, style="bold green" if report.ok else "bold red"))
