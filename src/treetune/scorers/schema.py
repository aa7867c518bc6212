"""Checks values against JSON schemas with common keywords, and checks the schemas themselves.

find_schema_faults({"type": "objekt"})                       # [(".type", "...")]
find_value_fault({"age": "7"}, {"properties": {"age": {"type": "integer"}}})      # "age is no integer"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from treetune.errors import did_you_mean

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
            yield here, f"is no keyword that is checked here{near}; there are {', '.join(KEYWORDS)}"
        elif key == "type":
            for name in value if isinstance(value, list) else [value]:
                if not isinstance(name, str) or name not in TYPES:
                    near = did_you_mean(str(name), TYPES)
                    yield here, f"{name!r:.60} is no type{near}; there are {', '.join(TYPES)}"
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
            return f"{name} is no {' or '.join(wanted)}"
    if "enum" in schema and not any(_equal(value, one) for one in schema["enum"]):
        return f"{name} is none of {', '.join(map(str, schema['enum'])):.100}"
    if "const" in schema and not _equal(value, schema["const"]):
        return f"{name} is not {schema['const']!r:.60}"
    if "anyOf" in schema and all(find_value_fault(value, one, path) is not None for one in schema["anyOf"]):
        return f"{name} fits none of anyOf"
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
            return f"{name} is {value!r:.40}, out of its limits"
    return None


def _equal(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
