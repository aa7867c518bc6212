"""`treetune eval`: run a policy on tasks, save traces, show a summary; `treetune rescore`: score saved traces again."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from treetune import evaluation as evaluating
from treetune.cli import options
from treetune.cli.display import Display, finish, run_to_end, show_warnings, summary_table
from treetune.cli.options import TARGET, TASKS, Json, option, read_overrides, without_none
from treetune.cli.output import Screen, print_json
from treetune.config import dump_yaml, to_plain
from treetune.errors import UsageError
from treetune.target import is_server, read_target


def eval_command(
    context: typer.Context,
    target: Annotated[str | None, typer.Argument(help=f"{TARGET} Absent with --resume -o DIR.")] = None,
    model: Annotated[
        str | None, option("scripted:gold, local:PATH, or a model at --endpoint.base_url.", "-m", "--model")
    ] = None,
    num_tasks: options.NumTasks = None,
    num_rollouts: Annotated[int | None, option("Tries per task.", "-r", "--num-rollouts")] = None,
    max_concurrent: options.MaxConcurrent = None,
    pass_threshold: Annotated[float | None, option("The reward from which a rollout counts as solved (1.0).")] = None,
    max_judge_tokens: options.MaxJudgeTokens = None,
    max_tokens_total: Annotated[
        int | None, option("The same for the tokens of the model and of judges together.", min=1)
    ] = None,
    split: options.Split = None,
    output: options.Output = None,
    resume: options.Resume = False,
    rescore: Annotated[bool, option("With --resume, after a scorer changed: score again.", "--rescore")] = False,
    server: Annotated[str | None, option("The same as the address as TARGET: evaluate on the server there.")] = None,
    serve: Annotated[int | None, option("Start a server with so many workers, and evaluate on it.", min=1)] = None,
    dry_run: Annotated[bool, option("Show the resolved config and the first task.", "--dry-run")] = False,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Evaluate a model on a taskset and save every trace.

    Keys of the config are set with dots: --taskset.level 2, --sampling.temperature 0.7, --limits.timeout 60,
    --endpoint.base_url http://127.0.0.1:8000/v1
    """
    from_run = resume and target is None and server is None and output is not None
    groups = (*TASKS, "sampling", "limits", "endpoint")
    overrides = read_overrides(context, groups, trust=trust and not from_run)
    if resume and output is None:
        raise UsageError("--resume needs to know which run", remedy="pass -o DIR")
    if rescore and not resume:
        raise UsageError("--rescore goes with --resume", remedy="`treetune rescore DIR` scores a run into a new folder")
    if server is not None:
        if target is not None:
            raise UsageError("--server brings its own taskset", remedy="leave out TARGET")
        if not is_server(server):
            raise UsageError(f"cannot connect to {server!r}", remedy="write tcp://HOST:PORT or http://HOST:PORT")
        target = server
    if target is None:
        if not resume or output is None:
            raise UsageError("nothing to evaluate", remedy="name a TARGET; `treetune list` shows what there is")
        target, of_rows = evaluating.take_up(output, trust)
        overrides |= of_rows
    sizes = {"num_tasks": num_tasks, "num_rollouts": num_rollouts, "max_concurrent": max_concurrent}
    ceilings = {"max_judge_tokens": max_judge_tokens, "max_tokens_total": max_tokens_total}
    given = without_none({"model": model, "pass_threshold": pass_threshold, **sizes, **ceilings})
    data = {"model": "", **read_target(target, overrides, split), **given}
    plan = evaluating.Plan(evaluating.read_config(data, evaluating.EvalConfig, overrides, target), workers=serve)
    if dry_run:
        plan.check_model()
        return _show_plan(plan, json)
    path = output or evaluating.name_run(plan.evaluation.taskset.name, plan.model)
    screen = Screen(json)
    interrupted = not play(plan, path, screen, resume=resume, rescore=rescore, trust=trust)
    summary = plan.tally.summary()
    figures = {**to_plain(summary), "errors": summary.errors, "run_dir": str(path)}
    faults = bool(summary.errors) or summary.stopped is not None
    show_warnings(summary, screen)
    go_on = f"go on with: treetune eval --resume -o {shlex.quote(str(path))}"
    if summary.stopped is not None:
        screen.say(f"stopped: {summary.stopped}; {go_on} and a higher ceiling", style="yellow")
    stopped = f"interrupted; {go_on}" if interrupted else None
    return finish(lambda: screen.print(summary_table(summary)), figures, faults, stopped, screen, json)


