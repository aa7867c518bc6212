"""The options of multiple-choice rows, however a dataset stores them."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune.core.from_config import build_taskset
from treetune.data.datasets.choices import Choices
from treetune.data.datasets.config import ChoicesConfig

PAIR = ["yes", "no"]


def made(row, **config):
    return Choices(ChoicesConfig(**config), list(row)).of(row)


@pytest.mark.parametrize(
    ("choices", "answer", "letter"),
    [
        (PAIR, 1, "B"),
        (PAIR, 0, "A"),
        (PAIR, "B", "B"),
        (PAIR, " A ", "A"),
        (PAIR, "no", "B"),
        (PAIR, 2, None),
        (PAIR, -1, None),
        (PAIR, True, None),
        (PAIR, None, None),
        (PAIR, "", None),
        (PAIR, "maybe", None),
        (["no", "no"], "no", None),
        (["B", "A"], "B", "B"),
        ({"text": PAIR, "label": ["1", "2"]}, "2", "B"),
        ({"text": PAIR, "label": ["1", "2"]}, 1, "A"),
        ({"text": PAIR, "label": ["B", "A"]}, "B", "A"),
        ({"text": PAIR, "label": ["A", "B"]}, "no", "B"),
        ([], 0, None),
        (["only"], 0, None),
        (None, 0, None),
        (["x"] * 27, 0, None),
    ],
)
def test_the_right_option_is_found_by_number_letter_label_or_text(choices, answer, letter):
    assert made({"of": choices, "is": answer}, column="of", answer="is")["letter"] == letter


def test_options_are_lines_with_letters_and_their_texts():
    row = {"of": {"text": [" trout", "whale "], "label": ["1", "2"]}, "is": "2"}
    assert made(row, column="of", answer="is") == {
        "options": "A) trout\nB) whale",
        "letter": "B",
        "choices": ["trout", "whale"],
    }


texts = st.lists(st.text(min_size=1).map(str.strip).filter(bool), min_size=2, max_size=6, unique=True)


@given(texts)
def test_shuffled_options_are_the_same_ones_and_the_right_one_stays_right(options):
    row = {str(number): text for number, text in enumerate(options)}
    config = {"columns": list(row), "answer": "0"}
    shuffled = made(row, **config, shuffle=True)
    assert sorted(shuffled["choices"]) == sorted(options)
    assert shuffled["choices"]["ABCDEF".index(shuffled["letter"])] == options[0]
    backwards = {str(number): text for number, text in enumerate([options[0], *options[:0:-1]])}
    assert made(backwards, **config, shuffle=True) == shuffled  # the order of the columns decides nothing


def test_a_row_that_lacks_an_option_or_has_one_twice_has_no_right_one():
    config = {"columns": ["a", "b"], "answer": "a", "shuffle": True}
    assert made({"a": "x", "b": None}, **config)["letter"] is None
    assert made({"a": "x", "b": "x "}, **config)["letter"] is None


@pytest.mark.parametrize(
    ("choices", "answer", "problem"),
    [
        (PAIR, 1, None),
        (PAIR, 2, "choices.answer 2 is not an option (numbers count from 0)"),
        (PAIR, 1.0, None),
        (["0.5", "1.0"], 1.0, None),
        (PAIR, 2.0, "choices.answer 2.0 is not an option (numbers count from 0)"),
        (
            PAIR,
            "1",
            "choices.answer '1' is not an option (a text of digits is not a number: leave out the quotes)",
        ),
        (PAIR, "maybe", "choices.answer 'maybe' is not an option (it is a number from 0, a letter or a text)"),
        (PAIR, None, "choices.answer None is not an option (it is a number from 0, a letter or a text)"),
        (["no", "no"], "no", "choices.answer 'no' matches several options"),
        ({"text": PAIR, "label": ["1", "2"]}, 3, "choices.answer 3 is not an option (there are 1, 2)"),
        (["only"], 0, "of does not have 2 to 26 options: ['only']"),
        (None, 0, "of does not have 2 to 26 options: None"),
    ],
)
def test_a_row_without_a_right_option_says_why(choices, answer, problem):
    row = {"of": choices, "is": answer}
    assert Choices(ChoicesConfig(column="of", answer="is"), list(row)).problem(row) == problem


def test_options_in_columns_that_cannot_be_told_apart_say_so():
    choices = Choices(ChoicesConfig(columns=["a", "b"], answer="a"), ["a", "b"])
    assert choices.problem({"a": "x", "b": None}) == "b is None"
    assert choices.problem({"a": "x", "b": "x "}) == "two of choices.columns have the same text"


def test_every_fault_of_the_key_is_told():
    with raises_code("config", "choices.column", "'option'", "'options'"):
        Choices(ChoicesConfig(column="option", answer="is"), ["options", "is"])
    with raises_code("config", "`column`"):
        Choices(ChoicesConfig(answer="is"), ["is"])
    with raises_code("config", "`columns`", "choices.answer"):
        Choices(ChoicesConfig(columns=["a", "b"], answer="is"), ["a", "b", "is"])


def test_tables_and_rows_give_the_same():
    rows = [{"of": PAIR, "is": 1, "options": "replaced"}, {"of": PAIR, "is": 5, "options": ""}]
    choices = Choices(ChoicesConfig(column="of", answer="is"), list(rows[0]))
    assert choices.add(pa.Table.from_pylist(rows)).to_pylist() == choices.add(rows)


def test_a_task_shows_the_options_and_leaves_out_rows_without_a_right_one(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": "Sure?", "of": PAIR, "is": answer}) + "\n" for answer in (1, 7)))
    node = {
        "id": "dataset",
        "loading_params": {"args": ["json"], "kwargs": {"data_files": str(file), "split": "train"}},
        "choices": {"column": "of", "answer": "is"},
        "prompt_template": "{q}\n{options}",
        "ground_truth": "letter",
        "scorer": "choice",
        "extra_fields": ["choices"],
    }
    taskset = build_taskset(node)
    with pytest.warns(UserWarning, match="1 row dropped: no ground truth; row 1: choices.answer 7 is not an option"):
        assert taskset.count() == 1
    assert taskset[0].messages[0]["content"] == "Sure?\nA) yes\nB) no"
    assert (taskset[0].ground_truth, taskset[0].extra_info["choices"]) == ("B", PAIR)


@pytest.mark.parametrize(
    "keys",
    [
        {"choices": {"column": "choices", "answer": "is"}, "ground_truth": "letter", "scorer": "choice"},
        {"ground_truth": "is", "scorer": {"kind": "choice", "choices": "choices", "truth": "index"}},
    ],
    ids=["made by the key", "a column of that name"],
)
def test_options_reach_the_scorer_without_being_named_twice(tmp_path, monkeypatch, keys):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"q": "Which is a mammal?", "choices": ["trout", "whale"], "is": 1}) + "\n")
    loading = {"args": ["json"], "kwargs": {"data_files": str(file), "split": "train"}}
    taskset = build_taskset({"id": "dataset", "loading_params": loading, "prompt_template": "{q}", **keys})
    with pytest.warns(UserWarning, match="without their options") if "choices" in keys else nullcontext():
        task = taskset[0]
    paid = {"B": 1.0, "It is the whale.": 1.0, "A": 0.0, "It is the trout.": 0.0, "The trout or the whale": 0.0}
    assert {said: taskset.reward(task, said).reward for said in paid} == paid
