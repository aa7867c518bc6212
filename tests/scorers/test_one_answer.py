"""No reply is right for two different ground truths: a reply that hedges earns no more than one that guesses.

`includes` and `f1` are apart: they compare a part of a statement. `rule` compares numbers or words, as the type of the
ground truth says; two truths of one type are compared here.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_catalogue import HALVES, read, reply_of

from treetune import Task
from treetune.scorers import read_scorer
from treetune.scorers.reading.numerals import read_number
from treetune.scorers.reading.wording import same

TOWNS = Task(extra_info={"choices": ["London", "Paris", "Rome", "Berlin"]})
POOLS: dict[str, list[str]] = {
    "number": ["5", "6", "-5", "1000", "0.5", "11"],
    "rule": ["Paris", "London", "not Paris", "Paris or London", "Paris, London"],
    "exact": ["5", "6", "Paris", "London", "A", "Rome, Paris"],
    "choice": ["A", "B", "C", "D"],
}
KINDS: dict[str, tuple[Any, list[str]]] = {
    **{kind: (kind, pool) for kind, pool in POOLS.items()},
    "number after ####": ({"kind": "number", "answer": "hash"}, POOLS["number"]),
    "text in a tag": ({"kind": "exact", "answer": {"tag": "answer"}}, POOLS["exact"]),
    "option in a line": ({"kind": "choice", "answer": {"line": "Answer:"}}, POOLS["choice"]),
    "pattern": ({"kind": "pattern", "pattern": r"answer is (\S+)"}, POOLS["number"]),
    "json": ("json", POOLS["number"]),
    "math": ("math", ["5", "6", "-5", "1000", "11"]),
}
VALUES = ["5", "6", "-5", "1,000", "11", "Paris", "London", "Rome", "A", "(B)", "**C**", "D.", "x = 5", "$6$", "5 or 6"]
AROUND = [
    "The answer is {}.", "Answer: {}", "\\boxed{{{}}}", "<answer>{}</answer>", "#### {}", "It is not {}.", "{}",
    "{} is wrong.",
    "I'd go with {}.", "That leaves {}.", "So it must be {}.", "Maybe {}?", "Wait, {}.", "- {}", "**{}**", "{}, not {}",
    "not {} but {}", "{} or {}", "{}, because {} is wrong", "between {} and {}", "{} = {}", "Final answer: {} ({})",
    "答案是{}。", "Die Antwort ist {}.", "Either {} or {}.", "{} and {}", "{}; {}", "{}\n{}", "<think>{}</think>{}",
]  # fmt: skip


def earn(kind: Any, reply: str, truth: str, task: Task) -> bool:
    found = read_scorer(kind).score(reply, truth, task)
    return bool((asyncio.run(found) if inspect.iscoroutine(found) else found).reward == 1)


def different(paid: list[str]) -> list[str]:
    """The truths that are not the same as the first one."""
    return [one for one in paid[1:] if not same(one, paid[0]) and read_number(one) != (read_number(paid[0]) or one)]


@st.composite
def replies(draw: st.DrawFn) -> str:
    pieces = []
    for pattern in draw(st.lists(st.sampled_from(AROUND), min_size=1, max_size=4)):
        values = [draw(st.sampled_from(VALUES)) for _ in range(pattern.count("{}"))]
        pieces.append(pattern.format(*values))
    return draw(st.sampled_from([" ", "\n", "\n\n", ", "])).join(pieces)


@pytest.mark.parametrize("kind", KINDS)
@given(reply=replies())
def test_no_generated_reply_is_right_for_two_truths(kind, reply):
    if kind == "math":
        pytest.importorskip("math_verify")
    config, truths = KINDS[kind]
    assert different([truth for truth in truths if earn(config, reply, truth, TOWNS)]) == []


@pytest.mark.parametrize("half", HALVES)
def test_no_reply_of_the_catalogue_is_right_for_two_truths(half):
    for entry in (*read(half, "honest"), *read(half, "hostile")):
        if entry["kind"] not in POOLS or "keys" in entry or isinstance(entry["truth"], list):
            continue
        reply = reply_of(entry)
        options = entry.get("choices")
        if entry["kind"] == "choice":
            truths = [chr(ord("A") + number) for number in range(len(options or "ABCD"))]
        else:
            truths = [str(entry["truth"]), *dict.fromkeys(re.findall(r"-?[\d.,]*\d|\w+", reply))][:40]
        if entry["kind"] != "exact" and not options:
            is_number = read_number(truths[0]) is not None
            truths = [one for one in truths if (read_number(one) is not None) == is_number]
        task = Task(extra_info={"choices": options} if options else {})
        paid = [truth for truth in truths if earn(entry["kind"], reply, truth, task)]
        assert different(paid) == [], reply
