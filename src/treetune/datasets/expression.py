"""A Filter decides which rows to keep: a Python-like expression over columns that can compute and nothing else.

    keep = Filter.parse("len(question) < 500 and 0.1 < pass_rate < 0.9", columns=["question", "pass_rate"])
    keep.columns  # ("question", "pass_rate")
    keep.keeps({"question": "1 + 1?", "pass_rate": 0.5})  # True

The expression is parsed and every node of it checked against what is allowed: there are no attributes, no names but
columns, no calls but to the functions below. What would let a short text ask for endless work is bounded.
"""

from __future__ import annotations

import ast
import re
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from types import CodeType
from typing import Any, NamedTuple

from treetune.errors import ConfigError, did_you_mean

KEY = "filter"
MAX_LENGTH = 2000
MAX_BITS = 4096


class Filter:
    """A checked and compiled expression; pickles by its text."""

    def __init__(self, text: str, columns: Sequence[str], code: CodeType) -> None:
        self.text = text
        self.columns = tuple(columns)
        """The columns it uses, in order of first use."""
        self._code = code

    @classmethod
    def parse(cls, text: str, columns: Sequence[str]) -> Filter:
        """Raises a `ConfigError` with every fault that can be seen without a row."""
        checker = _Checker(columns)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about '\d', which is fine in a pattern
                expression = checker.visit(_tree(text))
                if checker.faults:
                    raise ConfigError([(KEY, fault) for fault in checker.faults])
                code = compile(ast.fix_missing_locations(expression), "<filter>", "eval")
        except (RecursionError, MemoryError):
            raise ConfigError([(KEY, "is nested too deeply")]) from None
        return cls(text, list(checker.used), code)

    def keeps(self, row: Mapping[str, Any]) -> bool:
        """Whether the row passes; a `ValueError` with the values where the expression does not fit them."""
        try:
            values = {column: row[column] for column in self.columns}
        except KeyError as error:
            raise ValueError(f"the row has no {error}, which {KEY} {self.text!r} uses") from None
        try:
            return bool(eval(self._code, _NAMES, values))  # noqa: S307 - only checked nodes, and no builtins
        except Exception as error:
            raise ValueError(self._explained(values, error)) from error

    def __repr__(self) -> str:
        return f"Filter({self.text!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return Filter.parse, (self.text, self.columns)

    def _explained(self, values: Mapping[str, Any], error: Exception) -> str:
        shown = ", ".join(f"{column} = {reprlib.repr(value)}" for column, value in values.items())
        problem = f"no {error}" if isinstance(error, KeyError) else str(error)
        message = f"{KEY} {self.text!r} does not fit a row: {problem} ({shown})"
        empty = [column for column, value in values.items() if value is None]
        if empty:
            guard = " and ".join(f"{column} is not None" for column in empty)
            return f"{message}; guard it: {guard} and ({self.text.strip()})"
        if isinstance(error, TypeError) and any(isinstance(value, str) for value in values.values()):
            return f"{message}; turn text into a number with int(...) or float(...)"
        return message


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {reprlib.repr(value)}")
    return value


def _number(value: Any) -> Any:
    # `*` would repeat a sequence without end and `%` would fill in a format of any width.
    if not isinstance(value, Number):
        raise TypeError(f"expected a number, got {reprlib.repr(value)}")
    return value


def _power(base: Any, exponent: Any) -> Any:
    base, exponent = _number(base), _number(exponent)
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > MAX_BITS:
        raise OverflowError("the result of ** is too large")
    return base**exponent


def _round(number: Any, digits: int | None = None) -> Any:
    if digits is not None and abs(digits) > MAX_BITS:
        raise OverflowError("too many digits to round to")
    return round(_number(number), digits)


class _Function(NamedTuple):
    call: Callable[..., Any]
    fewest: int
    most: int
    """Arguments it takes; all are given by position."""


_FUNCTIONS = {
    "abs": _Function(abs, 1, 1),
    "bool": _Function(bool, 1, 1),
    "contains": _Function(lambda text, part: part in text, 2, 2),
    "endswith": _Function(lambda text, part: _text(text).endswith(part), 2, 2),
    "float": _Function(float, 1, 1),
    "int": _Function(int, 1, 2),
    "len": _Function(len, 1, 1),
    "lower": _Function(lambda text: _text(text).lower(), 1, 1),
    "matches": _Function(lambda text, pattern: re.search(pattern, _text(text)) is not None, 2, 2),
    "max": _Function(max, 1, 100),
    "min": _Function(min, 1, 100),
    "round": _Function(_round, 1, 2),
    "startswith": _Function(lambda text, part: _text(text).startswith(part), 2, 2),
    "str": _Function(str, 1, 1),
    "strip": _Function(lambda text: _text(text).strip(), 1, 1),
    "upper": _Function(lambda text: _text(text).upper(), 1, 1),
}

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Mult: lambda left, right: _number(left) * _number(right),
    ast.Mod: lambda left, right: _number(left) % _number(right),
    ast.Pow: _power,
}

# No identifier can spell these names, so a column called `len` hides nothing.
_NAMES: dict[str, Any] = {
    "__builtins__": {},
    **{f"{name}()": function.call for name, function in _FUNCTIONS.items()},
    **{f"{kind.__name__}()": function for kind, function in _OPERATORS.items()},
}

_PLAIN_NODES = (
    ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.Add, ast.Sub, ast.Div,
    ast.FloorDiv, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is,
    ast.IsNot, ast.IfExp, ast.List, ast.Tuple, ast.Set, ast.Load,
)  # fmt: skip

