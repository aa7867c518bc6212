"""The scorer for JSON: `json`, and the JSON schemas that it checks values against.

find_schema_faults({"type": "objekt"})                       # [(".type", "...")]
find_value_fault({"age": "7"}, {"properties": {"age": {"type": "integer"}}})      # "age is not of type integer"
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import msgspec

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, did_you_mean
from treetune.scorers.reading.answer_format import JSON
from treetune.scorers.reading.extraction import extract, read_as_written
from treetune.scorers.reading.numerals import plain, read_number
from treetune.scorers.reading.statements import Extraction, fenced, strip_thinking
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
            faults.append(("fields", "name at least one"))
        if self.partial and self.fields is None:
            faults.append(("partial", "needs fields: name the keys, each of which earns its share"))
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
            return Score(0.0, answer=text, explanation=f"does not match the schema: {fault}")
        if not self._compares:
            return Score(1.0, answer=text, explanation="matches the schema")
        wanted = self._read_truths(truth)
        best, why = max((self._compare(value, one) for one in wanted), key=lambda found: found[0])
        if best and text.count(":") > len(value if isinstance(value, dict) else ()) and _has_duplicate_keys(text):
            best, why = 0.0, "a key appears twice"
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
            return f"is not JSON: {error}"
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
    blocks = [block.body.strip() for block in fenced(reply) if block.language in JSON]
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


TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: not isinstance(value, bool) and (isinstance(value, int) or _is_whole(value)),
}
SIZES = ("minLength", "maxLength", "minItems", "maxItems")
LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SILENT = ("title", "description", "default", "examples", "$schema", "$id")
KEYWORDS = (
    *("type", "enum", "const", "properties", "required", "additionalProperties", "items", "anyOf"),
    *SIZES,
    *LIMITS,
    *SILENT,
)


def _is_whole(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value.is_integer()


def find_schema_faults(schema: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """The faults of a schema. Unsupported keywords are faults, so that they do not appear to be checked."""
    if not isinstance(schema, dict):
        yield path, f"expected keys and values, got {schema!r:.60}"
        return
    for key, value in schema.items():
        here = f"{path}.{key}"
        if key not in KEYWORDS:
            near = did_you_mean(str(key), KEYWORDS)
            yield here, f"is not a keyword that is checked here{near}; available: {', '.join(KEYWORDS)}"
        elif key == "type":
            for name in value if isinstance(value, list) else [value]:
                if not isinstance(name, str) or name not in TYPES:
                    near = did_you_mean(str(name), TYPES)
                    yield here, f"{name!r:.60} is not a type{near}; available: {', '.join(TYPES)}"
        elif key == "properties":
            if not isinstance(value, dict):
                yield here, f"expected keys and schemas, got {value!r:.60}"
            else:
                for name, inner in value.items():
                    yield from find_schema_faults(inner, f"{here}.{name}")
        elif key == "items" or (key == "additionalProperties" and not isinstance(value, bool)):
            yield from find_schema_faults(value, here)
        elif key in ("enum", "required", "anyOf") and not isinstance(value, list):
            yield here, f"expected a list, got {value!r:.60}"
        elif key == "anyOf":
            for number, inner in enumerate(value):
                yield from find_schema_faults(inner, f"{here}[{number}]")
        elif key in (*SIZES, *LIMITS) and not TYPES["number"](value):
            yield here, f"expected a number, got {value!r:.60}"


def find_value_fault(value: Any, schema: dict[str, Any], path: str = "") -> str | None:
    """The first violation of the schema by a value; None if it is valid."""
    name = path or "the value"
    types = schema.get("type")
    if types is not None:
        wanted = types if isinstance(types, list) else [types]
        if not any(TYPES[one](value) for one in wanted):
            return f"{name} is not of type {' or '.join(wanted)}"
    if "enum" in schema and not any(_equal(value, one) for one in schema["enum"]):
        return f"{name} is not one of {', '.join(map(str, schema['enum'])):.100}"
    if "const" in schema and not _equal(value, schema["const"]):
        return f"{name} is not {schema['const']!r:.60}"
    if "anyOf" in schema and all(find_value_fault(value, one, path) is not None for one in schema["anyOf"]):
        return f"{name} matches none of anyOf"
    return (
        _object_fault(value, schema, path)
        if isinstance(value, dict)
        else _list_fault(value, schema, path)
        if isinstance(value, list)
        else _scalar_fault(value, schema, name)
    )


def _object_fault(value: dict[str, Any], schema: dict[str, Any], path: str) -> str | None:
    known, inside = schema.get("properties", {}), f"{path}." if path else ""
    if missing := [key for key in schema.get("required", ()) if key not in value]:
        return f"{inside}{missing[0]} is missing"
    further = schema.get("additionalProperties", True)
    for key, item in value.items():
        inner = known.get(key, further)
        if inner is False:
            return f"{inside}{key} is not allowed"
        if isinstance(inner, dict) and (fault := find_value_fault(item, inner, f"{inside}{key}")) is not None:
            return fault
    return None


def _list_fault(value: list[Any], schema: dict[str, Any], path: str) -> str | None:
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
        return f"{path or 'the value'} has {len(value)} items"
    if "items" in schema:
        faults = (find_value_fault(item, schema["items"], f"{path}[{number}]") for number, item in enumerate(value))
        return next((fault for fault in faults if fault is not None), None)
    return None


def _scalar_fault(value: Any, schema: dict[str, Any], name: str) -> str | None:
    if isinstance(value, str) and not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf):
        return f"{name} has {len(value)} letters"
    if TYPES["number"](value):
        inside = schema.get("minimum", -math.inf) <= value <= schema.get("maximum", math.inf)
        if not inside or not schema.get("exclusiveMinimum", -math.inf) < value < schema.get(
            "exclusiveMaximum", math.inf
        ):
            return f"{name} is {value!r:.40}, outside its limits"
    return None


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
