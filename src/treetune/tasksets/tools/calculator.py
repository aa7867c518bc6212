"""The tool `calculator`: arithmetic, without running anything as code.

compute("2 ** 10 / 3")      # "341.3333333333333"
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from treetune.core.tool import tool
from treetune.errors import ToolError

MOST_CHARACTERS = 1_000
MOST_BITS = 10_000
"""Maximum bits of a whole number: enough for any question, and few enough to be quick."""

_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "^": "**"})
_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(math, name)
    for name in ("sqrt", "exp", "log", "log2", "log10", "sin", "cos", "tan", "asin", "acos", "atan", "floor", "ceil")
} | {"abs": abs, "round": round, "min": min, "max": max}
_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}


@tool
def calculator(expression: str) -> str:
    """Compute an arithmetic expression, exactly where the numbers are whole.

    expression: such as "(3 + 4) * 2.5 ** 2"; there are + - * / // % **, sqrt, log, exp, sin, cos, min, max, round, pi.
    """
    return compute(expression)


def compute(expression: str) -> str:
    """Return the value as text. Raises `ToolError` with what is wrong."""
    if len(expression) > MOST_CHARACTERS:
        raise ToolError(f"an expression has at most {MOST_CHARACTERS} characters, this has {len(expression)}")
    try:
        value = _compute(ast.parse(expression.translate(_SIGNS).strip(), mode="eval").body)
    except ToolError:
        raise
    except (SyntaxError, RecursionError, MemoryError, ValueError, TypeError, ArithmeticError) as error:
        raise ToolError(f"{expression!r:.80} cannot be computed: {error}") from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return str(value)


def _compute(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        value: Any = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_compute(node.operand))
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        value = _raise(_compute(node.left), _compute(node.right))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_compute(node.left), _compute(node.right))
    elif isinstance(node, ast.Name) and node.id in _CONSTANTS:
        value = _CONSTANTS[node.id]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        if node.keywords:
            raise ToolError(f"{node.func.id} takes no named arguments")
        value = _FUNCTIONS[node.func.id](*map(_compute, node.args))
    else:
        raise ToolError(f"{ast.unparse(node)!r:.80} is no arithmetic")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ToolError("the result has too many digits")
    if isinstance(value, float) and not math.isfinite(value):
        raise ToolError("the result is not finite")
    return value


def _raise(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > MOST_BITS:
        raise ToolError("the result has too many digits")
    value = base**exponent
    if isinstance(value, complex):
        raise ToolError("the result is no real number")
    return value
