"""The scorer for JSON: `json`."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import msgspec

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError
from treetune.scorers.reading.extraction import extract, read_as_written
from treetune.scorers.reading.numerals import plain, read_number
from treetune.scorers.reading.statements import Extraction, fenced, strip_thinking
from treetune.scorers.schema import find_schema_faults, find_value_fault
from treetune.scorers.scorer import Scorer, explain, truths_of

_NONE = object()


class Json(Scorer, frozen=True, tag="json"):
    schema: dict[str, Any] | None = None
    """A JSON schema that the value must match, with common keywords (`type`, `properties`, `required`, `enum`)."""
    fields: list[str] | None = None
    """The keys whose values must equal those of the ground truth, with dots for nested keys (`address.city`). Absent:
    the whole value must be equal, if there is a ground truth and no schema."""
    partial: bool = False
    """Whether each right field earns its share of the reward."""
    ignore_case: bool = False
    """Whether to ignore case."""
    strip: bool = False
    """Whether to compare texts without surrounding spaces, quotes and full stops, and numbers by value."""

    def __post_init__(self) -> None:
        faults = (
            [] if self.schema is None else [(f"schema{key}", what) for key, what in find_schema_faults(self.schema)]
        )
        if self.fields is not None and not (self.fields and all(self.fields)):
            faults.append(("fields", "name one at least"))
        if self.partial and self.fields is None:
            faults.append(("partial", "needs fields: name the keys of which each earns its share"))
        if faults:
            raise ConfigError(faults)

    @property
    def _compares(self) -> bool:
        return self.fields is not None or self.schema is None

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the reply contains JSON that matches the schema and the fields of the ground truth."""
        reply, form = strip_thinking(answer), "JSON"
        if self.answer is not None:
            found = extract(answer, self.answer, read_as_written)
            if found.text is None:
                return Score(0.0, explanation=found.why)
            reply, form = found.text, found.form
        value, text = _find_value(reply)
        if value is _NONE:
            return Score(0.0, explanation=text)
        if self.schema is not None and (fault := find_value_fault(value, self.schema)) is not None:
            return Score(0.0, answer=text, explanation=f"not as the schema says: {fault}")
        if not self._compares:
            return Score(1.0, answer=text, explanation="as the schema says")
        wanted = self._read_truths(truth)
        best, why = max((self._compare(value, one) for one in wanted), key=lambda found: found[0])
        if best and _has_duplicate_keys(text):
            best, why = 0.0, "a key is given twice"
        return Score(best, answer=text, explanation=explain(Extraction(text, form=form), why))

    def _compare(self, value: Any, truth: Any) -> tuple[float, str]:
        if self.fields is None:
            return (1.0, "") if self._is_same(value, truth) else (0.0, f"expected {_short(truth)}")
        wrong = [field for field in self.fields if not self._is_same(_at(value, field), _at(truth, field))]
        if not wrong:
            return 1.0, ""
        share = (len(self.fields) - len(wrong)) / len(self.fields) if self.partial else 0.0
        return share, f"wrong: {', '.join(wrong)}; expected {wrong[0]} to be {_short(_at(truth, wrong[0]))}"

    def _is_same(self, value: Any, truth: Any) -> bool:
        if value is _NONE or truth is _NONE:
            return False
        if isinstance(truth, dict):
            return (
                isinstance(value, dict)
                and value.keys() == truth.keys()
                and all(self._is_same(value[key], truth[key]) for key in truth)
            )
        if isinstance(truth, list):
            return isinstance(value, list) and len(value) == len(truth) and all(map(self._is_same, value, truth))
        if self.strip and not isinstance(value, bool) and not isinstance(truth, bool):
            numbers = [read_number(str(one)) if isinstance(one, str | int | float) else None for one in (value, truth)]
            if None not in numbers:
                return numbers[0] == numbers[1]
        if isinstance(value, str) and isinstance(truth, str):
            value, truth = (plain(one) if self.strip else one for one in (value, truth))
            return bool(value.casefold() == truth.casefold()) if self.ignore_case else bool(value == truth)
        return isinstance(value, bool) == isinstance(truth, bool) and bool(value == truth)

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        if not self._compares or self.problem(truth, task) is not None:
            return None
        value = self._read_truths(truth)[0]
        return self.say(f"```json\n{msgspec.json.encode(value).decode()}\n```")

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        if not self._compares:
            return None
        try:
            values = self._read_truths(truth)
        except msgspec.DecodeError as error:
            return f"is no JSON: {error}"
        if not values:
            return "is missing"
        missing = [field for field in self.fields or () if any(_at(value, field) is _NONE for value in values)]
        return f"has no {missing[0]}" if missing else None

    def _read_truths(self, truth: Any) -> list[Any]:
        """Parse a text as JSON; for a list of texts, any is right; other values are used as they are."""
        if isinstance(truth, str):
            return [_decode_truth(truth)]
        if isinstance(truth, list) and truth and all(isinstance(one, str) and one[:1] in "[{" for one in truth):
            return [_decode_truth(one) for one in truth]
        return [truth] if truths_of(truth) or truth == [] else []


@lru_cache(maxsize=1024)
def _decode_truth(text: str) -> Any:
    return msgspec.json.decode(text)


def _find_value(reply: str) -> tuple[Any, str]:
    """The one value in a reply: in a code block, or else the whole reply, or the object or list in it."""
    blocks = [block.body.strip() for block in fenced(reply) if block.language in _LANGUAGES]
    if not blocks:
        begin, end = min(_places(reply, "{["), default=-1), max(_places(reply, "}]"), default=-1)
        blocks = [reply.strip(), *([reply[begin : end + 1]] if 0 <= begin < end else [])]
        found = next(((value, block) for block in blocks if (value := _decode(block)) is not _NONE), (_NONE, "no JSON"))
        return (_NONE, "it is denied") if begin > 0 and _WRONG.search(reply[:begin]) else found
    values = [(value, block) for block in blocks if (value := _decode(block)) is not _NONE]
    if not values:
        return _NONE, "no JSON in the block of code"
    if any(value != values[0][0] for value, _ in values):
        return _NONE, "several different values"
    return values[-1]


def _places(text: str, letters: str) -> list[int]:
    find = text.find if letters == "{[" else text.rfind
    return [place for letter in letters if (place := find(letter)) >= 0]


def _decode(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return _NONE


def _has_duplicate_keys(text: str) -> bool:
    def check(pairs: list[tuple[str, Any]]) -> None:
        if len(dict(pairs)) < len(pairs):
            raise ValueError

    try:
        json.loads(text, object_pairs_hook=check)
    except ValueError:
        return True
    return False


def _at(value: Any, field: str) -> Any:
    if isinstance(value, dict) and field in value:
        return value[field]
    for key in field.split("."):
        if not isinstance(value, dict) or key not in value:
            return _NONE
        value = value[key]
    return value


def _short(value: Any) -> str:
    return "absent" if value is _NONE else f"{msgspec.json.encode(value).decode():.120}"


_WRONG = re.compile(r"\b(?:wrong|incorrect|not)\b[^.\n]{0,40}$", re.I)
_LANGUAGES = ("", "json", "json5", "jsonc", "javascript", "js")
