"""What verbs print: one JSON object on standard output with `--json`, text for people otherwise."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Any, BinaryIO

import msgspec
import typer

from treetune.system.screen import PICTURES

# Newer releases of typer carry their own click, older ones use the installed one: this is the base in either.
CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


_kept: BinaryIO | None = None
"""Standard output itself, while `sys.stdout` and what writes to its descriptor go to standard error."""
_printed = False


def keep_standard_output(as_json: bool) -> None:
    """With `--json`, keeps standard output for the one object: what user code and its children print goes to
    standard error, until the process ends."""
    global _kept
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout is not sys.__stdout__:
        return  # called from Python, with an output of the caller's own
    # A terminal or pipe that cannot show a letter is no reason to fail. First of all: it looks where in a file it is.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=as_json or sys.stdout.line_buffering)
    if as_json:
        sys.stdout.flush()
        _kept = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)


def print_json(value: Any) -> None:
    """The one JSON object of a `--json` run."""
    global _printed
    try:
        encoded = msgspec.json.encode(value, enc_hook=repr)
    except UnicodeEncodeError:  # a lone surrogate, such as the name of a file
        encoded = json.dumps(msgspec.to_builtins(value, enc_hook=repr)).encode()
    content = msgspec.json.format(encoded, indent=2) + b"\n"
    if _kept is None:
        sys.stdout.write(content.decode())
        sys.stdout.flush()
    else:
        _kept.write(content)
        _kept.flush()
    _printed = True


def was_printed() -> bool:
    """Whether the one object is out already."""
    return _printed


def report_error(message: str, remedy: str | None, exit_code: int, as_json: bool, code: str) -> int:
    """Says what is wrong; `code` names the kind of error for programs."""
    if as_json and not _printed:
        interrupted = {"interrupted": True} if exit_code == 130 else {}
        print_json({"error": message, "remedy": remedy, "code": code, **interrupted})
    sys.stderr.write(f"error: {message}\n")
    if remedy:
        sys.stderr.write(f"  -> {remedy}\n")
    return exit_code


def error_text(error: Any, better: str | None = None) -> str:
    """What typer found wrong, or `better` words for it, and where to read more."""
    context = getattr(error, "ctx", None)
    return (better or str(error.format_message())) + (
        f" (see `{context.command_path} --help`)" if context is not None else ""
    )


def show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    # Ours are UserWarnings and speak to the user; a library's deprecations do not.
    if issubclass(category, UserWarning):
        sys.stderr.write(f"warning: {str(message).translate(PICTURES)}\n")
