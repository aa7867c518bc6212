"""`treetune compare`: compares two or more runs, paired by task, and tests the difference against chance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from treetune import evaluation as evaluating
from treetune.cli.options import Json, option
from treetune.cli.output import make_table, print_json
from treetune.config.structs import to_plain
from treetune.errors import UsageError
from treetune.evaluation import Comparison, Difference, TaskChange
from treetune.runs.discovery import open_run
from treetune.system.screen import Screen

_MOST_TASKS = 10


def compare_command(
    runs: Annotated[
        list[Path], typer.Argument(help="Runs of any program; each is compared with the first.", metavar="A B …")
    ],
    fail_on_regression: Annotated[bool, option("Exit with 1 if a run is worse than the first, beyond chance.")] = False,
    json: Json = False,
) -> int:
    """Compare runs of the same tasks: which is better, by how much, and whether that could be chance.

    Tasks are paired. The difference is shown with its standard error and its p-value: the probability that chance alone
    gives a difference at least as large.
    """
    if len(runs) < 2:
        raise UsageError("only one run to compare", remedy="pass two: treetune compare runs/a runs/b")
    first, *others = map(open_run, runs)
    found = [evaluating.compare(first, other) for other in others]
    if json:
        print_json({"comparisons": [plain_comparison(each) for each in found]})
    else:
        screen = Screen()
        for number, comparison in enumerate(found):
            if number:
                screen.say("")
            show_comparison(comparison, screen)
    return int(fail_on_regression and any(comparison.is_loss for comparison in found))


def plain_comparison(found: Comparison) -> dict[str, Any]:
    return {**to_plain(found), "is_loss": found.is_loss}


def show_comparison(found: Comparison, screen: Screen) -> None:
    names = [f"{path}  {model}".rstrip() for path, model in zip((found.before, found.after), found.models, strict=True)]
    screen.print(make_table(zip(("before", "after"), names, strict=True)))
    rows = [_row("mean reward", found.scored)] if found.scored is not None else []
    rows += [_row("over all", found.over_all)]
    rows += [_row(f"  {name}", difference) for name, difference in found.sources.items()]
    numbers = ("tasks", "before", "after")
    screen.print(make_table(rows, ("", *numbers, "difference", "p"), right=numbers))
    screen.say(found.verdict, style="bold")
    counts = (
        f"{len(found.fixed)} tasks are solved more often, {len(found.broken)} less often, {found.unchanged} as often"
    )
    lonely = [f"{count} only {where}" for count, where in ((found.only_before, "before"), (found.only_after, "after"))]
    missing = ", ".join(text for text in lonely if not text.startswith("0 "))
    screen.say(f"{counts}{f'; {missing}' if missing else ''}")
    for title, tasks in (("less often", found.broken), ("more often", found.fixed)):
        if tasks:
            rows = [_task_row(task) for task in tasks[:_MOST_TASKS]]
            table = make_table(rows, (title, "source", "solved", "reward", "uid"))
            screen.print(table)
            if len(tasks) > _MOST_TASKS:
                screen.say(f"  and {len(tasks) - _MOST_TASKS} more (--json has them all)", style="dim")
    for change in found.config:
        screen.say(f"config: {change}", style="dim")


def _row(name: str, difference: Difference) -> tuple[str, ...]:
    error = "" if difference.stderr is None else f" ± {difference.stderr:.4f}"
    p = f"{difference.p_value:.4f}" if difference.p_value >= 0.0001 else "<0.0001"
    changed = f"{difference.difference:+.4f}{error}"
    return name, f"{difference.tasks:,}", f"{difference.before:.4f}", f"{difference.after:.4f}", changed, p


def _task_row(task: TaskChange) -> tuple[str, ...]:
    def figure(value: float | None) -> str:
        return "failed" if value is None else f"{value:.2f}"

    solved = f"{task.solved_before:.2f} -> {task.solved_after:.2f}"
    reward: Any = f"{figure(task.before)} -> {figure(task.after)}"
    return f"task {task.task}", task.source, solved, reward, task.uid[:12]
