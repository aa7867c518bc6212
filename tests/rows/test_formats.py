"""Rows of verl, SkyRL and TRL in parquet, JSON and JSON lines: read as written, written so that nothing is lost."""

from __future__ import annotations

import datetime
import gzip
import json
import os
import subprocess
import sys
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub import Hub, make_gsm8k
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from raising import raises_code

from treetune import Environment, Task
from treetune.config.plugins import environments
from treetune.core.environment import Kind, Stored, TaskRequirements
from treetune.data.arrow_values import JSON_FIELDS, drop_nulls
from treetune.data.rows import read_rows, read_tables, read_tasks
from treetune.data.rows.formats import FORMATS, IN_PARQUET, detect
from treetune.data.validate import write_tasks as write_sound_tasks
from treetune.errors import EmptyTasksetError, TreetuneError, UsageError


def write_tasks(*given: Any, **options: Any) -> int:
    """Tasks of any kind, which nothing could be trained on."""
    return write_sound_tasks(*given, check=False, **options)


KINDS = ("parquet", "json", "jsonl")


class Texts(Environment):
    REQUIREMENTS = TaskRequirements(about="as text", takes=(Kind.TEXT, Kind.NUMBER), stored=Stored.TEXT)


class Models(Environment):
    REQUIREMENTS = TaskRequirements(about="as aime", takes=(Kind.TEXT,), stored=Stored.TEXT, column="reward_model")


class Targets(Environment):
    REQUIREMENTS = TaskRequirements(about="search", takes=(Kind.LIST,), stored=Stored.TARGET, needs={"place": "where"})


class Cases(Environment):
    REQUIREMENTS = TaskRequirements(about="as lcb", takes=(Kind.CASES,), stored=Stored.JSON)


for stand_in in (Texts, Models, Targets, Cases):
    environments.register(f"formats_{stand_in.__name__.lower()}", stand_in)
ENVIRONMENTS = [
    None,
    "unheard_of",
    "text2sql",
    *(f"formats_{name}" for name in ("texts", "models", "targets", "cases")),
]


# Round trips

NUMBERS = [0, 1, 7, True, False, 2**70, -(2**70), 2**63 - 1, 1e22, -0.0, 0.1, 1.0, 5e-324, 2.0**53]
AWKWARD = [
    *NUMBERS,
    None,
    "",
    "007",
    "null",
    "true",
    "2024-01-01",
    "1e5",
    "é𝒳\u2028\n",
    "{}",
    {},
    [],
    [[]],
    [{}],
    [None],
]
leaves = (
    st.sampled_from(AWKWARD) | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
KEYS = ["a", "b", "a.b", "", "uid", "env_class", "scorer", "treetune", "row_json", "style", "index", "prompt", "é"]
keys = st.sampled_from(KEYS) | st.text(max_size=3)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=8
)
calls = st.lists(
    st.fixed_dictionaries({"id": st.text(max_size=3), "function": st.dictionaries(keys, leaves, max_size=2)}),
    max_size=2,
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": st.none() | st.text(max_size=5) | parts, "name": st.text(max_size=3), "tool_calls": calls},
    ),
    max_size=3,
)
specs = st.fixed_dictionaries(
    {},
    optional={"ground_truth": values, "method": st.sampled_from(["rule", "model", None]), "style": leaves, "": leaves},
)
tasks = st.builds(
    Task,
    prompt=st.none() | st.text(max_size=9) | messages,
    data_source=st.sampled_from(["", "unknown", "spider", "é"]),
    env_class=st.sampled_from(ENVIRONMENTS),
    reward_spec=specs | st.dictionaries(keys, values, max_size=3),
    ability=st.none() | st.sampled_from(["math", ""]),
    extra_info=st.dictionaries(keys, values, max_size=4),
)


