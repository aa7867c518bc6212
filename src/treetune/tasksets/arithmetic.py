"""Arithmetic: endless sums in five levels of difficulty. Infinite, random access."""

from __future__ import annotations

import ast
import operator
import random
import re
from typing import Annotated

import msgspec

from treetune.core.score import VALID, Verdict, invalid
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.scorers.scorer import Rule
from treetune.tasksets.turns import hash_number


class ArithmeticConfig(TasksetConfig, frozen=True, kw_only=True):
    level: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    """1: one-digit sums; 2: two digits, + and -; 3: products; 4: three terms; 5: parentheses."""
    seed: int = 0
    """The random seed. A different seed gives different tasks; `shuffle.seed` replaces it if set."""


class Arithmetic(Taskset[Task, ArithmeticConfig]):
    INFINITE = True
    scorer = Rule()

    def task_at(self, index: int) -> Task:
        level = self.config.level
        rng = random.Random(hash_number(f"{self.seed}/{level}/{index}"))
        while True:
            expression = _draw_expression(level, rng)
            result = evaluate(expression)
            # If the question contained the result, repeating the question would be rewarded.
            if str(abs(result)) not in re.findall(r"\d+", expression):
                break
        return Task(
            prompt=f"What is {expression}? Answer with just the number.",
            ground_truth=str(result),
            ability="math",
            extra_info={"expression": expression, "level": level},
        )

    def validate(self, task: Task) -> Verdict:
        result = str(evaluate(task.extra_info["expression"]))
        return VALID if result == task.ground_truth else invalid(f"the expression gives {result}")


def _draw_expression(level: int, rng: random.Random) -> str:
    if level == 1:
        return f"{rng.randint(0, 9)} + {rng.randint(0, 9)}"
    if level == 2:
        return f"{rng.randint(10, 99)} {rng.choice('+-')} {rng.randint(10, 99)}"
    if level == 3:
        return f"{rng.randint(10, 99)} * {rng.randint(2, 99)}"
    a, b, c = rng.randint(10, 99), rng.randint(10, 99), rng.randint(2, 20)
    if level == 4:
        return f"{a} {rng.choice('+-')} {b} {rng.choice('+-*')} {c}"
    return f"({a} {rng.choice('+-')} {b}) * ({c} {rng.choice('+-')} {rng.randint(2, 20)})"


_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def evaluate(expression: str) -> int:
    """Return the value of a sum of integers with + - * and parentheses."""

    def compute(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return int(_OPERATORS[type(node.op)](compute(node.left), compute(node.right)))
        raise ValueError(f"not arithmetic: {expression!r}")

    return compute(ast.parse(expression, mode="eval").body)
