"""How models write tool calls into their text: one format per model family, detected from its chat template.

    detect_format(template)                             # "hermes", "mistral", ...: a name in FORMATS, or None
    parse_calls("<tool_call>{...}</tool_call>", "hermes")    # the text around the calls, and the calls in OpenAI's form

If the calls in a text cannot be parsed, the text has no calls. `chat/tool_template.py` writes calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from treetune.chat.calls import call_id, function_of, write_call
from treetune.chat.message import Message
from treetune.errors import UnknownNameError

Schema = dict[str, Any]
NamedCall = tuple[str, str]
"""The name of a tool, and its arguments as JSON text."""


class UnreadableCall(ValueError):
    """The text begins a call but cannot be parsed as one."""


class CallFormat(NamedTuple):
    marks: tuple[str, ...]
    """Strings that a chat template of this format contains, all of them."""
    read: Callable[[str, Mapping[str, Schema]], tuple[str, list[NamedCall]]]
    """Splits a text into the text around the calls and the calls, given the parameter schemas by tool name."""
    write: Callable[[Sequence[NamedCall]], str]
    begins: tuple[str, ...]
    """Strings with which calls begin in an answer."""
    bare: bool = False
    """Whether an answer that begins with `{` may be a call."""


def detect_format(template: str, special_tokens: Collection[str] = ()) -> str | None:
    """The format of a chat template; without a template (mistral-common), it is detected from the special tokens."""
    for name, format in FORMATS.items():
        if all(mark in template for mark in format.marks):
            return name
    return "mistral" if not template and "[TOOL_CALLS]" in special_tokens else None


def check_name(format: str | None) -> str | None:
    if format is not None and format not in FORMATS:
        raise UnknownNameError.of("call format", format, FORMATS)
    return format


def parse_calls(text: str, format: str, tools: Sequence[Schema] = (), turn: int = 0) -> tuple[str, list[Message]]:
    """The text around the calls, and the calls; the whole text and no calls if they cannot be parsed."""
    schemas = {str(function.get("name")): function.get("parameters") or {} for function in map(function_of, tools)}
    thought = text.rfind("</think>") + len("</think>") if "</think>" in text else 0
    said = text[thought:]
    if "<think>" in said:  # still thinking, so nothing is a call yet
        return text, []
    try:
        beside, found = FORMATS[format].read(said, schemas)
    except (ValueError, RecursionError):
        return text, []
    if not found:
        return text, []
    calls = [write_call(call_id(turn, number), *call) for number, call in enumerate(found)]
    return (text[:thought] + beside).rstrip(), calls


# Strict JSON: a tool must get exactly what the model wrote


def _refuse(constant: str) -> Any:
    raise UnreadableCall(constant)


_JSON = json.JSONDecoder(parse_constant=_refuse)
_BLANK = re.compile(r"\s*")


def _skip(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]


def _value(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at this position, and where it ends."""
    return _JSON.raw_decode(text, _skip(text, at))


def _arguments(value: Any) -> str:
    if not isinstance(value, dict):
        raise UnreadableCall("arguments are not an object")
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _named(value: Any, *keys: str) -> NamedCall:
    """Parse a call written as one JSON object."""
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise UnreadableCall("no name")
    return name, _arguments(next((value[key] for key in keys if key in value), None))


def _as_json(call: NamedCall, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(call[0], ensure_ascii=False)}, "{key}": {call[1]}}}'


# Hermes, Qwen 2.5 and 3: JSON in tags


def _tagged(text: str, inside: Callable[[str, int], tuple[NamedCall, int]]) -> tuple[str, list[NamedCall]]:
    """Parse calls between <tool_call> and </tool_call>. The last one may be unclosed if a stop string ended it."""
    beside, found, at = "", [], 0
    while (begin := text.find("<tool_call>", at)) >= 0:
        beside += text[at:begin]
        call, at = inside(text, begin + len("<tool_call>"))
        found.append(call)
        at = _skip(text, at)
        if text.startswith("</tool_call>", at):
            at += len("</tool_call>")
        elif at < len(text):
            raise UnreadableCall("no closing tag")
    return beside + text[at:], found


def _hermes(text: str, schemas: Mapping[str, Schema]) -> tuple[str, list[NamedCall]]:
    def inside(text: str, at: int) -> tuple[NamedCall, int]:
        value, at = _value(text, at)
        return _named(value, "arguments", "parameters"), at

    return _tagged(text, inside)


def _write_hermes(calls: Sequence[NamedCall]) -> str:
    return "\n".join(f"<tool_call>\n{_as_json(call)}\n</tool_call>" for call in calls)


# Qwen 3 Coder, Qwen 3.5: each parameter in a tag, as text

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>\s*?\n?")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.S)
_FUNCTION_END = re.compile(r"\s*</function>")


def _qwen_xml(text: str, schemas: Mapping[str, Schema]) -> tuple[str, list[NamedCall]]:
    def inside(text: str, at: int) -> tuple[NamedCall, int]:
        if (function := _FUNCTION.match(text, at)) is None:
            raise UnreadableCall("no function")
        name, at = function[1], function.end()
        properties = schemas.get(name, {}).get("properties") or {}
        values: dict[str, Any] = {}
        while (parameter := _PARAMETER.match(text, at)) is not None:
            values[parameter[1]] = _typed(parameter[2], properties.get(parameter[1]))
            at = parameter.end()
        if (end := _FUNCTION_END.match(text, at)) is None:
            raise UnreadableCall("the end of the function is missing")
        return (name, _arguments(values)), end.end()

    return _tagged(text, inside)


