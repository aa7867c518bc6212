"""The tables of a run: its groups, and its rollouts one by one, sorted, filtered, and only the part that is shown.

list_groups(run, query="reward<0.5", sort="variance", descending=True, start=0, count=50)
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from treetune.errors import UsageError, did_you_mean
from treetune.evaluation import TRACES, Run
from treetune.runs.columns import NUMBERS, TEXTS, Codes, Columns, Mask, Numbers
from treetune.runs.query import Query
from treetune.task import text_of
from treetune.view.figures import FLAGS, flags_of, plain

_QUESTION = 160
SORTS = ("variance", "mean", "task", "rollouts", "source", "failed", "seconds")


def select(run: Run, query: str) -> Mask:
    """Which rollouts fit a query."""
    return Query(query).select(run.columns, run.path / TRACES.file)


# Rollouts


def describe(run: Run, at: int) -> dict[str, Any]:
    """The line of a rollout."""
    entry, columns = run.columns.entries[at], run.columns
    group = columns.groups()
    mean = group.mean[group.task[at]]
    return {
        "at": int(at),
        "task": entry.idx,
        "rollout": entry.rollout,
        "uid": entry.uid,
        "occurrence": entry.occurrence,
        "source": entry.source,
        "outcome": entry.outcome,
        "reward": entry.reward,
        "advantage": None if entry.reward is None else plain(entry.reward - mean),
        "turns": entry.turns,
        "tokens": entry.completion_tokens,
        "seconds": entry.seconds,
        "retries": getattr(entry, "retries", None),
        "answer": entry.answer,
        "failure": entry.failure,
        "step": entry.step,
        "metrics": entry.metrics,
        "mark": None,
    }


def list_rollouts(run: Run, query: str, sort: str, descending: bool, start: int, count: int) -> dict[str, Any]:
    columns = run.columns
    fitting = np.flatnonzero(select(run, query))
    order = fitting[_order(_column(columns, sort)[fitting], descending)] if sort else fitting
    rows = [describe(run, at) for at in order[start : start + count].tolist()]
    return {"total": len(fitting), "rows": rows}


def _column(columns: Columns, name: str) -> Numbers:
    """A column to sort by: numbers as they are, texts by their alphabet."""
    if name == "advantage":
        groups = columns.groups()
        return columns.reward - groups.mean[groups.task]
    if name in NUMBERS or name in columns.metrics:
        return columns.numbers(name)
    if name not in TEXTS:
        known = [*NUMBERS, *TEXTS, *columns.metrics, "advantage"]
        raise UsageError(f"rollouts are not sorted by {name!r}{did_you_mean(name, known)}", remedy=", ".join(known))
    return _rank(columns.texts(name))[columns.codes(name)]


def _rank(texts: list[str]) -> Numbers:
    """The place of each text in the alphabet; last, for -1, that of none."""
    ranks = np.full(len(texts) + 1, np.nan)
    ranks[np.array(sorted(range(len(texts)), key=texts.__getitem__), np.int64)] = np.arange(len(texts))
    return ranks


def _order(keys: Numbers, descending: bool) -> Codes:
    """What has no value stands last either way."""
    return np.argsort(-keys if descending else keys, kind="stable")


# Groups


def list_groups(run: Run, query: str, sort: str, descending: bool, start: int, count: int) -> dict[str, Any]:
    columns = run.columns
    groups = columns.groups()
    fits = select(run, query)
    shown = np.flatnonzero(np.bincount(groups.task[fits], minlength=len(groups)))
    order = shown[_order(_group_column(columns, sort)[shown], descending)].tolist()
    page = order[start : start + count]
    members = _members(columns, page)
    flags = flags_of(columns)
    rows = [_describe_group(run, group, members[group], flags[group], fits) for group in page]
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
    raise UsageError(f"groups are not sorted by {name!r}{did_you_mean(name, SORTS)}", remedy=", ".join(SORTS))


def _members(columns: Columns, wanted: list[int]) -> dict[int, list[int]]:
    """The rollouts of some groups, by their number."""
    task = columns.groups().task
    found: dict[int, list[int]] = {group: [] for group in wanted}
    for at in np.flatnonzero(np.isin(task, wanted)).tolist():
        found[int(task[at])].append(at)
    rollout = columns.numbers("rollout")
    return {group: sorted(places, key=lambda at: rollout[at]) for group, places in found.items()}


def group_of(run: Run, at: int) -> list[dict[str, Any]]:
    """The rollouts of the task of one of them."""
    group = int(run.columns.groups().task[at])
    entries = run.columns.entries
    return [
        {
            "at": place,
            "rollout": entries[place].rollout,
            "reward": entries[place].reward,
            "outcome": entries[place].outcome,
        }
        for place in _members(run.columns, [group])[group]
    ]


def _describe_group(run: Run, group: int, places: list[int], flag: int, fits: Mask) -> dict[str, Any]:
    groups, entries = run.columns.groups(), run.columns.entries
    first = entries[places[0]]
    mean = groups.mean[group]
    cells = [
        {
            "at": at,
            "rollout": entries[at].rollout,
            "reward": entries[at].reward,
            "outcome": entries[at].outcome,
            "advantage": None if (reward := entries[at].reward) is None else plain(reward - mean),
            "fits": bool(fits[at]),
            "tag": None,
        }
        for at in places
    ]
    return {
        "uid": first.uid,
        "occurrence": first.occurrence,
        "task": first.idx,
        "source": first.source,
        "mean": plain(mean),
        "variance": plain(groups.variance[group]),
        "flag": FLAGS[flag] if flag >= 0 else None,
        "question": question_of(run, places[0]),
        "cells": cells,
    }


class _Asked(msgspec.Struct):
    prompt: str | list[dict[str, Any]] | None = None


class _Glance(msgspec.Struct):
    task: _Asked


_glance = msgspec.json.Decoder(_Glance)


def question_of(run: Run, at: int) -> str:
    """The beginning of what the task asks."""
    entry = run.columns.entries[at]
    try:
        with open(run.path / TRACES.file, "rb") as file:
            file.seek(entry.offset)
            prompt = _glance.decode(file.read(entry.length)).task.prompt
    except (OSError, msgspec.MsgspecError):
        return ""
    if isinstance(prompt, list):
        asked = [message for message in prompt if message.get("role") == "user"] or prompt
        content = asked[-1].get("content") if asked else ""
        if isinstance(content, list):
            content = [part for part in content if isinstance(part, dict) and part.get("type") == "text"]
        prompt = text_of(content)
    return " ".join((prompt or "")[: 4 * _QUESTION].split())[:_QUESTION]
