"""Rollouts of NeMo Gym: JSON lines with the request (`responses_create_params`), the `response` and its `reward`.

Failed rollouts are in a separate file, `NAME_failures.jsonl`; failures that succeeded later are not kept there. If the
model's server returned tokens, they are the tokens of the trace.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treetune.chat.message import Message, flatten_content
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Trace
from treetune.data.rows.nemo_gym import PARAMS, TRUTH, from_items
from treetune.errors import PolicyError
from treetune.runs.foreign.program import (
    ForeignRollout,
    Keys,
    Program,
    Stamp,
    number_of,
    numbers_in,
    read_rows,
    tokens_of,
    turns_of,
)
from treetune.runs.plain_files import open_regular

_FAILED = "_failures"
_ROLLOUTS = Keys(PARAMS, "response", "reward")
_TASK, _ROLLOUT, _CLASS = "_ng_task_index", "_ng_rollout_index", "_ng_failure_class"
_OWN = (PARAMS, "response", "reward", "agent_ref", TRUTH, _TASK, _ROLLOUT)
_NAMES = ("instance_id", "task_id", "uuid", _TASK)
"""The fields that identify a task whose prompt only the agent knows."""
_TOKENS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_MARKED = 4096
"""How many bytes before a position identify a file."""


class NemoGym(Program):
    name = "nemo-gym"

    def files(self, path: Path) -> list[Path]:
        if path.suffix != ".jsonl" or not _ROLLOUTS.begin(path):
            return []
        if path.stem.endswith(_FAILED) and path.with_stem(path.stem.removesuffix(_FAILED)).exists():
            return []  # part of that run
        failed = _failures_of(path)
        return [path, failed] if failed.exists() else [path]

    def stamp(self, file: Path) -> Stamp:
        """The stamp of the failures and the successes together, because a failed rollout may have succeeded later."""
        states = [each.stat() for each in (file, _main_of(file)) if each.exists()]
        return sum(each.st_size for each in states), max(each.st_mtime_ns for each in states)

    def mark(self, file: Path, position: int) -> str:
        if file.stem.endswith(_FAILED):
            return ""
        with open_regular(file) as lines:
            lines.seek(max(0, position - _MARKED))
            return hashlib.sha256(lines.read(min(position, _MARKED))).hexdigest()[:16]

    def read(self, file: Path, after: int) -> Iterator[ForeignRollout]:
        rows = read_rows(file, after)
        if file.stem.endswith(_FAILED) and _main_of(file).exists():
            done = {_key(row.values) for row in read_rows(_main_of(file)) if row.values}
            last = {_key(row.values): row for row in read_rows(file) if row.values}
            left = [row for key, row in last.items() if key not in done]
            rows = iter([row._replace(position=at) for at, row in enumerate(left, 1)][after:])
        for row in rows:
            try:
                if row.values is None:
                    raise ValueError(row.fault)
                trace = _trace(row.values)
                rollout = row.values.get(_ROLLOUT)
                yield ForeignRollout(trace, row.position, rollout if isinstance(rollout, int) else None)
            except (ValueError, KeyError, TypeError, AttributeError, PolicyError) as error:
                fault = row.fault or f"{file.name}, before byte {row.position}: {type(error).__name__} {error}"
                yield ForeignRollout(None, row.position, fault=fault)


def _failures_of(file: Path) -> Path:
    return file.with_stem(file.stem + _FAILED)


def _main_of(file: Path) -> Path:
    return file.with_stem(file.stem.removesuffix(_FAILED))


def _key(row: dict[str, Any]) -> tuple[Any, Any]:
    return row.get(_TASK), row.get(_ROLLOUT)


def _trace(row: dict[str, Any]) -> Trace:
    params, response = row[PARAMS], row["response"] or {}
    agent = row.get("agent_ref") or {}
    asked, said = _messages(params.get("input") or []), _messages(_items(response))
    if said[: len(asked)] == asked:  # some agents record the whole chat
        said = said[len(asked) :]
    if not asked:
        answers = [at for at, message in enumerate(said) if message.get("role") == "assistant"]
        asked, said = said[: answers[0]] if answers else said, said[answers[0] :] if answers else []
    known = ("verifier_metadata",) if asked else ("verifier_metadata", *_NAMES)
    further = {name: row[name] for name in known if row.get(name)}
    index = row.get(_TASK)
    task = Task(
        idx=index if isinstance(index, int) else -1,
        prompt=asked,
        data_source=str(agent.get("name") or "") if isinstance(agent, dict) else "",
        reward_spec={**({"ground_truth": row[TRUTH]} if row.get(TRUTH) is not None else {}), **further},
    )
    trace = Trace(task=task, uid="", model=str(response.get("model") or ""), reward=number_of(row.get("reward")))
    trace.turns, trace.final = turns_of(asked, said)
    trace.turns[-1].reward = trace.reward or 0.0
    trace.tools = [{"type": "function", "function": tool} for tool in params.get("tools") or []]
    further_fields = {name: value for name, value in row.items() if name not in _OWN and not name.startswith("_ng_")}
    trace.metrics = numbers_in(further_fields)
    trace.turns[-1].info = {name: value for name, value in further_fields.items() if name not in trace.metrics}
    answer = row.get("extracted_answer")
    trace.answer = answer if isinstance(answer, str) else None
    used = response.get("usage") or {}
    trace.usage = Usage(used.get("input_tokens") or 0, used.get("output_tokens") or 0)
    trace.tokens = tokens_of(tuple(item.get(name) for name in _TOKENS) for item in _items(response))
    if row.get(_CLASS):
        failure = Failure(str(row[_CLASS]), str(row.get("error_message") or row[_CLASS]), "environment")
        late = row[_CLASS] == "timeout_exceeded"
        trace.fail(Outcome.TIMEOUT if late else Outcome.ENVIRONMENT_ERROR, failure)
    elif row.get("truncated") is True or response.get("incomplete_details"):
        trace.outcome = Outcome.TRUNCATED
    return trace


def _items(response: dict[str, Any]) -> list[dict[str, Any]]:
    """The output items of a response. Some agents write the whole list for each turn, so the last list is complete."""
    items = response.get("output") or []
    return items[-1] if items and isinstance(items[-1], list) else items


def _messages(items: Any) -> list[Message]:
    """Converts items of the Responses API to messages; a reasoning item becomes part of the message after it."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    kept: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        if item.get("type") == "reasoning":
            parts = [*(item.get("summary") or []), *(item.get("content") or [])]
            thoughts += [str(part["text"]) for part in parts if part.get("text")]
            continue
        plain = {key: item[key] for key in _PLAIN if item.get(key) is not None}
        if thoughts and plain.get("type") == "function_call":
            kept.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(thoughts)})
        elif thoughts:
            plain["reasoning_content"] = "\n".join(thoughts)
        kept.append(plain)
        thoughts = []
    return [flatten_content(message) for message in from_items(kept)]


_PLAIN = ("type", "role", "content", "name", "arguments", "call_id", "output")
