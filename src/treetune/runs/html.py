"""A run as a notebook shows it: its figures, how rewards are spread, which tasks teach nothing, what failed first.

Everything in it is of the index, but for the messages of the failures that are shown; all text is escaped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from treetune.errors import TreetuneError
from treetune.runs.plot import FLAGS, as_text, draw
from treetune.runs.summary import pass_at_k, standard_error

if TYPE_CHECKING:
    from treetune.runs.run import Run

_FAILURES = 3
_SOURCES = 12
_WIDEST = 200


def page_of(run: Run) -> str:
    head = f"<b>{as_text(run.taskset or 'tasks')}</b> by <b>{as_text(run.model or 'a trainer')}</b>"
    parts = [f"<div>{head} <code>{as_text(str(run.path))}</code></div>", _figures(run)]
    if len(run):
        parts += [f"<div>{draw(run.columns, 'rewards').svg(480, 200)}</div>", _flags(run), _sources(run)]
    return "".join([*parts, _failures(run)])


def _figures(run: Run) -> str:
    groups, reward = run.groups(), run.columns.reward
    scored, solved = ~np.isnan(reward), run.solved()
    parts = [groups.members(task) for task in range(len(groups))]
    clusters = [reward[part][scored[part]].tolist() for part in parts if scored[part].any()]
    passes = [solved[part][scored[part]].tolist() for part in parts if scored[part].any()]
    error = standard_error(clusters)
    mean = "-" if run.mean_reward is None else f"{run.mean_reward:.4f}"
    failed = int((~scored).sum())
    over_all = f"{np.nansum(reward) / len(run):.4f}" if len(run) else "-"
    shown = {"mean reward": mean + ("" if error is None else f" ± {error:.4f}"), "over all": over_all}
    shown |= {f"pass@{k}": f"{chance:.3f}" for k, chance in pass_at_k(passes).items()}
    shown |= {"tasks": f"{len(groups):,}", "rollouts": f"{len(run):,}", "failed": f"{failed:,}"}
    shown["tokens out"] = f"{run.columns.numbers('tokens').sum():,.0f}"
    return _table([shown.values()], list(shown))


def _flags(run: Run) -> str:
    """Groups that teach nothing, beside those that do."""
    counts = Counter(run.groups().flags())
    told = (f'<span style="color:{FLAGS[flag]}">■</span> {counts[flag]:,} {flag}' for flag in FLAGS if counts[flag])
    return f"<div>groups: {' &#160; '.join(told)}</div>"


def _sources(run: Run) -> str:
    names = run.columns.texts("source")
    if len(names) < 2:
        return ""
    bars = draw(run.columns, "sources").bars[:_SOURCES]
    more = f"<div>and {len(names) - _SOURCES} more sources</div>" if len(names) > _SOURCES else ""
    return _table([bar.note.rsplit(": ", 1) for bar in bars], ["source", "rewards"]) + more


def _failures(run: Run) -> str:
    failed = np.flatnonzero(run.columns.codes("failure") >= 0)
    if not len(failed):
        return ""
    rows = []
    for entry in map(run.columns.entry, failed[:_FAILURES]):
        message = ""
        with suppress(TreetuneError, OSError):  # a trace that is damaged, or gone
            failure = run.trace(entry).failure
            message = failure.message if failure is not None else ""
        rows.append((f"{entry.idx}/{entry.rollout}", str(entry.failure), message[:_WIDEST]))
    more = f"<div>{len(failed):,} failed; run.traces('failed') has them all</div>"
    return _table(rows, ["rollout", "failure", "what it said"]) + more


def _table(rows: Iterable[Iterable[str]], headings: Sequence[str]) -> str:
    head = "".join(f"<th>{as_text(name)}</th>" for name in headings)
    body = "".join("<tr>" + "".join(f"<td>{as_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
