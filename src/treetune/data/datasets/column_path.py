"""A column of a dataset, or an item inside it, as templates and `ground_truth` name it.

    path = ColumnPath.parse("meta[levels][-1]", columns=["question", "meta"])
    path.column, path.read(row["meta"])

Items are those of `str.format`: keys of mappings, numbers in lists and texts. A number below 0 counts from the end,
which `str.format` does not know. A column whose own name has dots or brackets is named as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from treetune.errors import did_you_mean, plural

_ITEMS = re.compile(r"(?:\[[^\[\]]+\])*")
_NUMBER = re.compile(r"-?\d+")


class NoItem(ValueError):
    """A value that does not have the item."""


class ColumnPath(NamedTuple):
    column: str
    items: tuple[tuple[str, int | None], ...]
    """As written, and the number that each is."""

    @classmethod
    def parse(cls, name: str, columns: Sequence[str]) -> Self | None:
        """None where the name is no column, and no item of one."""
        if name in columns:
            return cls(name, ())
        for end in (place for place, character in enumerate(name) if character == "["):
            if name[:end] in columns and _ITEMS.fullmatch(name, end):
                items = re.findall(r"\[([^\[\]]+)\]", name[end:])
                return cls(name[:end], tuple((item, int(item) if _NUMBER.fullmatch(item) else None) for item in items))
        return None

    def read(self, value: Any) -> Any:
        """The item of a column's value; a null has nothing but nulls inside."""
        for depth, (item, number) in enumerate(self.items):
            if value is None:
                return None
            try:
                value = value[item if number is None or isinstance(value, dict) else number]
            except (LookupError, TypeError):
                raise NoItem(self._explain(value, depth)) from None
        return value

    def _explain(self, value: Any, depth: int) -> str:
        """Why a value has no item."""
        item, number = self.items[depth]
        name = self.column + "".join(f"[{before}]" for before, _ in self.items[:depth])
        if isinstance(value, Mapping):
            return f"{name} has no {item!r}{did_you_mean(item, list(map(str, value)))}"
        if not isinstance(value, str | list):
            return f"{name} is {value!r:.80}, which has no items"
        if number is None:
            kind = "text" if isinstance(value, str) else "a list"
            return f"{name} is {kind}, whose items have numbers: {name}[0], or {name}[-1] for the last"
        return f"{name}[{item}] is out of range: it has {plural(len(value), 'item')}, and the first is {name}[0]"