def _show_plan(plan: evaluating.Plan, json: bool) -> int:
    evaluation, first = plan.evaluation, plan.first_task()
    config = evaluation.config
    if json:
        print_json({"config": evaluation.resolved(), "first_task": to_plain(first)})
        return 0
    screen = Screen()
    screen.say(dump_yaml(evaluation.resolved()))
    screen.say(f"first task: {first.messages}")
    screen.say(f"would run {config.num_tasks or 'all'} tasks x {config.num_rollouts} rollouts; nothing was run")
    return 0


def play(plan: evaluating.Plan, path: Path, screen: Screen, **how: bool) -> bool:
    """Plays what the run in `path` lacks; says whether it came to its end. `how` is for `Plan.begin`."""

    def watch(plan: evaluating.Plan, done: int) -> Display:
        if (again := plan.rescored) is not None:
            screen.say(f"scored again: {again.changed} of {again.after.rollouts} rewards changed")
        return Display(screen, plan.evaluation, done)

    plan.check()
    plan.load()
    with plan.begin(path, **how):
        return run_to_end(plan.play(watch))


def rescore_command(
    run: Annotated[Path, typer.Argument(help="A run folder: of an earlier `treetune eval`, or of `serve --traces`.")],
    output: Annotated[Path | None, option("A new run folder (RUN/rescored).", "-o", "--output")] = None,
    max_judge_tokens: options.MaxJudgeTokens = None,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Score saved traces again after a scorer changed, without the model. The old run is left as it is."""
    config = run / "config.yaml"
    if not config.exists() or not (run / evaluating.TRACES.file).exists():
        raise UsageError(f"{run} holds no run", remedy="name a folder that `eval` or `serve --traces` has written")
    evaluating.refuse_foreign(run, trust=trust)
    data = read_target(str(config), evaluating.trust_rows(run, trust))
    ceilings = {"max_judge_tokens": max_judge_tokens, "max_tokens_total": None}  # those of the run counted the run
    evaluation = evaluating.read_config({**data, **ceilings}, evaluating.EvalConfig, source=str(config))
    evaluating.refuse_unservable(evaluation.taskset)
    path = output or evaluating.unused_path(run / "rescored")
    with evaluating.RunFolder.create(path, evaluating.TRACES, evaluation) as folder:
        rescorer = evaluating.Rescorer(evaluation, run, folder, trust)
        interrupted = not run_to_end(rescorer.run_all())
    summary = rescorer.compare()
    screen = Screen(json)
    if not json:
        means = (summary.before.mean_reward, summary.before.mean_reward_all)
        mean = " and over all: ".join("-" if mean is None else f"{mean:.4f}" for mean in means)
        skipped = f"; {summary.skipped} failed rollouts have nothing to score" if summary.skipped else ""
        screen.say(f"{summary.changed} of {summary.after.rollouts} rewards changed; mean before: {mean}{skipped}")
        if summary.diverged:
            what = "rollouts diverged: the environment now says something else than was recorded"
            screen.say(f"{summary.diverged} {what}", style="yellow")
    show_warnings(summary.after, screen)
    stopped = f"interrupted: only a part is scored again; {run} is as it was" if interrupted else None
    after, figures = summary.after, {**to_plain(summary), "run_dir": str(path)}
    if after.stopped is not None:
        screen.say(f"stopped: {after.stopped}; only a part is scored again: {evaluating.MORE}", style="yellow")
    faults = bool(after.errors) or after.stopped is not None
    return finish(lambda: screen.print(summary_table(after)), figures, faults, stopped, screen, json)