_REMEDIES: dict[type[ast.AST], str] = {
    ast.BitAnd: "& is not available; write `and`",
    ast.BitOr: "| is not available; write `or`",
    ast.Invert: "~ is not available; write `not`",
    ast.NamedExpr: ":= is not available; write == to compare",
    ast.JoinedStr: "f-strings are not available",
    ast.Slice: "slices are not available; there are startswith(text, part) and endswith(text, part)",
}

_CONSTANTS = {"none": "None", "null": "None", "true": "True", "false": "False"}


class _Checker(ast.NodeTransformer):
    """Collects the columns used and the faults, and puts calls to our own functions in place of what could run away."""

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
        return self.refuse(node, _REMEDIES.get(type(node), f"{shown} is not available in a filter"))

    def visit_Expression(self, node: ast.Expression) -> ast.AST:
        if isinstance(node.body, ast.Tuple | ast.List | ast.Set):
            return self.refuse(node, f"`{ast.unparse(node)}` is a list, not a condition; join conditions with `and`")
        return super().generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value is None or isinstance(node.value, str | int | float):
            return node
        return self.refuse(node, f"{node.value!r} is not available: only numbers, text, True, False and None are")

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = node.id
        if name in self.columns and not name.startswith("__"):
            self.used[name] = None
            return node
        if name.casefold() in _CONSTANTS:
            return self.refuse(node, f"no column {name!r}; did you mean {_CONSTANTS[name.casefold()]}?")
        if name in _FUNCTIONS:
            return self.refuse(node, f"{name} is a function: write {name}(...)")
        there_are = f"there are: {', '.join(self.columns)}"
        return self.refuse(node, f"no column {name!r}{did_you_mean(name, self.columns)}; {there_are}")

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self.refuse(node, f"`{ast.unparse(node)}` is an attribute, which a filter may not ask for")

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        index = node.slice.operand if isinstance(node.slice, ast.UnaryOp) else node.slice
        if not isinstance(index, ast.Constant | ast.Name | ast.Slice):
            return self.refuse(node, f"`{ast.unparse(node)}`: an index is a number, a text or a column")
        return ast.Subscript(self.visit(node.value), self.visit(node.slice), node.ctx)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if type(node.op) not in _OPERATORS:
            return super().generic_visit(node)
        return _call(type(node.op).__name__, [self.visit(node.left), self.visit(node.right)])

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for operator, right in zip(node.ops, node.comparators, strict=True):
            singleton = isinstance(right, ast.Constant) and (right.value is None or isinstance(right.value, bool))
            if isinstance(operator, ast.Is | ast.IsNot) and not singleton:
                self.refuse(node, f"`{ast.unparse(node)}`: `is` is for None, True and False; compare with == or !=")
        return super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        listing = f"there are: {', '.join(_FUNCTIONS)}"
        if isinstance(node.func, ast.Attribute) and node.func.attr in _FUNCTIONS:
            written = ", ".join(ast.unparse(part) for part in [node.func.value, *node.args])
            return self.refuse(node, f"`{ast.unparse(node)}`: write {node.func.attr}({written})")
        if not isinstance(node.func, ast.Name):
            return self.refuse(node, f"`{ast.unparse(node.func)}` cannot be called; {listing}")
        name = node.func.id
        if name not in _FUNCTIONS:
            return self.refuse(node, f"no function {name!r}{did_you_mean(name, _FUNCTIONS)}; {listing}")
        function = _FUNCTIONS[name]
        if node.keywords or not function.fewest <= len(node.args) <= function.most:
            takes = " to ".join(dict.fromkeys([str(function.fewest), str(function.most)]))
            return self.refuse(node, f"`{ast.unparse(node)}`: {name} takes {takes} arguments, by position")
        if name == "matches" and (fault := _pattern_fault(node.args[1])):
            return self.refuse(node, f"`{ast.unparse(node)}`: {fault}")
        return _call(name, [self.visit(argument) for argument in node.args])


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(f"{name}()", ast.Load()), arguments, [])


def _tree(text: str) -> ast.Expression:
    if not text.strip():
        raise ConfigError([(KEY, "is empty; leave the key out to keep every row")])
    if len(text) > MAX_LENGTH:
        remedy = "write a function and give file.py:function"
        raise ConfigError([(KEY, f"has {len(text)} characters, more than {MAX_LENGTH}; {remedy}")])
    try:
        # In parentheses, so that a YAML block may break the lines.
        return ast.parse(f"({text}\n)", mode="eval")
    except (SyntaxError, ValueError) as error:
        problem = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ConfigError([(KEY, f"{text!r} is no expression: {problem}{_syntax_hint(text)}")]) from None


def _syntax_hint(text: str) -> str:
    if "&&" in text or "||" in text:
        return "; write `and` and `or`"
    if re.search(r"![^=]", text):
        return "; write `not`"
    if re.search(r"[^=!<>:]=[^=]", text):
        return "; write == to compare"
    return ""


def _pattern_fault(pattern: ast.expr) -> str | None:
    # A pattern from the data could take exponential time, and nobody would have written it.
    if not isinstance(pattern, ast.Constant) or not isinstance(pattern.value, str):
        return "the pattern must be written out as text"
    if "\b" in pattern.value:
        return r"'\b' in a plain text is a backspace; write the pattern as r'...'"
    try:
        re.compile(pattern.value)
    except (re.error, OverflowError) as error:
        return f"no regular expression: {error}"
    return None