def exact(task: Task) -> str:
    """All of a task, in a form that tells 1 from 1.0 and True; a key that is None counts as absent."""
    fields = {name: drop_nulls(getattr(task, name)) for name in task.__struct_fields__}
    return json.dumps(fields, sort_keys=True) + task.uid


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(tasks, min_size=1, max_size=5), st.permutations(["verl", "skyrl", "trl"]), st.permutations(KINDS))
def test_a_chain_of_formats_and_files_gives_equal_tasks(tmp_path_factory, given, formats, kinds):
    folder = tmp_path_factory.mktemp("chain")
    chained = given
    for format, kind in [*zip(formats, kinds, strict=True), ("nemo-gym", "jsonl"), (formats[0], kinds[0])]:
        path = folder / f"{format}.{kind}"
        assert write_tasks(chained, path, format, scorer="rule") == len(given)
        chained = list(read_tasks(path, format))
        assert [exact(task) for task in chained] == [exact(task) for task in given]
        assert [exact(task) for task in read_tasks(path)] == [exact(task) for task in given]


@example(Task(extra_info={"uid": None}))
@given(tasks)
def test_a_row_in_memory_gives_its_task_in_every_format(task):
    for format in FORMATS.values():
        row = format.row_of(task)
        assert exact(format.task_of(row)) == exact(task)
        own = task.extra_info.get("uid")
        assert row["extra_info"]["uid"] == (task.uid if own is None else own)


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=settings.default.max_examples // 2, suppress_health_check=[HealthCheck.too_slow])
@example(
    [Task(reward_spec={"ground_truth": 1}), Task(), Task(extra_info={"index": []}, reward_spec={"ground_truth": [1]})]
)
@given(st.lists(tasks, min_size=2, max_size=8))
def test_a_parquet_file_grows_over_batches_without_changing_a_value(tmp_path_factory, given):
    import treetune.data.rows.writing as writing

    path = tmp_path_factory.mktemp("grow") / "rows.parquet"
    before, writing.BATCH = writing.BATCH, 2
    try:
        write_tasks(given, path, "skyrl", scorer="rule")
    finally:
        writing.BATCH = before
    assert [exact(task) for task in read_tasks(path)] == [exact(task) for task in given]


# What trainers get


def skyrl_row(truth: Any, env_class: str, **more: Any) -> dict[str, Any]:
    spec = {"method": "rule", "ground_truth": truth}
    return FORMATS["skyrl"].row_of(Task(prompt="?", env_class=env_class, reward_spec=spec, **more))


@pytest.mark.parametrize(
    ("env_class", "truth", "stored"),
    [
        ("formats_texts", 42, "42"),
        ("formats_texts", "42", "42"),
        ("formats_targets", ["Paris", "paris"], {"target": ["Paris", "paris"]}),
        ("formats_cases", [{"input": "5", "output": "25"}], '[{"input":"5","output":"25"}]'),
        ("unheard_of", 42, 42),
    ],
)
def test_a_contract_decides_how_a_ground_truth_is_stored_and_the_original_comes_back(
    tmp_path, env_class, truth, stored
):
    row = skyrl_row(truth, env_class)
    assert row["reward_spec"] == {"method": "rule", "ground_truth": stored}
    assert FORMATS["skyrl"].task_of(row).ground_truth == truth
    for kind in KINDS:
        path = tmp_path / f"rows.{kind}"
        write_tasks([FORMATS["skyrl"].task_of(row)], path, "skyrl", scorer="rule")
        (read,) = read_rows(path)
        assert read["reward_spec"]["ground_truth"] == stored
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist()[0]["reward_spec"]["ground_truth"] == stored


def test_columns_that_an_environment_reads_are_added_and_taken_away_again():
    row = skyrl_row(7, "formats_models")
    assert row["reward_model"] == {"style": "rule", "ground_truth": "7"}
    assert FORMATS["skyrl"].task_of(row).extra_info == {}
    task = Task(prompt="?", env_class="text2sql", data_source="spider", extra_info={"db_id": "cars"})
    row = FORMATS["skyrl"].row_of(task)
    assert (row["db_id"], row["data"]) == ("cars", "spider")
    assert FORMATS["skyrl"].task_of(row).extra_info == {"db_id": "cars"}
    assert skyrl_row(["x"], "formats_targets", extra_info={"place": "here"})["place"] == "here"


