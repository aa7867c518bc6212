"""Converts a function's signature to the JSON schema that a model reads, and a model's arguments to Python values.

signature = read_signature(search)
signature.parameters                         # {"type": "object", "properties": {"query": ...}, ...}
signature.decode({"query": "red", "limit": 3})
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from treetune.core.task import Task
from treetune.errors import ToolError, UsageError, did_you_mean

_OWNER = ("self", "cls")


class Signature(msgspec.Struct):
    description: str
    parameters: dict[str, Any]
    """The JSON schema of the arguments, an object."""
    names: tuple[str, ...]
    """The arguments that a model may pass."""
    arguments: type[msgspec.Struct]
    task_parameter: str | None = None
    """The parameter that receives the task; it is not an argument of the model."""

    def decode(self, given: Any) -> dict[str, Any]:
        """Convert arguments to the function's types. A `ToolError` names the wrong argument, and what was expected."""
        try:
            values = msgspec.convert(given, self.arguments)
        except msgspec.ValidationError as error:
            raise ToolError(_explain(str(error), given, self.names)) from None
        except RecursionError:
            raise ToolError("the arguments are nested too deeply") from None
        return {name: getattr(values, name) for name in self.names}


def check_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that need a value. Raises for parameters that a schema cannot describe."""
    where = f"tool {function.__qualname__}"
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in _OWNER:
        parameters = parameters[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            remedy = "name each parameter: a model gives arguments by name"
            raise UsageError(f"{where} takes {str(parameter).partition(':')[0]}", remedy=remedy)
        if parameter.annotation is parameter.empty:
            remedy = f"write its type, as in {parameter.name}: str"
            raise UsageError(f"{where} has no type for {parameter.name!r}", remedy=remedy)
    return parameters


def check_owner(owner: str, name: str, method: Any) -> None:
    """Raise if a function in a class lacks `self`."""
    if not inspect.isfunction(method):
        return  # a static method or a class method
    parameters = list(inspect.signature(method).parameters)
    if not parameters or parameters[0] not in _OWNER:
        remedy = f"write def {name}({', '.join(('self', *parameters))}), or @staticmethod above @tool"
        raise UsageError(f"{owner}: the tool {name!r} is a method without self", remedy=remedy)


def read_signature(function: Callable[..., Any]) -> Signature:
    where = f"tool {function.__qualname__}"
    parameters = check_parameters(function)
    types = _resolve_types(function, parameters, where)
    given = [name for name, type_ in types.items() if isinstance(type_, type) and issubclass(type_, Task)]
    if len(given) > 1:
        raise UsageError(f"{where} takes the task twice: {', '.join(given)}")
    asked = [parameter for parameter in parameters if parameter.name not in given]
    names = tuple(parameter.name for parameter in asked)
    try:
        fields = [_field(parameter, types[parameter.name]) for parameter in asked]
        arguments = msgspec.defstruct("Arguments", fields, kw_only=True, forbid_unknown_fields=True)
        parameters_schema = _make_schema(arguments)
    except (TypeError, ValueError) as error:
        remedy = "use types that JSON has: text, numbers, enums, lists, dicts, msgspec structs"
        raise UsageError(f"{where} has a type that a model cannot pass: {error}", remedy=remedy) from error
    description, about = read_docstring(function.__doc__ or "", names)
    for name, text in about.items():
        parameters_schema["properties"][name].setdefault("description", text)
    return Signature(description, parameters_schema, names, arguments, given[0] if given else None)


def _resolve_types(function: Callable[..., Any], parameters: list[inspect.Parameter], where: str) -> dict[str, Any]:
    # The return type is not resolved: it may be imported only for type checkers.
    written = SimpleNamespace(__annotations__={parameter.name: parameter.annotation for parameter in parameters})
    around = dict(inspect.getclosurevars(function).nonlocals)
    try:
        return typing.get_type_hints(written, function.__globals__, around, include_extras=True)
    except Exception as error:
        remedy = "define or import its types at the top of the module"
        raise UsageError(f"the types of {where} cannot be read: {error}", remedy=remedy) from error


def _field(parameter: inspect.Parameter, type_: Any) -> tuple[str, Any] | tuple[str, Any, Any]:
    if parameter.default is parameter.empty:
        return parameter.name, type_
    default: Any = parameter.default
    if isinstance(default, list | dict | set | bytearray):
        return parameter.name, type_, msgspec.field(default_factory=default.copy)
    return parameter.name, type_, default


def _make_schema(arguments: type[msgspec.Struct]) -> dict[str, Any]:
    (schema,), parts = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    whole = parts.pop("Arguments")
    assert schema == {"$ref": "#/$defs/Arguments"}
    whole.pop("title", None)
    # Many templates and trainers do not support references, so only recursive types keep one.
    kept: dict[str, Any] = {}
    inlined: dict[str, Any] = _inline(whole, parts, (), kept)
    if kept:
        inlined["$defs"] = kept
    return inlined


def _inline(node: Any, parts: dict[str, Any], within: tuple[str, ...], kept: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_inline(item, parts, within, kept) for item in node]
    if not isinstance(node, dict):
        return node
    name = str(node.get("$ref", "")).removeprefix("#/$defs/")
    if name not in parts:
        return {key: _inline(value, parts, within, kept) for key, value in node.items()}
    if name in within or name in kept or _holds(parts[name], name, parts, set()):
        if name not in kept:
            kept[name] = {}
            kept[name] = _inline(parts[name], parts, (*within, name), kept)
        return node
    beside = {key: value for key, value in node.items() if key != "$ref"}
    return {**_inline(parts[name], parts, (*within, name), kept), **beside}


def _holds(node: Any, name: str, parts: dict[str, Any], seen: set[str]) -> bool:
    """Whether a schema refers to `name`, directly or indirectly."""
    if isinstance(node, list):
        return any(_holds(item, name, parts, seen) for item in node)
    if not isinstance(node, dict):
        return False
    reference = str(node.get("$ref", "")).removeprefix("#/$defs/")
    if reference == name:
        return True
    if reference in parts and reference not in seen:
        seen.add(reference)
        if _holds(parts[reference], name, parts, seen):
            return True
    return any(_holds(value, name, parts, seen) for value in node.values())


_VERL_KEEPS = {"type", "description", "enum"}


def lost_for_verl(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """What verl's schema of a tool would lose, because it keeps three keys of each property: `search.limit:
    default`."""
    lost = []
    for tool in tools:
        function = tool["function"]
        for name, schema in (function["parameters"].get("properties") or {}).items():
            if further := sorted(set(schema) - _VERL_KEEPS - {"title"}):
                lost.append(f"{function['name']}.{name}: {', '.join(further)}")
    return lost


_SECTION = re.compile(r"^[ \t]*(?:Args|Arguments|Parameters)[ \t]*:[ \t]*$", re.M)
_REST = re.compile(r"^[ \t]*(?:Returns?|Raises|Yields|Examples?)[ \t]*:|^[ \t]*:returns?:", re.M)


def read_docstring(text: str, names: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Read the description of a function and of its parameters from a docstring: `name: text` on its own line, in
    Google's `Args:`, after `:param`, or after a sentence."""
    text = _SECTION.sub("", inspect.cleandoc(text))
    if (rest := _REST.search(text)) is not None:
        text = text[: rest.start()]
    if not names:
        return _join(text), {}
    known = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    line = r"^[ \t]*(?:[-*][ \t]+)?(?::param[ \t]+(?:\w+[ \t]+)?)?"
    begins = rf"(?:{line}|(?<=[.;!?])[ \t]+)`*({known})`*[ \t]*(?:\([^)\n]*\))?:[ \t]"
    found = list(re.finditer(begins, text, re.M))
    if not found:
        return _join(text), {}
    ends = [match.start() for match in found[1:]] + [len(text)]
    about = {match[1]: _join(text[match.end() : end]) for match, end in zip(found, ends, strict=True)}
    return _join(text[: found[0].start()]), {name: said for name, said in about.items() if said}


def _join(text: str) -> str:
    """Put each paragraph on one line."""
    paragraphs = re.split(r"\n[ \t]*\n", text.strip())
    return "\n".join(" ".join(paragraph.split()) for paragraph in paragraphs if paragraph.strip())


def _explain(error: str, given: Any, names: tuple[str, ...]) -> str:
    """Rephrase msgspec's error in terms of the call."""
    problem, _, place = error.partition(" - at `$")
    place = place.rstrip("`").removeprefix(".").removeprefix("[...]")
    if (missing := re.fullmatch(r"Object missing required field `(.*)`", problem)) is not None:
        name = f"{place}.{missing[1]}" if place else missing[1]
        return f"the argument {name!r} is missing"
    if (unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem)) is not None:
        if place:
            return f"the argument {place!r} has no {unknown[1]!r}"
        known = f"; it takes {', '.join(names)}" if names else "; it takes none"
        return f"there is no argument {unknown[1]!r}{did_you_mean(unknown[1], names) or known}"
    if not place:
        return f"the arguments must be a JSON object: {problem.lower()}"
    top = re.split(r"[.\[]", place)[0]
    value = given.get(top) if isinstance(given, Mapping) else None
    return f"the argument {place!r}: {problem[:1].lower()}{problem[1:]} (given: {value!r:.60})"
