"""Replies of real models and reference solutions, each with the verdict of its authors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from treetune import Task
from treetune.scorers import read_scorer
from treetune.tasksets.gsm8k import Gsm8kEnvironment

DATA = Path(os.environ.get("TREETUNE_TEST_DATA", Path(__file__).parents[3] / "shared" / "data"))


def read(file: str) -> list[dict[str, Any]]:
    if not (DATA / file).is_file():
        pytest.skip(f"no {file} in TREETUNE_TEST_DATA")
    return [json.loads(line) for line in (DATA / file).read_text().splitlines()]


def test_of_the_replies_that_say_their_option_the_right_ones_are_paid():
    scorer, unpaid, wrongly_paid = read_scorer("choice"), [], []
    for row in read("replies/mmlu_pro.jsonl"):
        paid = scorer.score(row["reply"], row["answer"], Task(extra_info={"choices": row["options"]})).reward == 1
        if row["said"] == row["answer"] and not paid:
            unpaid.append(row["reply"])
        elif row["said"] not in (None, row["answer"]) and paid:
            wrongly_paid.append(row["reply"])
    assert wrongly_paid == []
    assert len(unpaid) <= 3, unpaid


@pytest.mark.parametrize("kind", ["number", "rule"])
def test_solutions_of_models_earn_what_their_authors_say(kind):
    scorer = read_scorer(kind)
    rows = read("replies/gsm8k.jsonl")
    assert [row for row in rows if bool(scorer.score(row["reply"], str(row["answer"])).reward) != row["right"]] == []


@pytest.mark.parametrize("kind", ["number", "rule", "gsm8k"])
@pytest.mark.parametrize("file", ["gsm8k/train.jsonl", "gsm8k/test.jsonl"])
def test_reference_solutions_are_right(kind, file):
    unpaid = []
    for row in read(file):
        truth = row["answer"].rpartition("#### ")[2].replace(",", "")
        if kind == "gsm8k":
            task = Task(prompt="?", env_class="gsm8k", ground_truth=truth)
            _, right, why = Gsm8kEnvironment(task).judge(row["answer"])
        else:
            score = read_scorer(kind).score(row["answer"], truth)
            right, why = score.reward == 1, score.explanation
        if not right:
            unpaid.append((why, row["answer"]))
    assert unpaid == []
