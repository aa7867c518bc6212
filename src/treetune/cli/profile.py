"""`treetune profile`: measures how often models solve each task, and writes a file for a curriculum."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from treetune import evaluation as evaluating
from treetune.cli import options
from treetune.cli.evaluate import play
from treetune.cli.options import Json, option, read_overrides
from treetune.cli.output import make_table, print_json
from treetune.config.interpolation import with_overrides
from treetune.config.structs import without_none
from treetune.config.trust import FINGERPRINT
from treetune.errors import UsageError
from treetune.runs.folder import slug
from treetune.system.digest import digest
from treetune.system.screen import Screen
from treetune.tasksets.target import read_target

USUAL = Path("rates.jsonl")
_BAR = 40


def profile_command(
    context: typer.Context,
    target: options.Target,
    model: Annotated[
        list[str] | None,
        option("scripted:gold, local:PATH, or a model at --endpoint.base_url. Repeatable.", "-m", "--model"),
    ] = None,
    num_tasks: options.NumTasks = None,
    num_rollouts: Annotated[int, option("Rollouts per task.", "-r", "--num-rollouts", min=1)] = 8,
    by: Annotated[
        str | None,
        option("For an infinite taskset: a key; each of its values gets a pass rate.", metavar="KEY=V,V,..."),
    ] = None,
    max_concurrent: options.MaxConcurrent = None,
    pass_threshold: options.PassThreshold = None,
    split: Annotated[
        str | None, option("For a config with train_tasks and val_tasks: which list. Default: train, or the only one.")
    ] = None,
    output: Annotated[
        Path | None, option("The file (rates.jsonl, or the one that `profile` in the config names).", "-o", "--output")
    ] = None,
    trust: options.Trust = False,
    json: Json = False,
) -> int:
    """Measure how often models solve each task. The `profile` key of a taskset uses the file to draw tasks by
    difficulty.

    Writes a line for each task, by its uid, with a column for each model, such as avg@8_MODEL. The same command
    resumes: rollouts are kept in FILE.runs. One file can have several models.

    treetune profile tasks.yaml -m my-model -r 8 -o rates.jsonl

    treetune profile arithmetic --by level=1,2,3,4,5 -m my-model -n 500
    """
    overrides = read_overrides(context, trust=trust)
    data = read_target(target, overrides, split, usual="train")
    data["taskset"], named = _without_profile(data["taskset"], None if by is None else _read_values(by))
    path = (output or (Path(named) if named else USUAL)).expanduser()
    screen = Screen(json)
    if not model:
        evaluating.refuse_foreign_model(target, trust)
    models = model or [str(data.get("model") or "")]
    sizes = without_none({"num_tasks": num_tasks, "max_concurrent": max_concurrent, "pass_threshold": pass_threshold})
    reports: list[dict[str, Any]] = []
    for name in models:
        given = {**data, "model": name, "num_rollouts": num_rollouts, **sizes}
        evaluation = evaluating.read_config(given, evaluating.EvalConfig, overrides, target)
        plan = evaluating.EvalPlan(evaluation)
        if plan.served is not None and not plan.remote and not plan.served.BY_NUMBER:
            problem = f"{target} does not show its tasks, and pass rates are stored by the uid of the task"
            raise UsageError(problem, remedy="profile the taskset itself, or the tcp:// address of its server")
        run = _run_folder(path, plan.model)
        resume = (run / FINGERPRINT).exists()
        interrupted = not play(plan, run, screen, resume=resume, may_rescore=False)
        tally = plan.tally
        if tally.stopped is not None:
            raise UsageError(
                f"the profile is not complete: {tally.stopped}", remedy="raise that limit and run the command again"
            )
        if interrupted:
            if json:
                print_json({"path": str(path), "models": reports, "interrupted": True})
            screen.say("Interrupted. Run the same command to resume.")
            return 130
        rates = evaluating.PassRates.of_run(run, evaluation)
        rates.write(path, evaluation.config.model, run.parent)
        reports.append(
            {"model": evaluation.config.model, **rates.summary(), "errors": tally.errors, "run_dir": str(run)}
        )
    if json:
        print_json({"path": str(path), "models": reports, "interrupted": False})
    else:
        for report in reports:
            _show(report, screen)
        screen.say(f"pass rates: {shlex.quote(str(path))}")
    return 1 if any(report["errors"] for report in reports) else 0


def _run_folder(path: Path, model: str) -> Path:
    """The run folder for the rollouts of a model."""
    return path.with_name(f"{path.name}.runs") / f"{slug(model)}-{digest(model, 4)}"


def _read_values(by: str) -> dict[str, Any]:
    key, equals, values = by.partition("=")
    if not key or not equals or not values:
        raise UsageError(f"--by must be KEY=VALUES, not {by}", remedy="write --by level=1,2,3")
    read = with_overrides({"values": []}, {"values": f"[{values}]"})["values"]
    return {"parameter": key, "values": read}


def _without_profile(node: Any, by: dict[str, Any] | None) -> tuple[Any, str | None]:
    """The taskset without its profile, except for the parameter, so that all its tasks are drawn; and the file that the
    profile names."""
    if not isinstance(node, Mapping):
        return node, None
    kept = {key: value for key, value in node.items() if key != "profile"}
    profile = node.get("profile")
    named = None
    if isinstance(profile, Mapping):
        named = profile.get("path")
        by = by or without_none({key: profile.get(key) for key in ("parameter", "values")})
    if by:
        kept["profile"] = by
    if isinstance(node.get("sources"), list):
        kept["sources"] = [_without_profile(source, None)[0] for source in node["sources"]]
    return kept, named


def _show(report: dict[str, Any], screen: Screen) -> None:
    """Shows a bar for each range of pass rates, and the share of tasks that are always or never solved."""
    most = max(report["histogram"].values(), default=0) or 1
    rows: list[tuple[str | Text, ...]] = [
        (name, f"{count:,}", "█" * round(_BAR * count / most)) for name, count in report["histogram"].items()
    ]
    screen.print(make_table(rows, (f"pass rate of {report['model']}", "tasks", ""), right=("tasks",)))
    if report["tasks"]:
        shares = "  ".join(f"{name.replace('_', ' ')}: {report[name]:.1%}" for name in ("all_0", "all_1", "mixed"))
        screen.say(f"{shares}  mean: {report['mean']:.4f}")
    if report["unrated"]:
        screen.say(f"{report['unrated']} tasks have no scored rollout, so no pass rate; the same command retries them")
