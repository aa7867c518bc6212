"""A batch that SkyRL trained on: a pickle of its tensors, read without running anything that is in it.

    for found in read_batch(Path("dumped_data/global_step_1_training_input.pkl"), 0, step=1):
        found.trace.tokens

A pickle may call whatever it names. Here every name in it stands for `_Inert`, which does nothing, but for the function
that puts a batch together, which gives its plain values.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from treetune.chat.tokens import Tokens, TokenSequence
from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.runs.foreign.kind import Found
from treetune.runs.plain_files import open_regular
from treetune.system.digest import digest

_NOTE = "SkyRL dumps the tokens and advantages of a batch, and neither texts nor rewards"


class _Inert:
    """Stands for whatever a pickle names."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def _ignore(self, *arguments: Any) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = _ignore


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _state_of if name == "_rebuild_tensor_batch" else _Inert

    def persistent_load(self, pid: Any) -> Any:
        return None


def _state_of(kind: Any, state: Any) -> Any:
    return state


def read_batch(file: Path, after: int, step: int | None) -> Iterator[Found]:
    """A trace for each sequence; those of one prompt are a group."""
    try:
        state = _Reader(open_regular(file)).load()
        columns = {name: _array(value) for name, value in state["batch_dict"].items()}
        kept = dict(state.get("metadata") or {})
    except (pickle.UnpicklingError, KeyError, IndexError, AttributeError, TypeError, ImportError, EOFError) as error:
        raise ValueError(f"no batch of SkyRL: {error}") from None
    sequences, shown = columns.get("sequences"), columns.get("attention_mask")
    if sequences is None or shown is None:
        raise ValueError("no batch of SkyRL: it has no sequences")
    groups = kept.get("policy_prompt_boundaries") or [(0, len(sequences) - int(kept.get("pad_size") or 0))]
    if any(not 0 <= start <= end <= len(sequences) for start, end in groups):
        raise ValueError("no batch of SkyRL: a group has rows that the batch has not")
    whose = {row: f"{number}" for number, (start, end) in enumerate(groups) for row in range(start, end)}
    for row in sorted(whose)[after:]:
        yield Found(_trace(row, columns, step), row + 1, group=whose[row] if len(groups) > 1 else "")


def _array(value: Any) -> Any:
    """A tensor as it was written; None where only torch could read it."""
    if not isinstance(value, dict) or "dtype" not in value:
        return None
    return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])


def _trace(row: int, columns: dict[str, Any], step: int | None) -> Trace:
    real = columns["attention_mask"][row] > 0
    padded = columns["sequences"][row]
    ids = padded[real]

    def at_the_end(name: str) -> Any:
        """What there is for the answer, whose tokens are the last; 0 for those before it."""
        values = np.zeros(len(padded))
        if columns.get(name) is not None:
            values[len(padded) - columns[name].shape[1] :] = columns[name][row]
        return values[real]

    answered, trained = at_the_end("response_mask") > 0, at_the_end("loss_mask") > 0
    has_logprobs = columns.get("rollout_logprobs") is not None
    logprobs = np.where(trained, at_the_end("rollout_logprobs"), 0.0).tolist() if has_logprobs else []
    prompt = ids[~answered].tolist()
    trace = Trace(task=Task(), uid=digest(prompt), step=step, warnings=[_NOTE])
    trace.tokens = Tokens([TokenSequence(ids.tolist(), trained.astype(int).tolist(), logprobs)])
    trace.usage.prompt_tokens, trace.usage.completion_tokens = len(prompt), int(trained.sum())
    if columns.get("advantages") is not None and trained.any():
        trace.metrics["advantage"] = float(at_the_end("advantages")[trained].mean())
    return trace