def test_verl_rows_have_text_truths_and_say_how_they_are_scored():
    row = FORMATS["verl"].row_of(Task(prompt="1 + 1?", reward_spec={"method": "rule", "ground_truth": 2}))
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert row["extra_info"]["scorer"] == "rule"
    row = FORMATS["verl"].row_of(Task(prompt="?", env_class="gsm8k"))
    assert row["extra_info"]["scorer"] == "env:gsm8k"
    assert json.loads(row["extra_info"]["row_json"])["prompt"] == row["prompt"]
    assert row["reward_model"]["style"] == "rule"


def test_what_only_the_trainer_of_a_file_reads_survives_the_others(tmp_path):
    row = {
        "data_source": "d", "prompt": [{"role": "user", "content": "?"}], "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": "5"},
        "extra_info": {"index": 3, "scorer": '{"id":"mine"}', "agent_name": "another", "uid": "my own"},
    }  # fmt: skip
    (tmp_path / "in.jsonl").write_text(json.dumps(row))
    chained = tmp_path / "in.jsonl"
    for number, format in enumerate(["skyrl", "trl", "verl"]):
        out = tmp_path / f"{number}.parquet"
        write_tasks(read_tasks(chained), out, format)
        chained = out
    (back,) = read_rows(chained)
    assert (back["agent_name"], back["extra_info"]["agent_name"]) == ("tool_agent", "another")
    assert (back["reward_model"], back["extra_info"]["scorer"]) == (row["reward_model"], '{"id":"mine"}')
    (task,) = read_tasks(chained)
    assert (task.extra_info["uid"], task.extra_info["index"]) == ("my own", 3)


def test_ground_truths_of_mixed_types_become_text_that_trainers_can_compare_with(tmp_path):
    truths = ["5", ["5", "five"], 2**70, {"a": {}}]
    given = [Task(prompt="?", reward_spec={"method": "rule", "ground_truth": truth}) for truth in truths]
    with pytest.warns(UserWarning, match="several types"):
        write_tasks(given, tmp_path / "rows.parquet", "trl", scorer="rule")
    stored = pq.read_table(tmp_path / "rows.parquet")["ground_truth"].to_pylist()
    assert stored == ["5", '["5","five"]', str(2**70), '{"a":{}}']
    assert list(read_tasks(tmp_path / "rows.parquet")) == given


def test_plain_rows_have_plain_columns_and_no_notes(tmp_path):
    prompt = [{"role": "user", "content": "1 + 1?"}]
    spec = {"method": "rule", "ground_truth": "2"}
    given = [Task(prompt=prompt, env_class="gsm8k", reward_spec=spec, extra_info={"index": 0, "level": 1.5})]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_tasks(given, tmp_path / "rows.parquet", "skyrl", scorer="rule")
    schema = pq.read_schema(tmp_path / "rows.parquet")
    assert {field.name: field.type for field in schema.field("prompt").type.value_type} == {
        "role": pa.string(),
        "content": pa.string(),
    }
    assert {field.name for field in schema.field("extra_info").type} == {"uid", "index", "level"}
    assert JSON_FIELDS not in (schema.metadata or {})


def test_prompts_that_parquet_cannot_hold_are_warned_about(tmp_path):
    content = [{"role": "user", "content": "?"}, {"role": "user", "content": [{"type": "text", "text": "?"}]}]
    with pytest.warns(UserWarning, match="jsonl"):
        write_tasks([Task(prompt=content)], tmp_path / "rows.parquet", "verl", scorer="rule")
    assert next(read_tasks(tmp_path / "rows.parquet")).prompt == content


# Reading


def test_files_of_all_kinds_combine_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / "data"
    (folder / "deep").mkdir(parents=True)
    (folder / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"n": "b0"}\r\n\r\n  \n{"n": "b1", "x": null}')
    (folder / "a.json").write_text('[{"n": "a0"},\n {"n": "a1"}]')
    (folder / "deep" / "one.json").write_text('{\n"n": "one"}')
    (folder / "deep" / "lines.json").write_text('{"n": "l0"}\n{"n": "l1"}\n')
    (folder / ".hidden.jsonl").write_text("{")
    (folder / "README.md").write_text("no rows")
    pq.write_table(pa.table({"n": ["p0", "p1"], "x": pa.array([None, 1])}), folder / "c.parquet")

    def names(*sources: str) -> list[str]:
        return [row["n"] for row in read_rows(list(sources))]

    everything = ["a0", "a1", "b0", "b1", "p0", "p1", "l0", "l1", "one"]
    assert names("data") == names("~/data") == names("data/**") == everything
    assert names("data/*.json*", "data/c.parquet") == ["a0", "a1", "b0", "b1", "p0", "p1"]
    assert [row for row in read_rows(folder) if "x" in row] == [{"n": "p1", "x": 1}]
    assert sum(table.num_rows for table in read_tables("data")) == len(everything)


