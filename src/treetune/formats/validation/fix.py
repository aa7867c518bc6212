"""Rows with what can be fixed safely fixed, written anew.

Safe is what changes how a row says something, not what it says: a ground truth in the type that its environment reads,
a prompt that was plain text, a role under another name, columns where the environment looks for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from treetune.contract import Contract, Stored, contract_of
from treetune.errors import TreetuneError
from treetune.formats.batch import Batch, Row
from treetune.formats.format import named
from treetune.formats.writing import write_tasks
from treetune.plugins import environments
from treetune.task import Task

ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}
"""Names that other chat formats have for our roles."""


class Fixed(msgspec.Struct):
    """What `--fix` wrote."""

    path: str
    rows: int = 0
    changed: int = 0
    left_out: dict[str, int] = {}
    """Rows that are no tasks whatever is done, by the reason."""


def write_fixed(batches: Iterable[Batch], path: str | Path, format: str, formats: Mapping[str, str]) -> Fixed:
    """Write the rows as rows of `format`, fixed. `formats`: of the files that are read, where it is another."""
    result = Fixed(str(path))
    left_out: Counter[str] = Counter()

    def tasks() -> Iterator[Task]:
        for batch in batches:
            read = named(formats.get(batch.source, format))
            for row in batch.rows:
                try:
                    if contradicts(row):
                        raise TreetuneError("two ground truths")
                    task = read.task_of_pruned(fixed(row))
                    if not task.messages:
                        raise TreetuneError("no prompt")
                except TreetuneError as error:
                    left_out[error.message.partition(":")[0]] += 1
                    continue
                result.changed += _differs(row, named(format).row_of(task))
                yield task

    result.rows = write_tasks(tasks(), path, format, scorer="rule", check=False)
    result.left_out = dict(left_out)
    return result


def contradicts(row: Row) -> bool:
    """Whether a row has two ground truths, as SkyRL's aime rows may: nobody knows which is meant."""
    spec, model = row.get("reward_spec"), row.get("reward_model")
    if not isinstance(spec, dict) or not isinstance(model, dict):
        return False
    one, two = spec.get("ground_truth"), model.get("ground_truth")
    return one is not None and two is not None and str(one) != str(two)


def fixed(row: Row) -> Row:
    """A row, fixed where that is safe. What the writer does anyway (types of ground truths, columns) is left to it."""
    row = dict(row)
    if (prompt := row.get("prompt")) is not None:
        row["prompt"] = _messages(prompt)
    env_class = row.get("env_class")
    contract = contract_of(env_class) if isinstance(env_class, str) and env_class in environments.names() else None
    if contract is not None:
        spec = row.get("reward_spec")
        if isinstance(spec, dict) and "ground_truth" in spec:
            row["reward_spec"] = {**spec, "ground_truth": _truth(spec["ground_truth"], contract)}
        if contract.max_turns > 1 and "max_turns" not in row:
            extra = row.get("extra_info", {})
            if isinstance(extra, dict):
                row["extra_info"] = {"max_turns": contract.max_turns, **extra}
    return row


def _messages(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, dict) and "role" in prompt:
        prompt = [prompt]
    if not isinstance(prompt, list):
        return prompt
    return [_message(message) if isinstance(message, dict) else message for message in prompt]


def _message(message: dict[str, Any]) -> dict[str, Any]:
    # ShareGPT's names.
    if "from" in message and "value" in message and "role" not in message:
        message = {"role": message["from"], "content": message["value"]}
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str):
        folded = role.strip().lower()
        message = {**message, "role": ROLES.get(folded, folded)}
    if isinstance(content, bool | int | float):
        message = {**message, "content": str(content)}
    return message


def _truth(truth: Any, contract: Contract) -> Any:
    """A number in text as answers have it: without spaces and thousands separators."""
    if contract.stored is Stored.TEXT and isinstance(truth, str) and contract.pattern is not None:
        import re

        plain = truth.strip().replace(",", "")
        if re.fullmatch(contract.pattern, plain):
            return plain
    return truth


def _differs(row: Row, written: Row) -> bool:
    """Whether a row says something otherwise than before; what is only added to `extra_info` is not counted."""
    extra, given = written.get("extra_info", {}), row.get("extra_info", {})
    same = all(extra.get(key) == value for key, value in given.items()) if isinstance(given, dict) else False
    others = (written.keys() | row.keys()) - {"extra_info", "data_source"}
    return not same or any(written.get(name) != row.get(name) for name in others)
