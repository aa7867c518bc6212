"""Files of rows checked by every rule: each fault told once, with its rows, and nothing else."""

from __future__ import annotations

import copy
import json
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import faults
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_code

from treetune import Environment, Step
from treetune.cli.app import run as main
from treetune.config.plugins import environments
from treetune.data.rows import read_tasks
from treetune.data.rows.parquet import table_of
from treetune.data.validate import RULES, FilesReport, column_types, validate, validate_dataset
from treetune.data.validate.gold import empty_answer
from treetune.data.validate.prefilter import columns_of, keys_of, prefilter
from treetune.data.validate.prompt_rules import LengthCheck, is_validation, key_of
from treetune.data.validate.row import check_row
from treetune.data.validate.rules import RowContext
from treetune.errors import UsageError

OTHERS = {"prompt-too-long", "template-fails", "environment-fails", "gold-not-rewarded", "gold-unknown"}
OTHERS |= {"gold-said-otherwise", "image-count", "image-unreadable", "image-size", "image-elsewhere"}
"""Rules that need a tokenizer, an environment or images: tested apart."""

WHOLE_FILE = {"unreadable", "no-rows", "unknown-ending", "unsupported-type", "type-differs", "late-types"}

OF_COLUMNS = {*WHOLE_FILE, "null-max-turns", "reread-dates", "mixed-types", "nan-becomes-null"}
"""Rules that need many rows of a kind."""


FORMS = ("answer-form-unsaid", "answer-form-differs", "answer-guessed")
"""Rules for where answers go: tested apart, with whole prompts."""


def told(*files: str | Path, **options: Any) -> dict[str, list[int]]:
    findings = validate([str(file) for file in files], **options).findings
    return {finding.rule: finding.rows for finding in findings if finding.rule not in FORMS}


@pytest.fixture
def paid() -> None:
    """An environment that pays for anything, and one that cannot start."""

    class Paid(Environment):
        @classmethod
        def gold(cls, task: Any) -> str:
            return "gold"

        def step(self, action: Any) -> Step:
            return Step(reward=1.0, done=True)

    class Broken(Paid):
        def __init__(self, task: Any) -> None:
            raise RuntimeError("no licence")

    class Mute(Environment):
        pass

    for id, cls in (("paid", Paid), ("broken", Broken), ("mute", Mute)):
        environments.register(id, cls)


def test_every_rule_has_a_file_that_breaks_it() -> None:
    assert RULES.keys() == faults.FAULTS.keys() | OTHERS | {*FORMS}


@pytest.mark.parametrize("rule", faults.FAULTS)
def test_each_fault_is_told_once_with_its_rows(rule: str, tmp_path: Path) -> None:
    report = validate(faults.files(rule, tmp_path))
    assert [finding.rule for finding in report.findings] == [rule]
    (finding,) = report.findings
    assert finding.severity == RULES[rule].severity
    assert finding.found
    assert finding.expected
    assert finding.remedy
    if rule in WHOLE_FILE:
        assert (finding.rows, finding.count) == ([], 0)
    elif rule == "ground-truth-type":
        assert (finding.rows, finding.count) == ([0, 1, 2, 3], 4)
    elif rule == "reread-dates":
        assert (finding.rows, finding.count) == ([1, 2, 3, 4], 4)
    else:
        assert (finding.rows, finding.count) == ([2 if finding.unit == "line" else 1], 1)


def test_all_faults_of_rows_in_one_file_come_each_once(tmp_path: Path) -> None:
    bad, expected = [], {}
    for rule in faults.FAULTS:
        for file in faults.files(rule, tmp_path) if rule not in OF_COLUMNS else ():
            for one in read_lenient(file):
                bad.append(one)
    path = faults.lines(tmp_path / "all", bad)
    report = validate(str(path))
    found = {finding.rule for finding in report.findings}
    missing = (faults.FAULTS.keys() - OF_COLUMNS - {"train-val-overlap"}) - found
    assert not missing
    assert len(report.findings) == len(found), "one finding for a rule and a file"
    expected = {finding.rule: finding.count for finding in report.findings}
    assert expected["unknown-role"] == expected["no-user-message"] == expected["empty-content"] == 1


def read_lenient(file: str) -> list[dict[str, Any]]:
    if file.endswith(".jsonl"):
        return [json.loads(line) for line in Path(file).read_text().splitlines()]
    return [_without_nulls(one) for one in pq.read_table(file).to_pylist()]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def test_a_million_row_count_and_only_the_first_ten_rows(tmp_path: Path) -> None:
    data = [faults.row(number, env_class="nowhere") for number in range(50)]
    (finding,) = validate(str(faults.parquet(tmp_path / "a", data))).findings
    assert (finding.rows, finding.count) == (list(range(10)), 50)


def test_sound_files_have_no_findings(tmp_path: Path) -> None:
    data = [faults.row(number) for number in range(30)]
    assert told(faults.parquet(tmp_path / "train", data)) == {}
    assert told(faults.lines(tmp_path / "train", data)) == {}


@pytest.mark.parametrize("write", [faults.lines, faults.parquet])
def test_the_same_rows_have_the_same_findings_in_every_kind_of_file(write: Any, tmp_path: Path) -> None:
    data = [
        faults.row(0, env_class="nowhere"),
        faults.row(1, prompt=faults.user("")),
        faults.row(2, prompt=faults.user("[INST] 1")),
        faults.row(3, reward_spec={"method": "rule"}),
        faults.row(4, prompt=faults.user("<｜User｜>")),
        faults.row(5, prompt=faults.user("x < y </s>")),
    ]
    first = 1 if write is faults.lines else 0
    expected = {
        "unknown-env-class": [0],
        "empty-content": [1],
        "missing-ground-truth": [3],
        "special-tokens": [2, 4, 5],
    }
    assert told(write(tmp_path / "a", data)) == {rule: [row + first for row in rows] for rule, rows in expected.items()}


# The prefilter


