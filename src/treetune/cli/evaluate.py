"""`treetune eval`: run a policy on tasks, score, save traces, show progress and a summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treetune.cli.arguments import TARGET, TRUST

if TYPE_CHECKING:
    from treetune.evaluation.config import Evaluation
    from treetune.evaluation.summary import Summary


def eval_command(
    context: typer.Context,
    target: Annotated[str | None, typer.Argument(help=f"{TARGET} Absent with --resume -o DIR.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            help="scripted:gold, scripted:echo, scripted:p=0.5, local:PATH, or a model behind --endpoint.base_url.",
        ),
    ] = None,
    num_tasks: Annotated[
        int | None, typer.Option("-n", "--num-tasks", help="How many tasks; all of a finite taskset unless given.")
    ] = None,
    num_rollouts: Annotated[int | None, typer.Option("-r", "--num-rollouts", help="Tries per task.")] = None,
    max_concurrent: Annotated[
        int | None, typer.Option("-c", "--max-concurrent", help="Rollouts under way at once (64).")
    ] = None,
    pass_threshold: Annotated[
        float | None, typer.Option(help="The reward from which a rollout counts as solved (1.0).")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="Of a config with train_tasks and val_tasks: which list (val, or the only one).")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The run folder.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the run in -o: only what is missing or failed.")] = False,
    rescore: Annotated[
        bool, typer.Option("--rescore", help="With --resume, after a scorer changed: score what there is again.")
    ] = False,
    write_pass_rate: Annotated[
        Path | None, typer.Option(help="Write the pass rate of each task, for `pass_rates` and `filter`.")
    ] = None,
    server: Annotated[
        str | None, typer.Option(help="The same as the address as TARGET: evaluate on the server there.")
    ] = None,
    serve: Annotated[
        int | None, typer.Option(min=1, help="Start a server with so many workers, and evaluate on it.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the resolved config and the first task.")] = False,
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Evaluate a model on a taskset and save every trace.

    Keys of the config are set with dots: --taskset.level 2, --sampling.temperature 0.7, --limits.timeout 60,
    --endpoint.base_url http://127.0.0.1:8000/v1
    """
    import asyncio

    from treetune.cli.arguments import TASKS, read_overrides, trusted
    from treetune.cli.hosts import describe, info_of, learn
    from treetune.errors import UsageError
    from treetune.evaluation.config import read_evaluation
    from treetune.target import is_server, read_target

    overrides = read_overrides(context, (*TASKS, "sampling", "limits", "endpoint")) | trusted(trust)
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
    if target is not None and serve is not None and is_server(target):
        raise UsageError(f"--serve starts a server, and {target} is one already", remedy="leave out --serve")
    if target is None:
        if not resume or output is None:
            raise UsageError("nothing to evaluate", remedy="name a TARGET; `treetune list` shows what there is")
        target = str(output / "config.yaml")
    data = read_target(target, overrides, split)
    flags = {
        "model": model,
        "num_tasks": num_tasks,
        "num_rollouts": num_rollouts,
        "max_concurrent": max_concurrent,
        "pass_threshold": pass_threshold,
    }
    data.update({key: value for key, value in flags.items() if value is not None})
    node = data["taskset"]
    remote = str(node["address"]) if isinstance(node, dict) and node.get("id", "").endswith("served:Served") else None
    info = info_of(remote) if remote is not None else None
    if "model" not in data and info is not None and info.models:
        data["model"] = info.models[0]
    if "model" not in data:
        raise UsageError("no model given", remedy="pass -m, for example -m scripted:gold")
    evaluation = read_evaluation(data, overrides, source=target)
    if info is not None:
        describe(evaluation, info)
    elif is_server(str(getattr(evaluation.taskset.config, "address", ""))):
        asyncio.run(learn(evaluation.taskset))
    if dry_run and info is None:
        return _dry_run(evaluation, json)
    if rescore and remote is not None:
        raise UsageError("the scorer is on the server: only there can answers be scored again", remedy="use another -o")
    return _run(evaluation, output, resume, rescore, write_pass_rate, json, remote, serve)


