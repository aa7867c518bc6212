"""Rows with what can be fixed safely fixed, written anew.

Safe is what changes how a row says something, not what it says: a ground truth in the type that its environment reads,
a prompt that was plain text, a role under another name, columns where the environment looks for them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from treetune.environment import Contract, Stored, contract_of
from treetune.errors import EmptyTasksetError, TreetuneError
from treetune.plugins import environments as known_environments
from treetune.rows.arrow_values import drop_nulls, encode_json
from treetune.rows.layouts import Format, format_named
from treetune.rows.sources import Batch, Kind, Row, kind_of
from treetune.rows.writing import write_file
from treetune.task import Task
from treetune.validate.finding import SHOWN, Finding, Severity
from treetune.validate.row import RowCheck

ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
}
"""Names that other chat formats have for our roles."""


class LeftOut(msgspec.Struct):
    """Rows that are no tasks whatever is done, and so are not in the fixed file."""

    why: str
    file: str
    unit: str
    rows: list[int] = []
    """The first ten."""
    count: int = 0


class Fixed(msgspec.Struct):
    """What `--fix` wrote."""

    path: str
    rows: int = 0
    changed: int = 0
    left_out: list[LeftOut] = []
    findings: list[Finding] = []
    """What `validate` says about it: not everything can be fixed."""

    @property
    def ok(self) -> bool:
        return self.rows > 0 and all(finding.severity is not Severity.ERROR for finding in self.findings)


def write_fixed(
    batches: Iterable[Batch],
    path: str | Path,
    format: str,
    formats: Mapping[str, str],
    *,
    turns: bool = False,
    environments: Collection[str] = (),
) -> Fixed:
    """Write the rows as rows of `format`, fixed, and check what was written.

    `formats`: of the files that are read, where it is another. `turns`: whether some rows have a column `max_turns`.
    `environments`: ids that are registered elsewhere.
    """
    result = Fixed(str(path))
    left_out: dict[tuple[str, str], LeftOut] = {}
    write = format_named(format)
    plain_json = kind_of(Path(path)) is not Kind.PARQUET

    def tasks() -> Iterator[Task]:
        for batch in batches:
            read = format_named(formats.get(batch.source, format))
            for number, row in zip(batch.numbers, batch.rows, strict=True):
                try:
                    task = _task(row, read, turns)
                    written = _row(task, write)
                    _refuse_unwritable(written, plain_json)
                except TreetuneError as error:
                    why = error.message.partition(":")[0]
                    left = left_out.setdefault((why, batch.source), LeftOut(why, batch.source, batch.unit))
                    left.count += 1
                    left.rows = [*left.rows, number][:SHOWN]
                    continue
                result.changed += _differs(row, written)
                yield task

    with suppress(EmptyTasksetError):  # all rows are left out, each with its reason
        result.rows = write_file(tasks(), path, format, scorer="rule")
    result.left_out = list(left_out.values())
    if result.rows:
        from treetune.validate.files import validate

        result.findings = validate(path, format=format, environments=environments).findings
    return result


def helps(rule: str, row: Row, check: RowCheck) -> bool:
    """Whether a row that breaks a rule breaks it no more when it is fixed."""
    format = format_named(check.format)
    try:
        written = drop_nulls(_row(_task(row, format), format))
    except TreetuneError:
        return False
    return all(found != rule for found, _ in check(written))


def _task(row: Row, format: Format, turns: bool = False) -> Task:
    """The task of a row, fixed; raises where it is none whatever is done."""
    if contradicts(row):
        raise TreetuneError("two ground truths")
    task = format.task_of_pruned(fixed(row, turns=turns))
    if not isinstance(task.env_class, str | None):
        raise TreetuneError("an env_class that is no text")
    if not task.messages:
        raise TreetuneError("no prompt")
    truth = task.ground_truth
    if isinstance(truth, float) and not math.isfinite(truth):
        raise TreetuneError("a ground truth that is no number")
    return task


def _row(task: Task, format: Format) -> Row:
    try:
        return format.row_of(task)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # whatever values a faulty row has
        raise TreetuneError(f"values that are no task's: {error}") from None


def _refuse_unwritable(row: Row, plain_json: bool) -> None:
    """Raises for text that is no Unicode, and for NaN where it would be JSON."""
    if plain_json:
        encode_json(row)
    else:
        try:
            msgspec.json.encode(row)
        except (UnicodeEncodeError, TypeError) as error:
            raise TreetuneError(f"a value that cannot be written: {error}") from None


def contradicts(row: Row) -> bool:
    """Whether a row has two ground truths, as SkyRL's aime rows may: nobody knows which is meant."""
    spec, model = row.get("reward_spec"), row.get("reward_model")
    if not isinstance(spec, dict) or not isinstance(model, dict):
        return False
    one, two = spec.get("ground_truth"), model.get("ground_truth")
    return one is not None and two is not None and str(one) != str(two)


def fixed(row: Row, *, turns: bool = False) -> Row:
    """A row, fixed where that is safe. What the writer does anyway (types of ground truths, columns) is left to it.

    `turns`: put the turns of a row that has none into a column, for other rows have it.
    """
    row = dict(row)
    if (prompt := row.get("prompt")) is not None:
        row["prompt"] = _messages(prompt)
    env_class = row.get("env_class")
    contract = (
        contract_of(env_class) if isinstance(env_class, str) and env_class in known_environments.names() else None
    )
    if contract is not None:
        spec = row.get("reward_spec")
        if isinstance(spec, dict) and "ground_truth" in spec:
            row["reward_spec"] = {**spec, "ground_truth": _truth(spec["ground_truth"], contract)}
        if contract.max_turns > 1 and "max_turns" not in row:
            extra = row.get("extra_info", {})
            if isinstance(extra, dict):
                row["extra_info"] = {"max_turns": contract.max_turns, **extra}
            if turns:
                row["max_turns"] = contract.max_turns
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