CONTENTS = st.one_of(
    st.sampled_from(
        ["", " ", "\n\t", "\u2003", "a", "é", "<s>", "a<|im_end|>", "<b>", "[INST]", "<｜x｜>", "<", "[", "<|"]
    ),
    st.text(max_size=20),
    st.none(),
)
MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "assistant", "tool", "human", None]), "content": CONTENTS}
)
ROWS = st.fixed_dictionaries(
    {
        "prompt": st.one_of(st.none(), st.lists(MESSAGES, max_size=3)),
        "env_class": st.sampled_from(["gsm8k", "gsm8k_multi_turn", "aime", "text2sql", "nowhere", None]),
        "reward_spec": st.one_of(
            st.none(), st.fixed_dictionaries({"ground_truth": st.sampled_from(["1", "1,000", "", " ", "-2.5", None])})
        ),
        "extra_info": st.one_of(st.none(), st.just({"a": "b"})),
        "max_turns": st.sampled_from([None, 1, 0]),
    }
)


@given(st.lists(ROWS, min_size=1, max_size=8), st.integers(0, 3))
@settings(max_examples=3 * settings.default.max_examples)
def test_the_prefilter_passes_over_no_faulty_row(rows: list[dict[str, Any]], skip: int) -> None:
    batch = pa.RecordBatch.from_pylist([rows[0]] * skip + rows, schema=SCHEMA).slice(skip)
    check = RowContext("skyrl")
    faulty = [bool(list(check_row(_without_nulls(row), check))) for row in rows]
    look = rows_to_look_at(batch, check)
    assert not [number for number, bad in enumerate(faulty) if bad and not look[number]]


SCHEMA = pa.schema(
    {
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "env_class": pa.string(),
        "reward_spec": pa.struct({"ground_truth": pa.string()}),
        "extra_info": pa.struct({"a": pa.string()}),
        "max_turns": pa.int64(),
    }
)


TEXTS = st.sampled_from(["1", "2", "", " ", "\u2003", "1,000", "Paris", "spider", "bird", None])
TURNS = st.sampled_from([None, 0, 1, 3])
OTHER_ROWS = st.fixed_dictionaries(
    {
        "prompt": st.just(faults.user()),
        "env_class": st.sampled_from(["search", "aime", "text2sql", "gsm8k_multi_turn", "searchcode"]),
        "reward_spec": st.one_of(st.none(), st.fixed_dictionaries({"ground_truth": TEXTS})),
        "reward_model": st.one_of(st.none(), st.fixed_dictionaries({"ground_truth": TEXTS})),
        "db_id": TEXTS,
        "data": TEXTS,
        "max_turns": TURNS,
        "extra_info": st.one_of(st.none(), st.fixed_dictionaries({"max_turns": TURNS})),
    }
)
TARGETS = st.one_of(st.none(), st.lists(TEXTS, max_size=3))


@given(st.lists(st.tuples(OTHER_ROWS, TARGETS), min_size=1, max_size=6), st.booleans(), st.booleans())
@settings(max_examples=3 * settings.default.max_examples)
def test_the_prefilter_passes_over_no_faulty_row_of_any_environment(
    drawn: list[tuple[dict[str, Any], Any]], targets: bool, turns: bool
) -> None:
    rows = [copy.deepcopy(row) for row, _ in drawn]
    for row, (_, target) in zip(rows, drawn, strict=True):
        if targets and row["reward_spec"]:
            row["reward_spec"] = {"ground_truth": {"target": target}}
        if not turns:
            del row["max_turns"]
    schema = OTHER_SCHEMA
    if targets:
        truth = pa.struct({"target": pa.list_(pa.string())})
        place = schema.get_field_index("reward_spec")
        schema = schema.set(place, pa.field("reward_spec", pa.struct({"ground_truth": truth})))
    if not turns:
        schema = schema.remove(schema.get_field_index("max_turns"))
    batch = pa.RecordBatch.from_pylist([rows[0], *rows], schema=schema).slice(1)
    check = RowContext("skyrl")
    look = rows_to_look_at(batch, check)
    pruned = [_without_nulls(row) for row in rows]
    assert not [row for number, row in enumerate(pruned) if list(check_row(row, check)) and not look[number]]


OTHER_SCHEMA = pa.schema(
    {
        "prompt": pa.list_(pa.struct({"role": pa.string(), "content": pa.string()})),
        "env_class": pa.string(),
        "reward_spec": pa.struct({"ground_truth": pa.string()}),
        "reward_model": pa.struct({"ground_truth": pa.string()}),
        "db_id": pa.string(),
        "data": pa.string(),
        "max_turns": pa.int64(),
        "extra_info": pa.struct({"max_turns": pa.int64()}),
    }
)


def rows_to_look_at(batch: pa.RecordBatch, check: RowContext) -> Any:
    columns = columns_of(batch)
    return np.ones(batch.num_rows, np.bool_) if columns is None else prefilter(columns, check)


def test_the_prefilter_points_at_no_sound_row() -> None:
    data = [faults.row(number) for number in range(50)]
    assert not rows_to_look_at(pa.RecordBatch.from_pylist(data), RowContext("skyrl")).any()


@given(st.lists(st.lists(st.text(max_size=10), min_size=1, max_size=3), min_size=1, max_size=6), st.booleans())
def test_prompts_have_the_same_key_in_every_kind_of_file(prompts: list[list[str]], large: bool) -> None:
    data = [faults.row(0, prompt=[{"role": "user", "content": text or "x"} for text in prompt]) for prompt in prompts]
    batch = pa.RecordBatch.from_pylist(data)
    if large:
        message = pa.struct({"role": pa.string(), "content": pa.large_string()})
        prompts_of_large_text = pa.array([row["prompt"] for row in data], pa.list_(message))
        batch = batch.set_column(1, "prompt", prompts_of_large_text)
    columns = columns_of(batch)
    assert columns is not None
    keys = keys_of(columns)
    assert keys is not None
    assert keys.tolist() == [key_of(row["prompt"]) for row in data]
    assert len(set(keys.tolist())) == len({json.dumps(row["prompt"]) for row in data})


# What SkyRL's environments read


CASE = {"input": "5", "output": "25"}


def cases(**changes: Any) -> str:
    return json.dumps([{**CASE, **changes}])


def asked(env_class: str, truth: Any, **changes: Any) -> dict[str, Any]:
    return faults.row(1, env_class=env_class, reward_spec={"ground_truth": truth}, **changes)


