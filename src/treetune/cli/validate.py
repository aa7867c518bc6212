"""`treetune validate`: check files of rows, or a taskset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def validate_command(
    context: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="Files of rows (parquet, JSON, JSON lines; folders, globs, name\\[@config]\\[:split] of the hub), "
            "or one taskset: an id, config.yaml, file.py:Name or module:Name.",
        ),
    ],
    num_tasks: Annotated[
        int | None, typer.Option("-n", "--num-tasks", help="How many tasks; all unless given.")
    ] = None,
    max_concurrent: Annotated[int | None, typer.Option("-c", "--max-concurrent", help="Checks at once (64).")] = None,
    split: Annotated[
        str | None, typer.Option(help="Of a config with train_tasks and val_tasks: which list (val, or the only one).")
    ] = None,
    gold: Annotated[
        bool | None,
        typer.Option(help="Run each row or task with its gold answer, rows with wrong ones too (tasksets: yes)."),
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The folder for the results.")] = None,
    resume: Annotated[bool, typer.Option(help="Go on with the results in -o.")] = False,
    val: Annotated[
        list[str] | None,
        typer.Option(help="Files: validation files, which must share no prompt with the others. Repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Files: an environment that is registered elsewhere. Repeatable.")
    ] = None,
    format: Annotated[str | None, typer.Option(help="Files: skyrl, verl or trl, if their columns do not tell.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Files: only the rules that need no contents.")] = False,
    tokenizer: Annotated[
        str | None, typer.Option(help="Files: count tokens, and look for its special tokens; a folder or a name.")
    ] = None,
    max_prompt_length: Annotated[
        int | None, typer.Option(min=1, help="Files: the limit, with --tokenizer (512).")
    ] = None,
    fix: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Files: write the rows with what is safe to fix fixed.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Files: --fix may overwrite OUT.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Check files of rows by every rule, or a taskset by its own `validate` and its gold answers.

    Files: each finding names its rule, rows, what was found, what is expected and the fix. Tasksets: every task ends as
    valid, invalid (with the reason) or unchecked. Exit code 1 where something is wrong; warnings are not.
    """
    from treetune.cli.overrides import TASKS, read_overrides
    from treetune.cli.validate_files import FileOptions, validate_files
    from treetune.errors import UsageError
    from treetune.rows.sources import names_rows
    from treetune.target import refuse_server

    for target in targets:
        refuse_server(target, "validate")
    if unknown := [target for target in targets if target.startswith("-")]:
        context.args[:] = unknown  # typer takes them for targets
        read_overrides(context, (*TASKS, "limits"))
    if any(map(names_rows, targets)):
        flags = [("-n", num_tasks), ("-c", max_concurrent), ("--split", split), ("-o", output), ("--resume", resume)]
        if wrong := [name for name, value in flags if value]:
            raise UsageError(f"{', '.join(wrong)}: only tasksets have that, and {targets[0]} is a file of rows")
        options = FileOptions(
            val=val or [],
            env=env or [],
            format=format,
            quick=quick,
            gold=bool(gold),
            fix=fix,
            force=force,
            tokenizer=tokenizer,
            max_prompt_length=max_prompt_length,
        )
        if context.obj:
            raise UsageError(f"{context.obj[0]}: files of rows have no config to override")
        return validate_files(targets, options, json)
    if len(targets) > 1:
        raise UsageError(f"{targets[1]}: only files are checked together", remedy="name one taskset at a time")
    given: list[tuple[str, object]] = [
        ("--val", val),
        ("--env", env),
        ("--format", format),
        ("--quick", quick),
        ("--tokenizer", tokenizer),
    ]
    given += [("--max-prompt-length", max_prompt_length), ("--fix", fix), ("--force", force)]
    if wrong := [name for name, value in given if value]:
        raise UsageError(f"{', '.join(wrong)}: only files have that, and {targets[0]} is a taskset")
    return _validate_taskset(context, targets[0], num_tasks, max_concurrent, split, gold, output, resume, json)


