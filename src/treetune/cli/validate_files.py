"""`treetune validate FILES`: check files of rows by all rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from treetune.rows.sources import find
from treetune.validate import Report, validate
from treetune.validate.files import split
from treetune.validate.finding import Severity
from treetune.validate.fix import Fixed
from treetune.validate.printed import counted, print_report, where

MAX_PROMPT_LENGTH = 512
"""With `--tokenizer`, unless said otherwise."""


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of `treetune validate` that files have."""

    val: list[str]
    env: list[str]
    format: str | None
    quick: bool
    gold: bool
    fix: Path | None
    force: bool
    tokenizer: str | None
    max_prompt_length: int | None


def validate_files(targets: list[str], options: FileOptions, json: bool) -> int:
    from treetune.cli.output import console_for, print_json

    _refuse_contradictions(targets, options)
    console = console_for(json)
    report = _validated(targets, options, console)
    if options.gold:
        _gold(targets, options, report, console)
    fixed = _fixed(targets, options, report) if options.fix is not None else None
    if json:
        findings = [msgspec.to_builtins(finding) for finding in report.findings]
        print_json(
            {
                "valid": report.ok,
                "rows": report.rows,
                "files": report.files,
                "gold_checked": report.gold_checked,
                "findings": findings,
                **({"fixed": {**msgspec.to_builtins(fixed), "valid": fixed.ok}} if fixed is not None else {}),
            }
        )
    else:
        print_report(report, console)
        if fixed is not None:
            _print_fixed(fixed, console)
    return 0 if report.ok else 1


def _print_fixed(fixed: Fixed, console: Any) -> None:
    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    if fixed.rows:
        verdict = "valid" if fixed.ok else "not valid yet"
        say(f"{fixed.path}: {counted(fixed.rows, 'row')}, {fixed.changed:,} of them fixed; {verdict}")
    else:
        say(f"{fixed.path} was not written: no row is left")
    for left in fixed.left_out:
        rows = f"{', '.join(map(str, left.rows))}{', ...' if left.count > len(left.rows) else ''}"
        say(f"  left out, {left.why}: {left.file}, {counted(left.count, left.unit)} ({rows})")
    for finding in fixed.findings:
        if finding.severity is Severity.ERROR:
            say(f"  left as it is, {finding.rule}: {where(finding)}: {finding.found}")


def _refuse_contradictions(targets: list[str], options: FileOptions) -> None:
    from treetune.errors import UsageError
    from treetune.rows.sources import kind_of, refuse_unwritable

    if options.quick and (options.tokenizer or options.gold):
        raise UsageError("--quick reads no contents, which --tokenizer and --gold need")
    if options.max_prompt_length is not None and options.tokenizer is None:
        raise UsageError("--max-prompt-length counts tokens", remedy="say with which --tokenizer")
    if options.fix is None:
        if options.force:
            raise UsageError("--force: nothing is written", remedy="say --fix OUT")
        return
    kind_of(options.fix)
    refuse_unwritable(options.fix)
    if options.fix.exists() and not options.force:
        raise UsageError(f"{options.fix} exists already", remedy="choose another name, or say --force")
    training, held_out = split(targets, options.val)
    if training and len(held_out) > len(set(find(options.val))):
        raise UsageError(
            "--fix writes one file, and there are training and validation files",
            remedy="fix the training files with --val for the others, then those alone",
        )


def _validated(targets: list[str], options: FileOptions, console: Any) -> Report:
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    lengths = None
    if options.tokenizer is not None:
        from treetune.validate.lengths import Lengths

        lengths = Lengths(options.tokenizer, options.max_prompt_length or MAX_PROMPT_LENGTH)
    with Progress(
        TextColumn("checking {task.completed:,} rows"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=None)
        return validate(
            targets,
            validation=options.val,
            format=options.format,
            environments=options.env,
            quick=options.quick,
            lengths=lengths,
            on_rows=lambda done: progress.update(bar, completed=done),
        )


def _gold(targets: list[str], options: FileOptions, report: Report, console: Any) -> None:
    import asyncio

    from rich.progress import Progress

    from treetune.validate.chunks import readable_batches
    from treetune.validate.gold import check_gold

    report.gold = True
    training, held_out = split(targets, options.val)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("trying gold answers", total=report.rows)
        batches = readable_batches([*training, *held_out])
        asyncio.run(check_gold(batches, options.format, report, lambda: progress.advance(bar)))


def _fixed(targets: list[str], options: FileOptions, report: Report) -> Any:
    """The rows of the targets, without those of `--val`, in the format of the first file."""
    from treetune.validate.chunks import readable_batches
    from treetune.validate.fix import write_fixed

    assert options.fix is not None
    training, held_out = split(targets, options.val)
    sources = training or held_out
    formats = [report.formats[name] for name in map(str, sources) if name in report.formats]
    format = options.format or (formats[0] if formats else "skyrl")
    turns = any(one.rule == "null-max-turns" and one.found.startswith("max_turns") for one in report.findings)
    return write_fixed(
        readable_batches(sources), options.fix, format, report.formats, turns=turns, environments=options.env
    )
