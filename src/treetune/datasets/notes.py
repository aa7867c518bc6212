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

from treetune.datasets.choices import TEXTS
from treetune.flaw import Flaw
from treetune.rows.image_columns import MARK as PLACE

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
        key = (flaw.rule, flaw.what)
        self.by_kind[key] = self.by_kind[key].join(flaw) if key in self.by_kind else flaw

    def add(self, later: Notes) -> None:
        """Those of rows that come later."""
        self.dropped.update(later.dropped)
        for flaw in later.flaws:
            self.tell(flaw)


def dropped_for(reason: str) -> str:
    """What a flaw says of rows that were dropped for a reason."""
    return f"dropped: {reason}"


def find_hidden_options(table: pa.Table, notes: Notes) -> None:
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


def find_places(table: pa.Table, notes: Notes) -> None:
    """Tells of rows whose prompts have a place for an image, where no column has images."""
    rows = [extra["index"] for extra in table["extra_info"].to_pylist()]
    first = f"prompt_template has {PLACE}, and images names no column"
    notes.tell(Flaw.of(NO_IMAGES, f"with {PLACE} in the prompt and no image", first, rows))
