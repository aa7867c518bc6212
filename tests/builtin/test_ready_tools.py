"""The ready tools: calculator, python, shell, search."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from raising import raises_code

from treetune import Task
from treetune.config.trust import USER
from treetune.core.tool import NamedTool, find_tool
from treetune.errors import ToolError
from treetune.sandbox import SandboxUnavailable, probe
from treetune.tasksets.search import CORPUS_VARIABLE
from treetune.tasksets.tools import compute

needs_sandbox = pytest.mark.skipif(not probe().available, reason="no sandbox can start here")
needs_shell = pytest.mark.skipif(not probe(shell=True).available, reason="no shell sandbox can start here")


def use(name: str, *calls: dict[str, Any], **settings: Any) -> list[Any]:
    """What the tool of this name answers, in one episode."""

    async def run() -> list[Any]:
        source = find_tool(NamedTool(name, settings), Task(prompt="x"), USER)
        try:
            (tool,) = await source.open()
            return [await tool.call(arguments) for arguments in calls]
        finally:
            await source.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * -4", "-20"),
        ("7 / 2", "3.5"),
        ("8 / 2", "4"),
        ("7 // 2 + 7 % 2", "4"),
        ("2 ** 100", str(2**100)),
        ("2^10", "1024"),
        ("6 × 7 ÷ 2 − 1", "20"),
        ("sqrt(16) + round(2.6)", "7"),
        ("min(3, 1, 2) + pi * 0", "1"),
        ("1_000 * 3", "3000"),
    ],
)
def test_the_calculator_computes(expression: str, value: str) -> None:
    assert compute(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "10 ** 10 ** 10",
        "9 ** 9999999",
        "(-8) ** 0.5",
        "1e308 * 10",
        "__import__('os').system('true')",
        "(1).__class__",
        "[1] * 10",
        "'a' * 3",
        "True + 1",
        "x",
        "sqrt(x=4)",
        "(" * 500 + "1" + ")" * 400,
        "1" * 2000,
        "\ud800",
        "\x00",
    ],
)
def test_what_is_no_arithmetic_is_told_and_nothing_runs(expression: str) -> None:
    with pytest.raises(ToolError):
        compute(expression)


@needs_sandbox
def test_python_runs_in_a_sandbox_and_tells_how_it_ended() -> None:
    answers = use(
        "python",
        {"code": "print(6 * 7)"},
        {"code": "raise ValueError('no')"},
        {"code": "x = 1"},
        {"code": "while True: pass"},
        {"code": "import os; print(os.path.exists('/home'), os.environ.get('HOME', ''))"},
        seconds=1,
    )
    assert answers[0] == "42"
    assert "ValueError: no" in answers[1]
    assert "[exit code 1]" in answers[1]
    assert answers[2] == "[no output]"
    assert answers[3] == "[stopped: it took longer than 1 seconds]"
    assert answers[4].startswith("False")


@needs_shell
def test_a_shell_lives_for_its_episode_and_no_longer() -> None:
    answers = use("shell", {"command": "cd /tmp && x=3 && echo hi > a"}, {"command": "echo $x; cat a; pwd; false"})
    assert answers == ["[no output]", "3\nhi\n/tmp\n[exit code 1]"]
    assert "No such file" in use("shell", {"command": "cat /tmp/a"})[0]


def test_where_no_sandbox_can_start_it_is_told_before_the_episode_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*, shell: bool = False) -> Any:
        raise SandboxUnavailable("no bubblewrap", remedy="install it")

    monkeypatch.setattr("treetune.tasksets.tools.require", refuse)
    for name in ("python", "shell"):
        with raises_code("no-sandbox", "install it"):
            use(name)


def test_settings_of_a_sandbox_are_checked() -> None:
    with raises_code("usage", "memory_mb"):
        use("python", memory=5)


def test_search_finds_the_best_passages_of_a_corpus_that_a_config_names(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.delenv(CORPUS_VARIABLE, raising=False)
    corpus = tmp_path / "docs.jsonl"
    texts = ["the cat sat on the mat", "paris is the capital of france", "berlin is the capital of germany"]
    corpus.write_text("".join(json.dumps({"contents": text}) + "\n" for text in texts))
    found, none = use("search", {"query": "capital of france"}, {"query": "zebra"}, corpus=str(corpus), documents=1)
    assert found == "Doc 1: paris is the capital of france"
    assert none == "nothing found: try other words"
    with raises_code("usage", "search", "TREETUNE_SEARCH_CORPUS"):
        use("search")
    with raises_code("environment", "none.jsonl"):
        use("search", corpus=str(tmp_path / "none.jsonl"))
