"""All verbs, and the reporting of errors: a line for people, an object with `--json`, and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from treetune.cli import options, output
from treetune.cli.options import OVERRIDABLE, option, split_overrides
from treetune.cli.output import report_error
from treetune.errors import TasksetError, TreetuneError, UsageError, format_error, is_of_network, place_of
from treetune.system.folders import FOLDER, read_version

VERBS = {
    "list": ("listing:list_command", "List what is installed: tasksets, environments, models."),
    "build": ("build:build_command", "Build tasks into a trainer's rows, in cached parquet."),
    "show": ("show:show_command", "Show tasks, or the rollouts of a run: messages and rewards."),
    "validate": (
        "validate:validate_command",
        "Check files of rows against every rule, or a taskset and its gold answers.",
    ),
    "audit": (
        "audit:audit_command",
        "Check whether a task is worth training on: solvable, not free, no leaks, its costs.",
    ),
    "eval": ("evaluate:eval_command", "Evaluate a model on a taskset and save every trace."),
    "view": ("view:view_command", "View runs in the browser: groups, rollouts, tokens, changes."),
    "compare": ("compare:compare_command", "Compare runs of the same tasks: which is better, and could it be chance?"),
    "profile": ("profile:profile_command", "Measure how often models solve each task, for a curriculum."),
    "train": (
        "train:train_command",
        "Train on tasks with verl, SkyRL, TRL, slime or AReaL: write config and data, start the trainer.",
    ),
    "verify-weights": (
        "verify_weights:verify_weights_command",
        "Verify that an episode counts once in a trainer, also if it is several training rows.",
    ),
    "serve": ("serve:serve_command", "Serve a taskset: clients pull tasks and rollouts, or play episodes over HTTP."),
    "gateway": (
        "gateway:gateway_app",
        "Serve a model to agents that were not written for Treetune, and record every token.",
    ),
    "convert": ("export:convert_command", "Convert tasks to another trainer's rows, or a run to an Inspect log."),
    "push": ("export:push_command", "Push tasks, built into rows, or a run to the hub, with a dataset card."),
    "export": ("export:export_app", "Export a TARGET as a package for another ecosystem: verifiers, prime-rl."),
    "probe": ("servers:probe_command", "Test a running task server: health, info, one episode, a verdict."),
    "register": ("servers:register_command", "Run a register of servers, for machines without a shared folder."),
    "top": ("servers:top_command", "Watch a running server: work in progress, rewards, errors."),
    "rescore": ("evaluate:rescore_command", "Score saved traces again after a scorer changed, without the model."),
    "cache": ("cache:cache_app", "List built datasets, show what one was built from, remove them."),
    "sandbox": (
        "sandbox:sandbox_app",
        "Show which sandboxes this machine supports, and build root file systems for them.",
    ),
    "init": ("init:init_command", "Create a taskset as a package: a passing test, a config, an entry point."),
    "demo": ("demo:demo_command", "Declare a task, evaluate it with scripts, build it into parquet, in a minute."),
}
"""Each verb with its function in this folder, and its line in `treetune --help`. Only the called verb is loaded, so its
module may import what it needs at the top."""


def make_app(verb: str | None) -> typer.Typer:
    """The command line with this verb loaded; the other verbs are only listed."""
    app = typer.Typer(
        name="treetune",
        help="One task, every trainer: declare an RL task once, inspect it, check it, evaluate it.",
        epilog="A TARGET is a taskset's id, config.yaml, file.py:Name, module:Name, rows (a file, folder or hub name), "
        "verifiers:ID or a server (tcp://, http://). Any key of its config can be set: --taskset.shuffle.seed 0",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_take_options)
    for name, (place, about) in VERBS.items():
        if name != verb:
            app.command(name, help=about)(lambda: None)
            continue
        module, _, function = place.partition(":")
        command = getattr(importlib.import_module(f"treetune.cli.{module}"), function)
        if isinstance(command, typer.Typer):
            its_help: dict[str, Any] = {} if command.registered_callback is not None else {"help": about}
            app.add_typer(command, name=name, no_args_is_help=True, **its_help)
        else:
            app.command(name)(command)
    return app


def _take_options(
    version: Annotated[
        bool,
        option(
            "Show the version and exit.", "--version", "-V", is_eager=True, callback=lambda asked: _show_version(asked)
        ),
    ] = False,
) -> None:
    pass


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"treetune {read_version()}")
        raise typer.Exit


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    as_json = "--json" in arguments
    output.keep_standard_output(as_json)
    warnings.showwarning = output.show_warning
    try:
        first = (options.typed_words() or arguments)[:1]
        verb = first[0] if first and first[0] in VERBS else None
        options.hide_overrides()
        plain, overrides = split_overrides(arguments) if verb in OVERRIDABLE else (arguments, {})
        code = make_app(verb)(plain, prog_name="treetune", standalone_mode=False, obj=overrides)
        if code == 130 and as_json and not output.was_printed():  # how typer handles Ctrl-C
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        return report_error("interrupted", None, 130, as_json, "interrupted")
    except output.CommandLineError as error:
        if not arguments:
            return 2  # the help was already shown
        return report_error(_explain(error, arguments), None, 2, as_json, UsageError.code)
    except TreetuneError as error:
        cause = error.__cause__ if isinstance(error, TasksetError) else None
        offline = cause is not None and is_of_network(cause)
        remedy = error.remedy or (_name_place(cause) if cause is not None and offline else None)
        code = report_error(error.message, remedy, error.exit_code, as_json, error.code)
        if cause is not None and not offline:  # a library's traceback does not help without a network
            traceback.print_exception(cause)
    except BrokenPipeError:
        return _end_silently()
    except SystemExit as error:
        if options.COMPLETION_VARIABLE in os.environ or {"--install-completion", "--show-completion"} & set(
            arguments[:1]
        ):
            return int(error.code or 0)  # typer ends both this way
        if isinstance(error.__context__, BrokenPipeError):  # typer wraps it like this
            return _end_silently()
        remedy = "a taskset and the modules it imports must not end the program"
        return report_error(f"sys.exit({error.code!r}) was called", remedy, 3, as_json, TasksetError.code)
    except Exception as error:
        code = report_error(f"unexpected {format_error(error)}", _culprit(error), 3, as_json, "unexpected")
        traceback.print_exception(error)
    return code if isinstance(code, int) else 0


def _explain(error: Any, arguments: list[str]) -> str:
    """The message of typer's error, with suggestions for an unknown option or verb."""
    from treetune.cli.flags import explain_flags, suggest_verb  # imported only for errors

    verb = arguments[0] if arguments else ""
    if verb not in VERBS:
        return output.error_text(error, None if verb.startswith("-") else suggest_verb(verb, VERBS))
    return output.error_text(error, explain_flags(verb, arguments, error.ctx.command) if _names_option(error) else None)


def _names_option(error: Any) -> bool:
    """Whether the error is about an unknown option."""
    return type(error).__name__ == "NoSuchOption"


def _end_silently() -> int:
    """Ends without a message, because the reader of standard output has closed it (`| head`)."""
    sys.stderr.close()
    return 0


def _name_place(error: BaseException) -> str:
    place = place_of(error)
    return "is there a network, or a proxy (HTTPS_PROXY)?" + (f" {place} needs it" if place else "")


def _culprit(error: Exception) -> str:
    """Whose code failed, judged by the innermost frame outside Python and its libraries."""
    from treetune.config.plugins import installed_by

    ours = FOLDER
    libraries = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ours):
            break
        if (package := installed_by(frame.filename)) is not None:
            return f"a fault in {file}, line {frame.lineno}, in the package {package}: please report it to its author"
        if file.exists() and not any(file.is_relative_to(folder) for folder in libraries):
            return f"a fault in {file}, line {frame.lineno}, which you asked Treetune to run"
    return "a bug in Treetune: please report it, with the lines below"
