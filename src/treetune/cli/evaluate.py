"""`treetune eval`: runs a policy on tasks, saves traces, shows a summary. `treetune rescore`: rescores saved traces.

Every verb that plays rollouts ends in the same way: with the figures of its run, the warnings, and the run's
location."""

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
from treetune.chat.images import name_all
from treetune.cli import options
from treetune.cli.compare import plain_comparison, show_comparison
from treetune.cli.options import TARGET, Json, complete_model, complete_target, option, read_overrides
from treetune.cli.output import figure, make_table, print_json
from treetune.config.structs import dump_yaml, to_plain, without_none
from treetune.errors import UsageError, plural
from treetune.evaluation.live import Display
from treetune.loggers import open_loggers
from treetune.runs.folder import TRACES, RunFolder, name_run, unused_path
from treetune.runs.run import is_run, no_run
from treetune.runs.summary import Summary
from treetune.system.screen import Screen
from treetune.tasksets.target import is_server, read_target

_MOST_SHOWN = 40
"""Rollouts of a preview, in the terminal."""


def eval_command(
    context: typer.Context,
    targets: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TARGET...",
            help=f"{TARGET} With several, each is a run. Omit it with --resume -o DIR.",
            autocompletion=complete_target,
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        option(
            "scripted:gold, local:PATH, vllm:MODEL, anthropic/NAME, or a model at --endpoint.base_url. "
            "Repeatable: each is a run, and the runs are compared.",
            "-m",
            "--model",
            autocompletion=complete_model,
        ),
    ] = None,
    agent: options.Agent = None,
    num_tasks: options.NumTasks = None,
    task: Annotated[
        list[str] | None,
        option("Only the task with this index, as shown by `treetune show`. Repeatable.", "--task", metavar="INDEX"),
    ] = None,
    num_rollouts: Annotated[int | None, option("Rollouts per task (1).", "-r", "--num-rollouts")] = None,
    max_concurrent: options.MaxConcurrent = None,
    pass_threshold: options.PassThreshold = None,
    max_judge_tokens: options.MaxJudgeTokens = None,
    max_tokens_total: Annotated[
        int | None,
        option("Start no more rollouts once the model and judges together have used this many tokens.", min=1),
    ] = None,
    split: options.Split = None,
    output: options.Output = None,
    resume: options.Resume = False,
    rescore: Annotated[bool, option("With --resume: score again, after a scorer changed.", "--rescore")] = False,
    server: Annotated[str | None, option("Evaluate on the server at this address, which replaces TARGET.")] = None,
    serve: Annotated[int | None, option("Start a server with this many workers and evaluate on it.", min=1)] = None,
    log: options.Log = None,
    dry_run: Annotated[bool, option("Show the resolved config and the first task; run nothing.", "--dry-run")] = False,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Evaluate a model on a taskset and save every trace.

    With several models or TARGETs, each is a run in one folder, and the models of a taskset are compared with the
    first.

    Set keys of the config with dots: --taskset.level 2, --sampling.temperature 0.7, --limits.timeout 60,
    --endpoint.base_url http://127.0.0.1:8000/v1, --agent.limits.calls 50
    """
    from_run = resume and not targets and server is None and output is not None
    overrides = read_overrides(context, trust=trust and not from_run)
    if resume and output is None:
        raise UsageError("--resume needs a run folder", remedy="pass -o DIR")
    if rescore and not resume:
        raise UsageError("--rescore requires --resume", remedy="`treetune rescore DIR` scores a run into a new folder")
    if server is not None:
        if targets:
            raise UsageError("--server has its own taskset", remedy="leave out TARGET")
        if not is_server(server):
            raise UsageError(f"cannot connect to {server!r}", remedy="write tcp://HOST:PORT or http://HOST:PORT")
        targets = [server]
    group = evaluating.RunSet(output) if output is not None else None
    known = group.take_up() if from_run and group is not None and group.exists else None
    sizes = {"num_tasks": num_tasks, "num_rollouts": num_rollouts, "max_concurrent": max_concurrent}
    ceilings = {"max_judge_tokens": max_judge_tokens, "max_tokens_total": max_tokens_total}
    given = without_none(
        {
            "pass_threshold": pass_threshold,
            "tasks": _read_indices(task or []) or None,
            **sizes,
            **ceilings,
        }
    )

    def read(target: str, model: str | None, further: dict[str, str]) -> evaluating.EvalPlan:
        raw = overrides | further
        if model is None:
            evaluating.refuse_foreign_model(target, trust)
        data = {"model": "", **read_target(target, raw, split), **given, **without_none({"model": model})}
        data = options.with_agent(data, agent)
        evaluation = evaluating.read_config(data, evaluating.EvalConfig, raw, target)
        return evaluating.EvalPlan(evaluation, workers=serve, loggers=open_loggers(log or ()))

    if targets:
        plans = [read(target, name, {}) for target in targets for name in (models or (None,))]
    elif from_run and output is not None:
        if models is not None and (len(models) > 1 or known is not None):
            raise UsageError("-m is ambiguous with several runs", remedy="pass the TARGET too")
        model = models[0] if models else None
        taken = [evaluating.take_up(folder, trust) for folder in known or [output]]
        plans = [read(target, model, of_rows) for target, of_rows in taken]
    else:
        raise UsageError("nothing to evaluate", remedy="pass a TARGET; `treetune list` shows them")
    if dry_run:
        return _show_plans(plans, json)
    screen = Screen(json)
    how = {"resume": resume, "rescore": rescore, "trust": trust}
    if len(plans) > 1 or (group is not None and group.exists):
        group = group or evaluating.RunSet.named_after(plans)
        return _evaluate_set(group, plans, None if known is None else [path.name for path in known], screen, json, how)
    (plan,) = plans
    path = output or name_run(plan.evaluation.taskset.name, plan.model)
    interrupted = not play(plan, path, screen, **how)
    summary = plan.tally.summary()
    figures = {**to_plain(summary), "errors": summary.errors, "run_dir": str(path)}
    faults = bool(summary.errors) or summary.stopped is not None
    stopped = _show_end(plan, summary, path, interrupted, screen)
    return finish(lambda: screen.print(summary_table(summary)), figures, faults, stopped, screen, json)


def _show_end(plan: evaluating.EvalPlan, summary: Summary, path: Path, interrupted: bool, screen: Screen) -> str | None:
    """Shows whether there were fewer tasks than `-n`, the warnings, and whether a token limit was reached; returns the
    hint after an interruption."""
    config, expected = plan.evaluation.config, plan.tally.expected
    asked = None if config.tasks else config.num_tasks
    if asked is not None and expected is not None and (tasks := expected // config.num_rollouts) < asked:
        screen.say(f"there are only {tasks:,} tasks; -n is {asked:,}")
    show_warnings(summary, screen)
    go_on = f"resume with: treetune eval --resume -o {shlex.quote(str(path))}"
    if summary.stopped is not None:
        screen.say(f"stopped: {summary.stopped}; {go_on} and a higher limit", style="yellow")
    return f"interrupted; {go_on}" if interrupted else None


def _evaluate_set(
    group: evaluating.RunSet,
    plans: list[evaluating.EvalPlan],
    names: list[str] | None,
    screen: Screen,
    json: bool,
    how: dict[str, bool],
) -> int:
    """Plays several plans one after the other, and compares their runs."""
    for plan in plans:
        plan.check()
        plan.check_model()
    played: list[tuple[str, str, Summary]] = []
    figures: list[dict[str, Any]] = []
    interrupted = False
    with group.begin(plans, names, **how) as paths:
        for number, (plan, path) in enumerate(zip(plans, paths, strict=True), 1):
            interrupted = not run_to_end(plan.play(_watch(screen, f"{number} of {len(plans)}")))
            summary, taskset = plan.tally.summary(), plan.evaluation.taskset.name
            played.append((taskset, plan.model, summary))
            about = {"taskset": taskset, "model": plan.model, "run_dir": str(path)}
            figures.append({**about, **to_plain(summary), "errors": summary.errors})
            mean = figure(summary.mean_reward)
            screen.say(f"{number} of {len(plans)}: {taskset} by {plan.model}: mean reward {mean}", style="bold")
            stopped = _show_end(plan, summary, group.path, interrupted, screen)
            if interrupted:
                break
    found = [] if interrupted else group.compare()

    def show() -> None:
        screen.print(runs_table(played))
        for comparison in found:
            screen.say("")
            show_comparison(comparison, screen)

    report = {"run_dir": str(group.path), "runs": figures, "comparisons": [plain_comparison(each) for each in found]}
    faults = any(summary.errors or summary.stopped is not None for _, _, summary in played)
    return finish(show, report, faults, stopped, screen, json)


def _show_plans(plans: list[evaluating.EvalPlan], json: bool) -> int:
    for plan in plans:
        plan.check_model()
    found = [(plan.evaluation, plan.first_task()) for plan in plans]
    if json:
        shown = [{"config": each.resolved(), "first_task": to_plain(first)} for each, first in found]
        print_json(shown[0] if len(shown) == 1 else {"runs": shown})
        return 0
    screen = Screen()
    for evaluation, first in found:
        config = evaluation.config
        screen.say(dump_yaml(evaluation.resolved()))
        screen.say(f"first task: {name_all(first.messages)}")
        of = "all tasks" if config.num_tasks is None else plural(config.num_tasks, "task")
        screen.say(f"would run {of} x {plural(config.num_rollouts, 'rollout')}; nothing was run")
    return 0


def play(plan: evaluating.EvalPlan, path: Path, screen: Screen, **how: bool) -> bool:
    """Plays the rollouts that the run in `path` lacks; returns whether it finished. `how` is passed to
    `EvalPlan.begin`."""
    plan.check()
    plan.load()
    with plan.begin(path, **how):
        return run_to_end(plan.play(_watch(screen)))


def _watch(screen: Screen, place: str = "") -> evaluating.Watch:
    def show(plan: evaluating.EvalPlan, done: int) -> Display:
        if (again := plan.rescored) is not None:
            screen.say(f"rescored: {again.changed} of {again.after.rollouts} rewards changed")
        return Display(screen, plan.evaluation, done, place)

    return show


def _read_indices(words: list[str]) -> list[int]:
    for word in words:
        if not word.isdecimal():
            remedy = f"TARGET needs no flag: treetune eval {shlex.quote(word)}"
            raise UsageError(f"--task takes the index of a task, not {word!r}", remedy=remedy)
    return [int(word) for word in words]


def rescore_command(
    run: Annotated[Path, typer.Argument(help="A run folder, from `treetune eval` or `serve --traces`.")],
    output: Annotated[Path | None, option("The new run folder (RUN/rescored).", "-o", "--output")] = None,
    dry_run: Annotated[bool, option("Write nothing; show the new rewards and what changes.", "--dry-run")] = False,
    where: Annotated[
        str | None, option("With --dry-run: only rollouts that match a query, such as 'source=gsm8k'.")
    ] = None,
    num_rollouts: Annotated[
        int | None, option("With --dry-run: at most this many rollouts.", "-n", "--num-rollouts", min=1)
    ] = None,
    max_judge_tokens: options.MaxJudgeTokens = None,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Score saved traces again after a scorer changed, without the model. The old run is not changed."""
    if not dry_run and (where is not None or num_rollouts is not None):
        raise UsageError("--where and -n require --dry-run", remedy="add --dry-run, or leave them out")
    config = run / "config.yaml"
    if not config.exists() or not (run / TRACES.file).exists():
        raise no_run(run, own=True)
    data = read_target(str(config), {"taskset.trust": "true"} if trust else {})
    ceilings = {"max_judge_tokens": max_judge_tokens, "max_tokens_total": None}  # not those of the run
    evaluation = evaluating.read_config({**data, **ceilings}, evaluating.EvalConfig, source=str(config))
    evaluating.refuse_unservable(evaluation.taskset)
    if dry_run:
        preview = evaluating.RescorePreview(evaluation, run, where or "", num_rollouts, trust)
        return _show_preview(preview, run_to_end(preview.run_all()), json)
    path = output or unused_path(run / "rescored")
    with RunFolder.create(path, TRACES, evaluation) as folder:
        rescorer = evaluating.Rescorer(evaluation, run, folder, trust)
        interrupted = not run_to_end(rescorer.run_all())
    summary = rescorer.compare()
    screen = Screen(json)
    if not json:
        means = (summary.before.mean_reward, summary.before.mean_reward_all)
        mean = " and over all: ".join(map(figure, means))
        skipped = f"; {summary.skipped} failed rollouts have nothing to score" if summary.skipped else ""
        screen.say(f"scored by {config} and the files that it names")
        screen.say(f"{summary.changed} of {summary.after.rollouts} rewards changed; mean before: {mean}{skipped}")
        if summary.diverged:
            what = "rollouts diverged: the environment now replies differently than it was recorded"
            screen.say(f"{summary.diverged} {what}", style="yellow")
    show_warnings(summary.after, screen)
    stopped = f"interrupted: only a part was rescored; {run} is unchanged" if interrupted else None
    after, figures = summary.after, {**to_plain(summary), "run_dir": str(path)}
    if after.stopped is not None:
        screen.say(f"stopped: {after.stopped}; only a part was rescored: {evaluating.MORE}", style="yellow")
    faults = bool(after.errors) or after.stopped is not None
    return finish(lambda: screen.print(summary_table(after)), figures, faults, stopped, screen, json)


def _show_preview(preview: evaluating.RescorePreview, ended: bool, json: bool) -> int:
    rows = sorted(preview.rows, key=lambda row: row.at)
    code = 130 if not ended else int(preview.failed > 0)
    if json:
        figures = {"changed": preview.changed, "failed": preview.failed, "left": preview.left}
        print_json({"rows": rows, **figures, "interrupted": not ended})
        return code
    screen, changed = Screen(), [row for row in rows if row.before != row.after]
    lines = [
        (f"{row.task}/{row.rollout}", figure(row.before, "g"), figure(row.after, "g"), " ".join(row.why.split())[:60])
        for row in changed[:_MOST_SHOWN]
    ]
    if lines:
        screen.print(make_table(lines, ("rollout", "before", "after", "why"), right=("before", "after")))
    more = f" ({len(changed) - _MOST_SHOWN} not shown; --json has all)" if len(changed) > _MOST_SHOWN else ""
    left = f"; {preview.left} more match" if preview.left else ""
    stop = "interrupted: " if not ended else ""
    screen.say(f"{stop}{len(changed)} of {len(rows)} rewards would change{more}{left}; nothing was written")
    return code


# The end of a verb that plays


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
