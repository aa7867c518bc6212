"""Rows of JSON files: an object on each line, an array of objects, or one object.

Parsed by msgspec: text stays text whatever it looks like, and numbers are exact. NaN and Infinity, which Python's
`json.dumps` writes though JSON has none, are read as Python does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from treetune.rows.arrow_values import pruned, uncollected
from treetune.rows.batch import BATCH, Batch, ReadError, Row
from treetune.rows.compressed import open_plain
from treetune.rows.sources import File, Kind

_object = msgspec.json.Decoder(dict[str, Any]).decode
_BOM = b"\xef\xbb\xbf"


OnFault = Callable[[int, str], None]


def json_batches(file: File, *, on_fault: OnFault | None = None) -> Iterator[Batch]:
    """The rows of a file of JSON or JSON lines.

    With `on_fault`, which is told its number and what is wrong, a faulty row is left out and the others follow, with
    their nulls. A key that comes twice in a mapping is such a fault then: trainers' loader refuses it.
    """
    path = file.path
    try:
        if file.kind is Kind.LINES or _holds_lines(path):
            yield from _lines(path, on_fault)
        else:
            yield from _document(path, on_fault)
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror or error}") from None


def _holds_lines(path: Path) -> bool:
    """Whether a `.json` file has an object on each line: the first is whole, and more follows."""
    with open_plain(path) as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, b"").removeprefix(_BOM), next(lines, None)
    if second is None or not first.lstrip().startswith(b"{"):
        return False
    try:
        _decode(first)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _lines(path: Path, on_fault: OnFault | None) -> Iterator[Batch]:
    with open_plain(path) as file:
        numbered = enumerate(file, 1)
        while some := list(islice(numbered, BATCH)):
            if some[0][0] == 1:
                some[0] = (1, some[0][1].removeprefix(_BOM))
            some = [(number, line) for number, line in some if line and not line.isspace()]
            with uncollected():
                yield _batch(path, "line", some, on_fault)


def _document(path: Path, on_fault: OnFault | None) -> Iterator[Batch]:
    """A JSON array of rows, or one row. Read whole: only its end tells whether an array is well-formed. Its rows are
    decoded batch by batch."""
    with open_plain(path) as file:
        content = file.read().removeprefix(_BOM)
    if not content.strip():
        raise ReadError(f"{path} is empty", remedy="an empty list of rows is []")
    if not content.lstrip().startswith(b"["):
        yield _batch(path, "row", [(0, content)], on_fault)
        return
    try:
        raw = _elements(content)
    except msgspec.DecodeError as error:
        raise ReadError(f"{path}{_position(content, error)}: {error}") from None
    for first in range(0, len(raw), BATCH):
        some = [(first + number, bytes(text)) for number, text in enumerate(raw[first : first + BATCH])]
        yield _batch(path, "row", some, on_fault)


def _batch(path: Path, unit: str, texts: list[tuple[int, bytes]], on_fault: OnFault | None) -> Batch:
    if on_fault is None:
        rows = [_row(text, str(path), unit, number) for number, text in texts]
        return Batch(str(path), unit, [number for number, _ in texts], rows)
    rows, numbers = [], []
    for number, text in texts:
        try:
            row = _decoded(text, str(path), unit, number)
            _refuse_twice(text, row)
            rows.append(row)
            numbers.append(number)
        except (ReadError, ValueError) as error:
            on_fault(number, str(error).removeprefix(f"{path}, {unit} {number}: "))
    return Batch(str(path), unit, numbers, rows)


def _refuse_twice(text: bytes, row: Row) -> None:
    """Raises ValueError where a mapping has a key twice. A text with as many colons after quotes as keys has none; in
    JSON that is itself text, there is a backslash before the quote."""
    inside = text.count(b'\\":') if b"\\\\" not in text else 0
    if text.count(b'":') - inside + text.count(b'" :') == _keys(row) and b'"\t:' not in text:
        return

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) < len(items):
            names = [name for name, _ in items]
            raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} comes twice in a mapping")
        return found

    json.loads(text, object_pairs_hook=pairs)


def _keys(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(_keys(item) for item in value.values() if isinstance(item, dict | list))
    return sum(_keys(item) for item in value if isinstance(item, dict | list))


def _row(text: bytes, path: str, unit: str, number: int) -> Row:
    row = _decoded(text, path, unit, number)
    return pruned(row) if b"null" in text else row


def _elements(content: bytes) -> list[Any]:
    """The text of each element of a JSON array."""
    try:
        return msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.DecodeError:
        if not _may_hold_nan(content):
            raise
        elements = _nan_elements(content.decode(errors="replace"))
        if elements is None:
            raise
        return elements


def _nan_elements(text: str) -> list[bytes] | None:
    """The same of an array in which there are NaNs; None where something else is wrong with it."""
    skip, read = json.decoder.WHITESPACE.match, json.JSONDecoder().raw_decode  # type: ignore[attr-defined]
    place, found = text.index("[") + 1, list[bytes]()
    while True:
        begin = skip(text, place).end()
        try:
            _, end = read(text, begin)
        except ValueError:
            return None
        found.append(text[begin:end].encode())
        place = skip(text, end).end() + 1
        if text[place - 1 : place] != ",":
            return found if text[place - 1 : place] == "]" and not text[place:].strip() else None


def _decode(text: bytes) -> Row:
    try:
        return _object(text)
    except msgspec.DecodeError:
        if not _may_hold_nan(text):
            raise
        try:
            row = json.loads(text)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise
        return row


def _may_hold_nan(text: bytes) -> bool:
    return b"NaN" in text or b"Infinity" in text


def _decoded(text: bytes, path: str, unit: str, number: int) -> Row:
    try:
        return _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        start, remedy, reason = text.lstrip(), None, str(error)
        if start.startswith((b"#", b"//")):
            reason = "a comment, which JSON does not have: take it out"
        elif unit == "line" and start.startswith(b"["):
            remedy = "a JSON array of rows is a .json file"
        raise ReadError(f"{path}, {unit} {number}: {reason}", remedy=remedy) from None


def _position(content: bytes, error: Exception) -> str:
    """The line of a fault that is told by its byte."""
    _, _, tail = str(error).rpartition("(byte ")
    if not tail[:-1].isdigit():
        return ""
    line = content.count(b"\n", 0, int(tail[:-1])) + 1
    return f", line {line}"
