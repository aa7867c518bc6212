"""SkyRL's dumps: evaluations in `dumped_evals` of its `export_path` (`trainer.dump_eval_results`), and the batches that
it trained on in `dumped_data` (`trainer.dump_data_batch`).

A line of an evaluation has the texts with their special tokens. ChatML texts are split into messages; any other text
becomes one message. A rollout that SkyRL trains on step by step has a line for each step: a line that begins with the
prompt and the answer of the previous line continues it. A batch has tokens and advantages, but no text and no reward.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from treetune.chat.message import Message
from treetune.chat.tokens import Tokens, TokenSequence
from treetune.core.task import Task
from treetune.core.trace import Outcome, Trace, Turn
from treetune.runs.foreign.program import (
    ForeignRollout,
    Keys,
    Program,
    files_in,
    number_of,
    numbers_in,
    read_grouped,
    split_chat,
    turns_of,
)
from treetune.runs.plain_files import open_regular
from treetune.system.digest import digest

_STEP = re.compile(r"global_step_(\d+)_(?:evals|training_input\.pkl)|eval_only")
_ROLLOUTS = Keys("input_prompt", "output_response", "score")
_NOTE = "SkyRL dumps the tokens and advantages of a batch, but neither texts nor rewards"
_WHOLE = "aggregated_results.jsonl"
"""Figures over all sources; contains no rollouts."""


class SkyRL(Program):
    name = "skyrl"

    def files(self, path: Path) -> list[Path]:
        if path.suffix == ".pkl" and _STEP.fullmatch(path.name):
            return [path]
        if path.suffix == ".jsonl":
            return [path] if path.name != _WHOLE and _is_dump(path) else []
        found = (
            [path] if _STEP.fullmatch(path.name) else [path / name for name in files_in(path) if _STEP.fullmatch(name)]
        )
        files: list[Path] = []
        for place in sorted(found, key=_order):
            if place.suffix == ".pkl":
                files.append(place)
            else:
                lines = sorted(name for name in files_in(place) if name.endswith(".jsonl") and name != _WHOLE)
                files += [place / name for name in lines]
        return files if files and (files[0].suffix == ".pkl" or _is_dump(files[0])) else []

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        if file.suffix == ".pkl":
            return _read_batch(file, after, _step_of(file))
        return read_grouped(file, after, "output_response", _goes_on, partial(_found, step=_step_of(file)))


def _is_dump(file: Path) -> bool:
    return _ROLLOUTS.begin(file)


def _order(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match and match[1] else -1


def _step_of(file: Path) -> int | None:
    step = max(_order(file), _order(file.parent))
    return None if step < 0 else step


def _goes_on(before: dict[str, Any], row: dict[str, Any]) -> bool:
    prompt = str(row.get("input_prompt") or "")
    return bool(before["output_response"]) and prompt.startswith(f"{before['input_prompt']}{before['output_response']}")


def _found(parts: list[dict[str, Any]], position: int, step: int | None) -> ForeignRollout:
    first, last = parts[0], parts[-1]
    extras = first.get("env_extras")
    spec = (extras.get("reward_spec") or extras.get("reward_model")) if isinstance(extras, dict) else None
    asked = str(first["input_prompt"])
    whole = f"{last['input_prompt']}{last['output_response']}"
    prompt, said = split_chat(asked, whole[len(asked) :]) or (None, [])
    task = Task(
        prompt=asked if prompt is None else prompt,
        data_source=str(first.get("data_source") or ""),
        reward_spec=spec if isinstance(spec, dict) else {},
        env_class=str(first["env_class"]) if first.get("env_class") else None,
    )
    trace = Trace(task=task, uid="", step=step, reward=_reward(last.get("score")))
    if isinstance(metrics := last.get("metrics"), dict):  # in files that `treetune train` writes
        trace.metrics = numbers_in({name.rpartition("/")[2]: value for name, value in metrics.items()})
    if prompt is None:
        trace.turns = [_turn(part, before) for part, before in zip(parts, [None, *parts], strict=False)]
    else:
        trace.turns, trace.final = turns_of(prompt, said)
    trace.turns[-1].reward = trace.reward or 0.0
    stop = last.get("stop_reason")
    trace.turns[-1].finish_reason = str(stop) if stop else None
    if stop == "length":
        trace.outcome = Outcome.TRUNCATED
    return ForeignRollout(trace, position)


def _turn(part: dict[str, Any], before: dict[str, Any] | None) -> Turn:
    """A step, with the part of its prompt that goes beyond the previous step and its answer."""
    known = 0 if before is None else len(before["input_prompt"]) + len(before["output_response"])
    observed: Message = {"role": "user", "content": str(part["input_prompt"])[known:]}
    return Turn(observed=[observed], message={"role": "assistant", "content": str(part["output_response"])})


def _reward(score: Any) -> float | None:
    """Sums rewards that are given per token."""
    if isinstance(score, list):
        numbers = [number for number in map(number_of, score) if number is not None]
        return sum(numbers) if numbers else None
    return number_of(score)


# Batches that SkyRL trained on: a pickle of its tensors, read without running any code in it.


class _Inert:
    """A placeholder for anything that a pickle names; it does nothing. A pickle may call anything that it names. Only
    the function that builds a batch is known, and it returns the batch's plain values."""

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


def _read_batch(file: Path, after: int, step: int | None) -> Iterator[ForeignRollout]:
    """Yields a trace for each sequence; the sequences of one prompt are a group."""
    try:
        state = _Reader(open_regular(file)).load()
        columns = {name: _array(value) for name, value in state["batch_dict"].items()}
        kept = dict(state.get("metadata") or {})
    except (pickle.UnpicklingError, KeyError, IndexError, AttributeError, TypeError, ImportError, EOFError) as error:
        raise ValueError(f"not a batch of SkyRL: {error}") from None
    sequences, shown = columns.get("sequences"), columns.get("attention_mask")
    if sequences is None or shown is None:
        raise ValueError("not a batch of SkyRL: it has no sequences")
    groups = kept.get("policy_prompt_boundaries") or [(0, len(sequences) - int(kept.get("pad_size") or 0))]
    if any(not 0 <= start <= end <= len(sequences) for start, end in groups):
        raise ValueError("not a batch of SkyRL: a group has rows that are not in the batch")
    whose = {row: f"{number}" for number, (start, end) in enumerate(groups) for row in range(start, end)}
    for row in sorted(whose)[after:]:
        yield ForeignRollout(_trace_of_batch(row, columns, step), row + 1, group=whose[row] if len(groups) > 1 else "")


def _array(value: Any) -> Any:
    """A tensor as an array; None if only torch could read it."""
    if not isinstance(value, dict) or "dtype" not in value:
        return None
    return np.frombuffer(value["data"], np.dtype(value["dtype"])).reshape(value["shape"])


def _trace_of_batch(row: int, columns: dict[str, Any], step: int | None) -> Trace:
    real = columns["attention_mask"][row] > 0
    padded = columns["sequences"][row]
    ids = padded[real]

    def at_the_end(name: str) -> Any:
        """The values for the answer, whose tokens come last; 0 for the tokens before it."""
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
