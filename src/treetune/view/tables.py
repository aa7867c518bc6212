"""The tables of a run (its groups and its rollouts, sorted, filtered, and cut to the part that is shown), what changed
between two runs, and one complete rollout with its tokens.

    list_groups(run, query="reward<0.5", sort="variance", descending=True, start=0, count=50)
    show_rollout(run, 17)["trace"]
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.audit import suspicions
from treetune.chat.message import text_of
from treetune.config.trust import CONFIG
from treetune.core.score import total
from treetune.core.trace import Trace, decode_trace
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import MissingExtraError, TasksetError, UsageError, did_you_mean
from treetune.evaluation import TaskChange, compare_tasks
from treetune.runs.annotations import key_of
from treetune.runs.columns import NOTES, NUMBERS, TEXTS, Codes, Columns, Mask, Numbers
from treetune.runs.run import Run
from treetune.trainers.credit import turn_advantages
from treetune.view.figures import FLAGS, plain

_QUESTION = 160
_MOST_TASKS = 5000
"""The maximum number of tasks in a comparison; those that changed come first."""
_LONGEST = 20_000
"""The maximum number of characters of a last answer."""
_SHOWN = (
    *("rollout", "uid", "occurrence", "source", "outcome", "reward", "turns", "seconds", "retries", "answer"),
    *("failure", "step", "metrics"),
)
"""The fields of an entry that the line of a rollout shows."""
SORTS = ("variance", "mean", "task", "rollouts", "source", "failed", "seconds")


# Rollouts


def row_of(run: Run, at: int) -> dict[str, Any]:
    """The table row of a rollout."""
    entry, groups = run.columns.entry(at), run.columns.groups()
    advantage = None if entry.reward is None else plain(entry.reward - groups.mean[groups.task[at]])
    own = {"at": at, "task": entry.idx, "tokens": entry.completion_tokens, "advantage": advantage}
    return {**{name: getattr(entry, name) for name in _SHOWN}, **own, "mark": _mark(run, at)}


def _mark(run: Run, at: int) -> str | None:
    """Its mark."""
    marks = run.read_marks()
    mark = marks.get(key_of(run.columns.entries[at])) if marks else None
    return None if mark is None else mark.mark or "comment"


def list_rollouts(run: Run, query: str, sort: str, descending: bool, start: int, count: int) -> dict[str, Any]:
    fitting = np.flatnonzero(run.fits(query))
    order = fitting[_order(_column(run.columns, sort)[fitting], descending)] if sort else fitting
    rows = [row_of(run, at) for at in order[start : start + count].tolist()]
    return {"total": len(fitting), "rows": rows}


def _column(columns: Columns, name: str) -> Numbers:
    """A column to sort by: numbers as they are, texts by their alphabetical rank."""
    if name == "advantage":
        groups = columns.groups()
        return columns.reward - groups.mean[groups.task]
    if name in NUMBERS or name in columns.metrics:
        return columns.numbers(name)
    if name not in TEXTS and name not in NOTES:
        known = [*NUMBERS, *TEXTS, *NOTES, *columns.metrics, "advantage"]
        raise UsageError(
            f"rollouts cannot be sorted by {name!r:.80}{did_you_mean(name, known)}", remedy=", ".join(known)
        )
    return _rank(columns.texts(name))[columns.codes(name)]


def _rank(texts: list[str]) -> Numbers:
    """The alphabetical rank of each text; the last rank, for code -1, is for a missing text."""
    ranks = np.full(len(texts) + 1, np.nan)
    ranks[np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)] = np.arange(len(texts))
    return ranks


def _order(keys: Numbers, descending: bool) -> Codes:
    """The sorted order. Rollouts without a value come last in either direction."""
    return np.argsort(-keys if descending else keys, kind="stable")


# Groups


def list_groups(run: Run, query: str, sort: str, descending: bool, start: int, count: int) -> dict[str, Any]:
    """The groups with a rollout that the query selects."""
    columns = run.columns
    groups = columns.groups()
    fits = run.fits(query)
    shown = np.flatnonzero(np.bincount(groups.task[fits], minlength=len(groups)))
    order = shown[_order(_group_column(columns, sort)[shown], descending)]
    flags = groups.flags()
    rows = [_describe_group(run, group, flags[group], fits) for group in order[start : start + count].tolist()]
    return {"total": len(order), "matching_rollouts": int(fits.sum()), "rows": rows}


def _group_column(columns: Columns, name: str) -> Numbers:
    groups = columns.groups()
    if name in ("variance", "mean"):
        return np.asarray(getattr(groups, name), np.float64)
    if name == "rollouts":
        return groups.rollouts.astype(np.float64)
    if name == "failed":
        return (groups.rollouts - groups.scored).astype(np.float64)
    if name == "seconds":
        seconds = np.nan_to_num(columns.numbers("seconds"))
        return np.bincount(groups.task, seconds, minlength=len(groups)).astype(np.float64)
    if name in ("task", "source"):
        return _column(columns, name)[groups.first]
    raise UsageError(f"groups cannot be sorted by {name!r:.80}{did_you_mean(name, SORTS)}", remedy=", ".join(SORTS))


def cells_of(columns: Columns, group: int) -> list[dict[str, Any]]:
    """A short description of the rollouts of a group."""
    places = columns.groups().members(group)
    rollout = columns.numbers("rollout")
    places = places[np.argsort(rollout[places], kind="stable")]
    outcomes = columns.texts("outcome")
    lines = zip(places, rollout[places], columns.reward[places], columns.codes("outcome")[places], strict=True)
    return [
        {"at": int(at), "rollout": int(number), "reward": plain(reward), "outcome": outcomes[outcome]}
        for at, number, reward, outcome in lines
    ]


def _describe_group(run: Run, group: int, flag: str, fits: Mask) -> dict[str, Any]:
    columns = run.columns
    groups = columns.groups()
    first = columns.entries[int(groups.first[group])]
    mean, cells = groups.mean[group], cells_of(columns, group)
    for cell in cells:
        cell["advantage"] = None if cell["reward"] is None else plain(cell["reward"] - mean)
        cell["fits"] = bool(fits[cell["at"]])
        cell["tag"] = _mark(run, cell["at"])
    return {
        "uid": first.uid,
        "occurrence": first.occurrence,
        "task": first.idx,
        "source": first.source,
        "mean": plain(mean),
        "variance": plain(groups.variance[group]),
        "flag": FLAGS.get(flag),
        "question": question_of(run, int(groups.first[group])),
        "cells": cells,
    }


def question_of(run: Run, at: int) -> str:
    """The beginning of the task's question."""
    try:
        messages = run.trace_without_tokens(at).task.messages
    except TasksetError:
        return ""
    asked = [message for message in messages if message.get("role") == "user"] or messages
    content = asked[-1].get("content") if asked else ""
    if isinstance(content, list):
        content = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
    return " ".join((text_of(content) or "")[: 4 * _QUESTION].split())[:_QUESTION]


