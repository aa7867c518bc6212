"""Test cases of a coding problem: what goes in, and what must come out.

    Problem.of([{"input": "5", "output": "25"}])                        # a program: standard input and output
    Problem.of(cases, [{"role": "user", "content": "...```python\\ndef square(n):\\n    # YOUR CODE HERE\\n```"}])

In LiveCodeBench's form a case may say `testtype: functional` and `metadata: {func_name: square}`: then a function is
called, with one argument a line. Where cases say nothing and the prompt shows the stub of one function, that function
is called, or a program is run where the answer does not define it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.environment import Contract
from treetune.task import Message, Task

_BLOCK = re.compile(r"```(?:\w+)?\n(.*?)```", re.DOTALL)
_DEFINITION = re.compile(r"^([ \t]*)def \w+", re.MULTILINE)


class Case(msgspec.Struct, frozen=True):
    stdin: str
    stdout: str
    arguments: list[Any]
    returns: Any
    """The same as the call of a function, in JSON's types."""


class Problem(msgspec.Struct, frozen=True):
    cases: list[Case]
    function: str | None = None
    """The function that is called, if the answer defines it."""
    program: bool = True
    """Whether a program that reads standard input may solve it."""

    @classmethod
    def of(cls, truth: Any, messages: Sequence[Message] = ()) -> Problem:
        """From a list of cases or JSON of one; ValueError says what is wrong with it."""
        cases = _decoded(truth)
        if cases[0].get("testtype") == "functional":
            name = (cases[0].get("metadata") or {}).get("func_name")
            if not isinstance(name, str) or not name.isidentifier():
                raise ValueError("has functional cases without metadata.func_name")
            return cls([Case("", "", *_call(case, None)) for case in cases], name, program=False)
        stub = None if cases[0].get("testtype") else stub_in(messages)
        if stub is None:
            return cls([Case(_text(case["input"]), _text(case["output"]), [], None) for case in cases])
        both = []
        for case in cases:
            arguments, returns = _call(case, stub.parameters)
            both.append(Case(_text(case["input"]), _text(case["output"]), arguments, returns))
        return cls(both, stub.name)


class Stub(msgspec.Struct, frozen=True):
    """A function that the prompt asks to be written."""

    name: str
    parameters: int


class CasesContract(Contract, frozen=True, kw_only=True):
    """A contract whose ground truth is test cases, stored as LiveCodeBench has them: JSON, all values text."""

    def problem(self, truth: Any) -> str | None:
        if (problem := super().problem(truth)) is not None:
            return problem
        try:
            Problem.of(truth)
        except ValueError as error:
            return str(error)
        return None

    def encode(self, truth: Any, task: Task | None = None) -> Any:
        try:
            problem = Problem.of(truth, task.messages if task is not None else ())
        except ValueError:
            return super().encode(truth, task)
        given = _decoded(truth)
        stored = [_stored(problem, case, raw) for case, raw in zip(problem.cases, given, strict=True)]
        return truth if isinstance(truth, str) and stored == given else json.dumps(stored)


def code_in(text: str) -> str | None:
    """The last code block of an answer."""
    blocks = _BLOCK.findall(text)
    return blocks[-1].strip() if blocks else None


def stub_in(messages: Sequence[Message]) -> Stub | None:
    """The one function that the last message of the user shows without a body."""
    asked = [message.get("content") for message in messages if message.get("role") == "user"]
    blocks = _BLOCK.findall(asked[-1]) if asked and isinstance(asked[-1], str) else []
    return _stub(blocks[0]) if len(blocks) == 1 else None


def _stub(code: str) -> Stub | None:
    lines = [line for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    definitions = _DEFINITION.findall(code)
    if len(definitions) != 1:
        return None
    tree = None
    for body in ((), (f"{definitions[0]}    pass",)):  # a comment alone is no body
        try:
            tree = ast.parse("\n".join([*lines, *body]))
            break
        except (SyntaxError, ValueError):
            continue
    found = [node for node in tree.body if not isinstance(node, ast.Import | ast.ImportFrom)] if tree else []
    method = len(found) == 1 and isinstance(found[0], ast.ClassDef) and found[0].name == "Solution"
    if method:
        found = list(found[0].body)  # type: ignore[attr-defined]
    if len(found) != 1 or not isinstance(found[0], ast.FunctionDef) or not all(map(_is_empty, found[0].body)):
        return None
    arguments = found[0].args
    return Stub(found[0].name, len(arguments.posonlyargs) + len(arguments.args) - method)


def _is_empty(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Expr | ast.Return):
        return statement.value is None or isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass | ast.Raise)


def _decoded(truth: Any) -> list[dict[str, Any]]:
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (ValueError, RecursionError):
            raise ValueError("is text, but no JSON of test cases") from None
    if not isinstance(truth, list) or not truth:
        raise ValueError("holds no test cases")
    for number, case in enumerate(truth, 1):
        if not isinstance(case, dict) or case.get("input") is None or case.get("output") is None:
            raise ValueError(f"has no input and output in case {number}")
        if not isinstance(case.get("metadata") or {}, dict):
            raise ValueError(f"has a metadata that is no mapping in case {number}")
    return truth


def _text(value: Any) -> str:
    """As a program reads or prints it: a list is lines, what has no text is JSON."""
    lines = value if isinstance(value, list) else [value]
    return "\n".join(str(line) if isinstance(line, str | int | float) else json.dumps(line) for line in lines)


def _call(case: dict[str, Any], parameters: int | None) -> tuple[list[Any], Any]:
    """Arguments and result: text is one argument a line; a list is all of them where there are as many parameters."""
    given, expected = case["input"], case["output"]
    if isinstance(given, str):
        arguments = [_value(line) for line in given.removesuffix("\n").split("\n")] if given.strip() else []
    elif isinstance(given, list) and parameters not in (None, 1) and len(given) == parameters:
        arguments = given
    else:
        arguments = [given]
    return arguments, _value(expected) if isinstance(expected, str) else expected


def _value(text: str) -> Any:
    """What a text stands for: JSON, else a Python literal, else itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(ast.literal_eval(text.strip())))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return text


def _stored(problem: Problem, case: Case, raw: dict[str, Any]) -> dict[str, Any]:
    """The case as skyrl-gym reads it."""
    if problem.function is None:
        return {**raw, "input": case.stdin, "output": case.stdout}
    lines = list(map(json.dumps, case.arguments))
    same = isinstance(raw["input"], str) and _all_json(raw["input"].split("\n"))
    return {
        **raw,
        "input": raw["input"] if same else "\n".join(lines),
        "output": raw["output"] if _all_json([raw["output"]]) else json.dumps(case.returns),
        "testtype": "functional",
        "metadata": {**(raw.get("metadata") or {}), "func_name": problem.function},
    }


def _all_json(texts: list[Any]) -> bool:
    try:
        for text in texts:
            json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return False
    return True
