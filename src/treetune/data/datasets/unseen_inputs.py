"""What the code of a dataset task reads that the cache cannot know about: files and variables that it names itself.

    find_unseen([Path("tables.py")])      # ["tables.py, line 7, reads the file 'table.json'"]

A built file is known by the code and the config. A file that a config names in a key of type `FileName` is part of
that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from treetune.config.code_files import parse_again

NAME_IT = (
    "name it in the config, a file in a key of type treetune.config.structs.FileName, a variable as "
    "KEY: ${oc.env:NAME}; --force builds anew"
)

_READERS = ("read_text", "read_bytes", "open")


def find_unseen(files: Iterable[Path]) -> list[str]:
    """Calls such as `open("table.json")` and `os.environ["X"]` in files of code, and where they stand."""
    return [f"{file.name}, line {line}, reads {what}" for file in files for line, what in _find_in(file)]


def _find_in(file: Path) -> Iterator[tuple[int, str]]:
    try:
        tree = parse_again(partial(ast.parse, file.read_bytes()))
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _name_file(node)) is not None:
            yield node.lineno, f"the file {name!r}"
        elif (name := _name_variable(node)) is not None:
            yield getattr(node, "lineno", 0), f"the variable {name!r}"


def _name_file(call: ast.Call) -> str | None:
    """The file that a call opens for reading, where its name is written there."""
    function = call.func
    if isinstance(function, ast.Name) and function.id == "open":
        modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
        written = any(isinstance(mode, ast.Constant) and set("wax") & set(str(mode.value)) for mode in modes)
        return None if written else _first_text(call)
    if isinstance(function, ast.Attribute) and function.attr in _READERS and isinstance(function.value, ast.Call):
        made = function.value.func
        if (made.id if isinstance(made, ast.Name) else getattr(made, "attr", "")) == "Path":
            return _first_text(function.value)
    return None


def _name_variable(node: ast.AST) -> str | None:
    """The variable of the environment that a node reads."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else None
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr == "get" and _is_environ(function.value):
        return _first_text(node)
    called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return _first_text(node) if called == "getenv" else None


def _is_environ(node: ast.expr) -> bool:
    return (node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")) == "environ"


def _first_text(call: ast.Call) -> str | None:
    first = call.args[0] if call.args else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
