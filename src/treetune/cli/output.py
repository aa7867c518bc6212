"""Prints the output of verbs: one JSON object on standard output with `--json`, otherwise text and tables for people.

screen.print(make_table([("arithmetic", "0.7000")], ("source", "reward"), right=("reward",)))
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any, BinaryIO

import msgspec
import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from treetune.system.screen import PICTURES

# Newer releases of typer bundle their own click, older ones use the installed one; this is the base class in both.
CommandLineError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


_kept: BinaryIO | None = None
"""The real standard output, while `sys.stdout` and its file descriptor are redirected to standard error."""
_printed = False


def keep_standard_output(as_json: bool) -> None:
    """With `--json`, keeps standard output for the one object: until the process ends, anything that user code and its
    children print goes to standard error."""
    global _kept
    if not isinstance(sys.stdout, io.TextIOWrapper) or sys.stdout is not sys.__stdout__:
        return  # called from Python, with the caller's own output
    # A terminal or pipe that cannot show a character must not fail. This must come first.
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=as_json or sys.stdout.line_buffering)
    if as_json:
        sys.stdout.flush()
        _kept = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)


def print_json(value: Any) -> None:
    """Prints the one JSON object of a command with `--json`."""
    global _printed
    try:
        encoded = msgspec.json.encode(value, enc_hook=repr)
    except UnicodeEncodeError:  # a lone surrogate, for example in a file name
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
    """Whether the one object was printed."""
    return _printed


def report_error(message: str, remedy: str | None, exit_code: int, as_json: bool, code: str) -> int:
    """Prints an error; `code` names its kind for programs."""
    if as_json and not _printed:
        interrupted = {"interrupted": True} if exit_code == 130 else {}
        print_json({"error": message, "remedy": remedy, "code": code, **interrupted})
    sys.stderr.write(f"error: {message}\n")
    if remedy:
        sys.stderr.write(f"  -> {remedy}\n")
    return exit_code


def error_text(error: Any, better: str | None = None) -> str:
    """The message of typer's error, or a `better` one, and the `--help` to read."""
    context = getattr(error, "ctx", None)
    return (better or str(error.format_message())) + (
        f" (see `{context.command_path} --help`)" if context is not None else ""
    )


def show_warning(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
    # Treetune warns the user with UserWarning; deprecation warnings of libraries are not shown.
    if issubclass(category, UserWarning):
        sys.stderr.write(f"warning: {str(message).translate(PICTURES)}\n")


_GAP = 2
_LONG = 32
"""Longer words, such as paths, may be broken."""


def figure(value: float | None, spec: str = ".4f") -> str:
    """A number, or a dash for None."""
    return "-" if value is None else format(value, spec)


def make_table(
    rows: Iterable[Sequence[str | Text]],
    headings: Sequence[str] = (),
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> WordTable:
    """A table without lines. Text is shown without markup. Columns in `right` are aligned right; those in `whole` are
    never broken."""
    return WordTable(
        [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows], headings, right, whole
    )


class WordTable(Table):
    def __init__(
        self, rows: list[list[Text]], headings: Sequence[str], right: Sequence[str], whole: Sequence[str]
    ) -> None:
        super().__init__(box=None, padding=(0, _GAP, 0, 0), show_header=bool(headings))
        self._texts, self._headings, self._whole = rows, headings, whole
        for heading in headings:
            self.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
        for row in rows:
            self.add_row(*row)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = fit_columns(*self._measure(), options.max_width - _GAP * len(self.columns))
        if widths is None:
            yield from self._paragraphs()
            return
        for column, width in zip(self.columns, widths, strict=True):
            column.width = width
        yield from super().__rich_console__(console, options)

    def _measure(self) -> tuple[list[int], list[int]]:
        """The full width of each column, and the least width that breaks no word."""
        wanted, least = [], []
        for number in range(len(self.columns)):
            heading = self._headings[number] if self._headings else ""
            lines = [line for row in self._texts for line in row[number].plain.splitlines()] + [heading]
            longest = None if heading and heading in self._whole else _LONG
            words = [word for line in lines for word in line.split()]
            wanted.append(max(map(cell_len, lines), default=1) or 1)
            least.append(min(max(map(cell_len, words), default=1), longest or 10**6))
        return wanted, least

    def _paragraphs(self) -> RenderResult:
        if self.title:
            yield Text(str(self.title), style=self.title_style or "")
        for row in self._texts:
            headings = self._headings or [""] * len(row)
            parts = [
                Text.assemble((f"{heading} ", "dim") if heading else "", cell)
                for heading, cell in zip(headings, row, strict=True)
                if cell.plain
            ]
            yield Text("  ").join(parts)


def fit_columns(wanted: Sequence[int], least: Sequence[int], room: int) -> list[int] | None:
    """Widths of at least `least` that fit into `room`; None if there are none. The remaining width goes first to the
    columns that need the least more."""
    spare = room - sum(least)
    if spare < 0:
        return None
    widths = list(least)
    order = sorted(range(len(least)), key=lambda number: wanted[number] - least[number])
    for place, number in enumerate(order):
        more = min(max(0, wanted[number] - least[number]), spare // (len(order) - place))
        widths[number] += more
        spare -= more
    return widths