def _dry_run(evaluation: Evaluation, json: bool) -> int:
    from treetune.cli.output import console_for, print_json
    from treetune.config import dump_yaml, to_plain
    from treetune.policies import check_policy

    config, taskset = evaluation.config, evaluation.taskset
    check_policy(config.model, taskset, config.endpoint)
    first = next(taskset.draw(config.num_tasks))
    if json:
        print_json({"config": evaluation.resolved(), "first_task": to_plain(first)})
        return 0
    console = console_for(False)
    console.print(dump_yaml(evaluation.resolved()), markup=False)
    console.print(f"first task: {first.messages}", markup=False, soft_wrap=True)
    tasks = config.num_tasks or "all"
    console.print(f"would run {tasks} tasks x {config.num_rollouts} rollouts; nothing was run", markup=False)
    return 0


def _run(
    evaluation: Evaluation,
    output: Path | None,
    resume: bool,
    rescore: bool,
    write_pass_rate: Path | None,
    json: bool,
    remote: str | None = None,
    workers: int | None = None,
) -> int:
    import asyncio
    import shlex

    from treetune.cli.hosts import ended, host_for, refuse_unservable
    from treetune.cli.output import console_for, print_json
    from treetune.evaluation.display import display_for, summary_table
    from treetune.evaluation.pass_rates import write_pass_rates
    from treetune.evaluation.rescore import score_again
    from treetune.evaluation.run_folder import TRACES, RunFolder
    from treetune.evaluation.runner import Runner
    from treetune.evaluation.summary import Tally
    from treetune.policies import load_policy
    from treetune.target import taskset_fingerprint

    taskset, config = evaluation.taskset, evaluation.config
    refuse_unservable(taskset)
    taskset.draw(config.num_tasks)  # an unbounded draw is refused before anything is written
    policy = load_policy(config.model, taskset, config.endpoint) if remote is None and workers is None else None
    path = output or _default_folder(evaluation)
    resolved, fingerprint = evaluation.resolved(), taskset_fingerprint(taskset)
    if resume:
        remedy = "pass --rescore to score what there is again, " if remote is None else ""
        run = RunFolder.resume(path, TRACES, resolved, fingerprint, changed=rescore, remedy=remedy)
    else:
        run = RunFolder.create(path, TRACES, resolved, fingerprint)
    console = console_for(json)
    tally = Tally(config.pass_threshold)

    async def evaluate() -> Summary:
        nonlocal tally
        async with ended(taskset), host_for(evaluation, policy, remote, workers) as host:
            runner = Runner(evaluation, run, host)
            done = runner.resume() if resume else 0
            with display_for(console, evaluation, total_rollouts(evaluation), done) as display:
                runner.on_trace = display.on_trace
                try:
                    return await runner.run()
                finally:
                    tally = runner.tally

    interrupted = False
    with run:
        try:
            if rescore:
                again = asyncio.run(score_again(evaluation, run))
                console.print(f"scored again: {again.changed} of {again.after.rollouts} rewards changed", markup=False)
            summary = asyncio.run(evaluate())
        except KeyboardInterrupt:
            interrupted, summary = True, tally.summary()
    if write_pass_rate is not None and not interrupted:
        write_pass_rates(path, write_pass_rate, config.pass_threshold)
    if json:
        print_json({**report(summary, path), "interrupted": interrupted})
    elif not interrupted:
        console.print(summary_table(summary))
        console.print(f"run folder: {path}", markup=False, soft_wrap=True)
    if interrupted:
        command = f"treetune eval --resume -o {shlex.quote(str(path))}"
        console.print(f"interrupted; go on with: {command}", markup=False, soft_wrap=True)
        return 130
    return 1 if summary.errors else 0


def report(summary: Summary, path: Path) -> dict[str, Any]:
    """What `--json` prints: the summary and where the run is."""
    from treetune.config import to_plain

    return {**to_plain(summary), "errors": summary.errors, "run_dir": str(path)}


def total_rollouts(evaluation: Evaluation) -> int | None:
    """How many rollouts there will be, where that can be known without building every task."""
    config, taskset = evaluation.config, evaluation.taskset
    count = taskset._size() if not taskset.INFINITE and taskset.random_access else None
    known = [number for number in (config.num_tasks, count) if number is not None]
    return min(known) * config.num_rollouts if known else None


def _default_folder(evaluation: Evaluation) -> Path:
    import re
    import time

    from treetune.evaluation.run_folder import unused

    parts = [evaluation.taskset.name, evaluation.config.model, time.strftime("%Y%m%d-%H%M%S")]
    stem = "--".join(re.sub(r"[^A-Za-z0-9.=_-]+", "-", part).strip("-")[-60:] for part in parts)
    return unused(Path("runs") / stem)
