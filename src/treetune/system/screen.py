"""The terminal output of commands and evaluations: `Screen`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import Progress, ProgressColumn
from rich.segment import Segment

PICTURES = {
    **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"},
    **dict.fromkeys([0x7F, *range(0x80, 0xA0)], "\ufffd"),
}
"""A visible replacement for each control character."""


class Screen(Console):
    """Standard output, or standard error if standard output is for JSON."""

    def __init__(self, as_json: bool = False) -> None:
        super().__init__(stderr=as_json, highlight=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Show control sequences in the text of models and tasks, instead of letting the terminal execute them."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=segment.text.translate(PICTURES))

    def say(self, text: str, style: str | None = None) -> None:
        """Print text without markup; the terminal wraps long lines."""
        self.print(text, style=style, markup=False, soft_wrap=True)

    def progress(self, *columns: ProgressColumn) -> Progress:
        """A progress bar that disappears at the end; disabled without a terminal."""
        return Progress(*columns, console=self, transient=True, disable=not self.is_terminal)
