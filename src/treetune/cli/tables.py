"""Tables whose words stay whole: on a narrow terminal columns wrap between words. Where even that does not fit, each
row becomes a paragraph with its headings.

    screen.print(make_table([("arithmetic", "0.7000")], ("source", "reward"), right=("reward",)))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2
_LONG = 32
"""A longer word, such as a path, may be broken: no table would hold it."""


def make_table(
    rows: Iterable[Sequence[str | Text]],
    headings: Sequence[str] = (),
    right: Sequence[str] = (),
    whole: Sequence[str] = (),
) -> WordTable:
    """A table without lines. Text is shown as it is; the headings in `right` stand above numbers, those in `whole`
    above what is never broken, however long."""
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
        """Of each column the width that it would like, and the least that breaks no word."""
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
    """Widths that fit into a room, each at least so wide; None where there are none. What is left over goes to the
    columns that lack least first."""
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
