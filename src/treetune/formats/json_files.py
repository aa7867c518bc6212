"""Rows of JSON files: an object on each line, an array of objects, or one object.

Parsed by msgspec: text stays text whatever it looks like, and numbers are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from treetune.formats.batch import BATCH, Batch, ReadError, Row
from treetune.formats.sources import File, Kind
from treetune.formats.values import pruned, uncollected

_object = msgspec.json.Decoder(dict[str, Any]).decode
_BOM = b"\xef\xbb\xbf"


def json_batches(file: File) -> Iterator[Batch]:
    """The rows of a file of JSON or JSON lines."""
    path = file.path
    try:
        if file.kind is Kind.LINES or _holds_lines(path):
            yield from _lines(path)
        else:
            yield from _document(path)
    except OSError as error:
        raise ReadError(f"{path} cannot be read: {error.strerror}") from None


def _holds_lines(path: Path) -> bool:
    """Whether a `.json` file has an object on each line: the first is whole, and more follows."""
    with path.open("rb") as file:
        lines = (line for line in file if line.strip())
        first, second = next(lines, b"").removeprefix(_BOM), next(lines, None)
    if second is None or not first.lstrip().startswith(b"{"):
        return False
    try:
        _object(first)
    except msgspec.DecodeError:
        return False
    return True


def _lines(path: Path) -> Iterator[Batch]:
    with path.open("rb") as file:
        numbered = enumerate(file, 1)
        while some := list(islice(numbered, BATCH)):
            if some[0][0] == 1:
                some[0] = (1, some[0][1].removeprefix(_BOM))
            some = [(number, line) for number, line in some if line and not line.isspace()]
            with uncollected():
                rows = [_row(line, str(path), "line", number) for number, line in some]
            yield Batch(str(path), "line", [number for number, _ in some], rows)


def _document(path: Path) -> Iterator[Batch]:
    """A JSON array of rows, or one row. Read whole: only its end tells whether an array is well-formed. Its rows are
    decoded batch by batch."""
    content = path.read_bytes().removeprefix(_BOM)
    if not content.strip():
        raise ReadError(f"{path} is empty", remedy="an empty list of rows is []")
    if not content.lstrip().startswith(b"["):
        yield Batch(str(path), "row", range(1), [_row(content, str(path), "row", 0)])
        return
    try:
        raw = msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise ReadError(f"{path}{_position(content, error)}: {error}") from None
    for first in range(0, len(raw), BATCH):
        some = raw[first : first + BATCH]
        rows = [_row(bytes(text), str(path), "row", first + number) for number, text in enumerate(some)]
        yield Batch(str(path), "row", range(first, first + len(rows)), rows)


def _row(text: bytes, path: str, unit: str, number: int) -> Row:
    try:
        row = _object(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        lines = unit == "line" and text.lstrip().startswith(b"[")
        remedy = "a JSON array of rows is a .json file" if lines else None
        raise ReadError(f"{path}, {unit} {number}: {error}", remedy=remedy) from None
    return pruned(row) if b"null" in text else row


def _position(content: bytes, error: Exception) -> str:
    """The line of a fault that is told by its byte."""
    _, _, tail = str(error).rpartition("(byte ")
    if not tail[:-1].isdigit():
        return ""
    line = content.count(b"\n", 0, int(tail[:-1])) + 1
    return f", line {line}"