SQL = {"db_id": "pets", "data": "spider"}
SOUND = [
    asked("search", {"target": ["Paris", "paris"]}),
    asked("search", {"target": "Paris"}, max_turns=3),
    asked("aime", "1", reward_model={"ground_truth": "1"}),
    asked("aime", 1, reward_model={"ground_truth": "1"}),
    faults.row(1, env_class="aime", reward_spec=..., reward_model={"ground_truth": "x^2"}),
    asked("text2sql", "SELECT 1", **SQL),
    asked("lcb", cases()),
    asked("lcb", json.dumps([{**CASE, "testtype": "functional", "metadata": {"func_name": "f"}}, CASE])),
    asked("searchcode", "12", max_turns=2),
    asked("gsm8k_multi_turn", "12", max_turns="3"),
    asked("gsm8k_multi_turn", "12", extra_info={"max_turns": 3}),
]
FAULTY = [
    ("ground-truth-type", asked("search", ["Paris"])),
    ("ground-truth-type", asked("search", {"target": [7]})),
    ("ground-truth-value", asked("search", {"target": ["\u2003"]})),
    ("ground-truth-type", asked("search", {"target": []})),
    ("bad-max-turns", asked("search", {"target": ["Paris"]}, max_turns="3")),
    ("ground-truth-type", asked("aime", "1", reward_model={"ground_truth": 1})),
    ("ground-truth-value", asked("aime", "1", reward_model={"ground_truth": "2"})),
    ("missing-column", asked("aime", "1")),
    ("wrong-value", asked("text2sql", "SELECT 1", db_id=5, data="spider")),
    ("wrong-value", asked("text2sql", "SELECT 1", db_id="", data="spider")),
    ("wrong-value", asked("text2sql", "SELECT 1", db_id="pets", data="wikisql")),
    ("missing-column", asked("text2sql", "SELECT 1", db_id="pets")),
    ("ground-truth-value", asked("text2sql", " ", **SQL)),
    ("ground-truth-type", asked("lcb", [CASE])),
    ("ground-truth-value", asked("lcb", cases(input=5))),
    ("ground-truth-value", asked("lcb", cases(testtype="functional"))),
    ("ground-truth-value", asked("lcb", cases(testtype="functional", metadata=None))),
    ("ground-truth-value", asked("lcb", "[]")),
    ("ground-truth-value", asked("searchcode", "twelve")),
    ("ground-truth-value", asked("searchcode", ".")),
    ("ground-truth-value", asked("searchcode", "5.5.5")),
    ("ground-truth-free", asked("search", {"target": ["Paris", "a"]})),
    ("ground-truth-free", asked("search", {"target": "..."})),
    ("ground-truth-free", asked("aime", "$", reward_model={"ground_truth": "$"})),
    ("ground-truth-free", asked("lcb", cases(output="\n"))),
    ("wrong-value", asked("gsm8k_multi_turn", "12", extra_info=7)),
    ("wrong-value", asked("gsm8k_multi_turn", "12", extra_info='{"max_turns": 3}')),
    ("missing-column", asked("gsm8k_multi_turn", "12", extra_info=...)),
    ("bad-max-turns", asked("gsm8k_multi_turn", "12", extra_info={"max_turns": 0})),
]


@pytest.mark.parametrize("write", [faults.lines, faults.parquet])
def test_rows_of_every_environment(write: Any, tmp_path: Path) -> None:
    for number, row in enumerate(SOUND):
        assert told(write(tmp_path / f"sound-{number}", [row])) == {}, row
    for number, (rule, row) in enumerate(FAULTY):
        found = told(write(tmp_path / f"faulty-{number}", [row])).keys() - {"extra-info-not-a-mapping"}
        assert found == {rule}, row


def test_turns_that_are_null_in_a_file_that_has_them(tmp_path: Path) -> None:
    with_turns, without = faults.row(0, max_turns=3), faults.row(1, env_class="gsm8k_multi_turn")
    assert told(faults.parquet(tmp_path / "another environment's", [with_turns, without])) == {"null-max-turns": [1]}
    assert told(faults.lines(tmp_path / "lines", [with_turns, without])) == {"null-max-turns": [2]}
    nothing = [{**without, "max_turns": None}]
    assert told(faults.parquet(tmp_path / "all null", nothing)) == {"null-max-turns": [0]}
    some = [{**without, "extra_info": {"max_turns": 3}}, faults.row(2, env_class="gsm8k_multi_turn")]
    assert told(faults.parquet(tmp_path / "inside", some)) == {"null-max-turns": [1]}
    assert told(faults.lines(tmp_path / "absent, not null", some)) == {}


def test_the_prefilter_points_at_faulty_rows_of_every_environment() -> None:
    for rule, row in FAULTY:
        assert rows_to_look_at(pa.RecordBatch.from_pylist([row]), RowContext("skyrl")).all(), (rule, row)


@pytest.mark.parametrize("write", [faults.lines, faults.parquet])
def test_turns_that_only_another_file_has_are_null_here(write: Any, tmp_path: Path) -> None:
    def made(name: str, *rows: Any) -> Path:
        return write(tmp_path / name, list(rows))  # type: ignore[no-any-return]

    several = {"env_class": "gsm8k_multi_turn"}
    first = 1 if write is faults.lines else 0
    without = made("without", faults.row(1), faults.row(2, **several))
    assert told(without) == {}
    for other in (faults.row(3, max_turns=3), faults.row(4, max_turns=None)):
        having = made(f"having-{other['max_turns']}", other)
        assert told(without, having) == told(having, without) == {"null-max-turns": [first + 1]}
        assert told(without, validation=str(having)) == {}, "they are loaded apart"
    inside = made("inside", faults.row(5, extra_info={"index": 1, "split": "a", "max_turns": 3}, **several))
    assert told(without, inside) == {"null-max-turns": [first + 1]}
    one_turn = made("one turn", faults.row(6))
    assert told(one_turn, inside) == {}


def test_mappings_that_differ_in_json_are_given_no_nulls(tmp_path: Path) -> None:
    several = {"env_class": "gsm8k_multi_turn"}
    one = [faults.row(0, extra_info={"max_turns": 3}, **several), faults.row(1, extra_info={"a": 1}, **several)]
    two = [faults.row(2, extra_info={"b": 3}, **several), faults.row(3, extra_info={"a": 1}, **several)]
    assert told(faults.lines(tmp_path / "one", one), faults.lines(tmp_path / "two", two)) == {}


