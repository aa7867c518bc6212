"""What a build says of its rows beside writing them: how many were dropped for what, and what is wrong with which.

notes = Notes()
notes.dropped["filter"] += 3
notes.tell(Flaw.of("rows-dropped", "dropped: no ground truth", "answer is None", [2, 5]))
notes.add(those_of_the_next_batch)
"""

from __future__ import annotations

from collections import Counter

import msgspec

from treetune.flaw import Flaw

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
