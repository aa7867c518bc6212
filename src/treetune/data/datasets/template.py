r"""A Template makes prompts from rows. It is a Python format string over the columns of a dataset.

    template = Template("Q: {question}\nA:", columns=["question", "answer"])
    template.format({"question": "1 + 1?", "answer": "2"})  # "Q: 1 + 1?\nA:"
    template.fill(table)  # the same for every row of an Arrow table, and None if a row has nothing to show

Columns, items (`{options[0]}`, `{options[-1]}`, `{meta[level]}`), conversions (`{x!r}`) and format specs
(`{score:.2f}`) work as in `str.format`; a spec for numbers also takes text that is a number. Positional fields,
attributes and fields inside a spec do not work: `x_{0}` is mostly LaTeX, and an attribute of a value can lead anywhere
in the program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from treetune.data.arrow_values import values_of
from treetune.data.datasets.config import explain_misfit
from treetune.errors import ConfigError, did_you_mean, plural

if TYPE_CHECKING:
    from treetune.data.sources.local_files import SourceBatch

_ITEMS = re.compile(r"(?:\[[^\[\]]+\])*")
_NUMBER = re.compile(r"-?\d+")


class NoItem(ValueError):
    """Raised if a value does not have the item."""


class ColumnPath(NamedTuple):
    """A column, or an item inside it: `meta[levels][-1]`. Items work as in `str.format`: keys of mappings, numbers in
    lists and texts. A negative number counts from the end. A column whose name has brackets is written as it is."""

    column: str
    items: tuple[tuple[str, int | None], ...]
    """Each item as written, and as a number if it is one."""

    @classmethod
    def parse(cls, name: str, columns: Sequence[str]) -> Self | None:
        """Parse a name. Returns None if it is neither a column nor an item of one."""
        if name in columns:
            return cls(name, ())
        for end in (place for place, character in enumerate(name) if character == "["):
            if name[:end] in columns and _ITEMS.fullmatch(name, end):
                items = re.findall(r"\[([^\[\]]+)\]", name[end:])
                return cls(name[:end], tuple((item, int(item) if _NUMBER.fullmatch(item) else None) for item in items))
        return None

    def read(self, value: Any) -> Any:
        """Return the item of a column's value. Every item of a null is null."""
        for depth, (item, number) in enumerate(self.items):
            if value is None:
                return None
            try:
                value = value[item if number is None or isinstance(value, dict) else number]
            except (LookupError, TypeError):
                raise NoItem(self._explain(value, depth)) from None
        return value

    def _explain(self, value: Any, depth: int) -> str:
        """Return why a value has no item."""
        item, number = self.items[depth]
        name = self.column + "".join(f"[{before}]" for before, _ in self.items[:depth])
        if isinstance(value, Mapping):
            return f"{name} has no {item!r}{did_you_mean(item, list(map(str, value)))}"
        if not isinstance(value, str | list):
            return f"{name} is {value!r:.80}, which has no items"
        if number is None:
            kind = "text" if isinstance(value, str) else "a list"
            return f"{name} is {kind}, whose items are numbered: {name}[0], or {name}[-1] for the last"
        return f"{name}[{item}] is out of range: it has {plural(len(value), 'item')}, and the first is {name}[0]"


KEY = "prompt_template"
_BRACES = "; braces that are meant literally are doubled: \\boxed{{}}"
_FOR_NUMBERS = re.compile(r"[bcdeEfFgGnoxX%,]\Z")
"""The end of format specs that do not accept text."""


LEAVE_OUT = "correct the row, or leave it out with `filter`"


class Misfit(ValueError):
    """Raised for a row that does not fit the template; the message says what to do."""

    def __init__(self, message: str, remedy: str = LEAVE_OUT) -> None:
        super().__init__(message)
        self.remedy = remedy


class Field(NamedTuple):
    """One replacement field, such as `{question}` or `{score:.2f}`."""

    path: ColumnPath
    conversion: str
    spec: str

    @property
    def plain(self) -> bool:
        """Whether the field is the whole value: no item, no conversion, no format spec."""
        return not (self.path.items or self.conversion or self.spec)

    @property
    def by_position(self) -> str:
        return "{" + self.conversion + (f":{self.spec}" if self.spec else "") + "}"

    def read(self, values: list[Any]) -> list[Any]:
        """Return what the field shows of its column's values, before formatting."""
        if self.path.items:
            values = list(map(self.path.read, values))
        if self.conversion or not _FOR_NUMBERS.search(self.spec):
            return values
        return [self._to_number(value) if type(value) is str else value for value in values]

    def _to_number(self, text: str) -> int | float:
        try:
            return int(text) if re.fullmatch(r"\s*[-+]?\d+\s*", text) else float(text)
        except ValueError:
            raise ValueError(f"{text!r:.80} is not a number, and :{self.spec} formats numbers") from None


