"""`treetune validate`: checks files of rows, or a taskset."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.progress import TextColumn, TimeElapsedColumn

from treetune import evaluation
from treetune.cli import options
from treetune.cli.evaluate import finish, run_to_end
from treetune.cli.options import Json, complete_target, option, read_overrides
from treetune.cli.output import print_json
from treetune.config.structs import to_plain, without_none
from treetune.core.finding import ERROR, name_rows, print_findings
from treetune.data.sources.names import find, kind_of, names_rows, refuse_unwritable
from treetune.data.validate.files import read_batches, validate
from treetune.data.validate.files import split as split_files
from treetune.data.validate.prompt_rules import LengthCheck
from treetune.data.validate.rules import print_report
from treetune.data.validate.write import write_fixed
from treetune.errors import UsageError, plural
from treetune.runs.folder import RunFolder, name_run
from treetune.system.screen import Screen
from treetune.tasksets.target import read_target, refuse_server

MAX_PROMPT_LENGTH = 512
"""The default with `--tokenizer`."""


def validate_command(
    context: typer.Context,
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            autocompletion=complete_target,
            help="Files of rows (parquet, JSON, JSON lines; folders, globs, name\\[@config]\\[:split] of the hub), "
            "or one taskset: an id, config.yaml, file.py:Name or module:Name.",
        ),
    ],
    num_tasks: options.NumTasks = None,
    max_concurrent: options.MaxConcurrent = None,
    pass_threshold: options.PassThreshold = None,
    split: options.Split = None,
    gold: Annotated[
        bool | None, option("Try gold answers and, on rows, wrong ones. Default: only on tasksets.")
    ] = None,
    output: options.Output = None,
    resume: options.Resume = False,
    val: Annotated[list[str] | None, option("Files: validation files, which must not share any prompt.")] = None,
    env: Annotated[list[str] | None, option("Files: an environment that the trainer registers. Repeatable.")] = None,
    format: Annotated[str | None, option("Files: skyrl, verl or trl. Default: detected from the columns.")] = None,
    quick: Annotated[bool, option("Files: try only rules that do not read contents.", "--quick")] = False,
    tokenizer: options.Tokenizer = None,
    max_prompt_length: options.MaxPromptLength = None,
    fix: Annotated[Path | None, option("Files: write the rows, with every safe fix applied.", metavar="OUT")] = None,
    force: Annotated[bool, option("Files: --fix may overwrite OUT.", "--force")] = False,
    json: Json = False,
) -> int:
    """Check files of rows against every rule, or a taskset by its own `validate` and its gold answers.

    Files: each finding has its rule, rows, what was found, what is expected and the fix. With --tokenizer, prompts of
    more than 512 tokens are reported, and special tokens in texts. Tasksets: each task is valid, invalid (with the
    reason) or unchecked. The exit code is 1 if there are errors; warnings do not count.
    """
    for target in targets:
        refuse_server(target, "validate")
    are_files = any(map(names_rows, targets))
    if len(targets) > 1 and not are_files:
        raise UsageError(f"{targets[1]}: only files can be checked together", remedy="pass one taskset at a time")
    of_files: dict[str, object] = {"--val": val, "--env": env, "--format": format, "--quick": quick}
    of_files |= {"--tokenizer": tokenizer, "--max-prompt-length": max_prompt_length, "--fix": fix, "--force": force}
    of_tasksets: dict[str, object] = {"-n": num_tasks, "-c": max_concurrent, "--split": split, "-o": output}
    of_tasksets |= {"--resume": resume, "--pass-threshold": pass_threshold}
    if wrong := ", ".join(name for name, value in (of_tasksets if are_files else of_files).items() if value):
        only, given = ("tasksets", "a file of rows") if are_files else ("files", "a taskset")
        raise UsageError(f"{wrong}: only for {only}, and {targets[0]} is {given}")
    if not are_files:
        if resume and output is None:
            raise UsageError("--resume needs a folder of results", remedy="pass -o DIR")
        overrides = read_overrides(context)
        sizes = {"num_tasks": num_tasks, "max_concurrent": max_concurrent}
        chosen = without_none({**sizes, "pass_threshold": pass_threshold, "gold": gold})
        data = {**read_target(targets[0], overrides, split), **chosen}
        validation = evaluation.read_config(data, evaluation.ValidateConfig, overrides, targets[0])
        return _validate_taskset(validation, output, resume, json)
    if context.obj:
        raise UsageError(f"--{next(iter(context.obj))}: files of rows have no config to override")
    if quick and (tokenizer or gold):
        raise UsageError("--quick reads no contents, which --tokenizer and --gold need")
    if max_prompt_length is not None and tokenizer is None:
        raise UsageError("--max-prompt-length requires --tokenizer", remedy="pass --tokenizer, which counts the tokens")
    if force and fix is None:
        raise UsageError("--force requires --fix", remedy="pass --fix OUT")
    if fix is not None:
        kind_of(fix)
        refuse_unwritable(fix)
        if fix.exists() and not force:
            raise UsageError(f"{fix} already exists", remedy="choose another name, or pass --force")
        training, held_out = split_files(targets, val or [])
        if training and len(held_out) > len(set(find(val or []))):
            remedy = "fix the training files with --val for the others, then the validation files alone"
            raise UsageError("--fix writes one file, but there are training and validation files", remedy=remedy)
    rules: dict[str, Any] = {"format": format, "environments": env or []}
    lengths = LengthCheck(tokenizer, max_prompt_length or MAX_PROMPT_LENGTH) if tokenizer is not None else None
    checks = {"validation": val or [], "lengths": lengths, "quick": quick}
    return _validate_files(targets, checks, rules, bool(gold), fix, json)


def _validate_files(
    targets: list[str], checks: dict[str, Any], rules: dict[str, Any], gold: bool, fix: Path | None, json: bool
) -> int:
    """`checks` are options of `validate`; `rules` also apply to writing the fixed rows."""
    screen = Screen(json)
    with screen.progress(TextColumn("checking {task.completed:,} rows"), TimeElapsedColumn()) as progress:
        bar = progress.add_task("", total=None)
        report = validate(targets, on_rows=lambda done: progress.update(bar, completed=done), **checks, **rules)
    training, held_out = split_files(targets, checks["validation"])
    if gold:
        from treetune.data.validate.gold import check_gold

        with screen.progress() as progress:
            bar = progress.add_task("trying gold answers", total=report.rows)
            batches = read_batches([*training, *held_out])
            asyncio.run(check_gold(batches, rules["format"], report, lambda: progress.advance(bar)))
    fixed = write_fixed(training or held_out, fix, report, **rules) if fix is not None else None
    if json:
        figures = {"valid": report.ok, "rows": report.rows, "files": report.files, "gold_checked": report.gold_checked}
        written = {} if fixed is None else {"fixed": {**msgspec.to_builtins(fixed), "valid": fixed.ok}}
        print_json({**figures, "findings": report.findings, **written})
    else:
        print_report(report, screen)
        if fixed is not None:
            _print_fixed(fixed, screen)
    return 0 if report.ok else 1


def _print_fixed(fixed: Any, screen: Screen) -> None:
    if fixed.rows:
        verdict = "valid" if fixed.ok else "not valid yet"
        screen.say(f"{fixed.path}: {plural(fixed.rows, 'row')}, {fixed.changed:,} of them fixed; {verdict}")
    else:
        screen.say(f"{fixed.path} was not written: no row is left")
    for left in fixed.left_out:
        rows = f"{plural(left.count, left.unit)} ({name_rows(left.rows, left.count)})"
        screen.say(f"  left out, {left.why}: {left.file}, {rows}")
    for finding in fixed.findings:
        if finding.severity is ERROR:
            screen.say(f"  left as it is, {finding.rule}: {finding.where}: {finding.found}")


def _validate_taskset(validation: evaluation.Validation, output: Path | None, resume: bool, json: bool) -> int:
    config, taskset = validation.config, validation.taskset
    if config.gold:
        evaluation.refuse_unservable(taskset)
    taskset.draw(config.num_tasks)  # raises for an unbounded draw before anything is written
    path = output or name_run("validate", taskset.name)
    if resume:  # even after a taskset was corrected: failed tasks are checked again
        run = RunFolder.resume(path, evaluation.CHECKS, validation, changed=True)
        run.keep(lambda check: check.rule not in evaluation.RETRIED)
    else:
        run = RunFolder.create(path, evaluation.CHECKS, validation)
    screen = Screen(json)
    checker = evaluation.TasksetChecker(validation, run)
    with run, screen.progress() as progress:
        bar = progress.add_task("checking", total=config.num_tasks)
        interrupted = not run_to_end(checker.run(lambda: progress.advance(bar)))
    summary = checker.summary()
    figures = {**to_plain(summary), "run_dir": str(path)}
    again = f"interrupted; run the same command with --resume -o {shlex.quote(str(path))}"
    stopped = again if interrupted else None
    return finish(lambda: _print_summary(summary, screen), figures, bool(summary.invalid), stopped, screen, json)


def _print_summary(summary: evaluation.CheckSummary, screen: Screen) -> None:
    counts = f"{summary.valid} valid, {summary.invalid} invalid, {summary.unchecked} unchecked"
    screen.say(f"{plural(summary.tasks, 'task')}: {counts}; {plural(summary.gold_checked, 'gold answer')} tried")
    if summary.unchecked:
        why = "the taskset has neither validate() nor gold() for them, or only scores groups"
        screen.say(f"unchecked: {why}", style="dim")
    print_findings(summary.findings, screen)
