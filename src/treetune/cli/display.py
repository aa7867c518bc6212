"""What a person sees of an evaluation: a live display on a terminal, plain lines elsewhere, figures at its end."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Self

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from treetune.cli.output import Screen, print_json
from treetune.cli.tables import make_table
from treetune.errors import plural
from treetune.evaluation import Evaluation, Summary, Tally, is_run
from treetune.trace import Outcome, Trace

_PLAIN_SECONDS = 5.0
_LATEST = 8
_NARROW = 70
_LONGEST_VALUE = 60

_COLOURS = {
    Outcome.COMPLETED: "green",
    Outcome.TRUNCATED: "yellow",
    Outcome.TIMEOUT: "magenta",
    Outcome.CANCELLED: "dim",
    Outcome.STALE: "dim",
}


class Display:
    """On a terminal, live: the overridden settings, a bar with mean reward and errors, the latest rollouts. Elsewhere,
    for logs: a line at the start, one for each of the first errors, and one every few seconds."""

    def __init__(self, screen: Screen, evaluation: Evaluation, done: int, place: str = "") -> None:
        """`place` says which of several runs it is (`2 of 3`); its display then goes away at the end."""
        self._screen = screen
        config, taskset = evaluation.config, evaluation.taskset
        # How many rollouts there will be, where that can be known without building every task.
        count = taskset._size() if not taskset.INFINITE and taskset.random_access else None
        known = [number for number in (config.num_tasks, count) if number is not None]
        self._total = min(known) * config.num_rollouts if known else None
        self._next = time.monotonic() + _PLAIN_SECONDS
        self._latest: deque[Text] = deque(maxlen=_LATEST)
        counts = (MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
        # A narrow terminal has room for the figures only.
        bar, times = BarColumn(bar_width=None), (TimeElapsedColumn(), TimeRemainingColumn())
        columns = counts if screen.width < _NARROW else (bar, *counts, *times)
        self._progress = Progress(*columns, console=screen)
        self._bar = self._progress.add_task("", total=self._total, completed=done, state="")
        settings = [_setting(key, value) for key, value in evaluation.overridden().items()]
        above = Text("\n".join([*([f"run {place}"] if place else []), *settings]))
        self._live = Live(
            get_renderable=lambda: Group(above, self._progress, *self._latest),
            console=screen,
            refresh_per_second=8,
            transient=bool(place),
        )
        if not screen.is_terminal:
            begun = f" ({done} rollouts done already)" if done else ""
            screen.say(f"evaluating {f'({place}) ' if place else ''}{' '.join(settings)}{begun}")

    def __enter__(self) -> Self:
        if self._screen.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._screen.is_terminal:
            self._live.stop()

    def on_trace(self, trace: Trace, tally: Tally) -> None:
        mean = "-" if tally.mean_reward is None else f"{tally.mean_reward:.3f}"
        over_all = f" ({tally.mean_reward_all:.3f} over all)" if tally.errors else ""
        retries = f"  retries {tally.retries}" if tally.retries else ""
        total, state = tally.expected or self._total, f"reward {mean}{over_all}  errors {tally.errors}{retries}"
        if self._screen.is_terminal:
            self._latest.append(_rollout_line(trace))
            self._progress.update(self._bar, completed=tally.rollouts, total=total, state=state)
            return
        if not trace.scored and tally.errors <= 3:
            self._screen.say(_rollout_line(trace).plain)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PLAIN_SECONDS
            self._screen.say(f"{tally.rollouts}/{total or '?'} {state}")


def _setting(key: str, value: Any) -> str:
    """On one line: a prompt may have several, and a scorer a rubric."""
    text = " ".join(str(value).split())
    return f"{key}={text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + '…'}"


def _rollout_line(trace: Trace) -> Text:
    what = trace.answer or trace.explanation or ""
    if (failure := trace.failure) is not None:
        what = failure.told
    what = what.partition("\n")[0]
    return Text.assemble(
        # The reward early: a narrow terminal cuts the end.
        f"task {trace.task.idx:<6} r{trace.rollout:<3} ",
        f"{'-' if trace.reward is None else format(trace.reward, '.2f'):>6}  ",
        (f"{trace.outcome.value:<18}", _COLOURS.get(trace.outcome, "red")),
        f"{trace.timing.total:7.2f}s  ",
        what if len(what) <= 80 else what[:79] + "…",
        no_wrap=True,
    )


def summary_table(summary: Summary) -> RenderableType:
    """A run's figures; below them, where there are several sources, a table with a line for each."""
    error = "" if summary.stderr is None else f" ± {summary.stderr:.4f} (standard error)"
    rows = {
        "mean reward": f"{_figure(summary.mean_reward)}{error} over {summary.scored} scored",
        "over all": f"{_figure(summary.mean_reward_all)}, where a failed rollout counts as 0",
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
        hits = f"{summary.judge_cache_hits} of them known already"
        figures.append(("judges", f"{summary.judge_calls} calls, {hits}; {tokens}"))
    table = make_table((Text(name, style="bold"), value) for name, value in figures)
    if len(summary.data_sources) < 2:
        return table
    numbers = ("tasks", "rollouts", "scored", "mean reward", "over all")
    sources = [
        (
            name,
            *(f"{count:,}" for count in (source.tasks, source.rollouts, source.scored)),
            *(_figure(source.mean_reward), _figure(source.mean_reward_all)),
        )
        for name, source in summary.data_sources.items()
    ]
    return Group(table, "", make_table(sources, ("source", *numbers), right=numbers))


def runs_table(runs: Sequence[tuple[str, str, Summary]]) -> RenderableType:
    """A line for each of several runs: its taskset, its model, and what it amounts to."""
    numbers = ("mean", "±", "over all", "pass@1", "scored", "failed")
    rows = []
    for taskset, model, summary in runs:
        means = summary.mean_reward, summary.stderr, summary.mean_reward_all, summary.pass_at_k.get("1")
        rows.append((taskset, model, *map(_figure, means), f"{summary.scored:,}", f"{summary.errors:,}"))
    return make_table(rows, ("taskset", "model", *numbers), right=numbers)


def _figure(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.4f}"


def _figures(chances: dict[str, float]) -> str:
    return "  ".join(f"{k}: {value:.3f}" for k, value in chances.items())


def show_warnings(summary: Summary, screen: Screen) -> None:
    for text in summary.warnings:
        screen.say(f"warning: {text}", style="yellow")


def run_to_end(work: Coroutine[Any, Any, object]) -> bool:
    """Runs it; gives False where Ctrl-C ended it, and what was done until then is to be shown."""
    try:
        asyncio.run(work)
    except KeyboardInterrupt:
        return False
    return True


def finish(
    show: Callable[[], None], figures: dict[str, Any], faults: bool, stopped: str | None, screen: Screen, json: bool
) -> int:
    """Reports what a run amounts to, or the part of it that there is; gives the exit code. `stopped` says what to do
    after an interruption."""
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
    """Where a run is, and how to look at it."""
    from treetune.cli.app import VERBS  # which loads this module

    screen.say(f"run folder: {folder}")
    if is_run(folder):
        name = shlex.quote(str(folder))
        failures = f"look at the failures: treetune show {name} --failed"
        screen.say(failures if has_failures else f"look at it: treetune show {name}")
        if "view" in VERBS:
            screen.say(f"in a browser: treetune view {name}")
