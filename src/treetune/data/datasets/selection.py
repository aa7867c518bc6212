"""Selects rows by a filter (an expression or a function) and by prompt length, and collects the notes of a build.

    keep = Filter("len(question) < 500 and level in [1, 2]", columns=["question", "level"])
    keep.columns  # ("question", "level")
    keep.keeps({"question": "1 + 1?", "level": 1})  # True

An expression is Python, and every node is checked against a list of what is allowed: no attributes, no names except
columns, no calls except to the functions below. Operations that could let a short text cause endless work are bounded.

`Notes` counts the dropped rows by reason, and lists the flaws of the others.
"""

from __future__ import annotations

import ast
import re
import reprlib
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

import msgspec

from treetune.config.code_reference import parse_reference
from treetune.config.plugins import file_of, load_object
from treetune.config.trust import Origin
from treetune.core.finding import Flaw
from treetune.data.datasets.choices import OPTIONS, TEXTS
from treetune.data.datasets.config import DatasetConfig, explain_misfit, no_column
from treetune.data.rows.image_columns import PLACE
from treetune.errors import ConfigError, TasksetError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

KEY = "filter"
MAX_LENGTH = 2000


def row_filter(spec: str | None, columns: list[str], origin: Origin) -> Callable[[dict[str, Any]], Any] | None:
    """Return the filter that a config names."""
    if spec is None:
        return None
    if file_of(spec) is not None:
        function = load_object(parse_reference(spec), origin)
        if not callable(function):
            raise ConfigError([(KEY, f"{spec} is a {type(function).__name__}, not a function")])
        return function  # type: ignore[no-any-return]
    return Filter(spec, columns).keeps


def length_filter(config: DatasetConfig) -> Callable[[pa.Table, Notes], pa.Table] | None:
    """Return a function that drops and counts prompts with too many tokens, or None if the config sets no limit."""
    if config.max_prompt_length is None:
        return None
    if config.tokenizer is None:
        raise ConfigError([("tokenizer", "is required if max_prompt_length is set")])
    from treetune.data.rows.prompt_lengths import PromptTokens, load_tokenizer

    most = config.max_prompt_length
    tokens = PromptTokens(load_tokenizer(config.tokenizer))

    def drop_long(table: pa.Table, notes: Notes) -> pa.Table:
        import pyarrow as pa

        prompts = table["prompt"].to_pylist()
        longer, faults = tokens.above(most, prompts)
        if faults:
            position, fault = min(faults.items())
            raise TasksetError(f"{fault}, in the prompt {prompts[position]!r:.200}")
        notes.dropped[f"longer than {most} tokens"] += len(longer)
        return table.filter(pa.array([position not in longer for position in range(table.num_rows)], pa.bool_()))

    return drop_long