def test_values_are_as_written(tmp_path):
    row = '{"a": "007", "b": "true", "c": "null", "d": "2024-01-01", "e": 1180591620717411303424, "f": 1e22, "g": 1.0}'
    (tmp_path / "rows.jsonl").write_text(row + '\n{"a": 7, "e": -0.0, "h": {"i": null, "j": [null]}}\n')
    first, second = read_rows(tmp_path / "rows.jsonl")
    assert json.dumps(first) == json.dumps(json.loads(row))
    assert repr(second) == "{'a': 7, 'e': -0.0, 'h': {'j': [None]}}"
    (table,) = read_tables(tmp_path / "rows.jsonl")
    assert sorted(json.loads(table.schema.metadata[JSON_FIELDS])) == ["a", "e"]


def test_parquet_nulls_that_fill_up_are_absent(tmp_path):
    rows = [{"m": [{"r": "a"}, {"r": "b", "n": None}]}, {"m": [{"r": "c", "n": "x"}, None]}, {"m": None}, {"m": []}]
    column = pa.chunked_array([pa.array([row["m"] for row in rows]).slice(0, 2), pa.array([r["m"] for r in rows])[2:]])
    dictionary = pa.array(["u", "v", "u", "v"]).dictionary_encode()
    pq.write_table(pa.table({"m": column, "d": dictionary, "s": pa.array([{"k": 1}, None, {"k": None}, {}])}),
                   tmp_path / "rows.parquet", row_group_size=3)  # fmt: skip
    assert list(read_rows(tmp_path / "rows.parquet")) == [
        {"m": [{"r": "a"}, {"r": "b"}], "d": "u", "s": {"k": 1}},
        {"m": [{"r": "c", "n": "x"}, None], "d": "v"},
        {"d": "u", "s": {}},
        {"m": [], "d": "v", "s": {}},
    ]


def test_json_columns_of_the_datasets_library_are_values(tmp_path):
    column = pa.array(["7", '{"a":null,"b":[1]}', "007", None]).cast(pa.json_())
    pq.write_table(pa.table({"n": [0, 1, 2, 3], "j": column}), tmp_path / "rows.parquet")
    rows = list(read_rows(tmp_path / "rows.parquet"))
    assert [row.get("j") for row in rows] == [7, {"b": [1]}, "007", None]


@pytest.mark.thorough
def test_large_files_keep_their_order_over_batches(tmp_path):
    given = [Task(prompt=str(n), extra_info={"n": n}) for n in range(25_003)]
    for kind in KINDS:
        assert write_tasks(iter(given), tmp_path / f"rows.{kind}", "verl", scorer="rule") == len(given)
        assert list(read_tasks(tmp_path / f"rows.{kind}")) == given


FAULTS = [
    ("rows.jsonl", b'{"a": 1}\n\n{"a": }\n', "rows.jsonl, line 3: "),
    ("rows.jsonl", b'{"a": 1}\n[1]\n', "rows.jsonl, line 2: .*array"),
    ("rows.jsonl", b'{"a": 1}\n{"a": 1,}\n', "rows.jsonl, line 2: .*trailing comma"),
    ("rows.jsonl", b'{"a": NaNa}', "rows.jsonl, line 1: "),
    ("rows.jsonl", b'# file: rows.jsonl\n{"a": 1}\n', "rows.jsonl, line 1: .*invalid character"),
    ("rows.jsonl", b'{"a": 1}\n  // the second\n{"a": 2}\n', "rows.jsonl, line 2: .*invalid character"),
    ("rows.jsonl", b'{"a": "\xff"}', "rows.jsonl, line 1: "),
    ("rows.jsonl", b'{"a": 1}\n{"a": 2', "rows.jsonl, line 2: "),
    ("rows.json", b'[{"a": 1},\n 7]', "rows.json, row 1: "),
    ("rows.json", b'[{"a": 1},\n{"b": 2},\n]', "rows.json, line 3: .*trailing comma"),
    ("rows.json", b"", "rows.json is empty"),
    ("rows.json", b"[", "rows.json"),
    ("rows.parquet", b"", "rows.parquet cannot be read as parquet"),
    ("rows.parquet", b"PAR1 no PAR1", "rows.parquet cannot be read as parquet"),
]


