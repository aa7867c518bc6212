"""All verbs together, and what becomes of every error: a line for people, an object with `--json`, an exit code."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import typer

from treetune.cli import (
    build,
    cache,
    convert,
    demo,
    evaluate,
    init,
    listing,
    probe,
    register,
    rescore,
    sandbox,
    serve,
    show,
    top,
    validate,
)
from treetune.cli.arguments import set_apart
from treetune.cli.output import (
    CommandLineError,
    error_text,
    keep_standard_output,
    report_error,
    show_warning,
    was_printed,
)
from treetune.errors import TasksetError, TreetuneError, described

app = typer.Typer(
    name="treetune",
    help="One task, every trainer: declare an RL task once, look at it, check it, evaluate it.",
    epilog="A TARGET is a taskset's id, config.yaml, file.py:Name, module:Name, rows (a file, folder or hub name) or a "
    "server (tcp://, http://). "
    "Any key of its config can be set: --taskset.shuffle.seed 0",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
OVERRIDABLE: dict[str, Callable[..., Any]] = {
    "build": build.build_command,
    "show": show.show_command,
    "validate": validate.validate_command,
    "eval": evaluate.eval_command,
    "serve": serve.serve_command,
}
"""The verbs that take dotted overrides."""

app.command("list")(listing.list_command)
for verb, command in OVERRIDABLE.items():
    app.command(verb, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(command)
app.command("convert")(convert.convert_command)
app.command("probe")(probe.probe_command)
app.command("register")(register.register_command)
app.command("top")(top.top_command)
app.command("rescore")(rescore.rescore_command)
app.add_typer(cache.cache_app, name="cache")
app.add_typer(sandbox.sandbox_app, name="sandbox")
app.command("init")(init.init_command)
app.command("demo")(demo.demo_command)


def run(arguments: list[str]) -> int:
    """Runs one command; gives the exit code."""
    as_json = "--json" in arguments
    keep_standard_output(as_json)
    warnings.showwarning = show_warning
    takes_overrides = bool(arguments) and arguments[0] in OVERRIDABLE
    arguments, dotted = set_apart(arguments) if takes_overrides else (arguments, [])
    try:
        code = app(arguments, prog_name="treetune", standalone_mode=False, obj=dotted)
        if code == 130 and as_json and not was_printed():  # typer's own answer to Ctrl-C
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        return report_error("interrupted", None, 130, as_json)
    except CommandLineError as error:
        return report_error(error_text(error), None, 2, as_json)
    except TreetuneError as error:
        code = report_error(error.message, error.remedy, error.exit_code, as_json)
        if isinstance(error, TasksetError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
    except BrokenPipeError:
        return _nobody_reads()
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # how typer takes it
            return _nobody_reads()
        remedy = "a taskset, or what it imports, must not end the program"
        return report_error(f"sys.exit({error.code!r}) was called", remedy, 3, as_json)
    except Exception as error:
        code = report_error(f"unexpected {described(error)}", _culprit(error), 3, as_json)
        traceback.print_exception(error)
    return code if isinstance(code, int) else 0


def _nobody_reads() -> int:
    """The reader went away (`| head`): no fault of ours, and nothing more to say to it."""
    sys.stderr.close()
    return 0


def _culprit(error: Exception) -> str:
    """Whose code failed: the innermost frame that is neither Python's own nor a library's."""
    import sysconfig
    from pathlib import Path

    ours = Path(__file__).parent.parent
    libraries = [Path(sysconfig.get_path(kind)) for kind in ("stdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ours):
            break
        if file.exists() and not any(file.is_relative_to(folder) for folder in libraries):
            return f"a fault in {file}, line {frame.lineno}, which Treetune was asked to run"
    return "a bug in Treetune: please report it, with the lines below"
