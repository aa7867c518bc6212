"""`treetune gateway verify`: verifies that each sample of a run is trained exactly once, as it was sampled."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from treetune.cli.options import Json, option, read_overrides
from treetune.cli.output import figure, make_table, print_json
from treetune.config.structs import to_plain
from treetune.errors import UsageError, plural
from treetune.models.local import LocalPolicy
from treetune.runs.discovery import open_run
from treetune.runs.token_check import TokenCheck
from treetune.system.screen import Screen

_MOST_FAULTS = 20


def verify_command(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="A run folder, by `eval`, `serve --traces` or a trainer.")],
    model: Annotated[
        str | None,
        option("Compare logprobs with a fresh pass of this model: its folder (extra `local`).", "-m", "--model"),
    ] = None,
    tolerance: Annotated[float, option("The largest accepted difference between two logprobs.", min=0)] = 1e-3,
    json: Json = False,
) -> int:
    """Verify the tokens of a run: each answer of the model is trained in exactly one sequence, as it was sampled.

    Masks, spans and lineage of every rollout must agree, side calls must not be trained, and sequences that share a
    beginning must have the same tokens there. With -m, logprobs must be those of the model. The exit code is 1 if
    anything is wrong.
    """
    read_overrides(context, ())
    opened, screen = open_run(run), Screen(json)
    policy = None if model is None else LocalPolicy(model.removeprefix("local:"))
    check = TokenCheck(None if policy is None else policy.score)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with screen.progress(*columns) as progress:
        for trace in progress.track(opened.traces(), len(opened), description="rollouts"):
            check.add(trace)
    counts, off = check.counts, (check.difference or 0.0) > tolerance
    if not counts.sequences:
        remedy = "tokens are recorded with -m local:PATH, -m vllm:PATH, and by trainers"
        raise UsageError(f"no rollout of {run} has tokens", remedy=remedy)
    passed = not check.faults and not off
    if json:
        faults = [{"rollout": name, "fault": fault} for name, fault in check.faults]
        compared = {"compared": check.compared, "difference": check.difference, "tolerance": tolerance}
        print_json({"run": run, "passed": passed, **to_plain(counts), "faults": faults, **compared})
        return int(not passed)
    rows = [(name.replace("_", " "), f"{count:,}") for name, count in to_plain(counts).items()]
    if policy is not None:
        rows += [("compared logprobs", f"{check.compared:,}"), ("largest difference", figure(check.difference, ".1e"))]
    screen.print(make_table(rows, ("", "count"), right=("count",)))
    for name, fault in check.faults[:_MOST_FAULTS]:
        screen.say(f"{name}: {fault}", style="red")
    if check.faults:
        screen.say(f"{plural(len(check.faults), 'fault')}", style="bold")
    elif off:
        screen.say(f"logprobs differ by up to {check.difference:.1e}, more than {tolerance:g}", style="bold")
    else:
        screen.say("each sample is trained exactly once, as it was sampled", style="bold")
    return int(not passed)