# Two runs


def compare_runs(before: Run, after: Run, query: str = "") -> dict[str, Any]:
    """Compares the tasks for which the query selects a rollout in either run: selecting by one would favour it."""
    only = None if not query.strip() else _keys(before, query) | _keys(after, query)
    comparison, changes = compare_tasks(before, after, only)
    plain = msgspec.to_builtins(comparison)
    for name in ("fixed", "broken"):  # they are in `tasks`
        plain[name] = len(plain[name])
    changes.sort(key=lambda change: -abs(change.change))
    return {
        "comparison": {**plain, "is_loss": comparison.is_loss},
        "verdict": comparison.verdict,
        "tasks": [_describe_change(change) for change in changes[:_MOST_TASKS]],
        "left": max(0, len(changes) - _MOST_TASKS),
    }


def _keys(run: Run, query: str) -> set[tuple[str, int]]:
    columns = run.columns
    groups = columns.groups()
    firsts = groups.first[np.unique(groups.task[run.fits(query)])]
    texts, codes, occurrences = columns.texts("uid"), columns.codes("uid"), columns.places("occurrence")
    return {(texts[codes[at]], int(occurrences[at])) for at in firsts.tolist()}


def _describe_change(change: TaskChange) -> dict[str, Any]:
    kind = "fixed" if change.change > 0 else "broken" if change.change < 0 else "unchanged"
    plain: dict[str, Any] = msgspec.to_builtins(change)
    return {**plain, "kind": kind}


def rollouts_of(run: Run, uid: str, occurrence: int) -> list[dict[str, Any]]:
    """The rollouts of one task, each with its last answer."""
    columns = run.columns
    if uid not in columns.texts("uid"):
        return []
    code = columns.texts("uid").index(uid)
    found = np.flatnonzero((columns.codes("uid") == code) & (columns.places("occurrence") == occurrence))
    return [_said(run, at) for at in found.tolist()]


def _said(run: Run, at: int) -> dict[str, Any]:
    said = ""
    for turn in reversed(run.trace_without_tokens(at).turns):
        if turn.message is not None and (text := text_of(turn.message.get("content"))):
            said = text[-_LONGEST:]
            break
    return {**row_of(run, at), "said": said}


