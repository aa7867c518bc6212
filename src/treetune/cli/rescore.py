"""`treetune rescore`: score saved traces again after a scorer changed, without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def rescore_command(
    run: Annotated[Path, typer.Argument(help="The folder of an earlier `treetune eval`.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="A new run folder (RUN/rescored).")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Score saved traces again after a scorer changed, without the model. The old run is left as it is."""
    import asyncio

    from treetune.cli.hosts import refuse_unservable
    from treetune.cli.output import console_for, print_json
    from treetune.config import to_plain
    from treetune.errors import UsageError
    from treetune.evaluation.config import read_evaluation
    from treetune.evaluation.display import summary_table
    from treetune.evaluation.rescore import Rescorer
    from treetune.evaluation.run_folder import CONFIG, TRACES, RunFolder, unused
    from treetune.target import read_target, taskset_fingerprint

    if not (run / CONFIG).exists() or not (run / TRACES.file).exists():
        raise UsageError(f"{run} holds no run", remedy="name the folder that `treetune eval` printed")
    evaluation = read_evaluation(read_target(str(run / CONFIG)), source=str(run / CONFIG))
    refuse_unservable(evaluation.taskset)
    path = output or unused(run / "rescored")
    fingerprint = taskset_fingerprint(evaluation.taskset)
    with RunFolder.create(path, TRACES, evaluation.resolved(), fingerprint) as folder:
        rescorer = Rescorer(evaluation, run, folder)
        try:
            result, interrupted = asyncio.run(rescorer.run()), False
        except KeyboardInterrupt:
            result, interrupted = rescorer.result(), True
    if json:
        print_json({**to_plain(result), "run_dir": str(path), "interrupted": interrupted})
    else:
        console = console_for(False)
        before = result.before.mean_reward
        console.print(
            f"{result.changed} of {result.after.rollouts} rewards changed; mean before: "
            + ("-" if before is None else f"{before:.4f}")
            + (f"; {result.skipped} failed rollouts have nothing to score" if result.skipped else "")
        )
        if result.diverged:
            console.print(
                f"{result.diverged} rollouts diverged: the environment now says something else than was recorded",
                style="yellow",
            )
        console.print(summary_table(result.after))
        console.print(f"run folder: {path}", markup=False, soft_wrap=True)
    if interrupted:
        console_for(json).print(f"interrupted: only a part is scored again; {run} is as it was", markup=False)
        return 130
    return 1 if result.after.errors else 0
