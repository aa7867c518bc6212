"""`treetune validate`: check files of rows, or a taskset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

MAX_PROMPT_LENGTH = 512
"""With `--tokenizer`, unless said otherwise."""


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
    from treetune.cli.arguments import TASKS, read_overrides
    from treetune.errors import UsageError
    from treetune.rows.sources import names_rows
    from treetune.target import refuse_server

    for target in targets:
        refuse_server(target, "validate")
    if unknown := [target for target in targets if target.startswith("-")]:
        context.args[:] = unknown  # typer takes them for targets
        read_overrides(context, (*TASKS, "limits"))
    are_files = any(map(names_rows, targets))
    if len(targets) > 1 and not are_files:
        raise UsageError(f"{targets[1]}: only files are checked together", remedy="name one taskset at a time")
    of_files: dict[str, object] = {
        "--val": val,
        "--env": env,
        "--format": format,
        "--quick": quick,
        "--tokenizer": tokenizer,
    }
    of_files |= {"--max-prompt-length": max_prompt_length, "--fix": fix, "--force": force}
    of_tasksets = {"-n": num_tasks, "-c": max_concurrent, "--split": split, "-o": output, "--resume": resume}
    if wrong := ", ".join(name for name, value in (of_tasksets if are_files else of_files).items() if value):
        only, given = ("tasksets", "a file of rows") if are_files else ("files", "a taskset")
        raise UsageError(f"{wrong}: only {only} have that, and {targets[0]} is {given}")
    if are_files:
        if context.obj:
            raise UsageError(f"{context.obj[0]}: files of rows have no config to override")
        if quick and (tokenizer or gold):
            raise UsageError("--quick reads no contents, which --tokenizer and --gold need")
        if max_prompt_length is not None and tokenizer is None:
            raise UsageError("--max-prompt-length counts tokens", remedy="say with which --tokenizer")
        if force and fix is None:
            raise UsageError("--force: nothing is written", remedy="say --fix OUT")
        if fix is not None:
            _refuse_output(fix, force, targets, val or [])
        options = {"format": format, "environments": env or [], "quick": quick}
        lengths = (tokenizer, max_prompt_length or MAX_PROMPT_LENGTH) if tokenizer is not None else None
        return _validate_files(targets, val or [], options, lengths, bool(gold), fix, json)
    if resume and output is None:
        raise UsageError("--resume needs to know which results", remedy="pass -o DIR")
    overrides = read_overrides(context, (*TASKS, "limits"))
    flags = {"num_tasks": num_tasks, "max_concurrent": max_concurrent, "gold": gold}
    return _validate_taskset(targets[0], overrides, flags, split, output, resume, json)


def _refuse_output(fix: Path, force: bool, targets: list[str], val: list[str]) -> None:
    from treetune.errors import UsageError
    from treetune.rows.sources import find, kind_of, refuse_unwritable
    from treetune.validate.files import split

    kind_of(fix)
    refuse_unwritable(fix)
    if fix.exists() and not force:
        raise UsageError(f"{fix} exists already", remedy="choose another name, or say --force")
    training, held_out = split(targets, val)
    if training and len(held_out) > len(set(find(val))):
        raise UsageError(
            "--fix writes one file, and there are training and validation files",
            remedy="fix the training files with --val for the others, then those alone",
        )


def _validate_files(
    targets: list[str],
    val: list[str],
    options: dict[str, Any],
    lengths: tuple[str, int] | None,
    gold: bool,
    fix: Path | None,
    json: bool,
) -> int:
    import msgspec
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    from treetune.cli.output import console_for, print_json
    from treetune.validate.files import read_batches, split, validate
    from treetune.validate.prompts import Lengths
    from treetune.validate.report import print_report
    from treetune.validate.write import write_fixed

    console = console_for(json)
    bars: dict[str, Any] = {"console": console, "transient": True, "disable": not console.is_terminal}
    counter = Lengths(*lengths) if lengths is not None else None
    with Progress(TextColumn("checking {task.completed:,} rows"), TimeElapsedColumn(), **bars) as progress:
        bar = progress.add_task("", total=None)

        def on_rows(done: int) -> None:
            progress.update(bar, completed=done)

        report = validate(targets, validation=val, lengths=counter, on_rows=on_rows, **options)
    training, held_out = split(targets, val)
    if gold:
        import asyncio

        from treetune.validate.gold import check_gold

        report.gold = True
        with Progress(**bars) as progress:
            bar = progress.add_task("trying gold answers", total=report.rows)
            batches = read_batches([*training, *held_out])
            asyncio.run(check_gold(batches, options["format"], report, lambda: progress.advance(bar)))
    fixed = None
    if fix is not None:
        del options["quick"]
        fixed = write_fixed(training or held_out, fix, report, **options)
    if json:
        result = {"valid": report.ok, "rows": report.rows, "files": report.files, "gold_checked": report.gold_checked}
        result["findings"] = report.findings
        if fixed is not None:
            result["fixed"] = {**msgspec.to_builtins(fixed), "valid": fixed.ok}
        print_json(result)
    else:
        print_report(report, console)
        if fixed is not None:
            _print_fixed(fixed, console)
    return 0 if report.ok else 1


def _print_fixed(fixed: Any, console: Any) -> None:
    from treetune.validate.report import name_rows, plural

    lines = [f"{fixed.path} was not written: no row is left"]
    if fixed.rows:
        verdict = "valid" if fixed.ok else "not valid yet"
        lines = [f"{fixed.path}: {plural(fixed.rows, 'row')}, {fixed.changed:,} of them fixed; {verdict}"]
    for left in fixed.left_out:
        rows = f"{plural(left.count, left.unit)} ({name_rows(left.rows, left.count)})"
        lines.append(f"  left out, {left.why}: {left.file}, {rows}")
    for finding in fixed.findings:
        if finding.severity == "error":
            lines.append(f"  left as it is, {finding.rule}: {finding.where}: {finding.found}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _validate_taskset(
    target: str,
    overrides: dict[str, str],
    flags: dict[str, Any],
    split: str | None,
    output: Path | None,
    resume: bool,
    json: bool,
) -> int:
    import asyncio
    import shlex
    import time

    from rich.progress import Progress

    from treetune.cli.hosts import refuse_unservable
    from treetune.cli.output import console_for, print_json
    from treetune.config import convert, to_plain
    from treetune.evaluation.config import ValidateConfig, own_keys
    from treetune.evaluation.run_folder import RunFolder, unused
    from treetune.evaluation.validation import CHECKS, RETRIED, Check, summarise_checks, validate_taskset
    from treetune.target import build_taskset, describe, read_target, taskset_fingerprint

    data = read_target(target, overrides, split)
    own = own_keys(data, ValidateConfig) | {key: value for key, value in flags.items() if value is not None}
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
    interrupted = False
    with run, Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("checking", total=config.num_tasks)

        def on_check(check: Check) -> None:
            progress.advance(bar)

        try:
            summary = asyncio.run(validate_taskset(taskset, config, run, on_check))
        except KeyboardInterrupt:
            interrupted, summary = True, summarise_checks(list(run.read()), taskset.name)
    if json:
        print_json({**to_plain(summary), "run_dir": str(path), "interrupted": interrupted})
    elif not interrupted:
        _print_summary(summary, path, console)
    if interrupted:
        again = f"--resume -o {shlex.quote(str(path))}"
        console.print(f"interrupted; go on with the same command and {again}", markup=False, soft_wrap=True)
        return 130
    return 1 if summary.invalid else 0


def _print_summary(summary: Any, path: Path, console: Any) -> None:
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
        table = Table("rule", "tasks", "first", "why", box=None, padding=(0, 2, 0, 0))
        for finding in summary.findings:
            rows = ", ".join(map(str, finding.rows))
            table.add_row(finding.rule, str(finding.count), rows, Text(finding.found))
        console.print(table)
    console.print(f"results: {path}", markup=False, soft_wrap=True)