# One rollout


_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def show_rollout(run: Run, at: int) -> dict[str, Any]:
    entry = run.columns.entry(at)
    line = run.read_line(entry, tokens=False)
    trace, parts = run.decode(entry, line, decode_trace), run.decode(entry, line, _parts.decode)
    parts.pop("tokens", None)
    mark = run.read_marks().get(key_of(entry))
    return {
        "at": at,
        "entry": row_of(run, at),
        "trace": parts,
        "has_tokens": entry.tokens,
        "conversations": trace.agent.names if trace.agent is not None else [],
        "group": cells_of(run.columns, int(run.groups().task[at])),
        "advantages": _turn_advantages(run, at, trace),
        "truth": trace.task.ground_truth,
        "suspicions": [{"rule": one.rule, "why": one.found} for one in suspicions(trace, run.pass_threshold)],
        "again": command_again(run, trace),
        "show": f"treetune show {shlex.quote(str(run.path))} --rollout {_name(run, at)}",
        "mark": None if mark is None else {"mark": mark.mark, "comment": mark.comment},
    }


def _turn_advantages(run: Run, at: int, trace: Trace) -> list[float] | None:
    """The advantage of each turn in its group of the same training step; None if turns are not credited."""
    if trace.credit == "outcome" or trace.reward is None:
        return None
    members = [place for place in run.groups().members(int(run.groups().task[at])).tolist() if place != at]
    others = [run.trace_without_tokens(place) for place in members]
    group = [trace, *(other for other in others if other.step == trace.step and other.reward is not None)]
    rewards = [_trained_rewards(each) for each in group]
    return turn_advantages(rewards, credit="turn", discount=trace.credit_discount)[0]


def _trained_rewards(trace: Trace) -> list[float]:
    """The rewards of the turns to train on: what a discount, a hook or the group's score changed is on the last one."""
    rewards = [turn.reward or 0.0 for turn in trace.turns if turn.message is not None]
    trained = trace.metrics.get("trained_reward", trace.shaped_reward or 0.0)
    return [*rewards[:-1], trained - total(rewards[:-1])] if rewards else []


def _name(run: Run, at: int) -> str:
    """The shortest name for a rollout that `show` accepts."""
    entry = run.columns.entries[at]
    occurrence = f"#{entry.occurrence}" if entry.occurrence else ""
    return f"{entry.uid[:12]}{occurrence}/{entry.rollout}"


def command_again(run: Run, trace: Trace) -> str | None:
    """The command that plays its task again; None if it is unknown."""
    config = run.path / CONFIG
    if run.kind != Run.kind or not config.exists() or trace.task.idx < 0:
        return None
    command = ["treetune", "eval", str(config.resolve()), "--task", str(trace.task.idx)]
    if not run.model:
        command += ["-m", trace.model or "MODEL"]
    return shlex.join(command)


Texts = Callable[[list[int]], list[str]]


def show_tokens(run: Run, at: int, texts: Texts | None, tokenizer: str | None) -> dict[str, Any]:
    entry = run.columns.entry(at)
    tokens = run.decode(entry, run.read_line(entry, images=False), decode_trace).tokens
    sequences = [
        {**msgspec.to_builtins(sequence), "texts": texts(sequence.ids) if texts is not None else None}
        for sequence in (tokens.sequences if tokens is not None else [])
    ]
    return {"sequences": sequences, "tokenizer": tokenizer if texts is not None else None}


def tokenizer_of(model: str) -> str | None:
    """The folder of a local model that has its own tokenizer."""
    path = model.removeprefix("local:")
    return path if model.startswith("local:") and (Path(path) / "tokenizer.json").is_file() else None


@lru_cache(maxsize=4)
def load_texts(name: str) -> Texts:
    """Returns a function that converts ids to texts, using the tokenizer of a folder or a name."""
    decode = _load_decoder(name)
    known: dict[int, str] = {}

    def texts(ids: list[int]) -> list[str]:
        for one in ids:
            if one not in known:
                known[one] = decode(one)
        return [known[one] for one in ids]

    return texts


def _load_decoder(name: str) -> Callable[[int], str]:
    """The `tokenizers` library reads a single `tokenizer.json`, in a tenth of the time and memory of transformers."""
    file = Path(name) / "tokenizer.json"
    if not file.is_file():
        loaded = load_tokenizer(name)
        return lambda one: str(loaded.decode([one]))
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError.of("tokenizers", "local") from None
    try:
        tokenizer: Any = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise UsageError(f"{file} is not a tokenizer: {error}") from None
    return lambda one: str(tokenizer.decode([one], skip_special_tokens=False))