def test_prompts_that_no_parquet_column_holds_are_judged_as_a_trainer_sees_them(tmp_path: Path) -> None:
    data = [faults.row(0), faults.row(1, prompt=faults.user([{"type": "text", "text": "1 + 1?"}]))]
    assert told(faults.lines(tmp_path / "lines", data)) == {}, "`datasets` keeps JSON lines as they are"
    path = tmp_path / "rows.parquet"
    pq.write_table(table_of(data), path)
    assert told(path) == {"prompt-not-messages": [0, 1]}
    assert [task.messages for task in read_tasks(path)] == [row["prompt"] for row in data]


def test_what_the_loader_changes_is_told_wherever_it_stands(tmp_path: Path) -> None:
    def of(*values: Any) -> dict[str, list[int]]:
        rows = [faults.row(number, extra_info={"value": value}) for number, value in enumerate(values)]
        found = told(faults.lines(tmp_path / "inside", rows))
        beside = [faults.row(number, value=value) for number, value in enumerate(values)]
        assert told(faults.lines(tmp_path / "beside", beside)) == found
        return found

    assert of("2024-01-01", "2024-01-02T10:30:00+01:00") == {"reread-dates": [1, 2]}
    assert of({"day": ["2024-01-01"]}) == {"reread-dates": [1]}
    assert of("2024-01-01", "tomorrow") == of("2023-02-29", "2024-13-01") == {}
    assert of({"day": "2024-01-01"}, {"day": "2024-01-02", "hour": 7}) == {}, "kept as JSON: the mappings differ"
    assert of("007", 7) == of("007", {"a": 1}) == {"mixed-types": [1]}
    assert of("a", 7) == of("2024-01-01", 7) == of({"a": "007"}, {"a": 7, "b": 1}) == {}
    assert of(float("nan"), 7) == {}
    assert of(float("nan"), "a") == of({"a": float("inf")}, {}) == {"nan-becomes-null": [1]}
    array = tmp_path / "array.json"
    array.write_text(json.dumps([faults.row(0, value=1.5), faults.row(1, value=float("nan"))]))
    assert told(array) == {"nan-becomes-null": [1]}


def test_parts_of_contents(tmp_path: Path) -> None:
    picture = {"type": "image", "image": "a.png"}
    data = [
        faults.row(0, prompt=faults.user([{"type": "text", "text": "What is it?"}, picture])),
        faults.row(1, prompt=faults.user([{"type": "text", "text": "<|im_start|>"}])),
        faults.row(2, prompt=faults.user([{"text": "no type"}])),
    ]
    assert told(faults.parquet(tmp_path / "a", data)) == {"special-tokens": [1], "content-not-text": [2]}
    assert told(faults.lines(tmp_path / "b", [faults.row(0, prompt=faults.user([1, 2]))])) == {"content-not-text": [1]}


@pytest.mark.parametrize("kind", [pa.uuid(), pa.decimal32(5, 2), pa.list_view(pa.int64()), pa.bool8()], ids=str)
def test_types_that_datasets_does_not_know(kind: Any, tmp_path: Path) -> None:
    table = pa.Table.from_pylist([faults.row(0)])
    path = tmp_path / "a.parquet"
    try:
        pq.write_table(table.append_column("more", pa.nulls(1, kind)), path)
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"this pyarrow cannot write it: {error}")
    assert told(path) == {"unsupported-type": []}


# Several files


def test_a_validation_file_inside_the_folder_is_taken_out_of_it(tmp_path: Path) -> None:
    data = [faults.row(number) for number in range(3)]
    faults.parquet(tmp_path / "a", data)
    held_out = faults.parquet(tmp_path / "held_out", data)
    assert told(tmp_path, validation=str(held_out)) == {"train-val-overlap": [0, 1, 2]}
    with raises_code("usage", "--val"):
        validate(str(held_out), validation=str(held_out))


def test_a_folder_for_tests_may_hold_the_training_file(tmp_path: Path) -> None:
    folder = tmp_path / "test"
    folder.mkdir()
    for name in ("train", "validation"):
        faults.parquet(folder / name, [faults.row(0)])
    assert told(folder) == {"train-val-overlap": [0]}
    assert is_validation("data/test/a.parquet")
    assert is_validation("constraint_test.jsonl")
    assert is_validation("openai/gsm8k@main:test")
    assert not is_validation("latest.parquet")


def test_a_file_that_is_named_twice_is_read_once(tmp_path: Path) -> None:
    path = faults.parquet(tmp_path / "a", [faults.row(0), faults.row(1, env_class="nowhere")])
    report = validate([str(path), str(path), str(tmp_path)])
    assert (report.rows, report.files) == (2, [str(path)])
    assert [finding.count for finding in report.findings] == [1]


def test_types_may_differ_between_training_and_validation(tmp_path: Path) -> None:
    train, other = faults.files("type-differs", tmp_path)
    assert told(train, validation=other) == {}


@pytest.mark.parametrize("write", [faults.lines, faults.parquet])
def test_nulls_before_a_mapping_do_not_fit(write: Any, tmp_path: Path) -> None:
    def made(name: str, notes: Any) -> Path:
        return write(tmp_path / name, [faults.row(len(name), notes=notes)])  # type: ignore[no-any-return]

    null, mapping, more = made("a", None), made("bb", {"by": "Ann"}), made("ccc", {"by": "Ben"})
    assert told(null, mapping) == {"type-differs": []}
    assert told(mapping, null, more) == {}
    nothing, text, texts = made("dddd", []), made("eeeee", "Ann"), made("ffffff", ["Ann"])
    assert told(nothing, texts) == {}
    assert told(nothing, text) == {"type-differs": []}


