"""What verbs print: one JSON object on standard output with `--json`, text for people otherwise."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

# Newer releases of typer carry their own click, older ones use the installed one: this is the base in either.
CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def print_json(value: Any) -> None:
    """The one JSON object of a `--json` run."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value, enc_hook=repr), indent=2).decode() + "\n")
    sys.stdout.flush()


def console_for(as_json: bool) -> Console:
    """Where people read: standard output, or standard error where that belongs to JSON."""
    from rich.console import Console

    return Console(stderr=as_json, highlight=False)


def report_error(message: str, remedy: str | None, code: int, as_json: bool) -> int:
    if as_json:
        print_json({"error": message, "remedy": remedy})
    sys.stderr.write(f"error: {message}\n")
    if remedy:
        sys.stderr.write(f"  -> {remedy}\n")
    return code


def error_text(error: Any) -> str:
    """What typer found wrong, and where to read more."""
    context = getattr(error, "ctx", None)
    return str(error.format_message()) + (f" (see `{context.command_path} --help`)" if context is not None else "")


def show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    # Ours are UserWarnings and speak to the user; a library's deprecations do not.
    if issubclass(category, UserWarning):
        sys.stderr.write(f"warning: {message}\n")
