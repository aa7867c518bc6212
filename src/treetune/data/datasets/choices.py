"""Reads the options of multiple-choice rows in any layout and adds columns that a template can show.

    choices = Choices(ChoicesConfig(column="choices", answer="answer"), ["question", "choices", "answer"])
    choices.of({"question": "2 + 2?", "choices": ["3", "4"], "answer": 1})
    # {"options": "A) 3\nB) 4", "letter": "B", "choices": ["3", "4"]}

A dataset has a list of texts (MMLU), texts with their own labels (ARC), or one column per text (GPQA). The right option
is a number from 0, a letter, a label or a text.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Mapping, Sequence
from string import ascii_uppercase as LETTERS
from typing import TYPE_CHECKING, Any

from treetune.data.datasets.config import ChoicesConfig, no_column
from treetune.errors import ConfigError, Faults

if TYPE_CHECKING:
    from treetune.data.sources.local_files import SourceBatch

OPTIONS, LETTER, TEXTS = "options", "letter", "choices"
MADE = (OPTIONS, LETTER, TEXTS)
"""The added columns, which replace columns of the same names: all options as lines, the letter of the right one (null
if there is none), and the texts in the order shown."""


class Choices:
    def __init__(self, config: ChoicesConfig, columns: Sequence[str]) -> None:
        faults: Faults = []
        if (config.column is None) == (not config.columns):
            faults.append(
                ("choices", "needs either `column`, which holds all options, or `columns`, one for each option")
            )
        named = {"column": [config.column] if config.column is not None else [], "columns": config.columns}
        for key, names in {**named, "answer": [config.answer]}.items():
            faults += [(f"choices.{key}", no_column(name, columns)) for name in names if name not in columns]
        if config.columns and config.answer in columns and config.answer not in config.columns:
            faults.append(("choices.answer", "names the column of the right option, which is one of `columns`"))
        if faults:
            raise ConfigError(faults)
        self._config = config

    def of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the added columns for a row."""
        texts, right = self._read(row)
        if self._config.shuffle:
            salt = sorted(texts)  # so that an option that many rows share does not always get the same position
            order = sorted(range(len(texts)), key=lambda number: _digest([*salt, texts[number]]))
            texts, right = [texts[number] for number in order], None if right is None else order.index(right)
        lines = "\n".join(f"{letter}) {text}" for letter, text in zip(LETTERS, texts, strict=False))
        return {OPTIONS: lines or None, LETTER: None if right is None else LETTERS[right], TEXTS: texts}

    def _read(self, row: Mapping[str, Any]) -> tuple[list[str], int | None]:
        """Return the texts and the index of the right one. The index is None if the row names none, or one that does
        not exist."""
        config = self._config
        if config.columns:
            found = [row[name] for name in config.columns]
            texts = [str(text).strip() for text in found]
            complete = None not in found and len(set(texts)) == len(texts)
            return (texts if None not in found else []), config.columns.index(config.answer) if complete else None
        stored = row[config.column or ""] or []
        texts = [str(text).strip() for text in (stored["text"] if isinstance(stored, Mapping) else stored)]
        if not 1 < len(texts) <= len(LETTERS):
            return [], None
        return texts, _find(row[config.answer], texts, self._labels(row))

    def _labels(self, row: Mapping[str, Any]) -> list[str]:
        """Return the row's own labels for its options."""
        stored = row[self._config.column or ""]
        return [str(label) for label in stored.get("label", [])] if isinstance(stored, Mapping) else []

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """Return why a row has no right option, or None if it has one."""
        config = self._config
        texts, right = self._read(row)
        if right is not None:
            return None
        if config.columns:
            empty = [name for name in config.columns if row[name] is None]
            return f"{empty[0]} is None" if empty else "two of choices.columns have the same text"
        if not texts:
            return (
                f"{config.column} does not have 2 to {len(LETTERS)} options: {reprlib.repr(row[config.column or ''])}"
            )
        answer, labels = row[config.answer], self._labels(row)
        if texts.count(str(answer).strip()) > 1:
            return f"choices.answer {answer!r:.60} matches several options"
        counted = isinstance(answer, int | float) and not isinstance(answer, bool)
        known = f"there are {', '.join(labels)}" if labels else "it is a number from 0, a letter or a text"
        if isinstance(answer, str) and answer.strip().isdecimal() and not labels:
            known = "a text of digits is not a number: leave out the quotes"
        how = "numbers count from 0" if counted and not labels else known
        return f"choices.answer {answer!r:.60} is not an option ({how})"

    def add(self, table: SourceBatch) -> SourceBatch:
        """Add the columns to every row of a batch."""
        if isinstance(table, list):
            return [{**row, **self.of(row)} for row in table]
        import pyarrow as pa

        made = [self.of(row) for row in table.to_pylist()]
        types = {OPTIONS: pa.string(), LETTER: pa.string(), TEXTS: pa.list_(pa.string())}
        kept = table.drop_columns([name for name in MADE if name in table.column_names])
        for name, kind in types.items():
            kept = kept.append_column(name, pa.array([one[name] for one in made], kind))
        return kept


def _find(answer: Any, texts: Sequence[str], labels: Sequence[str]) -> int | None:
    """Find the option that an answer means: the row's own labels come before letters, letters before texts."""
    if isinstance(answer, float) and answer.is_integer() and str(answer) not in texts:
        answer = int(answer)  # a column of whole numbers with an empty cell is read as floats
    if isinstance(answer, int) and not isinstance(answer, bool) and not labels:
        return answer if 0 <= answer < len(texts) else None
    said = str(answer).strip() if answer is not None else ""
    for known in (labels, LETTERS[: len(texts)] if not labels else (), texts):
        if said in known and list(known).count(said) == 1:
            return list(known).index(said)
    return None


def _digest(parts: Sequence[Any]) -> bytes:
    return hashlib.sha256("\0".join(map(str, parts)).encode("utf-8", "surrogatepass")).digest()
