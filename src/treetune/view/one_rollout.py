"""One complete rollout: its trace as plain values, its group, what is suspicious about it, and, separately, its tokens.

texts = load_texts("Qwen/Qwen3-0.6B")
texts([9707, 11])          # ["Hello", ","]
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from treetune.audit import suspicions
from treetune.config.trust import CONFIG
from treetune.core.trace import Trace, decode_trace
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import MissingExtraError, UsageError
from treetune.runs.annotations import key_of
from treetune.runs.run import Run
from treetune.view.tables import cells_of, describe

_parts = msgspec.json.Decoder(dict[str, msgspec.Raw])


def show_rollout(run: Run, at: int) -> dict[str, Any]:
    entry = run.columns.entry(at)
    line = run.read_line(entry, tokens=False)
    trace, parts = run.decode(entry, line, decode_trace), run.decode(entry, line, _parts.decode)
    parts.pop("tokens", None)
    mark = run.read_marks().get(key_of(entry))
    return {
        "at": at,
        "entry": describe(run, at),
        "trace": parts,
        "has_tokens": entry.tokens,
        "group": cells_of(run.columns, int(run.groups().task[at])),
        "truth": trace.task.ground_truth,
        "suspicions": [{"rule": one.rule, "why": one.found} for one in suspicions(trace, run.pass_threshold)],
        "again": command_again(run, trace),
        "show": f"treetune show {shlex.quote(str(run.path))} --rollout {_name(run, at)}",
        "mark": None if mark is None else {"mark": mark.mark, "comment": mark.comment},
    }


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
        raise UsageError(f"{file} is no tokenizer: {error}") from None
    return lambda one: str(tokenizer.decode([one], skip_special_tokens=False))
