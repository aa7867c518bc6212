"""Where people read what a command or an evaluation says: `Screen`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

PICTURES = {
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
            yield segment if segment.control else segment._replace(text=segment.text.translate(PICTURES))

    def say(self, text: str, style: str | None = None) -> None:
        """Text as it is: no markup, and a long line is left to the terminal."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def progress(self, *columns: ProgressColumn) -> Progress:
        """A bar that goes away when the work is done; none where nobody watches."""
        return Progress(*columns, console=self, transient=True, disable=not self.is_terminal)