class Filter:
    """A checked and compiled expression."""

    def __init__(self, text: str, columns: Sequence[str]) -> None:
        """Raise a `ConfigError` with every fault that is visible without a row."""
        self.text = text
        checker = _Checker(columns)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about '\d', which is fine in a pattern
                expression = checker.visit(_parse(text))
                if checker.faults:
                    raise ConfigError([(KEY, fault) for fault in checker.faults])
                self._code = compile(ast.fix_missing_locations(expression), "<filter>", "eval")
        except (RecursionError, MemoryError):
            raise ConfigError([(KEY, "is nested too deeply")]) from None
        self.columns = tuple(checker.used)
        """The columns that the expression uses, in order of first use."""

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether the row passes. Raises `ValueError` with the values if the expression does not fit them."""
        try:
            values = {column: row[column] for column in self.columns}
            return bool(eval(self._code, _NAMES, values))  # noqa: S307 - only checked nodes, and no builtins
        except Exception as error:
            problem = explain_misfit(KEY, self.text, self.columns, row, error)
            raise ValueError(problem + self._advise(row, error)) from error

    def _advise(self, row: Mapping[str, Any], error: Exception) -> str:
        if empty := [name for name in self.columns if row.get(name, "") is None]:
            return f"; guard it: {' and '.join(f'{name} is not None' for name in empty)} and ({self.text.strip()})"
        if isinstance(error, TypeError) and any(isinstance(row.get(name), str) for name in self.columns):
            return "; turn text into a number with int(...) or float(...)"
        return ""


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {reprlib.repr(value)}")
    return value


def _number(value: Any) -> Any:
    # `*` could repeat a sequence without end, and `%` could format to any width.
    if not isinstance(value, Number):
        raise TypeError(f"expected a number, got {reprlib.repr(value)}")
    return value


def _truth(value: Any) -> Any:
    # Any non-empty text counts as true, and a CSV column with `false` in it is text.
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        raise ValueError(f"{value!r} is text, and any text counts as true; compare it: column == {value!r}")
    return value


_FUNCTIONS: dict[str, tuple[Callable[..., Any], int, int]] = {
    "abs": (abs, 1, 1),
    "bool": (lambda value: bool(_truth(value)), 1, 1),
    "contains": (lambda text, part: part in text, 2, 2),
    "endswith": (lambda text, part: _text(text).endswith(part), 2, 2),
    "float": (float, 1, 1),
    "int": (int, 1, 2),
    "len": (len, 1, 1),
    "lower": (lambda text: _text(text).lower(), 1, 1),
    "matches": (lambda text, pattern: re.search(pattern, _text(text)) is not None, 2, 2),
    "max": (max, 1, 100),
    "min": (min, 1, 100),
    "startswith": (lambda text, part: _text(text).startswith(part), 2, 2),
    "str": (str, 1, 1),
    "strip": (lambda text: _text(text).strip(), 1, 1),
    "upper": (lambda text: _text(text).upper(), 1, 1),
}
"""The functions allowed in an expression, with their minimum and maximum number of arguments, all positional."""

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: lambda left, right: _number(left) * _number(right),
    ast.Mod: lambda left, right: _number(left) % _number(right),
}

# No identifier can have these names, so a column called `len` shadows nothing.
_NAMES: dict[str, Any] = {
    "__builtins__": {},
    **{f"{name}()": function for name, (function, _, _) in _FUNCTIONS.items()},
    **{f"{kind.__name__}()": function for kind, function in _OPERATORS.items()},
    "truth()": _truth,
}

_PLAIN_NODES = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Add, ast.Sub, ast.Div,
    ast.FloorDiv, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is,
    ast.IsNot, ast.IfExp, ast.List, ast.Tuple, ast.Set, ast.Subscript, ast.Load,
)  # fmt: skip

_AVAILABLE = (
    "available: and, or, not, in, comparisons, + - * / // %, `a if b else c`, column[key], numbers, text, lists, None, "
    f"True, False, and the functions {', '.join(_FUNCTIONS)}"
)


class _Checker(ast.NodeTransformer):
    """Collects the columns used and the faults, and replaces operators of unbounded cost with bounded functions."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.columns = columns
        self.used: dict[str, None] = {}
        self.faults: dict[str, None] = {}

    def refuse(self, node: ast.AST, problem: str) -> ast.AST:
        self.faults[problem] = None
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _PLAIN_NODES):
            return super().generic_visit(node)
        shown = f"`{ast.unparse(node)}`" if isinstance(node, ast.expr) else type(node).__name__
        return self.refuse(node, f"{shown} is not available in a filter; {_AVAILABLE}")

    def visit_Expression(self, node: ast.Expression) -> ast.AST:
        if isinstance(node.body, ast.Tuple | ast.List | ast.Set):
            return self.refuse(node, f"`{ast.unparse(node)}` is a list, not a condition; join conditions with `and`")
        super().generic_visit(node)
        node.body = _as_condition(node.body)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        super().generic_visit(node)
        node.values = list(map(_as_condition, node.values))
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        visited = self.generic_visit(node)
        if isinstance(node.op, ast.Not):
            node.operand = _as_condition(node.operand)
        return visited

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        super().generic_visit(node)
        node.test = _as_condition(node.test)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value is None or isinstance(node.value, str | int | float):
            return node
        return self.refuse(node, f"{node.value!r} is not available in a filter; {_AVAILABLE}")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id
        if name in self.columns and not name.startswith("__"):
            self.used[name] = None
            return node
        return self.refuse(node, f"{no_column(name, self.columns)}, None, True, False")

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if type(node.op) not in _OPERATORS:
            return super().generic_visit(node)
        return self.call(type(node.op).__name__, [node.left, node.right])

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for operator, right in zip(node.ops, node.comparators, strict=True):
            singleton = isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
            if isinstance(operator, ast.Is | ast.IsNot) and not singleton:
                self.refuse(node, f"`{ast.unparse(node)}`: `is` is for None, True and False; compare with == or !=")
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        written = f"`{ast.unparse(node)}`"
        name = ast.unparse(node.func)
        if not isinstance(node.func, ast.Name) or name not in _FUNCTIONS:
            return self.refuse(node, f"no function {name!r}{did_you_mean(name, _FUNCTIONS)}; {_AVAILABLE}")
        _, fewest, most = _FUNCTIONS[name]
        if node.keywords or not fewest <= len(node.args) <= most:
            takes = str(fewest) if fewest == most else f"{fewest} to {most}"
            return self.refuse(node, f"{written}: {name} takes {takes} arguments, by position")
        if name == "matches" and (fault := _pattern_fault(node.args[1])):
            return self.refuse(node, f"{written}: {fault}")
        return self.call(name, node.args)

    def call(self, name: str, arguments: list[ast.expr]) -> ast.Call:
        return ast.Call(ast.Name(f"{name}()", ast.Load()), [self.visit(argument) for argument in arguments], [])


