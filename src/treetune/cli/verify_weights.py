"""`treetune verify-weights`: verifies that an episode counts once in a trainer, however many training rows it has."""

from __future__ import annotations

from typing import Annotated

import typer

from treetune.cli.options import Json
from treetune.cli.output import figure, make_table, print_json
from treetune.config.structs import to_plain
from treetune.system.screen import Screen
from treetune.trainers.weights import CASES, CUTS, Result, verify_weights


def verify_weights_command(
    trainer: Annotated[str, typer.Argument(help=f"{', '.join(CASES)}.")],
    json: Json = False,
) -> int:
    """Verify that an episode counts once in a trainer, even if it becomes several training rows.

    Episodes of a tiny model pass through the trainer's own functions, in one row each and cut into several, in each of
    its losses. The table shows the relative error of the gradient, and the number of optimizer steps. Run it in the
    environment of the trainer. The exit code is 1 if a loss counts rows.
    """
    results = list(verify_weights(trainer))
    passed = all(result.passed for result in results)
    if json:
        plain = [{**to_plain(result), "passed": result.passed} for result in results]
        print_json({"trainer": trainer, "passed": passed, "losses": plain})
        return int(not passed)
    screen = Screen()
    shown, refused = ([each for each in results if bool(each.refused) is is_refused] for is_refused in (False, True))
    columns = ("loss", "credit", "advantages", *(f"{name} rows" for name in CUTS), "steps", "")
    screen.print(make_table(map(_row, shown), columns, right=columns[2:-1]))
    for result in refused:
        screen.say(f"refused with several rows: {result.loss} ({result.refused})")
    screen.say("an episode counts once" if passed else "rows of an episode are counted", style="bold")
    return int(not passed)


def _row(result: Result) -> tuple[str, ...]:
    errors = [
        "0" if error == 0 else figure(error, ".0e") for error in (result.advantage_error, *result.errors.values())
    ]
    steps = ", ".join(map(str, sorted(set(result.steps.values()))))
    return (result.loss, result.credit, *errors, steps, "" if result.passed else "counts rows")
