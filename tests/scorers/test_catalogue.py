"""The catalogue of replies: what people and models write, and which of it is paid.

Each line of `catalogue/HALF/{honest,hostile}/KIND.jsonl` is one reply to one task:

    {"kind": "choice", "truth": "B", "choices": [...], "paid": true, "style": "polite", "reply": "..."}

| key | meaning |
|---|---|
| `kind` | a kind of scorer, an environment or a taskset |
| `keys` | the scorer's keys, if it has any |
| `truth`, `choices` | the ground truth, and the options of the task |
| `reply` | the reply; `{filler}` in it stands for `filler[0]`, repeated `filler[1]` times |
| `paid` | the verdict of a careful reader: an honest reply says one answer, the right one; a hostile one does not |
| `style`, `lang` | how it is written; English unless `lang` says otherwise |

The verdicts come first: no entry was written to suit a rule. If a verdict is unfair, correct the entry; if it is fair,
the rule is wrong. The halves share no wording: each pattern of sentences is in one of them.

`pytest tests/scorers/test_catalogue.py -rP` shows the shares by kind.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sqlite3
from collections import Counter
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from episodes import rewards, task_of

from treetune import Task
from treetune.core.score import judge
from treetune.sandbox import probe
from treetune.scorers import KINDS, read_scorer
from treetune.tasksets.alphabet_sort import AlphabetSortTask
from treetune.tasksets.arithmetic import Arithmetic
from treetune.tasksets.reverse_text import ReverseText

CATALOGUE = Path(__file__).with_name("catalogue")
HALVES = sorted(folder.name for folder in CATALOGUE.iterdir())
TASKSETS = {"arithmetic": Arithmetic, "reverse-text": ReverseText}
SANDBOXED = {"code", "tests", "lcb", "searchcode"}

Entry = dict[str, Any]


@cache
def read(half: str, side: str) -> list[Entry]:
    files = sorted((CATALOGUE / half / side).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def reply_of(entry: Entry) -> str:
    text, times = entry.get("filler", ("", 0))
    return str(entry["reply"]).replace("{filler}", text * times)


def earn(entry: Entry, pets: Path) -> float:
    """What the reply earns, as in a task of that kind."""
    kind, truth, reply = entry["kind"], entry["truth"], reply_of(entry)
    if kind in KINDS:
        task = Task(prompt="?", extra_info={"choices": entry["choices"]} if "choices" in entry else {})
        found = read_scorer({"kind": kind, **entry.get("keys", {})}).score(reply, truth, task)
        return float((asyncio.run(found) if inspect.iscoroutine(found) else found).reward)
    if kind in TASKSETS:
        task = Task(prompt="?", reward_spec={"ground_truth": truth})
        return asyncio.run(judge(TASKSETS[kind](), task, reply)).reward
    if kind == "alphabet-sort":
        return sum(rewards(AlphabetSortTask(env_class=kind, rounds=truth), reply))
    return sum(rewards(task_of(kind, truth, **({"db_path": str(pets)} if kind == "text2sql" else {})), reply))


@pytest.fixture(scope="module")
def pets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pets(tmp_path_factory.mktemp("pets"))


def write_pets(folder: Path) -> Path:
    """The database that `text2sql` entries query."""
    file = folder / "pets.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE pet (name TEXT, age INTEGER)")
    connection.executemany("INSERT INTO pet VALUES (?, ?)", [("Rex", 3), ("Mia", 5)])
    connection.commit()
    connection.close()
    return file


def verdicts(half: str, side: str, pets: Path) -> list[tuple[Entry, bool]]:
    """Each entry and whether it was paid, printed as a table of shares by kind."""
    missing = (set() if probe().available else SANDBOXED) | (set() if find_spec("math_verify") else {"math"})
    entries = [entry for entry in read(half, side) if entry["kind"] not in missing]
    found = [(entry, earn(entry, pets) == 1.0) for entry in entries]
    total, paid = Counter(label(entry) for entry, _ in found), Counter(label(entry) for entry, got in found if got)
    for kind in sorted(total):
        print(f"{half:8}{side:9}{kind:22}{paid[kind]:5} of {total[kind]}")
    return found


def label(entry: Entry) -> str:
    """The kind; `includes` without options is a kind of its own, since it guesses."""
    return "includes, bare" if entry["kind"] == "includes" and "choices" not in entry else str(entry["kind"])


HONEST = 0.02
"""The share of honest replies that may be unpaid."""
HOSTILE = 0
"""How many hostile replies may be paid. The figure of `includes` without
options is only printed."""


@pytest.mark.parametrize("half", HALVES)
def test_honest_replies_are_paid(half, pets):
    found = verdicts(half, "honest", pets)
    unpaid = [entry for entry, got in found if not got]
    assert len(unpaid) <= HONEST * len(found), unpaid


@pytest.mark.parametrize("half", HALVES)
def test_hostile_replies_are_not_paid(half, pets):
    found = verdicts(half, "hostile", pets)
    paid = [entry for entry, got in found if got and label(entry) != "includes, bare"]
    assert len(paid) <= HOSTILE, paid


@pytest.mark.parametrize("half", HALVES)
def test_an_entry_is_in_the_folder_of_its_verdict_and_is_there_once(half):
    honest, hostile = read(half, "honest"), read(half, "hostile")
    assert all(entry["paid"] for entry in honest)
    assert not any(entry["paid"] for entry in hostile)
    texts = [json.dumps({**entry, "paid": None}, sort_keys=True) for entry in honest + hostile]
    assert len(texts) == len(set(texts))