def _as_condition(node: ast.expr) -> ast.expr:
    """Wrap a bare column that is used as a condition, so that `_truth` checks it."""
    return ast.Call(ast.Name("truth()", ast.Load()), [node], []) if isinstance(node, ast.Name) else node


def _parse(text: str) -> ast.Expression:
    if not text.strip():
        raise ConfigError([(KEY, "is empty; leave the key out to keep every row")])
    if len(text) > MAX_LENGTH:
        problem = f"has {len(text)} characters, more than {MAX_LENGTH}; write a function and give file.py:function"
        raise ConfigError([(KEY, problem)])
    try:
        # In parentheses, so that a YAML block can break the lines.
        return ast.parse(f"({text}\n)", mode="eval")
    except (SyntaxError, ValueError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError([(KEY, f"{text!r} is not an expression: {problem}; {_AVAILABLE}")]) from None


def _pattern_fault(pattern: ast.expr) -> str | None:
    # A pattern from the data could take exponential time, and no user has reviewed it.
    if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str):
        return "the pattern must be written out as text"
    if "\b" in pattern.value:
        return r"'\b' in a plain text is a backspace; write the pattern as r'...'"
    try:
        re.compile(pattern.value)
    except (re.error, OverflowError) as error:
        return f"not a regular expression: {error}"
    return None


# Findings about rows

DROPPED = "rows-dropped"
"""The rule for rows that were dropped because something is wrong with them."""
NOT_SHOWN = "options-not-shown"
"""The rule for rows whose prompts do not show the options."""
NO_IMAGES = "images-missing"
"""The rule for rows whose prompts have a place for an image but no image."""
INVALID = "invalid-task"
"""The rule for rows that no answer solves, as `validate` finds them per task."""


class Notes(msgspec.Struct):
    dropped: Counter[str] = msgspec.field(default_factory=Counter)
    """Dropped rows, by reason."""
    by_kind: dict[tuple[str, str], Flaw] = {}

    @property
    def flaws(self) -> list[Flaw]:
        return list(self.by_kind.values())

    def report(self, flaw: Flaw) -> None:
        """Add a flaw of the rows of one batch, at most one of each kind."""
        self.by_kind[flaw.rule, flaw.what] = flaw

    def end_with(self, last: int) -> None:
        """Remove drops after `last`, the last row of the batch that is used."""
        for reason in list(self.dropped):
            flaw = self.by_kind.pop((DROPPED, dropped_for(reason)), None)
            if flaw is None:
                continue
            rows = [row for row in flaw.rows if row < last]
            self.dropped[reason] -= flaw.count - len(rows)
            if not rows:
                del self.dropped[reason]
            else:
                self.report(Flaw.of(flaw.rule, flaw.what, flaw.first, rows))

    def add(self, later: Notes) -> None:
        """Add the notes of the next batch."""
        self.dropped.update(later.dropped)
        for key, flaw in later.by_kind.items():
            known = self.by_kind.get(key)
            self.by_kind[key] = flaw.join(None) if known is None else known.join(flaw)


def dropped_for(reason: str) -> str:
    """Return how a flaw describes rows that were dropped for a reason."""
    return f"dropped: {reason}"


def look_at_prompts(config: DatasetConfig, table: pa.Table, notes: Notes) -> None:
    """Report rows of our own map function whose prompts lack their options or an image."""
    if config.images:  # images may show the options, too
        return
    template, system = config.prompt_template or "", config.system_prompt or ""
    shows_options = config.prompt_format == "template" and f"{{{OPTIONS}" in template
    if config.choices is not None and not shows_options:
        _find_hidden_options(table, notes)
    if PLACE in template or PLACE in system:
        rows = [extra["index"] for extra in table["extra_info"].to_pylist()]
        first = f"prompt_template has {PLACE}, but images names no column"
        notes.report(Flaw.of(NO_IMAGES, f"with {PLACE} in the prompt and no image", first, rows))


def _find_hidden_options(table: pa.Table, notes: Notes) -> None:
    """Report rows whose prompts lack the text of an option."""
    hidden: dict[int, str] = {}
    for prompt, extra in zip(table["prompt"].to_pylist(), table["extra_info"].to_pylist(), strict=True):
        said = "\n".join(str(message.get("content")) for message in prompt)
        options = extra[TEXTS] if isinstance(extra.get(TEXTS), list) else []
        if (missing := next((text for text in options if text not in said), None)) is not None:
            hidden.setdefault(extra["index"], missing)
    if hidden:
        first = f"the prompt lacks {next(iter(hidden.values()))!r:.60}; write {{options}} in prompt_template"
        notes.report(Flaw.of(NOT_SHOWN, "without their options in the prompt", first, list(hidden)))
