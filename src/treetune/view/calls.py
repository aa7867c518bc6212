"""What the pages ask: a struct for the body of each call, and the function that answers it, in a thread.

Calls(runs).answer("groups", b'{"run": 0, "sort": "variance", "descending": true}')
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from treetune.errors import UsageError
from treetune.runs.columns import NUMBERS, TEXTS
from treetune.runs.query import WORDS
from treetune.serve import encode, read_body
from treetune.view.figures import details, overview
from treetune.view.one_rollout import show_rollout, show_tokens
from treetune.view.run_list import RunList, ShownRun
from treetune.view.tables import list_groups, list_rollouts

Place = Annotated[int, msgspec.Meta(ge=0)]
Text = Annotated[str, msgspec.Meta(max_length=10_000)]


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class OfRun(msgspec.Struct, forbid_unknown_fields=True):
    run: Place


class OfTable(OfRun, forbid_unknown_fields=True):
    query: Text = ""
    sort: str = ""
    descending: bool = False
    start: Place = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 50


class OfRollout(OfRun, forbid_unknown_fields=True):
    at: Place | None = None
    name: Text | None = None


class Known(msgspec.Struct, forbid_unknown_fields=True):
    runs: dict[str, int] = {}


class Calls:
    def __init__(self, runs: RunList) -> None:
        self._runs = runs
        self.by_name: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "runs": (Nothing, self.runs),
            "changes": (Known, self.changes),
            "run": (OfRun, self.run),
            "groups": (OfTable, self.groups),
            "rollouts": (OfTable, self.rollouts),
            "rollout": (OfRollout, self.rollout),
            "tokens": (OfRollout, self.tokens),
            "words": (Nothing, self.words),
        }

    def answer(self, name: str, body: bytes) -> bytes:
        struct, function = self.by_name[name]
        return encode(function(read_body(struct, body)))

    # Lists

    def runs(self, body: Nothing) -> dict[str, Any]:
        self._runs.look()
        return {"place": self._runs.place, "runs": [self._row(shown) for shown in self._runs], "curve": None}

    def _row(self, shown: ShownRun) -> dict[str, Any]:
        about = {"id": shown.id, "name": shown.name, "path": str(shown.path), "kind": "treetune"}
        with shown.open() as run:
            return {**about, **overview(run), "live": False, "tags": []}

    def changes(self, body: Known) -> dict[str, Any]:
        changed = []
        for id, known in body.runs.items():
            with self._runs[int(id)].open() as run:
                if len(run) != known:
                    changed.append(int(id))
        return {"changed": changed, "new_runs": self._runs.look()}

    def words(self, body: Nothing) -> dict[str, Any]:
        metrics = {}
        for shown in self._runs:
            with shown.open() as run:
                metrics[str(shown.id)] = run.columns.metrics
        return {"numbers": list(NUMBERS), "texts": list(TEXTS), "words": list(WORDS), "metrics": metrics}

    # One run

    def run(self, body: OfRun) -> dict[str, Any]:
        shown = self._runs[body.run]
        with shown.open() as run:
            return {**self._row(shown), **details(run)}

    def groups(self, body: OfTable) -> dict[str, Any]:
        with self._runs[body.run].open() as run:
            sort = body.sort or "task"
            return list_groups(run, body.query, sort, body.descending, body.start, body.count)

    def rollouts(self, body: OfTable) -> dict[str, Any]:
        with self._runs[body.run].open() as run:
            return list_rollouts(run, body.query, body.sort, body.descending, body.start, body.count)

    # One rollout

    def rollout(self, body: OfRollout) -> dict[str, Any]:
        with self._runs[body.run].open() as run:
            return show_rollout(run, _place(run, body))

    def tokens(self, body: OfRollout) -> dict[str, Any]:
        with self._runs[body.run].open() as run:
            return show_tokens(run, _place(run, body))


def _place(run: Any, body: OfRollout) -> int:
    if body.at is not None:
        if body.at >= len(run):
            raise UsageError(f"there is no rollout {body.at}", remedy=f"the run has {len(run)}")
        return body.at
    if body.name is None:
        raise UsageError("no rollout is named", remedy="pass `at`, or `name`: UID/0")
    return int(run.columns.entries.index(run.find(body.name)))