def _typed(text: str, schema: Any) -> Any:
    """Convert a parameter written as text: if its schema says that it is not text, it is parsed as JSON."""
    if not isinstance(schema, dict) or schema.get("type") == "string" or "enum" in schema:
        return text
    try:
        value, end = _value(text, 0)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)  # as rendered by Jinja
    return value if _skip(text, end) == len(text) else text


def _write_qwen_xml(calls: Sequence[NamedCall]) -> str:
    def parameter(name: str, value: Any) -> str:
        written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"<parameter={name}>\n{written}\n</parameter>\n"

    return "\n".join(
        f"<tool_call>\n<function={name}>\n"
        + "".join(parameter(*each) for each in json.loads(arguments).items())
        + "</function>\n</tool_call>"
        for name, arguments in calls
    )


# Mistral: a list of JSON objects after a mark; newer models write a mark, a name and arguments for each call


def _mistral(text: str, schemas: Mapping[str, Schema]) -> tuple[str, list[NamedCall]]:
    beside, *parts = text.split("[TOOL_CALLS]")
    found: list[NamedCall] = []
    for part in parts:
        name, marked, arguments = part.partition("[ARGS]")
        value, end = _value(arguments if marked else part, 0)
        rest = (arguments if marked else part)[end:]
        if marked:
            found.append((re.sub(r"\[CALL_ID\].*", "", name, flags=re.S).strip(), _arguments(value)))
        else:
            found += [_named(each, "arguments") for each in (value if isinstance(value, list) else [value])]
        if rest.strip() or not all(name for name, _ in found):
            raise UnreadableCall("text after the calls")
    return beside, found


def _write_mistral(calls: Sequence[NamedCall]) -> str:
    return f"[TOOL_CALLS] [{', '.join(map(_as_json, calls))}]"


# Llama 3: the whole answer is JSON, or the part after a mark


def _llama(text: str, schemas: Mapping[str, Schema]) -> tuple[str, list[NamedCall]]:
    beside, marked, calls = text.partition("<|python_tag|>")
    if not marked:
        beside, calls = "", text
    found, at = [], _skip(calls, 0)
    if not calls.startswith("{", at):
        raise UnreadableCall("no JSON")
    while at < len(calls):
        value, at = _value(calls, at)
        if not isinstance(value, dict) or not {"parameters", "arguments"} & value.keys():
            raise UnreadableCall("no call")
        found.append(_named(value, "parameters", "arguments"))
        at = _skip(calls, at)
        if at < len(calls) and calls[at] == ";":
            at = _skip(calls, at + 1)
    return beside, found


def _write_llama(calls: Sequence[NamedCall]) -> str:
    return "; ".join(_as_json(call, "parameters") for call in calls)


# DeepSeek: special tokens; the arguments in a code fence (V3, R1) or bare (V3.1)

_CALLS_BEGIN, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL_BEGIN, _SEPARATOR, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_FENCED = re.compile(r"function" + _SEPARATOR + r"([^\n]+)\n```json\n(.*)\n```\s*", re.S)
_BARE = re.compile(r"(.+?)" + _SEPARATOR + r"(.*)", re.S)


def _deepseek(text: str, schemas: Mapping[str, Schema]) -> tuple[str, list[NamedCall]]:
    # The prompt may already end with the first mark, if the template wrote it.
    beside, *parts = text.split(_CALL_BEGIN)
    found = []
    for part in parts:
        call, _, rest = part.partition(_CALL_END)
        read = _FENCED.fullmatch(call) or _BARE.fullmatch(call)
        if read is None or rest.replace(_CALLS_END, "").strip():
            raise UnreadableCall("no call")
        value, end = _value(read[2], 0)
        if _skip(read[2], end) != len(read[2]):
            raise UnreadableCall("text after the arguments")
        _arguments(value)
        found.append((read[1].strip(), read[2]))  # kept verbatim, because templates write it verbatim
    return beside.rstrip().removesuffix(_CALLS_BEGIN), found


def _write_deepseek(calls: Sequence[NamedCall]) -> str:
    written = "\n".join(
        f"{_CALL_BEGIN}function{_SEPARATOR}{name}\n```json\n{arguments}\n```{_CALL_END}" for name, arguments in calls
    )
    return _CALLS_BEGIN + written + _CALLS_END


FORMATS = {
    "qwen-xml": CallFormat(("<tool_call>", "<function=", "<parameter="), _qwen_xml, _write_qwen_xml, ("<tool_call>",)),
    "hermes": CallFormat(("<tool_call>", '"arguments"'), _hermes, _write_hermes, ("<tool_call>",)),
    "mistral": CallFormat(("[TOOL_CALLS]",), _mistral, _write_mistral, ("[TOOL_CALLS]",)),
    "deepseek": CallFormat((_CALLS_BEGIN,), _deepseek, _write_deepseek, (_CALLS_BEGIN, _CALL_BEGIN)),
    "llama": CallFormat(
        ('"parameters": ', "<|start_header_id|>"), _llama, _write_llama, ("<|python_tag|>",), bare=True
    ),
}
"""Formats by name, in the order in which templates are checked for them."""
