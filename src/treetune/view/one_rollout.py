"""One rollout, whole: its trace as plain values, its group, what is odd about it, and its tokens apart."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from treetune.audit import suspicions
from treetune.errors import TasksetError
from treetune.evaluation import TRACES, Run
from treetune.runs.images import bring_back
from treetune.trace import decode_trace
from treetune.view.tables import describe, group_of

_raw = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_line(run: Run, at: int) -> bytes:
    """The line of a rollout, with its images."""
    entry = run.columns.entries[at]
    with open(run.path / TRACES.file, "rb") as file:
        file.seek(entry.offset)
        return bring_back(file.read(entry.length), run.path)


def show_rollout(run: Run, at: int) -> dict[str, Any]:
    line = read_line(run, at)
    try:
        trace, parts = decode_trace(line), _raw.decode(line)
    except msgspec.MsgspecError as error:
        raise TasksetError(f"the trace of rollout {at} is damaged: {error}", remedy="look at its line") from None
    parts.pop("tokens", None)
    entry = run.columns.entries[at]
    name = f"{entry.uid}{f'#{entry.occurrence}' if entry.occurrence else ''}/{entry.rollout}"
    return {
        "at": at,
        "entry": describe(run, at),
        "trace": parts,
        "has_tokens": trace.tokens is not None,
        "group": group_of(run, at),
        "truth": trace.task.ground_truth,
        "suspicions": suspicions(trace, float(run.config.get("pass_threshold", 1.0))),
        "rendered": None,
        "again": "",
        "show": f"treetune show {shlex.quote(str(run.path))} --rollout {name}",
        "mark": None,
    }


def show_tokens(run: Run, at: int) -> dict[str, Any]:
    class _Tokens(msgspec.Struct):
        tokens: Any = None

    found = msgspec.json.decode(read_line(run, at), type=_Tokens).tokens or {}
    return {"sequences": [{**sequence, "texts": None} for sequence in found.get("sequences", [])], "tokenizer": None}
