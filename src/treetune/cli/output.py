"""What verbs print: one JSON object on standard output with `--json`, text for people otherwise."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

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


_PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys([0x7F, *range(0x80, 0xA0)], "\ufffd"),
}
"""Characters that a terminal obeys, each with one that shows it."""


class Screen(Console):
    """Where people read: standard output, or standard error where that belongs to JSON."""

    def __init__(self, as_json: bool = False) -> None:
        super().__init__(stderr=as_json, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Text of models and tasks may hold sequences that a terminal would obey: they are shown instead."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(_PICTURES))

    def say(self, text: str, style: str | None = None) -> None:
        """Text as it is: no markup, and a long line is left to the terminal."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def progress(self, *columns: ProgressColumn) -> Progress:
        """A bar that goes away when the work is done; none where nobody watches."""
        return Progress(*columns, console=self, transient=True, disable=not self.is_terminal)


def report_error(message: str, remedy: str | None, code: int, as_json: bool) -> int:
    if as_json and not _printed:
        print_json({"error": message, "remedy": remedy, **({"interrupted": True} if code == 130 else {})})
    sys.stderr.write(f"error: {message}\n")
    if remedy:
        sys.stderr.write(f"  -> {remedy}\n")
    return code


def error_text(error: Any, better: str | None = None) -> str:
    """What typer found wrong, or `better` words for it, and where to read more."""
    context = getattr(error, "ctx", None)
    return (better or str(error.format_message())) + (
        f" (see `{context.command_path} --help`)" if context is not None else ""
    )


def show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    # Ours are UserWarnings and speak to the user; a library's deprecations do not.
    if issubclass(category, UserWarning):
        sys.stderr.write(f"warning: {str(message).translate(_PICTURES)}\n")
