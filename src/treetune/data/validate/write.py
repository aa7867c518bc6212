"""Files that `treetune validate` calls valid: tasks written and checked, and rows fixed where that is safe.

    write_tasks(tasks, "train.parquet", "skyrl")
    write_tasks(taskset.draw(1000), "train.parquet", "verl", scorer=taskset)

Safe is what changes how a row says something, not what it says: a ground truth in the type that its environment reads,
a prompt that was plain text, a role under another name, columns where the environment looks for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.config.plugins import environments as known_environments
from treetune.core.environment import Stored, contract_of
from treetune.core.finding import ERROR, SHOWN, Finding
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.rows.arrow_values import drop_nulls, encode_json, json_fields_of
from treetune.data.rows.formats import Format, format_named
from treetune.data.rows.sources import File, FileKind, HubName, Row, kind_of
from treetune.data.rows.writing import write_file
from treetune.data.validate.rules import RULES, FilesReport
from treetune.errors import EmptyTasksetError, TasksetError, TreetuneError

if TYPE_CHECKING:
    from treetune.data.validate.files import RowCheck


def write_tasks(
    tasks: Iterable[Task],
    path: str | Path,
    format: str,
    *,
    scorer: str | Taskset[Any, Any] | None = None,
    check: bool = True,
    environments: Collection[str] = (),
) -> int:
    """Write tasks as rows; gives their number. `treetune.data.rows.read_tasks` gives back equal tasks.

    `scorer` is the taskset that the tasks were drawn from, or `"rule"`: answers are compared with ground truths.
    `tasks` may be a taskset itself. A file that `treetune validate` would not call valid is refused, unless `check` is
    False, before it is put in its place. `environments`: ids that are registered elsewhere.
    """
    refuse = partial(_refuse_invalid, path=Path(path).expanduser(), format=format, environments=environments)
    return write_file(tasks, path, format, scorer=scorer, check=refuse if check else None)


def _refuse_invalid(written: Path, *, path: Path, format: str, environments: Collection[str]) -> None:
    """Raises where the validator calls the file at `written`, which is to be `path`, not valid."""
    import pyarrow.parquet as pq

    from treetune.data.validate.files import validate

    if written.suffix.lower() == ".parquet" and "prompt" in json_fields_of(pq.read_metadata(written).metadata):
        raise TasksetError(
            f"{path} would not be valid: some messages have text as content and others lists, and no parquet column "
            "that a trainer reads holds both",
            remedy="write .jsonl, or all contents as lists of parts; check=False writes it as it is",
        )
    report = validate(written, format=format, environments=environments)
    if report.ok:
        return
    errors = [one for one in report.findings if one.severity is ERROR]
    faults = "; ".join(f"{_name_tasks(one)}: {one.rule}: {one.found}" for one in errors[:3])
    more = f"; and {len(errors) - 3} more faults" if len(errors) > 3 else ""
    remedy = RULES[errors[0].rule].remedy
    if errors[0].rule == "unknown-env-class":
        remedy = "see `treetune list`, or name one that is registered elsewhere: environments=[...]"
    raise TasksetError(f"{path} would not be valid: {faults}{more}", remedy=f"{remedy}; check=False writes it as it is")


def _name_tasks(finding: Finding) -> str:
    """The tasks of a finding, whose lines count from 1."""
    if not finding.count:
        return "all tasks together"
    first = finding.rows[0] - (finding.unit == "line")
    return f"task {first}" + (f" and {finding.count - 1:,} more" if finding.count > 1 else "")


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
        return self.rows > 0 and all(finding.severity is not ERROR for finding in self.findings)


def write_fixed(
    sources: Sequence[File | HubName],
    path: Path,
    report: FilesReport,
    format: str | None,
    environments: Collection[str],
) -> Fixed:
    """Write the rows of files that `report` is about, fixed, and check what was written. They are in `format`, else in
    that of the first file. `environments`: ids that are registered elsewhere."""
    from treetune.data.validate.files import read_batches, validate

    format = format or next((report.formats[str(one)] for one in sources if str(one) in report.formats), "skyrl")
    turns = any(one.rule == "null-max-turns" and one.found.startswith("max_turns") for one in report.findings)
    result = Fixed(str(path))
    left_out: dict[tuple[str, str], LeftOut] = {}

    def tasks() -> Iterator[Task]:
        for batch in read_batches(sources):
            read = format_named(report.formats.get(batch.source, format))
            for number, row in zip(batch.numbers, batch.rows, strict=True):
                try:
                    task, written = _fix(row, read, format_named(format), turns)
                    # Of these only the second refuses NaN, which parquet has.
                    (msgspec.json.encode if kind_of(path) is FileKind.PARQUET else encode_json)(written)
                except (TreetuneError, UnicodeEncodeError, TypeError) as error:
                    said = error.message if isinstance(error, TreetuneError) else "a value that cannot be written"
                    why = said.partition(":")[0]
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
        result.findings = validate(path, format=format, environments=environments).findings
    return result


def helps(rule: str, row: Row, check: RowCheck) -> bool:
    """Whether a row that breaks a rule breaks it no more when it is fixed."""
    try:
        _, written = _fix(row, check.format, check.format)
    except TreetuneError:
        return False
    return all(found != rule for found, _ in check(drop_nulls(written)))


def _fix(row: Row, read: Format, write: Format, turns: bool = False) -> tuple[Task, Row]:
    """The task of a row, fixed, and the row that is written of it; raises where it is none whatever is done."""
    spec, model = row.get("reward_spec"), row.get("reward_model")
    if isinstance(spec, dict) and isinstance(model, dict):  # as SkyRL's aime has them
        one, two = spec.get("ground_truth"), model.get("ground_truth")
        if one is not None and two is not None and str(one) != str(two):
            raise TreetuneError("two ground truths")
    task = read.task_of_pruned(fix(row, turns=turns))
    if not isinstance(task.env_class, str | None):
        raise TreetuneError("an env_class that is no text")
    if not task.messages:
        raise TreetuneError("no prompt")
    if isinstance(task.ground_truth, float) and not math.isfinite(task.ground_truth):
        raise TreetuneError("a ground truth that is no number")
    try:
        return task, write.row_of(task)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # whatever values a faulty row has
        raise TreetuneError(f"values that are no task's: {error}") from None


def fix(row: Row, *, turns: bool = False) -> Row:
    """A row, fixed where that is safe. What the writer does anyway (types of ground truths, columns) is left to it.

    `turns`: put the turns of a row that has none into a column, for other rows have it.
    """
    row = dict(row)
    if "prompt" in row:
        row["prompt"] = _fix_prompt(row["prompt"])
    env_class, spec, extra = row.get("env_class"), row.get("reward_spec"), row.get("extra_info", {})
    registered = isinstance(env_class, str) and env_class in known_environments.names()
    contract = contract_of(env_class) if registered else None
    if contract is None:
        return row
    truth = spec.get("ground_truth") if isinstance(spec, dict) else None
    if isinstance(spec, dict) and isinstance(truth, str) and contract.stored is Stored.TEXT and contract.pattern:
        # A number in text as answers have it: without spaces and thousands separators.
        plain = truth.strip().replace(",", "")
        if re.fullmatch(contract.pattern, plain):
            row["reward_spec"] = {**spec, "ground_truth": plain}
    if contract.max_turns > 1 and "max_turns" not in row:
        if isinstance(extra, dict):
            row["extra_info"] = {"max_turns": contract.max_turns, **extra}
        if turns:
            row["max_turns"] = contract.max_turns
    return row


def _fix_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, dict) and "role" in prompt:
        prompt = [prompt]
    if not isinstance(prompt, list):
        return prompt
    return [_fix_message(message) if isinstance(message, dict) else message for message in prompt]


ROLES = dict.fromkeys(("human", "prompter"), "user") | dict.fromkeys(("gpt", "bot", "model", "ai"), "assistant")
"""Names that other chat formats have for our roles."""


def _fix_message(message: dict[str, Any]) -> dict[str, Any]:
    if "from" in message and "value" in message and "role" not in message:  # ShareGPT's names
        message = {"role": message["from"], "content": message["value"]}
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str):
        plain = role.strip().lower()
        message = {**message, "role": ROLES.get(plain, plain)}
    return {**message, "content": str(content)} if isinstance(content, bool | int | float) else message


def _differs(row: Row, written: Row) -> bool:
    """Whether a row says something otherwise than before; what is only added to `extra_info` is not counted."""
    extra, given = written.get("extra_info", {}), row.get("extra_info", {})
    same = all(extra.get(key) == value for key, value in given.items()) if isinstance(given, dict) else False
    others = (written.keys() | row.keys()) - {"extra_info", "data_source"}
    return not same or any(written.get(name) != row.get(name) for name in others)
