"""The ready tools: what tasks and configs name under `tools`.

    tools: [calculator, python, {shell: {seconds: 30, memory_mb: 1024}}, {search: {corpus: docs.jsonl, documents: 5}}]

The settings of `python` and `shell` are those of SandboxLimits: a model's code runs in a sandbox, or not at all. If no
sandbox can start, the episode fails before it begins, and the error says why. The corpus of `search` has one JSON
object per line, `{"contents": ...}` or `{"title": ..., "text": ...}`. A config or TREETUNE_SEARCH_CORPUS names it,
never a row.
"""

from __future__ import annotations

import ast
import asyncio
import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from treetune.core.task import Task
from treetune.core.tool import Tool, ToolSource, tool
from treetune.errors import ToolError, UsageError
from treetune.sandbox import Ended, Result, SandboxLimits, require
from treetune.sandbox.shell import SandboxGone, Shell
from treetune.system.threads import call
from treetune.tasksets.code import run_python

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
    """Evaluate an arithmetic expression; whole numbers are computed exactly.

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
        raise ToolError(f"{ast.unparse(node)!r:.80} is not arithmetic")
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
        raise ToolError("the result is not a real number")
    return value


# A sandbox

GRACE_SECONDS = 20.0
"""Extra seconds for a sandbox to start and end, beyond the time of what runs in it."""
_STOPPED = {
    Ended.TIMEOUT: "stopped: it took longer than {limits.seconds:g} seconds",
    Ended.MEMORY: "stopped: it used more than {limits.memory_mb} MB of memory",
    Ended.OUTPUT: "stopped: it wrote more than {limits.output_kb} KB",
    Ended.KILLED: "stopped",
}


class _Sandboxed(ToolSource):
    def __init__(self, task: Task, **settings: Any) -> None:
        super().__init__(task)
        try:
            self.limits = msgspec.convert(settings, SandboxLimits)
        except msgspec.ValidationError as error:
            known = ", ".join(SandboxLimits.__struct_fields__)
            raise UsageError(
                f"tools: {type(self).__name__.lower()}: {error}", remedy=f"its settings: {known}"
            ) from None

    async def open(self) -> list[Tool]:
        await asyncio.to_thread(require, shell=isinstance(self, ShellTool))
        tools = await super().open()
        for one in tools:
            one.timeout = self.limits.seconds + GRACE_SECONDS
        return tools

    def describe(self, result: Result) -> str:
        """Return the model's view of a run."""
        parts = [result.text, result.error_text]
        if result.ended is not Ended.COMPLETED:
            parts.append(f"[{_STOPPED[result.ended].format(limits=self.limits)}]")
        elif result.exit_code:
            parts.append(f"[exit code {result.exit_code}]")
        if result.restarted:
            parts.append("[the shell was restarted: its variables and its folder are gone, its files remain]")
        return "\n".join(part.strip("\n") for part in parts if part.strip()) or "[no output]"


class PythonTool(_Sandboxed):
    """A Python program, in a fresh sandbox each time."""

    @tool
    async def python(self, code: str) -> str:
        """Run a Python program and get what it prints. Each call starts afresh, without files or network.

        code: the whole program; print what you want to see.
        """
        return self.describe(await run_python(code.encode("utf-8", "surrogatepass"), limits=self.limits))


class ShellTool(_Sandboxed):
    """A shell in a sandbox that lives for the episode; it is started by the first command."""

    def __init__(self, task: Task, **settings: Any) -> None:
        super().__init__(task, **settings)
        self._shell: Shell | None = None
        self._starting = asyncio.Lock()

    @tool
    async def shell(self, command: str) -> str:
        """Run a command in a persistent Linux shell: files, variables and the current folder stay. No network.

        command: one or several lines of bash.
        """
        async with self._starting:
            if self._shell is None or not self._shell.alive:
                self._shell = await Shell.open(self.limits)
        try:
            return self.describe(await self._shell.execute(command))
        except SandboxGone as error:
            raise ToolError(f"the machine has ended, the next command gets a fresh one: {error.message}") from error

    async def close(self) -> None:
        async with self._starting:
            if self._shell is not None:
                await self._shell.close()


class SearchTool(ToolSource):
    """The best passages of a file of documents, by BM25."""

    def __init__(self, task: Task, corpus: str | None = None, documents: int | None = None) -> None:
        from treetune.tasksets.search import CORPUS_VARIABLE, DOCUMENTS  # here, because the other tools need no aiohttp

        super().__init__(task)
        documents = DOCUMENTS if documents is None else documents
        named = corpus or os.environ.get(CORPUS_VARIABLE)
        if not named:
            remedy = f"write {{search: {{corpus: FILE.jsonl}}}} in the config, or export {CORPUS_VARIABLE}=FILE.jsonl"
            raise UsageError("the tool search has nothing to search", remedy=remedy)
        if not isinstance(documents, int) or documents < 1:
            raise UsageError(f"the tool search must show at least 1 document, got {documents!r}")
        self._corpus, self._documents = Path(named), documents

    async def open(self) -> list[Tool]:
        from treetune.tasksets.search import load_index

        self._index: Any = await call(load_index, self._corpus)
        return await super().open()

    @tool
    def search(self, query: str) -> str:
        """Search the documents and get the best passages.

        query: words to look for.
        """
        found = self._index.search(query, self._documents)
        listing = [f"Doc {number}: {text.strip()}" for number, text in enumerate(found, 1)]
        return "\n".join(listing) or "nothing found: try other words"
