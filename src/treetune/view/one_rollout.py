"""One rollout, whole: its trace as plain values, its group, what is odd about it, and its tokens apart."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

import msgspec

from treetune.audit import suspicions
from treetune.config.run_config import CONFIG
from treetune.core.trace import Trace, decode_trace
from treetune.evaluation import Run
from treetune.runs.annotations import key_of
from treetune.runs.plain_files import UNREADABLE
from treetune.view.lines import damaged, read_line, read_text, show_images
from treetune.view.tables import describe, group_of

_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def show_rollout(run: Run, at: int) -> dict[str, Any]:
    line = show_images(run, read_text(run, at))
    try:
        trace, parts = decode_trace(line), _parts.decode(line)
    except msgspec.MsgspecError as error:
        raise damaged(run, at, error) from None
    parts.pop("tokens", None)
    mark = run.read_marks().get(key_of(run.columns.entries[at]))
    return {
        "at": at,
        "entry": describe(run, at),
        "trace": parts,
        "has_tokens": run.columns.entries[at].tokens,
        "group": group_of(run.columns, at),
        "truth": trace.task.ground_truth,
        "suspicions": suspicions(trace, run.pass_threshold),
        "again": command_again(run, trace),
        "show": f"treetune show {shlex.quote(str(run.path))} --rollout {_name(run, at)}",
        "mark": None if mark is None else {"mark": mark.mark, "comment": mark.comment},
    }


def _name(run: Run, at: int) -> str:
    """Of the rollout, for `show`: as short as it may be."""
    entry = run.columns.entries[at]
    occurrence = f"#{entry.occurrence}" if entry.occurrence else ""
    return f"{entry.uid[:12]}{occurrence}/{entry.rollout}"


def command_again(run: Run, trace: Trace) -> str | None:
    """The command that plays its task again; None where nobody knows how it was played."""
    config = run.path / CONFIG
    if run.kind != Run.kind or not config.exists() or trace.task.idx < 0:
        return None
    command = ["treetune", "eval", str(config.resolve()), "--task", str(trace.task.idx)]
    if not run.model:
        command += ["-m", trace.model or "MODEL"]
    return shlex.join(command)


class _WithTokens(msgspec.Struct):
    tokens: dict[str, Any] | None = None


_with_tokens = msgspec.json.Decoder(_WithTokens)
Texts = Callable[[list[int]], list[str]]


def show_tokens(run: Run, at: int, texts: Texts | None, tokenizer: str | None) -> dict[str, Any]:
    try:
        found = _with_tokens.decode(read_line(run, at)).tokens or {}
    except UNREADABLE as error:
        raise damaged(run, at, error) from None
    sequences = [
        {**sequence, "texts": texts(sequence["ids"]) if texts is not None else None}
        for sequence in found.get("sequences", [])
    ]
    return {"sequences": sequences, "tokenizer": tokenizer if texts is not None else None}