def _validate_taskset(
    context: typer.Context,
    target: str,
    num_tasks: int | None,
    max_concurrent: int | None,
    split: str | None,
    gold: bool | None,
    output: Path | None,
    resume: bool,
    json: bool,
) -> int:
    import asyncio
    import shlex
    import time

    from treetune.cli.output import console_for, print_json
    from treetune.cli.overrides import TASKS, read_overrides
    from treetune.cli.requirements import refuse_unservable
    from treetune.config import convert, to_plain
    from treetune.errors import UsageError
    from treetune.evaluation.config import ValidateConfig, own_keys
    from treetune.evaluation.run_folder import RunFolder, unused
    from treetune.evaluation.validation import (
        CHECKS,
        RETRIED,
        Check,
        ValidationSummary,
        summarise_checks,
        validate_taskset,
    )
    from treetune.fingerprint import taskset_fingerprint
    from treetune.target import build_taskset, describe, read_target

    overrides = read_overrides(context, (*TASKS, "limits"))
    if resume and output is None:
        raise UsageError("--resume needs to know which results", remedy="pass -o DIR")
    data = read_target(target, overrides, split)
    own = own_keys(data, ValidateConfig)
    flags = {"num_tasks": num_tasks, "max_concurrent": max_concurrent, "gold": gold}
    own.update({key: value for key, value in flags.items() if value is not None})
    config = convert(own, ValidateConfig, raw=overrides, source=target)
    taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    if config.gold:
        refuse_unservable(taskset)
    taskset.draw(config.num_tasks)
    resolved = {**to_plain(config), "taskset": describe(taskset, config.taskset)}
    path = output or unused(Path("runs") / f"validate--{taskset.name}--{time.strftime('%Y%m%d-%H%M%S')}")
    fingerprint = taskset_fingerprint(taskset)
    if resume:  # after a taskset was corrected too: what failed is checked again
        run = RunFolder.resume(path, CHECKS, resolved, fingerprint, changed=True)
        run.keep(lambda check: check.rule not in RETRIED)
    else:
        run = RunFolder.create(path, CHECKS, resolved, fingerprint)
    console = console_for(json)

    async def validate() -> ValidationSummary:
        from rich.progress import Progress

        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            bar = progress.add_task("checking", total=config.num_tasks)

            def on_check(check: Check) -> None:
                progress.advance(bar)

            return await validate_taskset(taskset, config, run, on_check)

    interrupted = False
    with run:
        try:
            summary = asyncio.run(validate())
        except KeyboardInterrupt:
            interrupted, summary = True, summarise_checks(list(run.read()), taskset.name)
    if json:
        print_json({**to_plain(summary), "run_dir": str(path), "interrupted": interrupted})
    elif not interrupted:
        _print(console, summary, path)
    if interrupted:
        again = f"--resume -o {shlex.quote(str(path))}"
        console.print(f"interrupted; go on with the same command and {again}", markup=False, soft_wrap=True)
        return 130
    return 1 if summary.invalid else 0


def _print(console: Any, summary: Any, path: Path) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(
        f"{summary.tasks} tasks: {summary.valid} valid, {summary.invalid} invalid, {summary.unchecked} unchecked; "
        f"{summary.gold_checked} gold answers tried",
        soft_wrap=True,
    )
    if summary.unchecked:
        console.print("unchecked: the taskset has neither validate() nor gold() for them", style="dim")
    if summary.findings:
        table = Table(box=None, padding=(0, 2, 0, 0))
        for heading in ("rule", "tasks", "first", "why"):
            table.add_column(heading)
        for finding in summary.findings:
            rows = ", ".join(map(str, finding.rows))
            table.add_row(finding.rule, str(finding.count), rows, Text(finding.found))
        console.print(table)
    console.print(f"results: {path}", markup=False, soft_wrap=True)
