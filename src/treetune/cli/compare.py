"""`treetune compare`: compares two or more runs, paired by task, and tests the difference against chance. Also the end
of every verb that plays: the figures of its run, the warnings, and the run's location."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from treetune import evaluation as evaluating
from treetune.cli.options import Json, option
from treetune.cli.output import figure, make_table, print_json
from treetune.config.structs import to_plain
from treetune.errors import UsageError, plural
from treetune.evaluation import Comparison, Difference, TaskChange
from treetune.runs.discovery import open_run
from treetune.runs.run import is_run
from treetune.runs.summary import Summary
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
    gives one as large.
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


def summary_table(summary: Summary) -> RenderableType:
    """The figures of a run and, if it has several sources, a table with a line for each."""
    error = "" if summary.stderr is None else f" ± {summary.stderr:.4f} (standard error)"
    rows = {
        "mean reward": f"{figure(summary.mean_reward)}{error} over {summary.scored} scored",
        "over all": f"{figure(summary.mean_reward_all)}, with failed rollouts counted as 0",
    }
    if summary.pass_at_k:
        rows["pass@k"] = _figures(summary.pass_at_k)
        if summary.pass_at_k != summary.pass_at_k_all:
            rows["pass@k over all"] = _figures(summary.pass_at_k_all)
    rows["rollouts"] = f"{summary.scored} scored of {summary.rollouts}, {plural(summary.tasks, 'task')}"
    rows["outcomes"] = "  ".join(f"{name}: {count}" for name, count in summary.outcomes.items())
    figures = [*rows.items(), *((name, f"{value:.4f}") for name, value in summary.metrics.items())]
    if summary.completion_tokens:
        figures.append(("tokens", f"{summary.prompt_tokens} in, {summary.completion_tokens} out"))
    if summary.retries:
        figures.append(("retries", f"{summary.retries} calls repeated (429, 5xx, cut connections, timeouts)"))
    if summary.judge_calls:
        tokens = f"{summary.judge_prompt_tokens} tokens in, {summary.judge_completion_tokens} out"
        hits = f"{summary.judge_cache_hits} of them from the cache"
        figures.append(("judges", f"{summary.judge_calls} calls, {hits}; {tokens}"))
    table = make_table((Text(name, style="bold"), value) for name, value in figures)
    if len(summary.data_sources) < 2:
        return table
    numbers = ("tasks", "rollouts", "scored", "mean reward", "over all")
    sources = [
        (
            name,
            *(f"{count:,}" for count in (source.tasks, source.rollouts, source.scored)),
            *(figure(source.mean_reward), figure(source.mean_reward_all)),
        )
        for name, source in summary.data_sources.items()
    ]
    return Group(table, "", make_table(sources, ("source", *numbers), right=numbers))


def runs_table(runs: Sequence[tuple[str, str, Summary]]) -> RenderableType:
    """A line for each run: its taskset, its model and its figures."""
    numbers = ("mean", "±", "over all", "pass@1", "scored", "failed")
    rows = []
    for taskset, model, summary in runs:
        means = summary.mean_reward, summary.stderr, summary.mean_reward_all, summary.pass_at_k.get("1")
        rows.append((taskset, model, *map(figure, means), f"{summary.scored:,}", f"{summary.errors:,}"))
    return make_table(rows, ("taskset", "model", *numbers), right=numbers)


def _figures(chances: dict[str, float]) -> str:
    return "  ".join(f"{k}: {value:.3f}" for k, value in chances.items())


def show_warnings(summary: Summary, screen: Screen) -> None:
    for text in summary.warnings:
        screen.say(f"warning: {text}", style="yellow")


def run_to_end(work: Coroutine[Any, Any, object]) -> bool:
    """Runs the work; returns False if Ctrl-C ended it, so that the finished part is shown."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return False
    return True


def finish(
    show: Callable[[], None], figures: dict[str, Any], faults: bool, stopped: str | None, screen: Screen, json: bool
) -> int:
    """Shows the figures of a run, or of the part that was played; returns the exit code. `stopped` is the hint after an
    interruption."""
    if json:
        print_json({**figures, "interrupted": stopped is not None})
    else:
        if figures.get("rollouts") != 0:
            show()
        _tell_run(Path(figures["run_dir"]), bool(figures.get("errors")), screen)
    if stopped is not None:
        screen.say(stopped)
        return 130
    return 1 if faults else 0


def _tell_run(folder: Path, has_failures: bool, screen: Screen) -> None:
    """Shows where a run is, and how to view it."""
    screen.say(f"run folder: {folder}")
    if is_run(folder):
        name = shlex.quote(str(folder))
        failures = f"look at the failures: treetune show {name} --failed"
        screen.say(failures if has_failures else f"look at it: treetune show {name}")
        screen.say(f"in a browser: treetune view {name}")