def test_later_blocks_of_lines_must_fit_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_types, "BLOCK", 1000)
    rows = [faults.row(number, extra_info={"index": number, "note": None}) for number in range(20)]
    assert told(faults.lines(tmp_path / "same", rows)) == {}

    def last(**changes: Any) -> list[str]:
        row = faults.row(20, **{"extra_info": {"index": 20, "note": None}, **changes})
        path = faults.lines(tmp_path / "last", [*rows, row])
        return [finding.found for finding in validate(str(path)).findings if finding.rule == "late-types"]

    assert last(ability="sums") == ["ability first appears in line 21"]
    assert last(ability=None) == ["ability first appears in line 21"]
    assert last(extra_info={"index": 1, "more": 1}) == ["extra_info.more first appears in line 21"]
    assert last(extra_info={"index": 1.5}) == [
        "extra_info.index is float, integer in the whole file, but int64 at first"
    ]
    assert last(extra_info={"note": "a"}) == ["extra_info.note is text in the whole file, but null at first"]
    assert last(prompt=faults.user(name="Ann")) == ["prompt[].name first appears in line 21"]
    assert last(data_source=7) == last(data_source=...) == last(extra_info={}) == []
    path = faults.lines(
        tmp_path / "json", [faults.row(30, extra_info={"other": 1}), *rows, faults.row(20, extra_info={"more": 1})]
    )
    assert told(path) == {}, "mappings that differ from the start are kept as JSON"


def test_the_first_rows_are_told_whatever_the_order(tmp_path: Path) -> None:
    report = FilesReport()
    for number in (20, 5, *range(30, 50), 1):
        report.add("gold-not-rewarded", "a", "found", [number])
    (finding,) = report.findings
    assert (finding.rows, finding.count) == ([1, 5, 20, *range(30, 37)], 23)


def test_prompts_of_validation_files_are_looked_for_in_the_training_files(tmp_path: Path) -> None:
    train = faults.parquet(tmp_path / "some", [faults.row(number) for number in range(20)])
    held_out = faults.lines(tmp_path / "others", [faults.row(number) for number in range(15, 25)])
    assert told(train, held_out) == {"duplicate-prompts": [1, 2, 3, 4, 5]}
    report = validate(str(train), validation=str(held_out))
    assert [(finding.rule, finding.file, finding.count) for finding in report.findings] == [
        ("train-val-overlap", str(held_out), 5)
    ]


