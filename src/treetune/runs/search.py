"""Words in the traces of a run: which of them say a text, whichever case.

    said = Search("therefore").among(Path("runs/x/traces.jsonl"), columns, within)

Lines are read without their tokens and looked through as they are; nothing is decoded. What counts is what somebody
said: no names of fields, no numbers, no roles, no descriptions of tools.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np

from treetune.runs.columns import Columns, Mask

_WORDS_OF_OURS = (b'"role":', b'"type":', b'"finish_reason":', b'"outcome":')
"""Fields whose texts are of the format, not of what was said."""
_LONGEST = 32
"""Of such texts."""
_TOOLS, _AFTER_TOOLS = b'],"tools":[', b'],"final":['


class Search:
    def __init__(self, text: str) -> None:
        # As a line of JSON has it; the letters of other alphabets as they are.
        self._wanted = json.dumps(text.lower(), ensure_ascii=False)[1:-1].encode()

    def among(self, traces: Path, columns: Columns, within: Mask) -> Mask:
        """Which of those rollouts say it."""
        found = np.zeros(len(columns), bool)
        rows = np.flatnonzero(within)
        places = columns.places("offset")[rows].tolist()
        lengths = columns.places("text_length")[rows].tolist()
        is_plain = self._wanted.isascii()
        with open(traces, "rb", buffering=0) as file:
            number = file.fileno()
            for row, offset, length in zip(rows.tolist(), places, lengths, strict=True):
                line = os.pread(number, length, offset)
                if self._is_said(line.lower() if is_plain else line.decode(errors="replace").lower().encode()):
                    found[row] = True
        return found

    def _is_said(self, line: bytes) -> bool:
        wanted, start = self._wanted, 0
        while (at := line.find(wanted, start)) >= 0:
            start = at + len(wanted)
            if not _is_text(line, at, start):
                continue
            tools = line.find(_TOOLS)
            after = line.find(_AFTER_TOOLS, tools)
            if not tools < at < after:
                return True
            start = after
        return False


def _is_text(line: bytes, start: int, stop: int) -> bool:
    """Whether this part of a line stands in a text. The next quote ends that then, and is followed by what can follow a
    text; it begins another one where the part is a number, and a colon follows where it is a name."""
    quote = line.find(b'"', stop)
    while quote > 0 and _is_escaped(line, quote):
        quote = line.find(b'"', quote + 1)
    if quote < 0 or line[quote + 1 : quote + 2] not in (b",", b"}", b"]"):
        return False
    begin = line.rfind(b'"', max(0, start - _LONGEST), start + 1)
    return begin < 0 or not line.endswith(_WORDS_OF_OURS, 0, begin)


def _is_escaped(line: bytes, quote: int) -> bool:
    at = quote
    while line[at - 1] == 0x5C:
        at -= 1
    return (quote - at) % 2 == 1
