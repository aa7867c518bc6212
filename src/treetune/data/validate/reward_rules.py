"""Rules for a row's environment and ground truth: the row must have what the environment reads, in the form that it
reads.

No trainer reports these faults: a ground truth that no answer matches scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from treetune.core.environment import Kind, Stored, TaskRequirements, kind_of
from treetune.data.rows.scorer import BY_RULE, ScoredBy, reading_of, scored_by_row, taskset_of
from treetune.data.sources.names import Row
from treetune.data.validate.column_types import Places
from treetune.data.validate.rules import Fault, FilesReport, RowContext, show_value
from treetune.errors import TreetuneError, did_you_mean
from treetune.scorers.scorer import find_form_faults

MAKE_NUMBERS = ("gsm8k_multi_turn",)
"""SkyRL environments that also read `extra_info.max_turns`, and accept text as a number."""


def check_reward(row: Mapping[str, Any], check: RowContext) -> Iterator[Fault]:
    extra = row.get("extra_info", {})
    if not isinstance(extra, dict):
        yield "extra-info-not-a-mapping", show_value(extra)
        extra = {}
    if not isinstance(scorer := extra.get("scorer"), str | None):
        yield "scorer-not-text", show_value(scorer)
    env_class = (row if check.format.has_environments else extra).get("env_class")
    needed = None
    if env_class is None:
        if check.format.has_environments:
            yield "missing-env-class", "none" + did_you_mean("env_class", row)
    elif not isinstance(env_class, str):
        yield "env-class-not-text", show_value(env_class)
    elif ":" in env_class:
        pass  # the row names its own code, which is not run here
    elif env_class not in check.known:
        yield "unknown-env-class", show_value(env_class) + did_you_mean(env_class, check.known)
    else:
        needed = check.requirements(env_class)
    yield from _check_truth(row, check, env_class, needed, scorer)
    if check.format.has_environments and needed is not None:
        yield from _check_needs(row, needed)
        yield from _check_turns(row, check)


def _check_truth(
    row: Mapping[str, Any], check: RowContext, env_class: Any, needed: TaskRequirements | None, scorer: Any
) -> Iterator[Fault]:
    column = check.format.reward
    if check.format.has_environments:
        # An environment that declares nothing about ground truths may need none.
        free = needed is None and isinstance(env_class, str) and (":" in env_class or env_class in check.registered)
        if needed is not None and column not in row:
            column = needed.column
    else:
        # A row may name another scorer than a comparison with its ground truth.
        free = column is None or (needed is None and isinstance(scorer, str) and scorer != BY_RULE.text)
    spec = row.get(column) if column is not None else row
    if spec is None:
        if not free or not check.format.has_environments:
            yield "missing-reward-spec", f"no {column}{did_you_mean(str(column), row)}"
        return
    if not isinstance(spec, dict):
        yield "reward-spec-not-a-mapping", show_value(spec)
        return
    truth = spec.get("ground_truth")
    if truth is None and not free:
        yield "missing-ground-truth", f"only {', '.join(spec)}" if spec else "none"
    if needed is None:
        if truth is not None and not free and not _says_something(truth):
            yield "ground-truth-value", f"no answer can be {show_value(truth)}"
        return
    if not check.format.has_environments:
        if truth is not None and (problem := needed.problem(truth)) is not None:
            yield "ground-truth-type", f"for {env_class} it {problem}"
        return
    holder = row.get(needed.column)
    read = holder.get("ground_truth") if isinstance(holder, dict) else None
    if read is None and needed.column != "reward_spec":
        yield "missing-column", f"no {needed.column}.ground_truth, which {env_class} reads"
    read = truth if read is None else read
    if read is not None and (fault := find_fault(needed, read)) is not None:
        rule, expected = fault
        yield rule, f"{env_class} reads {expected}, this is {show_value(read)}"
    elif truth is not None and read != truth and read != needed.encode(truth):
        yield "ground-truth-value", f"{needed.column} says {show_value(read)}, reward_spec {show_value(truth)}"


def check_forms(row: Row, check: RowContext) -> Iterator[Fault]:
    """Check that a row's prompt asks for the form in which its answer is read, if a scorer or a registered environment
    reads it."""
    try:
        task = check.format.task_of_pruned(row)
        scored = ScoredBy.read(task.extra_info.get("scorer")) or scored_by_row(task)
        known = scored is not None and (scored.by_scorer or scored.value in check.registered)
        if scored is not None and known:
            yield from find_form_faults(*reading_of(taskset_of(scored), task))
    except TreetuneError:
        return  # it breaks another rule


def find_fault(needed: TaskRequirements, truth: Any) -> Fault | None:
    """Return the rule that a ground truth breaks, in the form that its environment reads, and what is expected."""
    texts: Any = [truth]
    if needed.stored is Stored.JSON:
        return _check_json(needed, truth)
    if needed.stored is Stored.TARGET:
        target = truth.get("target") if isinstance(truth, dict) else None
        texts = [target] if isinstance(target, str) else target
        fits = isinstance(texts, list) and bool(texts) and all(isinstance(text, str) for text in texts)
        expected = '{"target": [texts]}'
    elif needed.stored is Stored.TEXT:
        fits, expected = isinstance(truth, str), "text"
    else:
        fits, expected = needed.problem(truth) is None, " or ".join(needed.takes)
    if not fits:
        return "ground-truth-type", expected
    if all(isinstance(text, str) and not text.strip() for text in texts):
        return "ground-truth-value", "non-empty text"
    if needed.stored is Stored.TEXT and needed.pattern and not re.fullmatch(needed.pattern, truth):
        return "ground-truth-value", f"text such as {needed.pattern}"
    return ("ground-truth-free", "a text with something left to compare") if needed.is_free(truth) else None


def _says_something(truth: Any) -> bool:
    """Whether the rule could find an answer equal to the ground truth."""
    return any(str(text).strip() for text in (truth if isinstance(truth, list) else [truth]))


def _check_json(needed: TaskRequirements, truth: Any) -> Fault | None:
    expected = f"{' or '.join(kind for kind in needed.takes if kind is not Kind.TEXT)} as JSON in a text"
    if not isinstance(truth, str):
        return "ground-truth-type", expected
    try:
        value = msgspec.json.decode(truth)
    except (msgspec.DecodeError, UnicodeError):
        return "ground-truth-value", expected
    kind = kind_of(value)
    if kind is Kind.TEXT or kind not in needed.takes:
        return "ground-truth-value", expected
    if kind is Kind.CASES and all(map(_is_plain, value)):
        silent = not any(case["output"].strip() for case in value)
        return ("ground-truth-free", "cases, some of which expect an output") if silent else None
    if (problem := needed.problem(truth)) is not None:
        return "ground-truth-value", f"{expected}, but it {problem}"
    if kind is Kind.CASES:
        pairs = zip(value, msgspec.json.decode(needed.encode(truth)), strict=True)
        if any((one["input"], one["output"]) != (two["input"], two["output"]) for one, two in pairs):
            return "ground-truth-value", "inputs and outputs that are text"
    return None


def _is_plain(case: dict[str, Any]) -> bool:
    """Whether the requirements need not be asked: most cases are text in, text out."""
    texts = isinstance(case["input"], str) and isinstance(case["output"], str)
    return texts and case.get("testtype") in (None, "stdin") and not case.get("metadata")


def _check_needs(row: Mapping[str, Any], needed: TaskRequirements) -> Iterator[Fault]:
    """Yield the columns that an environment reads, and what they should hold."""
    if missing := [key for key in needed.needs if key not in row]:
        yield "missing-column", f"no {', '.join(missing)}, which {row['env_class']} reads"
    for key in needed.needs.keys() & row.keys():
        value, expected = row[key], None
        if key in needed.choices:
            expected = None if value in needed.choices[key] else ", ".join(needed.choices[key])
        elif key == "db_id":
            expected = None if isinstance(value, str) and value.strip() else "the name of a database"
        elif key == "extra_info" and not isinstance(value, dict):
            # SkyRL tests `"max_turns" in` it, which also works for text and lists.
            expected = None if isinstance(value, str | list) and "max_turns" not in value else "a mapping"
        if expected is not None:
            yield "wrong-value", f"{key} is {show_value(value)}, expected {expected}"
            return


def _check_turns(row: Mapping[str, Any], check: RowContext) -> Iterator[Fault]:
    for place, holder in (("max_turns", row), ("extra_info.max_turns", row.get("extra_info"))):
        turns = holder.get("max_turns") if isinstance(holder, dict) else None
        if turns is not None and check.has_turns(row["env_class"]) and not _is_turns(turns, row["env_class"]):
            yield "bad-max-turns", f"{place} is {show_value(turns)}"
            return


def _is_turns(turns: Any, env_class: str) -> bool:
    """Whether it is a whole number from 1; text counts only if the environment converts it."""
    if isinstance(turns, bool) or (isinstance(turns, str) and env_class not in MAKE_NUMBERS):
        return False
    try:
        return int(turns) == float(turns) >= 1
    except (TypeError, ValueError, OverflowError):
        return False


class Turns:
    """Rows of one file without `max_turns`. If a file that is loaded with it has the column, the loader fills in null,
    and SkyRL's `int(None)` fails."""

    def __init__(self) -> None:
        self._without = Places()
        """Rows without their own `max_turns`, in an environment with several turns."""
        self._without_inside = Places()
        """Rows whose `extra_info`, which their environment also reads, lacks it too."""
        self._null_inside = Places()
        """JSON rows with an explicit null in `extra_info`."""

    def add(self, row: Mapping[str, Any], number: int, check: RowContext) -> None:
        """Add a row; JSON rows keep their nulls."""
        env_class, extra = row.get("env_class"), row.get("extra_info")
        if row.get("max_turns") is not None or not (isinstance(env_class, str) and check.has_turns(env_class)):
            return
        self._without.add(number)
        if env_class in MAKE_NUMBERS and isinstance(extra, dict) and extra.get("max_turns") is None:
            self._without_inside.add(number)
            if "max_turns" in extra:
                self._null_inside.add(number)

    def report_to(self, report: FilesReport, file: str, unit: str, *, column: bool, inside: bool) -> None:
        """`column`: whether the files that are loaded together have a column `max_turns`. `inside`: whether all their
        `extra_info` have that key. In JSON with differing mappings, only rows that write the key have it."""
        if column:
            place, rows = "max_turns", self._without
        else:
            place, rows = "extra_info.max_turns", self._without_inside if inside else self._null_inside
        if rows.count:
            found = f"{place} is null here, because other rows have it"
            report.add("null-max-turns", file, found, rows.first, unit, count=rows.count)