class Template:
    """A format string that is checked against the columns when it is made."""

    def __init__(self, text: str, columns: Sequence[str], text_columns: Sequence[str] | None = None) -> None:
        self.text = text
        if text in ("{}", "{0}"):
            column = _only_column(text_columns or columns)
            pieces: list[str | Field] = [Field(ColumnPath(column, ()), "", "")]
        else:
            pieces, faults = _parse(text, columns)
            if faults:
                raise ConfigError([(KEY, problem) for problem in faults])
        self._fields = [piece for piece in pieces if isinstance(piece, Field)]
        self.columns = tuple(dict.fromkeys(field.path.column for field in self._fields))
        """The columns that the template uses, in order of first use."""
        self._plain = all(field.plain for field in self._fields)
        # Positional values are the fastest, and a column may have a name that no field could have.
        self._by_position = "".join(_escape(one) if isinstance(one, str) else one.by_position for one in pieces)

    def format(self, row: Mapping[str, Any]) -> str:
        """Return the same as `text.format(**row)`. Raises `Misfit` with the values if the template does not fit
        them."""
        try:
            return self._by_position.format(*(field.read([row[field.path.column]])[0] for field in self._fields))
        except Exception as error:
            remedy = LEAVE_OUT
            if not isinstance(error, NoItem) and any(field.spec for field in self._fields):
                remedy += "; a field without a format, {column}, shows any value"
            raise Misfit(explain_misfit(KEY, self.text, self.columns, row, error), remedy) from error

    def lacks(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has nothing to make a prompt from: a shown value is null, or all shown values are blank."""
        if self._plain:
            values = [row.get(name) for name in self.columns]
        else:
            try:
                values = [field.path.read(row.get(field.path.column)) for field in self._fields]
            except Exception:
                return False  # reported when the row is formatted
        return None in values or (bool(values) and all(map(_is_blank, values)))

    def fill(self, table: SourceBatch) -> list[str | None]:
        """Return `format` of every row, or None for rows that lack something."""
        if not self._fields:
            return [self.text.format()] * len(table)
        columns = {name: values_of(table, name) for name in self.columns}
        shown = [columns[field.path.column] for field in self._fields]
        if not self._plain:
            with suppress(Exception):  # the faulty row is found below
                rows = zip(
                    *(field.read(values) for field, values in zip(self._fields, shown, strict=True)), strict=True
                )
                fill = self._by_position.format
                return [None if None in row or all(map(_is_blank, row)) else fill(*row) for row in rows]
            each = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
            return [None if self.lacks(row) else self.format(row) for row in each]
        prompts: list[str | None] = list(map(self._by_position.format, *shown))
        for number, value in enumerate(shown[0]):
            # This loop runs for every row, so it is written out.
            if type(value) is str and (not value or value.isspace()) and all(_is_blank(one[number]) for one in shown):
                prompts[number] = None
        for values in shown:
            if None in values:
                prompts = [None if value is None else prompt for value, prompt in zip(values, prompts, strict=True)]
        return prompts


def _is_blank(value: Any) -> bool:
    # No `strip`, which copies the text of every row.
    return type(value) is str and (not value or value.isspace())


def _only_column(candidates: Sequence[str]) -> str:
    if len(candidates) == 1:
        return candidates[0]
    there_are = f"there are {len(candidates)}: {', '.join(candidates)}"
    problem = f'the default "{{}}" takes the only text column, but {there_are}; set {KEY}, such as "{{question}}"'
    raise ConfigError([(KEY, problem)])


def _escape(text: str) -> str:
    return re.sub(r"[{}]", r"\g<0>\g<0>", text)


def _parse(text: str, columns: Sequence[str]) -> tuple[list[str | Field], list[str]]:
    """Return a template's literals and fields, and its faults."""
    pieces: list[str | Field] = []
    faults: dict[str, None] = {}
    try:
        for literal, name, spec, conversion in Formatter().parse(text):
            pieces.append(literal)
            if name is None:
                continue
            if conversion is not None and conversion not in ("r", "s", "a"):
                raise ValueError(f"unknown conversion !{conversion} (there are !r, !s and !a)")
            if spec and "{" in spec:
                raise ValueError(
                    f"the format of {{{name}}} cannot come from a column: write it out, as in {{{name}:.2f}}"
                )
            if (path := ColumnPath.parse(name, columns)) is None:
                faults[_explain_name(name, columns)] = None
                continue
            pieces.append(Field(path, f"!{conversion}" if conversion else "", spec or ""))
    except ValueError as error:
        problem = str(error)
        if problem.startswith("unexpected '{'"):
            problem = (
                "a field must name its column itself; for values that depend on another column, override _make_map_fn "
                "in a subclass"
            )
        faults[f"{text!r} is not a format string: {problem}{_BRACES}"] = None
    return pieces, list(faults)


def _explain_name(name: str, columns: Sequence[str]) -> str:
    """Return why a field does not name a column."""
    column = re.split(r"[.\[]", name, maxsplit=1)[0]
    there_are = f"available: {', '.join(columns)}{_BRACES}"
    if not column or column.isdecimal():
        return (
            f"{{{name}}} is a position, and columns have names, as in {{{columns[0] if columns else 'x'}}}; {there_are}"
        )
    if column not in columns:
        return f"{{{name}}} is not a column{did_you_mean(column, columns)}; {there_are}"
    if attribute := re.fullmatch(r"([^.]+)\.(\w+)", name):
        key = f"{attribute[1]}[{attribute[2]}]"
        return f"{{{name}}} reads an attribute, which templates do not support; a key of a mapping is {{{key}}}"
    return (
        f"{{{name}}} is neither a column nor an item of one, which is written {{{column}[key]}}; "
        "attributes are not read"
    )
