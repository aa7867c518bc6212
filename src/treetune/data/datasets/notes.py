"""What a build says of its rows beside writing them: how many were dropped for what, and what is wrong with which.

notes = Notes()
notes.dropped["filter"] += 3
notes.tell(Flaw.of("rows-dropped", "dropped: no ground truth", "answer is None", [2, 5]))
notes.add(those_of_the_next_batch)
"""

from __future__ import annotations

from collections import Counter

import msgspec
import pyarrow as pa

from treetune.core.finding import Flaw
from treetune.data.datasets.choices import OPTIONS, TEXTS
from treetune.data.datasets.config import DatasetConfig
from treetune.data.rows.image_columns import MARK as PLACE

DROPPED = "rows-dropped"
"""The rule of rows that were dropped because something is wrong with them."""
NOT_SHOWN = "options-not-shown"
"""The rule of rows whose prompts do not show the options."""
NO_IMAGES = "images-missing"
"""The rule of rows whose prompts have a place for an image, and none is there."""
INVALID = "invalid-task"
"""The rule of rows that no answer solves, as `validate` finds them task by task."""


class Notes(msgspec.Struct):
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Rows left out, by reason."""
    by_kind: dict[tuple[str, str], Flaw] = {}

    @property
    def flaws(self) -> list[Flaw]:
        return list(self.by_kind.values())

    def tell(self, flaw: Flaw) -> None:
        """Of the rows of one batch, each kind of flaw once."""
        self.by_kind[flaw.rule, flaw.what] = flaw

    def end_with(self, last: int) -> None:
        """Leaves out what was dropped after a row of its batch, behind which none is used."""
        for reason in list(self.dropped):
            flaw = self.by_kind.pop((DROPPED, dropped_for(reason)), None)
            if flaw is None:
                continue
            rows = [row for row in flaw.rows if row < last]
            self.dropped[reason] -= flaw.count - len(rows)
            if not rows:
                del self.dropped[reason]
            else:
                self.tell(Flaw.of(flaw.rule, flaw.what, flaw.first, rows))

    def add(self, later: Notes) -> None:
        """Those of the next batch."""
        self.dropped.update(later.dropped)
        for key, flaw in later.by_kind.items():
            known = self.by_kind.get(key)
            self.by_kind[key] = flaw.join(None) if known is None else known.join(flaw)


def dropped_for(reason: str) -> str:
    """What a flaw says of rows that were dropped for a reason."""
    return f"dropped: {reason}"


def look_at_prompts(config: DatasetConfig, table: pa.Table, notes: Notes) -> None:
    """Tells of rows, made by our own function, whose prompts lack what they need."""
    if config.images:  # they may show the options, too
        return
    template, system = config.prompt_template or "", config.system_prompt or ""
    shows_options = config.prompt_format == "template" and f"{{{OPTIONS}" in template
    if config.choices is not None and not shows_options:
        _find_hidden_options(table, notes)
    if PLACE in template or PLACE in system:
        rows = [extra["index"] for extra in table["extra_info"].to_pylist()]
        first = f"prompt_template has {PLACE}, and images names no column"
        notes.tell(Flaw.of(NO_IMAGES, f"with {PLACE} in the prompt and no image", first, rows))


def _find_hidden_options(table: pa.Table, notes: Notes) -> None:
    """Tells of rows whose prompts do not hold the text of each option."""
    hidden: dict[int, str] = {}
    for prompt, extra in zip(table["prompt"].to_pylist(), table["extra_info"].to_pylist(), strict=True):
        said = "\n".join(str(message.get("content")) for message in prompt)
        options = extra[TEXTS] if isinstance(extra.get(TEXTS), list) else []
        if (missing := next((text for text in options if text not in said), None)) is not None:
            hidden.setdefault(extra["index"], missing)
    if hidden:
        first = f"the prompt lacks {next(iter(hidden.values()))!r:.60}; write {{options}} in prompt_template"
        notes.tell(Flaw.of(NOT_SHOWN, "without their options in the prompt", first, list(hidden)))
