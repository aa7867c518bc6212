r"""A Template makes prompts from rows: a Python format string over the columns of a dataset.

    template = Template("Q: {question}\nA:", columns=["question", "answer"])
    template.format({"question": "1 + 1?", "answer": "2"})  # "Q: 1 + 1?\nA:"
    template.fill(table)  # the same for every row of an Arrow table, and None where there is nothing to ask

Columns, items (`{options[0]}`, `{meta[level]}`), conversions (`{x!r}`) and format specs (`{score:.2f}`) work as in
`str.format`. Positional fields and attributes do not: an attribute of a value can lead anywhere in the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple

from treetune.datasets.config import explain_misfit
from treetune.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "prompt_template"
_BRACES = "; braces that are meant literally are doubled: \\boxed{{}}"


class Field(NamedTuple):
    """One replacement field, such as `{question}` or `{score:.{digits}f}`."""

    name: str
    """The column, with its items: `meta[level]`."""
    columns: tuple[str, ...]
    """The column shown, then those that its format spec names."""
    plain: bool
    """The whole value: no item, no conversion, no format spec."""

    def value(self, row: Mapping[str, Any]) -> Any:
        """What it shows, before it is formatted; of an item that is not there, the whole value."""
        value = row.get(self.columns[0])
        if value is None or self.name == self.columns[0]:
            return value
        try:
            return Formatter().get_field(self.name, (), row)[0]
        except (LookupError, TypeError, AttributeError):
            return value  # reported when it is formatted


class Template:
    """A format string, checked against the columns there are when it is made."""

    def __init__(self, text: str, columns: Sequence[str], text_columns: Sequence[str] | None = None) -> None:
        self.text = text
        if text == "{}":
            column = _only_column(text_columns or columns)
            pieces: list[str | Field] = [Field(column, (column,), plain=True)]
        else:
            pieces, faults = _parse(text, columns)
            if faults:
                raise ConfigError([(KEY, problem) for problem in faults])
        self._fields = [piece for piece in pieces if isinstance(piece, Field)]
        self.columns = tuple(dict.fromkeys(column for field in self._fields for column in field.columns))
        """The columns it uses, in order of first use."""
        self._plain = all(field.plain for field in self._fields)
        # Values by position are the fastest, and `{}` may stand for a column that no field could spell.
        literals = (re.sub(r"[{}]", r"\g<0>\g<0>", piece) if isinstance(piece, str) else "{}" for piece in pieces)
        self._by_position = "".join(literals)

    def format(self, row: Mapping[str, Any]) -> str:
        """Exactly `text.format(**row)`; a `ValueError` with the values where it does not fit them."""
        try:
            return format(row[self.columns[0]]) if self.text == "{}" else self.text.format_map(row)
        except Exception as error:
            raise ValueError(explain_misfit(KEY, self.text, self.columns, row, error)) from error

    def lacks(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has nothing to make a prompt of: a value that is shown is null, or all of them are blank."""
        values = [row.get(name) for name in self.columns] if self._plain else [one.value(row) for one in self._fields]
        return None in values or (bool(values) and all(map(_is_blank, values)))

    def fill(self, table: pa.Table) -> list[str | None]:
        """`format` of every row, and None where it lacks something."""
        if not self._fields:
            return [self.text.format()] * table.num_rows
        columns = {name: table[name].to_pylist() for name in self.columns}
        if not self._plain:
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            return [None if self.lacks(row) else self.format(row) for row in rows]
        shown = [columns[field.columns[0]] for field in self._fields]
        prompts: list[str | None] = list(map(self._by_position.format, *shown))
        for number, value in enumerate(shown[0]):
            # Every row is looked at, so that this is written out.
            if type(value) is str and (not value or value.isspace()) and all(_is_blank(one[number]) for one in shown):
                prompts[number] = None
        for values in shown:
            if None in values:
                prompts = [None if value is None else prompt for value, prompt in zip(values, prompts, strict=True)]
        return prompts


def _is_blank(value: Any) -> bool:
    # Not by `strip`, which copies the text of every row.
    return type(value) is str and (not value or value.isspace())


def _only_column(candidates: Sequence[str]) -> str:
    if len(candidates) == 1:
        return candidates[0]
    there_are = f"there are {len(candidates)}: {', '.join(candidates)}"
    problem = f'the default "{{}}" takes the only text column, but {there_are}; set {KEY}, such as "{{question}}"'
    raise ConfigError([(KEY, problem)])


def _parse(text: str, columns: Sequence[str]) -> tuple[list[str | Field], list[str]]:
    """The literals and fields of a template, and its faults."""
    pieces: list[str | Field] = []
    faults: dict[str, None] = {}
    try:
        for literal, name, spec, conversion in Formatter().parse(text):
            pieces.append(literal)
            if name is not None:
                names = list(_names(name, spec or "", conversion))
                faults |= {fault: None for used in names if (fault := _name_fault(used, columns))}
                plain = not spec and not conversion and "[" not in name
                pieces.append(Field(name, tuple(_column(used) for used in names), plain))
    except ValueError as error:
        faults[f"{text!r} is no format string: {error}{_BRACES}"] = None
    return pieces, list(faults)


def _names(name: str, spec: str, conversion: str | None, *, nested: bool = False) -> Iterator[str]:
    """The name of a field and those of the fields inside its format spec."""
    if conversion is not None and conversion not in ("r", "s", "a"):
        raise ValueError(f"unknown conversion !{conversion} (there are !r, !s and !a)")
    yield name
    if "{" in spec:  # only then does str.format look inside
        if nested:
            raise ValueError("fields are nested too deeply")
        for _, inner, inner_spec, inner_conversion in Formatter().parse(spec):
            if inner is not None:
                yield from _names(inner, inner_spec or "", inner_conversion, nested=True)


def _column(name: str) -> str:
    return re.split(r"[.\[]", name, maxsplit=1)[0]


def _name_fault(name: str, columns: Sequence[str]) -> str | None:
    column = _column(name)
    if name != column and name in columns:
        return f"a template cannot name the column {name!r} because of its dot or bracket; rename the column"
    if column not in columns or not column or column.isdecimal():  # the last two are positions
        return f"{{{name}}} names no column{did_you_mean(column, columns)}; there are: {', '.join(columns)}{_BRACES}"
    if re.fullmatch(r"(\[[^\]]+\])*", name[len(column) :]):
        return None
    return f"{{{name}}} is no column and no item of one, which is written {{{column}[key]}}; attributes are not read"
