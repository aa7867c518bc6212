"""The calls of the pages: a struct for the body of each call, and the function that answers it, in a thread.

    Calls(runs).answer("groups", b'{"run": 0, "sort": "variance", "descending": true}')

`docs/viewing.md` documents them for other clients.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treetune.errors import TreetuneError, UsageError
from treetune.evaluation import render
from treetune.runs.annotations import Word, write_mark, write_tags
from treetune.runs.columns import NOTES, NUMBERS, TEXTS
from treetune.runs.export import RunExport
from treetune.runs.query import WORDS
from treetune.runs.rolling import EARLIER
from treetune.runs.run import Run
from treetune.serve import read_body
from treetune.system.http_error import encode
from treetune.view.figures import details, steps_of
from treetune.view.run_list import Overviews, RunList
from treetune.view.suspicious import Suspicions
from treetune.view.tables import (
    compare_runs,
    list_groups,
    list_rollouts,
    load_texts,
    rollouts_of,
    show_rollout,
    show_tokens,
    tokenizer_of,
)

Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Text = Annotated[str, msgspec.Meta(max_length=10_000)]

_MOST_RESCORED = 1000
"""The maximum number of rollouts in a preview."""
_RESCORE_SECONDS = 600.0


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class OfRun(Body, kw_only=True):
    run: Number


class OfQuery(OfRun, kw_only=True):
    query: Text = ""


class OfTable(OfQuery, kw_only=True):
    sort: Text = ""
    descending: bool = False
    start: Number = 0
    count: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 50


class OfRollout(OfRun, kw_only=True):
    at: Number | None = None
    name: Text | None = None


class OfRuns(Body, kw_only=True):
    runs: Annotated[list[Number], msgspec.Meta(min_length=2, max_length=16)]
    query: Text = ""


class OfTask(Body, kw_only=True):
    runs: Annotated[list[Number], msgspec.Meta(max_length=16)]
    uid: Text
    occurrence: int = 0


class KnownSizes(Body, kw_only=True):
    runs: dict[str, int] = {}


class Marked(OfRollout, kw_only=True):
    mark: Word | None = None
    comment: str = ""


class Tagged(OfRun, kw_only=True):
    tags: list[str]


class Exported(OfQuery, kw_only=True):
    format: Literal["jsonl", "parquet", "eval"] = "jsonl"


class Calls:
    def __init__(self, runs: RunList, tokenizer: str | None = None) -> None:
        """`tokenizer` is a folder or a name, for runs that do not record theirs."""
        self._runs, self._tokenizer = runs, tokenizer
        self._overviews = Overviews(runs)
        self._suspicions = Suspicions()
        self._rescoring = Rescoring()
        self.by_name: dict[str, tuple[type[Any], Callable[[Any], Any]]] = {
            "runs": (Body, self.runs),
            "changes": (KnownSizes, self.changes),
            "words": (Body, self.words),
            "run": (OfRun, self.run),
            "groups": (OfTable, self.groups),
            "rollouts": (OfTable, self.rollouts),
            "rollout": (OfRollout, self.rollout),
            "tokens": (OfRollout, self.tokens),
            "suspicious": (OfRun, self.suspicious),
            "compare": (OfRuns, self.compare),
            "pair": (OfTask, self.pair),
            "rescore": (OfQuery, self.rescore),
            "mark": (Marked, self.mark),
            "tag": (Tagged, self.tag),
        }

    def answer(self, name: str, body: bytes) -> bytes:
        struct, function = self.by_name[name]
        return encode(function(read_body(struct, body)))

    def select(self, body: bytes) -> RunExport:
        """The selection that the call `export` requests."""
        asked = read_body(Exported, body)
        with self._runs[asked.run].open() as run:
            return RunExport(run, asked.query, asked.format)

    @property
    def shown(self) -> RunList:
        return self._runs

    def close(self) -> None:
        self._rescoring.close()

    # Run lists

    def runs(self, body: Body) -> dict[str, Any]:
        self._runs.look(now=True)
        rows = self._overviews.rows()
        return {"place": self._runs.place, "runs": rows, "curve": self._curve(rows)}

    def _curve(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """The steps of the training that is shown, if any: a run with steps, and the `earlier` run below it."""
        trained = [self._runs[row["id"]] for row in rows if row["steps"]]
        folders = {shown.path.parent if shown.path.name == EARLIER else shown.path for shown in trained}
        if len(folders) != 1:
            return None
        steps: dict[int, dict[str, Any]] = {}
        for shown in sorted(trained, key=lambda shown: shown.path.name != EARLIER):
            with shown.open() as run:
                steps |= {step["step"]: step for step in steps_of(run.columns)}
        return [steps[step] for step in sorted(steps)]

    def changes(self, body: KnownSizes) -> dict[str, Any]:
        changed = []
        for id, known in body.runs.items():
            if not id.isdigit():
                raise UsageError(f"{id:.20} is not a run")
            shown = self._runs[int(id)]
            try:
                if shown.rollouts is not None:
                    with shown.open() as run:
                        is_new = len(run) != known
                else:
                    is_new = self._overviews.has_changed(shown, known)
            except (OSError, TreetuneError):
                is_new = known >= 0  # the run is gone
            if is_new:
                changed.append(int(id))
        return {"changed": changed, "new_runs": self._runs.look()}

    def words(self, body: Body) -> dict[str, Any]:
        rows = self._overviews.rows()
        metrics = {str(row["id"]): row["metrics"] for row in rows}
        return {"numbers": list(NUMBERS), "texts": [*TEXTS, *NOTES], "words": list(WORDS), "metrics": metrics}

    # One run

    def run(self, body: OfRun) -> dict[str, Any]:
        shown = self._runs[body.run]
        with shown.open() as run:
            row = self._overviews.row(shown)
            return {**(row or {}), **details(run), "read": shown.share_read}

    def groups(self, body: OfTable) -> dict[str, Any]:
        shown = self._runs[body.run]
        with shown.open() as run:
            found = list_groups(run, body.query, body.sort or "task", body.descending, body.start, body.count)
            return {**found, "read": shown.share_read}  # below 1, the page asks again

    def rollouts(self, body: OfTable) -> dict[str, Any]:
        shown = self._runs[body.run]
        with shown.open() as run:
            found = list_rollouts(run, body.query, body.sort, body.descending, body.start, body.count)
            return {**found, "read": shown.share_read}

    def suspicious(self, body: OfRun) -> dict[str, Any]:
        return self._suspicions.answer(self._runs[body.run])

    def rescore(self, body: OfQuery) -> dict[str, Any]:
        shown = self._runs[body.run]
        if not shown.is_own:
            return _refusal(f"a run of {shown.kind} does not say how its answers are scored")
        return self._rescoring.preview(shown.path, body.query)

    def tag(self, body: Tagged) -> dict[str, Any]:
        return {"tags": write_tags(self._runs[body.run].path, body.tags)}

    # One rollout

    def rollout(self, body: OfRollout) -> dict[str, Any]:
        with self._runs[body.run].open() as run:
            at = _place(run, body)
            entry, shown = run.columns.entries[at], show_rollout(run, at)
        # The task's code may take time; meanwhile others may look at the run.
        rendered, why_not = render(run, entry)
        return {**shown, "rendered": rendered, "not_rendered": why_not}

    def tokens(self, body: OfRollout) -> dict[str, Any]:
        with self._runs[body.run].open() as run:
            tokenizer, texts = self._tokenizer or tokenizer_of(run.model), None
            try:
                texts = load_texts(tokenizer) if tokenizer is not None else None
            except TreetuneError:
                if self._tokenizer is not None:  # the user named it; without a tokenizer, tokens are shown as ids
                    raise
            return show_tokens(run, _place(run, body), texts, tokenizer)

    def mark(self, body: Marked) -> dict[str, Any]:
        shown = self._runs[body.run]
        with shown.open() as run:
            mark = write_mark(shown.path, run.columns.entries[_place(run, body)], body.mark, body.comment)
        return {"mark": {"mark": mark.mark, "comment": mark.comment} if mark.mark or mark.comment else None}

    # Several runs

    def compare(self, body: OfRuns) -> list[dict[str, Any]]:
        first, *others = (self._runs[id] for id in body.runs)
        found = []
        for other in others:
            # Locked in the order of their ids, so that two calls that compare the same runs never deadlock.
            one, two = sorted((first, other), key=lambda shown: shown.id)
            with one.open() as earlier, two.open() as later:
                before, after = (earlier, later) if one is first else (later, earlier)
                compared = compare_runs(before, after, body.query)
            found.append({"before": first.id, "after": other.id, **compared})
        return found

    def pair(self, body: OfTask) -> list[dict[str, Any]]:
        found = []
        for id in body.runs:
            with self._runs[id].open() as run:
                found.append({"run": id, "rollouts": rollouts_of(run, body.uid, body.occurrence)})
        return found


def _place(run: Run, body: OfRollout) -> int:
    if body.at is not None:
        if body.at >= len(run):
            raise UsageError(f"there is no rollout {body.at}", remedy=f"the run has {len(run)}")
        return body.at
    if body.name is None:
        raise UsageError("no rollout is named", remedy="pass `at`, or `name`: UID/0")
    return run.row(body.name)


def _refusal(why: str) -> dict[str, Any]:
    return {"rows": [], "changed": 0, "failed": 0, "left": 0, "refused": why}


class Rescoring:
    """Previews `treetune rescore`: what the current scorers say about recorded answers. It writes nothing.

        Rescoring().preview(Path("runs/x"), "source=gsm8k")["changed"]

    It runs the verb itself in a separate process. So the task's current code is loaded, however often it is edited, and
    it cannot harm the server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()

    def preview(self, run: Path, query: str) -> dict[str, Any]:
        command = [
            sys.executable,
            "-P",
            "-m",
            "treetune",
            "rescore",
            str(run),
            "--dry-run",
            "-n",
            str(_MOST_RESCORED),
            "--json",
        ]
        command += ["--where", query] if query.strip() else []
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        with self._lock:
            self._children.add(child)
        try:
            said, complaints = child.communicate(timeout=_RESCORE_SECONDS)
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"it took more than {_RESCORE_SECONDS:g} s", remedy="select fewer rollouts by a query"
            ) from None
        finally:
            child.kill()
            with self._lock:
                self._children.discard(child)
        try:
            found: dict[str, Any] = msgspec.json.decode(said)
        except msgspec.MsgspecError:
            raise TreetuneError(f"rescore failed: {complaints.decode(errors='replace')[-2000:]}") from None
        if "error" in found:
            why = found["error"] + (f" ({found['remedy']})" if found.get("remedy") else "")
            return _refusal(why)
        return {**found, "refused": None}

    def close(self) -> None:
        with self._lock:
            for child in self._children:
                child.kill()
