r"""A Template makes prompts from rows: a Python format string over the columns of a dataset.

    template = Template("Q: {question}\nA:", columns=["question", "answer"])
    template.format({"question": "1 + 1?", "answer": "2"})  # "Q: 1 + 1?\nA:"
    template.render(batch)  # the same for a whole Arrow batch, fast

Columns, items (`{options[0]}`, `{meta[level]}`), conversions (`{x!r}`) and format specs (`{score:.2f}`) work as in
`str.format`. Positional fields and attributes do not: an attribute of a value can lead anywhere in the program.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, Any

from treetune.datasets.config import no_column
from treetune.errors import ConfigError, closest

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "prompt_template"


@dataclass(frozen=True)
class Field:
    """One replacement field, such as `{question}` or `{score:.{digits}f}`."""

    source: str
    name: str
    """The column, with its items: `meta[level]`."""
    columns: tuple[str, ...]
    """The column shown, then those that its format spec names."""
    plain: bool
    """The whole value: no item, no conversion, no format spec."""

    def format(self, row: Mapping[str, Any]) -> str:
        # The name of a plain field is a key, not syntax: `{}` may stand for a column that no field could spell.
        return format(row[self.columns[0]]) if self.plain else self.source.format_map(row)

    def value(self, row: Mapping[str, Any]) -> Any:
        """What it shows, before it is formatted; of an item that is not there, the whole value."""
        value = row.get(self.columns[0])
        if value is None or "[" not in self.name or self.plain:
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
            self._pieces: list[str | Field] = [Field("{}", column, (column,), plain=True)]
        else:
            self._pieces, faults = _parse(text, columns)
            if faults:
                problems = list(faults)
                if any(faults.values()):
                    problems[-1] += _advise_on_braces(text, columns)
                raise ConfigError([(KEY, problem) for problem in problems])
        self._fields = [piece for piece in self._pieces if isinstance(piece, Field)]
        self.columns = tuple(dict.fromkeys(column for field in self._fields for column in field.columns))
        """The columns it uses, in order of first use."""
        self._sole = self.columns[0] if len(self._fields) == 1 and self._fields[0].plain else None

    def format(self, row: Mapping[str, Any]) -> str:
        """Exactly `text.format(**row)`; a `ValueError` that names the field where a value does not fit it."""
        try:
            return self._fields[0].format(row) if self.text == "{}" else self.text.format_map(row)
        except Exception:
            for field in self._fields:
                self._fill(field, row)  # raises for the field at fault, and names it
            raise

    def render(self, batch: pa.RecordBatch) -> pa.Array:
        """`format` of every row, as a `string` array; one batch holds at most 2 GB of text."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not self._fields:
            return pa.repeat(pa.scalar(self.text.format(), pa.string()), batch.num_rows)
        pieces = [
            pa.scalar(piece, pa.string()) if isinstance(piece, str) else self._render_field(piece, batch)
            for piece in self._pieces
        ]
        return pieces[0] if len(pieces) == 1 else pc.binary_join_element_wise(*pieces, "")

    def lacks(self, row: Mapping[str, Any]) -> bool:
        """Whether a row has nothing to make a prompt of: a value that is shown is null, or all of them are blank."""
        if self._sole is not None:  # what nearly every template is, and every row is looked at
            value = row.get(self._sole)
            return value is None or (type(value) is str and (not value or value.isspace()))
        values = [field.value(row) for field in self._fields]
        # Not by `strip`, which copies the text of every row.
        blank = values and all(isinstance(value, str) and (not value or value.isspace()) for value in values)
        return bool(blank) or any(value is None for value in values)

    def find_lacking(self, table: pa.Table) -> list[int]:
        """`lacks` of every row: the numbers of those that lack something, fast where none does."""
        import pyarrow as pa
        import pyarrow.compute as pc

        columns = [table[field.columns[0]] for field in self._fields]
        suspects = [pc.is_null(column) for column in columns if column.null_count]
        if columns and all(
            pa.types.is_string(column.type) or pa.types.is_large_string(column.type) for column in columns
        ):
            blank = pc.or_(pc.equal(pc.binary_length(columns[0]), 0), pc.utf8_is_space(columns[0]))
            suspects.append(pc.fill_null(blank, True))
        if any("[" in field.source for field in self._fields):  # an item of a value may be null where the value is not
            suspects.append(pa.chunked_array([pa.repeat(True, table.num_rows)]))
        numbers = sorted({int(n) for mask in suspects for n in pc.indices_nonzero(mask).to_pylist()})
        if not numbers:
            return []
        rows = table.select(list(self.columns)).take(pa.array(numbers, pa.int64())).to_pylist()
        return [number for number, row in zip(numbers, rows, strict=True) if self.lacks(row)]

    def _render_field(self, field: Field, batch: pa.RecordBatch) -> pa.Array:
        import pyarrow as pa

        array = _to_text(batch.column(field.columns[0])) if field.plain else None
        if array is not None:
            return array
        rows = batch.select(list(dict.fromkeys(field.columns))).to_pylist()
        return pa.array([self._fill(field, row) for row in rows], pa.string())

    def _fill(self, field: Field, row: Mapping[str, Any]) -> str:
        try:
            return field.format(row)
        except Exception as error:
            for column in field.columns:
                if column not in row:
                    raise ValueError(f"the row has no {column!r}, which {KEY} {self.text!r} uses") from None
            types = {
                column: "None" if row[column] is None else f"a {type(row[column]).__name__}" for column in field.columns
            }
            kinds = ", ".join(f"{column} is {kind}" for column, kind in types.items())
            problem = f"no {error}" if isinstance(error, KeyError) else str(error)
            fault = f"{field.source} of {KEY} {self.text!r} does not fit a row: {problem} ({kinds})"
            raise ValueError(fault) from error