@pytest.mark.parametrize(("name", "content", "said"), FAULTS)
def test_a_fault_is_told_with_its_file_and_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TreetuneError, match=said):
        list(read_rows(tmp_path / name))


def test_a_truncated_parquet_file_is_told(tmp_path):
    path = tmp_path / "rows.parquet"
    write_tasks([Task(prompt=str(n)) for n in range(100)], path, "trl", scorer="rule")
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes(200) + whole[300:])
    with raises_code("unreadable", "rows.parquet"):
        list(read_rows(path))


def compressed(content: bytes, ending: str) -> bytes:
    return gzip.compress(content) if ending == "gz" else pa.Codec("zstd").compress(content, asbytes=True)


@pytest.mark.parametrize("ending", ["gz", "zst", "GZ"])
def test_compressed_files_of_json_are_read(ending, tmp_path):
    rows = [{"prompt": f"{number}?", "ground_truth": "x" * number} for number in range(2500)]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    halves = [compressed(part, ending.lower()) for part in (text[:20_001], text[20_001:])]
    (tmp_path / f"rows.jsonl.{ending}").write_bytes(b"".join(halves))  # as `cat` and loggers write them
    (tmp_path / f"rows.json.{ending}").write_bytes(compressed(json.dumps(rows).encode(), ending.lower()))
    (tmp_path / f"rows.parquet.{ending}").write_bytes(b"")
    for source in (f"rows.jsonl.{ending}", f"rows.json.{ending}", "*.jsonl*"):
        assert list(read_rows(tmp_path / source)) == rows
    assert len(list(read_rows(tmp_path))) == 5000, "parquet compresses itself"
    (tmp_path / f"rows.jsonl.{ending}").write_bytes(halves[0][:-20])
    with raises_code("unreadable", f"rows.jsonl.{ending}"):
        list(read_rows(tmp_path / f"rows.jsonl.{ending}"))
    with raises_code("usage", "out.parquet"):
        write_tasks([Task(prompt="?")], tmp_path / f"out.jsonl.{ending}", "trl", scorer="rule")


@pytest.mark.parametrize("indent", [None, 1])
def test_what_python_writes_for_nan_is_read(indent, tmp_path):
    rows = [{"a": float("nan"), "b": "NaN"}, {"a": [float("inf"), {"c": -float("inf")}]}, {"a": 2**70}]
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=indent))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind in ("json", "jsonl"):
        assert repr(list(read_rows(tmp_path / f"rows.{kind}"))) == repr(rows)
    for broken in ('[{"a": NaN},]', '[{"a": NaN} {}]', '[{"a": NaN}', '[{"a": NaNa}]', '[{"a": NaN}] 1'):
        (tmp_path / "broken.json").write_text(broken)
        with raises_code("unreadable", "broken.json"):
            list(read_rows(tmp_path / "broken.json"))


def test_a_row_that_is_no_task_is_told_with_its_place(tmp_path):
    path = tmp_path / "rows.jsonl"
    for row, said in [
        ({"prompt": 5}, "line 2: prompt is a int, expected a list of messages"),
        ({"prompt": "?", "extra_info": "x"}, "line 2: extra_info is a str, expected a mapping"),
        ({"prompt": "?", "reward_spec": [1]}, "line 2: reward_spec is a list"),
        ({"question": "?"}, "line 2: these are not rows of tasks"),
        ({"prompt": "?", "reward_spec": {}, "ground_truth": 1}, "line 2: .*several formats: skyrl, trl"),
    ]:
        path.write_text(json.dumps({"prompt": "fine"}) + "\n" + json.dumps(row))
        with pytest.raises(TreetuneError, match=said):
            list(read_tasks(path))