def test_types_that_the_loader_would_not_put_together(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([faults.row(number) for number in range(4)])
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    pq.write_table(table, one)
    pq.write_table(table.set_column(2, "env_class", table["env_class"].cast(pa.large_string())), two)
    report = validate([str(one), str(two)])
    found = {finding.rule: finding.found for finding in report.findings}
    assert found["type-differs"] == f"env_class (large_string and string): the latter in {one}"
    more_keys = [faults.row(number, extra_info={"index": number, "split": "a", "more": 1}) for number in range(8, 12)]
    assert told(one, faults.parquet(tmp_path / "three", more_keys)) == {}


def test_a_damaged_file_among_others_hides_nothing(tmp_path: Path) -> None:
    bad = faults.files("unreadable", tmp_path)
    other = faults.files("unknown-role", tmp_path)
    assert told(*bad, *other) == {"unreadable": [], "unknown-role": [1]}


def test_lines_after_a_broken_one_are_checked(tmp_path: Path) -> None:
    path = faults.lines(tmp_path / "a", [faults.row(0), faults.row(1), faults.row(2, env_class="nowhere")])
    text = path.read_text().splitlines()
    path.write_text("\n".join([text[0], text[1][:-5], '{"a": 1, "a": 2}', text[2]]))
    assert told(path) == {"unreadable": [2, 3], "unknown-env-class": [4]}


TWICE = rb"""{"a": 1, "a": 2}
{"note": "{\"x\":1}", "a": 1, "a": 2}
{"a\\": 1, "a\\": 2}
{"a\"": "\":", "a\"": 2}
{"a": {"b": 1, "b": 2}, "note": "\":"}
"""
ONCE = rb"""{"note": "{\"x\":1,\"x\":2}"}
{"a\\": "\"", "b\"": "\":"}
{"a": {"b": "{\"c\" : 1}"}, "b": {"a": 1}}
"""


def test_a_key_that_comes_twice_is_seen_beside_text_that_looks_like_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(TWICE + ONCE)
    assert told(path)["unreadable"] == [1, 2, 3, 4, 5]


def test_text_that_is_no_unicode_is_told_by_row(tmp_path: Path) -> None:
    data = [faults.row(number) for number in range(5)]
    path = faults.parquet(tmp_path / "a", data)
    table = pq.read_table(path)
    sources = pa.array([b"sums", b"sums", b"\xff\xfe", b"sums", b"sums"])
    bad = pa.Array.from_buffers(pa.string(), 5, sources.buffers())
    pq.write_table(table.set_column(0, "data_source", bad), path)
    assert told(path) == {"unreadable": [2]}


def test_quick_reads_no_contents(tmp_path: Path) -> None:
    data = [faults.row(0, prompt=faults.user("<|im_start|>")), faults.row(1, prompt=faults.user(role="human"))]
    path = faults.parquet(tmp_path / "a", [*data, faults.row(2, env_class="nowhere")])
    assert told(path, quick=True) == {"unknown-role": [1], "unknown-env-class": [2]}
    assert told(faults.parquet(tmp_path / "b", [faults.row(3)]), quick=True) == {}
    several = [faults.row(number, env_class="gsm8k_multi_turn") for number in range(3)]
    assert told(faults.parquet(tmp_path / "c", several), quick=True) == {}
    for rule in ("prompt-not-messages", "missing-role"):
        prompt = "1 + 1?" if rule == "prompt-not-messages" else faults.user(role=...)
        assert told(faults.parquet(tmp_path / "d", [faults.row(0, prompt=prompt)]), quick=True) == {rule: [0]}


def test_environments_that_are_registered_elsewhere_can_be_named(tmp_path: Path) -> None:
    path = faults.parquet(tmp_path / "a", [faults.row(0, env_class="divide")])
    assert told(path) == {"unknown-env-class": [0]}
    assert told(path, environments=["divide"]) == {}


def test_rows_of_verl_and_trl(tmp_path: Path) -> None:
    def verl(number: int, **changes: Any) -> dict[str, Any]:
        reward = {"style": "rule", "ground_truth": "1"}
        return faults.row(number, **{"reward_spec": ..., "env_class": ..., "reward_model": reward, **changes})

    assert told(faults.parquet(tmp_path / "a", [verl(0), verl(1)])) == {}
    bad = [verl(0), verl(1, reward_model=...), verl(2, reward_model={"style": "rule"})]
    assert told(faults.parquet(tmp_path / "b", bad)) == {"missing-reward-spec": [1], "missing-ground-truth": [2]}
    blank = [verl(0), verl(1, reward_model={"style": "rule", "ground_truth": " "})]
    assert told(faults.parquet(tmp_path / "blank", blank)) == {"ground-truth-value": [1]}
    trl = [faults.row(n, reward_spec=..., env_class=..., ground_truth="1") for n in range(2)]
    assert told(faults.parquet(tmp_path / "c", trl)) == {}


# Tokens


class Letters:
    """A tokenizer of letters, whose template wants a user at the end."""

    chat_template = "..."
    all_special_tokens = ("<go>",)

    def apply_chat_template(self, prompt: Any, **options: Any) -> list[int]:
        assert options == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        if prompt[-1]["role"] != "user":
            raise ValueError("a user must come last")
        return list(map(ord, "".join(message["content"] for message in prompt) + "<"))


@pytest.mark.parametrize("write", [faults.lines, faults.parquet])
def test_prompts_are_rendered_and_counted(write: Any, tmp_path: Path) -> None:
    data = [
        faults.row(0, prompt=faults.user("x" * 9)),
        faults.row(1, prompt=faults.user("x" * 10)),
        faults.row(2, prompt=[*faults.user("a"), {"role": "tool", "content": "b"}]),
        faults.row(3, prompt=faults.user("a <go> b")),
        faults.row(4, prompt=faults.user("</s>")),
    ]
    first = 1 if write is faults.lines else 0
    expected = {"prompt-too-long": [1], "template-fails": [2], "rare-role": [2], "special-tokens": [3]}
    found = told(write(tmp_path / "a", data), lengths=LengthCheck(Letters(), 10))
    assert found == {rule: [row + first for row in rows] for rule, rows in expected.items()}


def test_a_tokenizer_without_special_tokens_or_without_a_template(tmp_path: Path) -> None:
    tokenizer = Letters()
    tokenizer.all_special_tokens = ()
    path = faults.parquet(tmp_path / "a", [faults.row(0, prompt=faults.user("<s>"))])
    assert told(path, lengths=LengthCheck(tokenizer, 10)) == {}
    tokenizer.chat_template = None
    with pytest.raises(UsageError, match="no chat template"):
        LengthCheck(tokenizer, 10)


# Gold answers


def test_gold_answers_are_tried_with_wrong_ones(tmp_path: Path, paid: None, capsys: Any) -> None:
    data = [
        faults.row(0),
        faults.row(1, env_class="paid"),
        faults.row(2, env_class="broken"),
        faults.row(3, env_class="mute"),
        faults.row(4, prompt=faults.user("Say #### 5")),
        faults.row(5),
    ]
    path = faults.parquet(tmp_path / "a", data)
    assert main(["validate", str(path), "--gold", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    findings = {finding["rule"]: finding for finding in result["findings"]}
    assert {rule: finding["rows"] for rule, finding in findings.items()} == {
        "gold-not-rewarded": [1, 4],
        "environment-fails": [2],
        "gold-unknown": [3],
    }
    assert "no licence" in findings["environment-fails"]["found"]
    assert result["gold_checked"] == 4


@pytest.mark.parametrize(
    ("gold", "truth", "empty"),
    [
        ("<think>So.</think><answer>Paris</answer>", {"target": ["Paris"]}, "<think>So.</think><answer></answer>"),
        ("#### 42", 42, "#### "),
        ("#### 42", 42.0, "#### "),
        ("Answer: x^2", "x^2", "Answer: "),
        ("So:\n```python\nprint(1)\n```\n", [{"input": "1", "output": "1"}], "So:\n```python\n```\n"),
        (["look", "<answer>a</answer>"], "a", ["look", "<answer></answer>"]),
        ("b, a", ["x"], None),
        ([], "a", None),
    ],
)
def test_an_answer_is_emptied_in_its_format(gold: Any, truth: Any, empty: Any) -> None:
    assert empty_answer(gold, truth) == empty


def test_an_environment_that_pays_for_the_format_is_found(tmp_path: Path, capsys: Any) -> None:
    class Format(Environment):
        @classmethod
        def gold(cls, task: Any) -> str:
            return f"<answer>{task.ground_truth}</answer>"

        def step(self, action: Any) -> Step:
            said = action.text.removeprefix("<answer>").removesuffix("</answer>")
            return Step(reward=float("<answer>" in action.text and said in ("", self.task.ground_truth)), done=True)

    environments.register("pays-for-format", Format)
    path = faults.parquet(tmp_path / "a", [faults.row(0, env_class="pays-for-format")])
    assert main(["validate", str(path), "--gold", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["found"] == "the gold answer earns 1, an empty answer in the format 1"


def test_an_environment_that_pays_for_two_guesses_is_found(tmp_path: Path, capsys: Any) -> None:
    class PaysForAny(Environment):
        @classmethod
        def gold(cls, task: Any) -> str:
            return str(task.ground_truth)

        def step(self, action: Any) -> Step:
            return Step(reward=float(self.task.ground_truth in action.text.split()), done=True)

    class PaysForLast(PaysForAny):
        def step(self, action: Any) -> Step:
            return Step(reward=float([self.task.ground_truth] == action.text.split()[-1:]), done=True)

    environments.register("pays-for-any", PaysForAny)
    environments.register("pays-for-last", PaysForLast)
    rows = [faults.row(number, env_class=name) for number, name in enumerate(("pays-for-any", "pays-for-last"), 5)]
    path = faults.parquet(tmp_path / "a", [{**row, "prompt": faults.user("?")} for row in rows])
    assert main(["validate", str(path), "--gold", "--json"]) == 1
    (finding,) = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["severity"] == "error"]
    assert (finding["rows"], finding["rule"]) == ([0], "gold-not-rewarded")
    assert "next to a wrong one, in either order" in finding["found"]


def test_a_query_that_any_query_without_rows_answers_is_found(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    file = tmp_path / "pets" / "pets.sqlite"
    file.parent.mkdir()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE pet (name TEXT)")
    connection.close()
    monkeypatch.setenv("TREETUNE_TEXT2SQL_DB", str(tmp_path))
    sql = [asked("text2sql", truth, **SQL) for truth in ("SELECT name FROM pet", "SELECT count(*) FROM pet")]
    asks = "<solution>?"
    path = faults.lines(tmp_path / "a", [{**row, "prompt": faults.user(f"{n} {asks}")} for n, row in enumerate(sql)])
    assert main(["validate", str(path), "--gold", "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["rows"], finding["found"]) == ([1], "the gold answer earns 1, a query without rows 1")


def test_what_is_right_in_another_row_and_what_a_prompt_shows_are_no_wrong_answers(tmp_path: Path, capsys: Any) -> None:
    paris = [{"target": ["Paris"]}, {"target": ["London", "Paris"]}, {"target": ["paris!"]}]
    rows = [asked("search", truth, prompt=faults.user(f"{n}? <answer>")) for n, truth in enumerate(paris)]
    shown = "Say <answer>Paris</answer> if it is Paris."
    rows.append(asked("search", {"target": ["Paris"]}, prompt=faults.user(shown)))
    path = faults.lines(tmp_path / "a", rows)
    assert main(["validate", str(path), "--gold", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["findings"], result["gold_checked"]) == ([], 4)


# Fixing


def test_what_can_be_fixed_safely_is(tmp_path: Path, capsys: Any) -> None:
    data = [
        faults.row(0, reward_spec={"ground_truth": 1}),
        faults.row(1, reward_spec={"ground_truth": "1,000"}),
        faults.row(2, prompt="3 + 1? ####"),
        faults.row(3, prompt=faults.user("4 + 1? ####", role="Human")),
        faults.row(4, prompt=[{"from": "human", "value": "5 + 1? ####"}]),
        faults.row(5, env_class="aime"),
        faults.row(6, env_class="gsm8k_multi_turn", extra_info={"max_turns": 2}),
        faults.row(7, env_class="gsm8k_multi_turn", extra_info=...),
        faults.row(8),
    ]
    path, out = faults.lines(tmp_path / "bad", data), tmp_path / "good.parquet"
    assert main(["validate", str(path), "--fix", str(out), "--json"]) == 1
    fixed = json.loads(capsys.readouterr().out)["fixed"]
    assert (fixed["rows"], fixed["left_out"], fixed["valid"], fixed["findings"]) == (9, [], True, [])
    assert told(out) == {}
    tasks = list(read_tasks(out))
    assert [task.ground_truth for task in tasks[:2]] == [1, "1000"]
    assert tasks[8] == next(iter(read_tasks(faults.lines(tmp_path / "same", data[8:]))))
    assert main(["validate", str(path), "--fix", str(out)]) == 2, "nothing is overwritten unasked"


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_that_cannot_be_fixed_are_left_out_and_named(kind: str, tmp_path: Path, capsys: Any) -> None:
    two = faults.row(3, env_class="aime", reward_model={"ground_truth": "5"})
    rows = [faults.row(0), faults.row(1, prompt=5), faults.row(2, prompt=...), two]
    rows += [faults.row(n, reward_spec={"ground_truth": float("nan")}) for n in range(4, 16)]
    path, out = faults.lines(tmp_path / "bad", rows), tmp_path / f"good.{kind}"
    main(["validate", str(path), "--fix", str(out), "--json"])
    fixed = json.loads(capsys.readouterr().out)["fixed"]
    assert (fixed["rows"], fixed["valid"]) == (1, True)
    assert {left["why"]: (left["file"], left["unit"], left["rows"], left["count"]) for left in fixed["left_out"]} == {
        "prompt is a int, expected a list of messages": (str(path), "line", [2], 1),
        "no prompt": (str(path), "line", [3], 1),
        "two ground truths": (str(path), "line", [4], 1),
        "a ground truth that is not a number": (str(path), "line", list(range(5, 15)), 12),
    }
    main(["validate", str(path), "--fix", str(out), "--force"])
    printed = capsys.readouterr().out
    assert f"{out}: 1 row, 0 of them fixed; valid" in printed
    assert (
        f"left out, a ground truth that is not a number: {path}, 12 lines (5, 6, 7, 8, 9, 10, 11, 12, 13, 14, ...)"
        in printed
    )


@pytest.mark.parametrize("bad", [["gsm8k"], {"a": 1}, 7, True])
def test_rows_with_values_of_any_type_are_told_and_left_out(bad: Any, tmp_path: Path, capsys: Any) -> None:
    columns = ("prompt", "env_class", "reward_spec", "extra_info", "data_source", "ability", "db_id", "max_turns")
    for number, column in enumerate(columns):
        rows = [faults.row(0), faults.row(1, prompt="1?")]
        rows[1] |= {"env_class": "gsm8k_multi_turn", "reward_spec": {"ground_truth": 2}, column: bad}
        path = faults.lines(tmp_path / f"{number}", rows)
        main(["validate", str(path), "--gold", "--fix", str(tmp_path / f"{number}.parquet"), "--json"])
        fixed = json.loads(capsys.readouterr().out)["fixed"]
        assert fixed["rows"] + sum(left["count"] for left in fixed["left_out"]) == 2, column


def test_what_fixing_left_faulty_is_told(tmp_path: Path, capsys: Any) -> None:
    rows = [faults.row(0, prompt="1?"), faults.row(1, reward_spec={"ground_truth": "twelve"})]
    path, out = faults.lines(tmp_path / "bad", rows), tmp_path / "good.parquet"
    main(["validate", str(path), "--fix", str(out)])
    printed = capsys.readouterr().out
    assert f"{out}: 2 rows, 1 of them fixed; not valid yet" in printed
    assert "left as it is, ground-truth-value: row 1: gsm8k reads" in printed


def test_a_file_of_which_no_row_is_left_is_not_written(tmp_path: Path, capsys: Any) -> None:
    path, out = faults.lines(tmp_path / "bad", [faults.row(0, prompt=5)]), tmp_path / "good.parquet"
    assert main(["validate", str(path), "--fix", str(out)]) == 1
    printed = capsys.readouterr().out
    assert "prompt-not-messages" in printed
    assert f"{out} was not written: no row is left" in printed
    assert not out.exists()


def test_fixing_is_advised_only_where_it_helps(tmp_path: Path) -> None:
    def advised(*rows: Any) -> bool:
        finding, *others = validate(str(faults.lines(tmp_path / "a", list(rows)))).findings
        assert [other.rule for other in others] in ([], ["duplicate-prompts"])
        return "--fix" in finding.remedy

    assert advised(faults.row(0, prompt=faults.user(role="Human")))
    assert not advised(faults.row(0, prompt=faults.user(role="narrator")))
    assert advised(faults.row(0, prompt=faults.user(role="narrator")), faults.row(1, prompt=faults.user(role="gpt")))
    assert advised(faults.row(0, reward_spec={"ground_truth": "1,000"}))
    assert not advised(faults.row(0, reward_spec={"ground_truth": "twelve"}))
    assert not advised(faults.row(0, prompt=faults.user({"a": 1})))
    assert not advised(*_sql_row())
    assert not advised(faults.row(0, prompt=faults.user("7 ####")), faults.row(1, prompt=faults.user([PART])))


PART = {"type": "text", "text": "?"}


def _sql_row() -> list[Any]:
    return [asked("text2sql", "SELECT 1", db_id="pets")]


@pytest.mark.parametrize("inside", [False, True])
def test_turns_that_only_some_rows_have_are_filled_in(inside: bool, tmp_path: Path) -> None:
    several = {"env_class": "gsm8k_multi_turn"}
    turns: Any = {"extra_info": {"index": 1, "max_turns": 3}} if inside else {"max_turns": 3}
    files = [
        str(faults.parquet(tmp_path / "a", [faults.row(0, **several), faults.row(1)])),
        str(faults.parquet(tmp_path / "b", [faults.row(2, **several, **turns)])),
    ]
    assert told(*files) == {"null-max-turns": [0]}
    out = tmp_path / "good.parquet"
    assert main(["validate", *files, "--fix", str(out)]) == 1
    assert told(out) == {}


def test_fixed_rows_keep_their_format(tmp_path: Path, capsys: Any) -> None:
    reward = {"style": "rule", "ground_truth": "1"}
    data = [faults.row(0, prompt=faults.user(role="human"), reward_spec=..., env_class=..., reward_model=reward)]
    path, out = faults.lines(tmp_path / "verl", data), tmp_path / "out.jsonl"
    main(["validate", str(path), "--fix", str(out)])
    assert "out.jsonl: 1 row, 1 of them fixed; valid" in capsys.readouterr().out
    (row,) = map(json.loads, out.read_text().splitlines())
    assert (row["reward_model"], row["prompt"]) == (reward, faults.user())
    assert "reward_spec" not in row


# The command line and the function


def test_it_says_that_no_gold_answer_was_tried(tmp_path: Path, capsys: Any) -> None:
    path = faults.lines(tmp_path / "a", [faults.row(0, env_class="mine:Own")])
    main(["validate", str(path), "--gold"])
    assert "1 row in 1 file, no gold answer tried" in capsys.readouterr().out


def test_help_shows_how_hub_datasets_are_named(capsys: Any) -> None:
    main(["validate", "--help"])
    assert "name[@config][:split]" in capsys.readouterr().out


def test_the_command_says_what_is_wrong_and_ends_with_1(tmp_path: Path, capsys: Any) -> None:
    path = faults.files("unknown-env-class", tmp_path)
    assert main(["validate", *path]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "unknown-env-class" in shown
    assert "did you mean 'gsm8k'" in shown
    assert "Not valid: 4 rows in 1 file, 1 error" in shown
    assert main(["validate", *faults.files("duplicate-prompts", tmp_path)]) == 0, "a warning is not an error"


def test_wrong_usage_is_told(tmp_path: Path, capsys: Any) -> None:
    (path,) = faults.files("unknown-role", tmp_path)
    for arguments in (
        [path, "arithmetic", "--quick", "--gold"],
        ["arithmetic", "--quick"],
        ["arithmetic", "reverse-text"],
        [path, "--taskset.level", "3"],
        [path, "--qick"],
        [str(tmp_path / "absent.parquet")],
        [path, "--format", "verll"],
        [path, "-n", "5"],
        [path, "--split", "train", "--resume"],
        [path, "--max-prompt-length", "5"],
        [path, "--force"],
        [path, "--fix", str(tmp_path / "out.txt")],
        [path, "--val", path],
        ["arithmetic", "--max-prompt-length", "5"],
        [*faults.files("train-val-overlap", tmp_path), "--fix", str(tmp_path / "out.parquet")],
    ):
        assert main(["validate", *arguments]) == 2, arguments
    assert "no such option: --qick; did you mean --quick?" in capsys.readouterr().err


def test_validate_dataset_prints_and_gives_the_report(tmp_path: Path, capsys: Any) -> None:
    report = validate_dataset(str(faults.parquet(tmp_path / "a", [faults.row(0)])))
    assert report.ok
    assert "Dataset valid! 1 row in 1 file" in capsys.readouterr().out
    assert not validate_dataset(faults.files("unknown-role", tmp_path)).ok


def test_the_docs_list_every_rule() -> None:
    text = (Path(__file__).parents[2] / "docs" / "data-format.md").read_text()
    listed = set(re.findall(r"^\| `([a-z-]+)` \|", text, re.MULTILINE))
    assert RULES.keys() <= listed


def test_keys_of_many_prompts_are_spread() -> None:
    keys = {key_of([{"role": "user", "content": str(np.int64(number))}]) for number in range(10_000)}
    assert len(keys) == 10_000


def test_a_sound_file_is_checked_without_pandas(tmp_path):
    """Arrow imports it for many small calls: a fifth of a second, in a command that takes half of one."""
    pytest.importorskip("pandas")
    spec = {"method": "rule", "ground_truth": "2"}
    prompts = [[{"role": "user", "content": f"{number} + {2 - number}?"}] for number in range(2000)]
    rows = [{"prompt": prompt, "env_class": "gsm8k", "reward_spec": spec} for prompt in prompts]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    look = (
        "import sys; from treetune.data.validate import validate; "
        "print(validate(sys.argv[1]).ok, 'pandas' in sys.modules)"
    )
    command = [sys.executable, "-c", look, str(tmp_path / "rows.parquet")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True False\n"


@pytest.mark.parametrize("check", [validate, validate_dataset])
def test_no_files_are_not_valid(check):
    with raises_code("usage", "file"):
        check([])
