"""The rules of the folder list: few files beside the folders, small folders, one order, no reaching up by a string."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "treetune"
ROOMS = [folder for folder in sorted(PACKAGE.iterdir()) if (folder / "__init__.py").is_file()]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
ORDER = next(contract for contract in CONTRACTS if contract["id"] == "rooms")["layers"]


def test_few_files_stand_beside_the_folders():
    assert len(list(PACKAGE.glob("*.py"))) <= 8


def test_no_two_test_files_have_the_same_name():
    """pytest would import the first in place of the second."""
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_the_contract_orders_every_room_strictly():
    assert sorted(ORDER) == sorted([*(room.name for room in ROOMS), "__main__"])
    assert not any(re.search(r"[:|]", layer) for layer in ORDER)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_says_what_it_is(room):
    assert ast.get_docstring(ast.parse((room / "__init__.py").read_text()))


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_no_string_names_a_room_above(room):
    above = ORDER[: ORDER.index(room.name)]
    named = re.compile(rf"treetune\.({'|'.join(above)})\.\w") if above else re.compile(r"(?!)")
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {node.value!r:.60}"
        for file in room.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and named.match(node.value)
    ]
    assert found == []


REMOVABLE = [
    "view", "audit", "sandbox", "serve/mcp_door.py", "serve/openenv",
    *(f"trainers/{name}" for name in ("areal", "skyrl", "slime", "trl", "verl")),
    *(f"tasksets/{name}" for name in ("code", "harbor", "ifeval.py", "mcp", "shell", "textarena", "tools.py")),
]  # fmt: skip


@pytest.mark.parametrize("part", ["view", *(pytest.param(part, marks=pytest.mark.thorough) for part in REMOVABLE[1:])])
def test_the_rest_works_without_a_part_that_only_some_want(tmp_path, part):
    copy = tmp_path / "treetune"
    shutil.copytree(PACKAGE, copy)  # with what is compiled, or the first process would compile it anew
    (copy / part).unlink() if part.endswith(".py") else shutil.rmtree(copy / part)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TREETUNE_TASK_CACHE_DIR": str(tmp_path / "cache")}
    for verb in ("list", "show arithmetic -n 1", "validate arithmetic -n 2", "eval arithmetic -m scripted:gold -n 2"):
        command = [sys.executable, "-m", "treetune", *verb.split()]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