def test_formats_are_told_by_their_columns():
    assert detect(["prompt", "reward_model", "extra_info"]).name == "verl"
    assert detect(["prompt", "env_class", "reward_model"]).name == "skyrl"
    assert detect(["prompt", "reward_spec"]).name == "skyrl"
    assert detect(["prompt", "ground_truth"]).name == "trl"
    with raises_code("usage", "reward_model, ground_truth"):
        detect(["prompt", "reward_model", "ground_truth"])


@pytest.mark.parametrize("source", ["nothing.jsonl", "./nothing", "none/*.json", "a/b/c"])
def test_a_path_that_is_not_there_asks_no_hub(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with raises_code("usage", source):
        list(read_rows(source))


@pytest.mark.thorough
def test_a_dataset_is_read_by_its_hub_name(tmp_path):
    train = [{"question": f"{n}?", "answer": "007"} for n in range(5)]
    make_gsm8k(tmp_path / "hub", train, train[:2])
    code = (
        "import json; from treetune.data.rows import read_rows, read_tables\n"
        "rows = [list(read_rows(name)) for name in ('openai/gsm8k@main', 'openai/gsm8k@main:test')]\n"
        "tables = [table.num_rows for table in read_tables('openai/gsm8k@main')]\n"
        "try: list(read_rows('openai/gsm9k'))\n"
        "except Exception as error: said = str(error)\n"
        "print(json.dumps([*rows, tables, said]))"
    )
    with Hub(tmp_path / "hub") as hub:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=90,
            env={**os.environ, **hub.environment(tmp_path / "home")},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second, tables, said = json.loads(done.stdout)
    assert (first, second, tables) == (train, train[:2], [5])
    assert "'openai/gsm9k' is neither a file here nor a dataset on the hub" in said


# Writing


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    def failing() -> Any:
        yield Task(prompt="?")
        raise TreetuneError("broke")

    for kind in KINDS:
        path = tmp_path / f"rows.{kind}"
        path.write_text("before")
        with raises_code("failed", "broke"):
            write_tasks(failing(), path, "verl", scorer="rule")
        with pytest.raises(EmptyTasksetError):
            write_tasks([], path, "verl")
        assert path.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"rows.{kind}" for kind in sorted(KINDS)]


def test_what_cannot_be_written_is_said(tmp_path):
    with raises_code("unknown-name", "'verl'"):
        write_tasks([], tmp_path / "rows.jsonl", "verll")
    with raises_code("usage", "rows.tsv", "*.parquet"):
        write_tasks([], tmp_path / "rows.tsv", "verl")
    (tmp_path / "file").touch()
    with raises_code("storage", "rows.jsonl"):
        write_tasks([Task()], tmp_path / "file" / "rows.jsonl", "verl", scorer="rule")
    for bad in ("\ud800", float("nan")):
        with raises_code("taskset", "task 1"):
            write_tasks([Task(), Task(extra_info={"x": bad})], tmp_path / "rows.jsonl", "trl", scorer="rule")
    write_tasks([Task(extra_info={"x": float("inf")})], tmp_path / "rows.parquet", "trl", scorer="rule")
    assert next(read_tasks(tmp_path / "rows.parquet")).extra_info == {"x": float("inf")}


# The command


def convert(*arguments: str) -> Any:
    import typer
    from typer.testing import CliRunner

    from treetune.cli.export import convert_command

    app = typer.Typer()
    app.command()(convert_command)
    return CliRunner().invoke(app, arguments)


def test_convert_writes_another_format_and_asks_before_it_overwrites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = [Task(prompt="?", reward_spec={"ground_truth": n}) for n in range(3)]
    write_tasks(given, Path("in.parquet"), "verl", scorer="rule")
    done = convert("in.parquet", "in.parquet", "out.jsonl", "--to", "skyrl", "--json")
    assert json.loads(done.stdout) == {"path": "out.jsonl", "rows": 6, "from": None, "to": "skyrl"}
    assert list(read_tasks("out.jsonl", "skyrl")) == given * 2
    assert "6 rows as skyrl: out.jsonl" in convert("out.jsonl", "out.jsonl", "--to", "skyrl", "--force").stdout
    for arguments, said in [
        (("in.parquet", "out.jsonl", "--to", "trl"), "--force"),
        (("in.parquet", "--to", "trl"), "no output file"),
        (("in.parquet", ".", "--to", "trl"), "is a folder"),
        (("in.parquet", "x.jsonl", "--to", "tlr"), "did you mean"),
        (("in.parquet", "x.jsonl", "--to", "trl", "--from", "veril"), "did you mean"),
    ]:
        error = convert(*arguments).exception
        assert isinstance(error, UsageError)
        assert said in str(error)
    assert not Path("x.jsonl").exists()


