"""Hostile answers to every environment that comes with the package: each episode ends, is scored, and earns nothing.

An answer that made an environment fail would be left out of the mean: a zero that does not count.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from packing import MANY
from test_harbor import write_task

from treetune import Completion, Limits, Outcome, Task, build_taskset, run_rollout
from treetune.core.taskset import Taskset
from treetune.errors import MissingExtraError
from treetune.models.scripted import Replay
from treetune.play.given_tasks import GivenTasks
from treetune.sandbox import probe

DEEP, LONG = (100_000, 10_000_000) if MANY else (10_000, 100_000)


def call_tool(name: Any, arguments: Any) -> Completion:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}
    return Completion("", message, "tool_calls")


TEXTS = {
    "empty": "",
    "spaces": " \n\t\u2028",
    "5,000 digits": "9" * 5000,
    "a long run of digits": "9" * LONG,
    "a long run of words": "a " * (LONG // 2),
    "a long run of lines": "click a\n" * (LONG // 8),
    "open tags": "<answer>" * (LONG // 8),
    "fences": "```\n" * (DEEP // 2),
    "half a surrogate pair": "\ud800",
    "two halves": "\udc00\ud83d",
    "NUL": "\0",
    "parentheses": "(" * DEEP,
    "closed parentheses": "(" * 500 + "1" + ")" * 500,
    "brackets": "[" * DEEP,
    "braces": '{"a":' * DEEP,
    "LaTeX": "\\boxed{" * DEEP,
    "closed LaTeX": "\\frac{1}{" * 500 + "2" + "}" * 500,
    "power tower": "9**9**9**9",
    "LaTeX power tower": "9^{9^{9^{9}}}",
    "exponent": "1e999999999",
    "not a number": "nan",
    "infinite": "-inf",
    "unicode digits": "\u0667\u00b2\u2460",
    "backtracking": "a" * 5000 + "!",
    "operators": "-+" * (DEEP // 2),
    "commas": "1," * DEEP,
    "code": "__import__('os')._exit(3)",
    "format": "{0.__class__}%s%n{}",
    "tags": "</answer><answer></solution><solution>",
}
OTHERS = {
    "no content": Completion("", {"role": "assistant", "content": None}),
    "no message": Completion("", {"role": "assistant"}),
    "an image": Completion("", {"role": "assistant", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}),
    "a tool call": call_tool("bash_action", '{"script": "true"}'),
    "an unknown tool": call_tool("nothing", "{}"),
    "deep arguments": call_tool("answer_action", "[" * DEEP),
    "no arguments": call_tool("answer_action", None),
    "no name": call_tool(None, {"answer": ["9" * 5000]}),
    "a broken call": Completion("", {"role": "assistant", "tool_calls": [1, None]}),
    "half a surrogate pair in a call": call_tool("answer_action", {"answer": "\ud800"}),
}


Make = Callable[[Path], tuple[Taskset, Task]]


def named(env_class: str, truth: Any, **extra: Any) -> tuple[Taskset, Task]:
    task = Task(prompt="?", env_class=env_class, reward_spec={"ground_truth": truth}, extra_info=extra)
    return GivenTasks(), task


def built(node: dict[str, Any]) -> tuple[Taskset, Task]:
    taskset = build_taskset(node)
    return taskset, next(taskset.draw(1))


def rows(folder: Path, truth: Any) -> tuple[Taskset, Task]:
    row = {"prompt": [{"role": "user", "content": "?"}], "data_source": "x", "reward_model": {"ground_truth": truth}}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    return built({"id": "rows", "files": [str(folder / "rows.jsonl")]})


def database(folder: Path) -> tuple[Taskset, Task]:
    with sqlite3.connect(folder / "x.sqlite") as opened:
        opened.execute("CREATE TABLE t AS SELECT 5 AS a")
    return named("text2sql", "SELECT a FROM t", db_path=str(folder / "x.sqlite"), data="spider")


def corpus(folder: Path, env_class: str, truth: Any) -> tuple[Taskset, Task]:
    (folder / "corpus.jsonl").write_text('{"id": "1", "contents": "Paris is a city."}\n')
    return named(env_class, truth, corpus=str(folder / "corpus.jsonl"), max_turns=2)


def graph(folder: Path) -> tuple[Taskset, Task]:
    (folder / "links.tsv").write_text("a\tb\nb\tc\nc\td\nd\ta\n")
    return built({"id": "wikispeedia", "graph": str(folder / "links.tsv"), "min_distance": 2, "max_distance": 2})


def machine(folder: Path) -> tuple[Taskset, Task]:
    sample = {"description": "How many?", "evaluation": {"check": [None, "integer-match"], "example": "echo 7"}}
    (folder / "samples.json").write_text(json.dumps([sample]))
    return built({"id": "os-interaction", "data": str(folder / "samples.json"), "command_seconds": 5})


def harbor(folder: Path) -> tuple[Taskset, Task]:
    write_task(folder / "task")
    return built({"id": "harbor", "folder": str(folder)})


def generated(dataset: str) -> Make:
    return lambda folder: built({"id": "reasoning-gym", "dataset": dataset})


ENVIRONMENTS: dict[str, tuple[str, Make]] = {
    "arithmetic": ("so {}", lambda folder: built({"id": "arithmetic"})),
    "reverse-text": ("{} ", lambda folder: built({"id": "reverse-text"})),
    "alphabet-sort": ("1. {}", lambda folder: built({"id": "alphabet-sort"})),
    "rule, a number": ("\\boxed{{{}}}", lambda folder: rows(folder, "5")),
    "rule, a text": ("#### {}", lambda folder: rows(folder, "Paris")),
    "gsm8k": ("#### {}", lambda folder: named("gsm8k", "5")),
    "gsm8k_multi_turn": ("#### {}", lambda folder: named("gsm8k_multi_turn", "5")),
    "aime": ("Answer: {}", lambda folder: named("aime", "204")),
    "text2sql": ("<think>t</think><solution>{}</solution>", database),
    "text2sql, a try": ("<think>t</think><sql>{}</sql>", database),
    "search": ("<answer>{}</answer>", lambda folder: corpus(folder, "search", ["Paris"])),
    "search, a query": ("<search>{}</search>", lambda folder: corpus(folder, "search", ["Paris"])),
    "wikispeedia": ("click {}", graph),
    "textarena": ("[{}]", lambda folder: built({"id": "textarena", "game": "GuessTheNumber-v0"})),
    "reasoning-gym, numbers": ("<answer>{}</answer>", generated("chain_sum")),
    "reasoning-gym, sympy": ("<answer>{}</answer>", generated("polynomial_multiplication")),
    "reasoning-gym, eval": ("<answer>{}</answer>", generated("binary_matrix")),
}
"""Each with how an answer is written there, and how a task of it is made."""
SANDBOXED: dict[str, tuple[str, Make]] = {
    "searchcode": ("<tool><python>{}</python></tool>", lambda folder: corpus(folder, "searchcode", "5")),
    "lcb": ("```python\n{}\n```", lambda folder: named("lcb", [{"input": "5", "output": "25"}])),
    "os-interaction": ("Act: answer({})", machine),
    "os-interaction, a script": ("```bash\n{}\n```", machine),
    "harbor": ("```bash\n{}\n```\nDONE", harbor),
}
QUICK = ("empty", "NUL*", "half a surrogate pair*", "a long run of words", "deep arguments")
"""The answers that environments with a machine are always tried with; with all of them only at length."""


def write_answers(form: str) -> dict[str, Completion]:
    """Each text as it is and in the form that the environment reads."""
    texts = {f"{name}{note}": form.format(text) if note else text for name, text in TEXTS.items() for note in ("", "*")}
    return {name: Completion(text) for name, text in texts.items()} | OTHERS


async def play_all(taskset: Taskset, task: Task, completions: dict[str, Completion]) -> dict[str, Any]:
    """What went otherwise than it should, by the name of the answer."""
    limits = Limits(max_turns=2, timeout=60)
    wrong = {}
    for name, completion in completions.items():
        trace = await run_rollout(taskset, task, Replay([completion] * 2), limits=limits)
        fine = trace.outcome in (Outcome.COMPLETED, Outcome.TRUNCATED) and trace.reward is not None
        if not fine or trace.passed() or trace.warnings:
            wrong[name] = (trace.outcome.value, trace.reward, trace.warnings, trace.failure and trace.failure.message)
    return wrong


@pytest.fixture
def shells() -> None:
    if not (found := probe(shell=True)).available:
        pytest.skip(str(found))


def play_with(make: Make, folder: Path, completions: dict[str, Completion]) -> dict[str, Any]:
    try:
        taskset, task = make(folder)
    except MissingExtraError as error:
        pytest.skip(str(error))
    return asyncio.run(play_all(taskset, task, completions))


@pytest.mark.parametrize("name", ENVIRONMENTS)
@pytest.mark.quick_cases(6)
def test_a_hostile_answer_is_scored_and_earns_nothing(name, tmp_path):
    form, make = ENVIRONMENTS[name]
    assert not play_with(make, tmp_path, write_answers(form))


@pytest.mark.filterwarnings("ignore:.*stands in for the tasks' images")
@pytest.mark.parametrize("name", SANDBOXED)
@pytest.mark.parametrize("half_of_them", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["some", "half"])
@pytest.mark.quick_cases(2)
def test_a_hostile_answer_to_a_machine_is_scored_and_earns_nothing(name, half_of_them, tmp_path, shells):
    form, make = SANDBOXED[name]
    answers = write_answers(form)
    chosen = {**dict(islice(answers.items(), 0, None, 2)), **{key: answers[key] for key in QUICK}}
    assert not play_with(make, tmp_path, chosen if half_of_them else {key: answers[key] for key in QUICK})


BREAKING = {
    "the folder is a file": "cd /; rm -rf /app; echo x > /app",
    "the folder is a FIFO": "cd /; rm -rf /app; mkfifo /app",
    "the folder is a loop": "cd /; rm -rf /app; ln -s /app /app",
    "the folder is locked": "chmod 000 /app",
    "an answer that nobody can read to its end": "mkfifo greetings.txt",
    "a FIFO where the reward is written": "mkdir -p /logs/verifier; mkfifo /logs/verifier/reward.txt",
    "a NUL": "echo \0",
}


@pytest.mark.filterwarnings("ignore:.*stands in for the tasks' images")
@pytest.mark.thorough
def test_a_machine_that_the_policy_left_broken_earns_nothing(tmp_path, shells):
    write_task(tmp_path / "task", toml="[verifier]\ntimeout_sec = 1.0\n")
    taskset, task = built({"id": "harbor", "folder": str(tmp_path)})
    answers = {name: Completion(f"```bash\n{script}\n```\nDONE") for name, script in BREAKING.items()}
    assert not asyncio.run(play_all(taskset, task, answers))


@pytest.mark.filterwarnings("ignore:.*stands in for the tasks' images")
def test_tests_that_give_no_reward_on_a_fresh_machine_either_are_the_tasks_fault(tmp_path, shells):
    write_task(tmp_path / "task", test="#!/bin/bash\nexit 3\n")
    taskset, task = built({"id": "harbor", "folder": str(tmp_path)})
    done = Completion("```bash\ntrue\n```\nDONE")
    trace = asyncio.run(run_rollout(taskset, task, Replay([done])))
    assert (trace.outcome, trace.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert "check tests/test.sh" in trace.failure.message