def _to_text(array: pa.Array) -> pa.Array | None:
    """The array as `str` shows its values, or None where Arrow spells them differently (floats, dates, lists...)."""
    import pyarrow as pa
    import pyarrow.compute as pc

    types, type_ = pa.types, array.type
    if isinstance(type_, pa.BaseExtensionType):
        return None
    if types.is_dictionary(type_):
        return _to_text(array.dictionary_decode())
    if types.is_null(type_):
        return pa.repeat(pa.scalar("None", pa.string()), len(array))
    if types.is_boolean(type_):
        array = pc.if_else(array, "True", "False")
    elif types.is_integer(type_) or types.is_large_string(type_) or types.is_string_view(type_):
        array = array.cast(pa.string())
    elif not types.is_string(type_):
        return None
    return pc.fill_null(array, "None") if array.null_count else array


def _only_column(candidates: Sequence[str]) -> str:
    if len(candidates) == 1:
        return candidates[0]
    problem = 'the default "{}" takes the only text column, but '
    if not candidates:
        raise ConfigError([(KEY, f"{problem}the dataset has no columns")])
    problem += f"there are {len(candidates)} candidates: {', '.join(candidates)}"
    raise ConfigError([(KEY, f'{problem}; set {KEY}, for example to "{{{candidates[0]}}}"')])


def _parse(text: str, columns: Sequence[str]) -> tuple[list[str | Field], dict[str, bool]]:
    """The literals and fields of a template; and each fault, with whether literal braces may be the cause of it."""
    pieces: list[str | Field] = []
    faults: dict[str, bool] = {}
    try:
        for literal, name, spec, conversion in Formatter().parse(text):
            if literal and pieces and isinstance(pieces[-1], str):
                pieces[-1] += literal  # the parser ends a literal at each doubled brace
            elif literal:
                pieces.append(literal)
            if name is not None:
                names = list(_names(name, spec or "", conversion))
                faults.update(fault for used in names if (fault := _name_fault(used, columns)))
                source = "{" + name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
                plain = not spec and not conversion and "[" not in name
                pieces.append(Field(source, name, tuple(_column(used) for used in names), plain))
    except ValueError as error:
        faults[f"{text!r} is no format string: {error}"] = True
    return pieces, faults


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


def _name_fault(name: str, columns: Sequence[str]) -> tuple[str, bool] | None:
    column = _column(name)
    if name != column and name in columns:
        return f"a template cannot name the column {name!r} because of its dot or bracket; rename the column", False
    if column == "" or column.isdecimal():
        return f"{{{name}}} names no column; there are: {', '.join(columns)}", True
    if column not in columns:
        return no_column(column, columns), not closest(column, columns)
    items = name[len(column) :]
    if re.fullmatch(r"(\[[^\]]+\])*", items):
        return None
    problem = "asks for an attribute, which a template may not" if "." in items else "is malformed"
    return f"{{{name}}} {problem}; an item is written {{{column}[key]}}", False


def _advise_on_braces(text: str, columns: Sequence[str]) -> str:
    """How to write the template if the braces that are not columns were meant literally."""
    named = "|".join(map(re.escape, columns)) or "(?!)"
    field = rf"\{{(?:{named})(?:\[[^\]{{}}]+\])*(?:![rsa])?(?::[^{{}}]*)?\}}"
    # Without a "{{" nothing was doubled yet, and a "}}" closes two braces, as in \frac{1}{\sqrt{2}}.
    doubled = r"\{\{|\}\}|" if "{{" in text else ""
    corrected = re.sub(rf"({doubled}{field})|[{{}}]", lambda found: found[1] or found[0] * 2, text)
    if corrected == text or _parse(corrected, columns)[1]:
        return ""
    return f"; if the braces are meant literally, double them: {corrected}"


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