# Built files


@pytest.mark.parametrize("format", IN_PARQUET)
def test_a_built_file_gives_tasks_with_the_uids_it_was_built_with(tmp_path, format):
    from treetune.data.datasets.taskset import DatasetTaskset

    (tmp_path / "in.jsonl").write_text('{"q": "1 + 1?", "a": "2"}\n{"q": "007?", "a": "7"}\n')
    source = {"args": ["json"], "kwargs": {"data_files": str(tmp_path / "in.jsonl"), "split": "train"}}
    config = {"loading_params": source, "prompt_template": "{q}", "ground_truth": "a", "env_class": "formats_texts"}
    taskset = DatasetTaskset(config, cache_dir=tmp_path / "cache")
    path = taskset.get_parquet_path(format)
    built = [taskset.task_at(0), taskset.task_at(1)]
    assert list(read_tasks(path)) == built
    assert [row["extra_info"]["uid"] for row in read_rows(path)] == [task.uid for task in built]


class Rounds(Task, frozen=True, kw_only=True):
    rounds: int = 3
    limits: dict[str, Any] | None = None


@pytest.mark.parametrize(("format", "kind"), [*product(IN_PARQUET, KINDS), ("nemo-gym", "jsonl")])
def test_the_fields_of_a_subclass_travel_with_its_task(tmp_path: Path, format: str, kind: str) -> None:
    given = [Rounds(prompt="?", rounds=2), Rounds(prompt="!", limits={"a": [1, 1.0, "x"]})]
    write_tasks(given, tmp_path / f"a.{kind}", format, scorer="rule")
    write_tasks(read_tasks(tmp_path / f"a.{kind}"), tmp_path / f"b.{kind}", "verl")
    back = list(read_tasks(tmp_path / f"b.{kind}"))
    assert [(task.rounds, task.limits) for task in back] == [(task.rounds, task.limits) for task in given]
    assert [task.uid for task in back] == [task.uid for task in given]


@pytest.mark.parametrize("kind", KINDS)
def test_a_date_is_its_iso_text_in_every_file(tmp_path: Path, kind: str) -> None:
    day, hour = datetime.date(2024, 5, 1), datetime.datetime(2024, 5, 1, 12, 30)
    write_tasks(
        [Task(prompt="?", extra_info={"day": day, "hours": [hour]})], tmp_path / f"rows.{kind}", "verl", scorer="rule"
    )
    (task,) = read_tasks(tmp_path / f"rows.{kind}")
    assert task.extra_info == {"day": "2024-05-01", "hours": ["2024-05-01T12:30:00"]}


@pytest.mark.parametrize("uid", ["mine", 7, "d41d8cd98f00b204e9800998ecf8427e"])
def test_a_uid_of_the_users_own_survives_every_format_and_file(tmp_path: Path, uid: Any) -> None:
    spec = {"method": "rule", "ground_truth": "5"}
    given = [Task(prompt=text, reward_spec=spec, extra_info={"uid": uid}) for text in "ab"]
    chained = tmp_path / "in.jsonl"
    write_tasks(given, chained, "verl", scorer="rule")
    for number, (format, kind) in enumerate([("skyrl", "parquet"), ("trl", "json"), ("verl", "parquet")]):
        out = tmp_path / f"{number}.{kind}"
        write_tasks(read_tasks(chained), out, format)
        chained = out
        assert [row["extra_info"]["uid"] for row in read_rows(out)] == [uid, uid]
    assert [task.extra_info for task in read_tasks(chained)] == [{"uid": uid}] * 2
    assert [task.uid for task in read_tasks(chained)] == [task.uid for task in given]
