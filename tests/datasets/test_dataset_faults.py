"""Bad input to dataset tasks: each fault is the user's to correct, and is said with its file, line, row or key."""

from __future__ import annotations

import datetime
import errno
import json
import re
import socket
import textwrap
import warnings

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from raising import raises_code

from treetune.data.datasets.task_lists import load_task, load_tasks
from treetune.data.rows import read_tasks
from treetune.errors import (
    ConfigError,
    EmptyTasksetError,
    StorageError,
    TasksetError,
    TreetuneError,
    UsageError,
)
from treetune.system import hub

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": n} for n in range(4)]


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


def node(data_files="rows.jsonl", kind="json", **keys):
    loading = {"args": [kind], "kwargs": {"data_files": data_files, "split": "train"}}
    return {"loading_params": loading, "prompt_template": "{question}", **keys}


@pytest.fixture
def rows(tmp_path):
    def write(rows=ROWS, **keys):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return node(**keys)

    return write


@pytest.fixture
def table(tmp_path):
    def write(columns, **keys):
        pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
        return node("rows.parquet", "parquet", **keys)

    return write


@pytest.fixture
def custom(tmp_path):
    """The `custom_cls` of a class with this body."""

    def write(body):
        text = "from treetune_verl.tasks import Task as Base\n\nclass Task(Base):\n" + textwrap.indent(body, "    ")
        file = tmp_path / f"task_{abs(hash(body))}.py"
        file.write_text(text + "\n")
        return {"path": str(file)}

    return write


def fault_of(config, kind=TreetuneError):
    """The error that building gives; a plain one, that no traceback follows."""
    with pytest.raises(kind) as caught:
        load_task(config).build()
    assert caught.value.__cause__ is None
    return caught.value


# Files


@pytest.mark.parametrize(
    ("name", "kind", "content", "said"),
    [
        ("b.jsonl", "json", b'{"question": "a"}\n{"question": \n', "b.jsonl, line 2: "),
        ("b.jsonl", "json", b'{"question": "a"}\n5\n', "b.jsonl, line 2: Expected `object`"),
        ("b.jsonl", "json", '{"question": "a"}\n'.encode("utf-16"), "b.jsonl, line 1: "),
        ("b.json", "json", b'[{"question": "a"},\n{"question":', "b.json"),
        ("b.json", "json", b"5", "b.json, row 0: Expected `object`"),
        ("b.jsonl.gz", "json", b"nothing packed", "b.jsonl.gz cannot be read: zlib"),
        ("b.csv", "csv", b"question,answer\na,b\nc,d,e,f\n", "b.csv, row 1: 4 cells, but only 2 columns have a name"),
        ("b.csv", "csv", "question\nok\ncaf\xe9\n".encode("latin-1"), "b.csv is not UTF-8 text: "),
        ("b.txt", "text", "caf\xe9\n".encode("latin-1"), "b.txt is not UTF-8 text: "),
        ("b.parquet", "parquet", b"PAR1 and no more PAR1", "b.parquet cannot be read as parquet"),
    ],
)
def test_a_malformed_file_is_told_with_its_line(tmp_path, name, kind, content, said):
    (tmp_path / name).write_bytes(content)
    assert said in fault_of(node(name, kind)).message


def test_text_of_another_encoding_is_told_with_its_row(tmp_path):
    (tmp_path / "b.jsonl").write_bytes('{"question": "ok"}\n{"question": "caf\xe9"}\n'.encode("latin-1"))
    fault = fault_of(node("b.jsonl"))
    assert "row 1: 'utf-8' codec" in fault.message or "b.jsonl, line 2" in fault.message


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "kind", "content"),
    [("e.jsonl", "json", ""), ("e.jsonl", "json", "\n \n"), ("e.csv", "csv", ""), ("e.csv", "csv", "question\n")],
)
def test_an_empty_file_is_told_by_its_name(tmp_path, name, kind, content, streaming):
    (tmp_path / name).write_text(content)
    config = node(name, kind)
    config["loading_params"]["kwargs"]["streaming"] = streaming
    assert f"{tmp_path / name} " in fault_of(config, EmptyTasksetError).message


def test_a_stream_that_ends_in_a_malformed_line_says_which(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"question": "a"}\n' * 15_000 + '{"question": \n')
    config = node("b.jsonl")
    config["loading_params"]["kwargs"]["streaming"] = True
    assert "b.jsonl, line 15001" in fault_of(config).message


def test_a_table_without_rows_or_with_a_column_twice_is_told(table, tmp_path):
    assert "rows.parquet has no rows" in fault_of(table({"question": pa.array([], pa.string())})).message
    pq.write_table(pa.table([["a"], ["b"]], names=["question", "question"]), tmp_path / "rows.parquet")
    assert "has several columns question" in fault_of(node("rows.parquet", "parquet")).message


def test_names_that_mean_no_file_say_what_to_write(rows, tmp_path):
    rows()
    (tmp_path / "folder").mkdir()
    assert "no file matches 'absent.jsonl'" in fault_of(node("absent.jsonl"), UsageError).message
    assert "no file matches '*.nothing'" in fault_of(node("*.nothing"), UsageError).message
    fault = fault_of(node("folder"), UsageError)
    assert ("no file matches 'folder'" in fault.message, "write folder/*" in fault.remedy) == (True, True)
    fault = fault_of({"loading_params": {"args": ["rows.jsonl"]}, "prompt_template": "{question}"}, UsageError)
    assert "args: [json], kwargs: {data_files: rows.jsonl}" in fault.remedy


def test_a_file_that_cannot_be_opened_is_told(tmp_path):
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("door.jsonl")
        assert "door.jsonl cannot be read" in fault_of(node("door.jsonl"), StorageError).message


def test_what_is_wrong_with_loading_params_is_told_by_its_key():
    wrong = [
        {"args": [5]},
        {"args": [["a"]]},
        {"args": ["json"]},
        {"args": ["json"], "kwargs": {"data_files": 5}},
        {"args": ["json"], "kwargs": {"data_files": []}},
    ]
    with pytest.raises(ConfigError) as caught:
        load_tasks([{"loading_params": params, "prompt_template": "{q}"} for params in wrong])
    assert [key for key, _ in caught.value.faults] == [
        "tasks[0].loading_params.args",
        "tasks[1].loading_params.args",
        "tasks[2].loading_params.kwargs",
        "tasks[3].loading_params.kwargs.data_files",
        "tasks[4].loading_params.kwargs.data_files",
    ]


@pytest.mark.parametrize(
    ("kind", "meant"),
    [("jsonl", "json"), ("ndjson", "json"), ("JSON", "json"), ("txt", "text"), ("tsv", "csv")],
)
def test_a_kind_of_files_that_is_called_otherwise_is_told_without_the_hub(rows, kind, meant):
    rows()
    with raises_code("config", kind, meant):
        load_tasks([node("rows.jsonl", kind)])
    with raises_code("config", f"[{meant}]") as caught:
        load_task(node("rows.jsonl", kind)).count()
    assert caught.value.faults[0][0] == "loading_params.args"


@pytest.mark.parametrize(
    ("name", "kind", "content", "remedy"),
    [
        ("rows.csv", "json", "question,answer\n1 + 1?,2\n", "args: [csv]"),
        ("rows.csv", "parquet", "question,answer\n1 + 1?,2\n", "args: [csv]"),
        ("rows.tsv", "json", "question\tanswer\n1 + 1?\t2\n", 'args: [csv], kwargs: {sep: "\\t"}'),
        ("rows.jsonl", "csv", '{"question": "a"}\n', "args: [json]"),
    ],
)
def test_a_file_of_another_kind_says_how_to_read_it(tmp_path, name, kind, content, remedy):
    (tmp_path / name).write_text(content)
    assert fault_of(node(name, kind)).remedy == f"it is called {name}: write {remedy}"


def test_a_malformed_line_is_told_once(tmp_path, treetune_process):
    (tmp_path / "rows.jsonl").write_text('{"question": "a"}\n{"question": "a",,}\n')
    (tmp_path / "tasks.yaml").write_text(yaml.safe_dump({"train_tasks": [node(ground_truth="answer")]}))
    told = treetune_process("build", "tasks.yaml").err.splitlines()
    assert len(told) == 1
    assert "rows.jsonl, line 2: JSON is malformed" in told[0]


# Rows


@pytest.mark.parametrize("num_proc", [1, 2])
def test_a_template_that_does_not_fit_a_row_says_which(rows, num_proc):
    mixed = [{"question": {"a": "x"}}, {"question": {"a": "y", "b": "z"}}]
    assert (
        "row 0: prompt_template '{question:.2f}'"
        in fault_of(rows(prompt_template="{question:.2f}", num_proc=num_proc)).message
    )
    if num_proc == 1:
        assert (
            "row 0: prompt_template '{question[c]}'" in fault_of(rows(mixed, prompt_template="{question[c]}")).message
        )
        assert "row 0: prompt_template '{level:%Y}'" in fault_of(rows(prompt_template="{level:%Y}")).message


def test_a_whole_number_above_64_bits_is_told_by_row_and_column(table):
    large = pa.array([1, 2**64 - 1], pa.uint64())
    fault = fault_of(table({"question": ["a", "b"], "size": large}, extra_fields=["size"]), TasksetError)
    assert "row 1: size cannot be kept in extra_info" in fault.message
    assert "extra_fields" in fault.remedy
    lists = pa.array([[1], [2**64 - 1]], pa.list_(pa.uint64()))
    assert "does not fit in 64 bits" in fault_of(table({"question": ["a", "b"], "n": lists}, ground_truth="n")).message


@pytest.mark.parametrize(
    "column",
    [
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([b"\xff", b"ok"]),
        pa.array([datetime.date(2020, 1, 1), None]),
        pa.array([1, 2], pa.duration("s")),
        pa.array([{"a": {"b": None}}, None], pa.struct([("a", pa.struct([("b", pa.null())]))])),
        pa.array([[None], None], pa.list_(pa.null())),
        pa.array(["1.50", None]).cast(pa.decimal128(10, 2)),
    ],
    ids=lambda column: str(column.type).partition("<")[0].partition("(")[0],
)
def test_columns_of_every_type_can_be_shown_in_a_prompt(table, column):
    config = table({"question": ["a", "b"], "value": column}, prompt_template="{question} {value}")
    assert load_task(config).build()[0].rows == len(column) - column.null_count


def test_bytes_are_a_ground_truth_where_they_are_text(table):
    columns = {"question": ["a", "b"], "answer": pa.array([b"Paris", b"Rome"])}
    task = load_task(table(columns, ground_truth="answer"))
    assert [task[index].ground_truth for index in range(2)] == ["Paris", "Rome"]
    columns["answer"] = pa.array([b"Paris", b"\xff"])
    assert "row 1: 'utf-8' codec" in fault_of(table(columns, ground_truth="answer")).message


def test_a_filter_that_fails_says_on_which_row(rows):
    levels = [{"question": "a", "level": 1}, {"question": "b", "level": None}]
    assert "the filter failed on row 1: filter 'level < 5'" in fault_of(rows(levels, filter="level < 5")).message


def test_a_filter_that_is_no_function_is_a_fault_of_its_key(rows, tmp_path):
    (tmp_path / "keep.py").write_text("keep = 5\n")
    assert fault_of(rows(filter=f"{tmp_path}/keep.py:keep"), ConfigError).faults[0][0] == "filter"


QUIZ = {"choices": {"column": "options", "answer": "right"}, "ground_truth": "letter", "scorer": "choice"}
OPTIONS = ["trout", "whale", "wasp"]


def quiz(*answers, question="Which?"):
    return [{"question": question, "options": OPTIONS, "right": answer} for answer in answers]


@pytest.mark.parametrize(
    ("given", "keys", "said"),
    [
        (
            quiz(1, 3, 2, 3),
            {**QUIZ, "prompt_template": "{question} {options}"},
            "2 rows dropped: no ground truth; row 1: choices.answer 3 is not an option (numbers count from 0)",
        ),
        (
            [{"question": "a", "answer": "1"}, {"question": "b", "answer": None}],
            {"ground_truth": "answer"},
            "1 row dropped: no ground truth; row 1: answer is None",
        ),
        (
            [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "two"}],
            {"ground_truth": {"column": "answer", "pattern": "#### (.+)"}},
            "1 row dropped: no ground truth; row 1: answer is 'two', where ground_truth.pattern matches nothing",
        ),
        (
            [{"question": "a", "answer": {"one": "1"}}, {"question": "b", "answer": {"one": None}}],
            {"ground_truth": "answer[one]"},
            "1 row dropped: no ground truth; row 1: answer is {'one': None}, which has no answer[one]",
        ),
        (
            [{"question": "a", "level": 1}, {"question": None, "level": 2}],
            {"prompt_template": "{level} {question}"},
            "1 row dropped: no prompt; row 1: question is None",
        ),
        (
            [{"question": "a", "messages": [{"role": "user", "content": "a"}]}, {"question": "b", "messages": []}],
            {"prompt_format": "chat_messages"},
            "1 row dropped: no prompt; row 1: messages is []",
        ),
    ],
    ids=["no option", "no value", "no match", "no item", "no prompt", "no messages"],
)
def test_rows_that_lack_something_are_told_with_the_first_and_why(rows, recwarn, given, keys, said):
    config = rows(given, **keys)
    for task in (load_task(config), load_task(config)):  # the second has them from the cache
        task.count()
        assert task[0] is not None
        assert [str(flaw) for flaw in task.find_flaws()] == [said]
    (told,) = {str(one.message) for one in recwarn}
    assert re.fullmatch(rf"DatasetTaskset \(.*rows.jsonl\): {re.escape(said)}", told)


@pytest.mark.parametrize("keys", [{}, {"extra_fields": ["uid"]}, {"images": ["picture"]}])
@pytest.mark.parametrize("template", ["", " \n"])
def test_a_template_that_is_empty_is_told(rows, template, keys):
    given = [{"question": "q", "answer": "a", "uid": None, "picture": "https://example.org/a.png"}] * 4
    config = rows(given, prompt_template=template, ground_truth="answer", **keys)
    assert "prompt_template: is empty" in fault_of(config, ConfigError).message


def test_a_split_that_is_not_there_is_told_whatever_the_file_is_called(tmp_path):
    (tmp_path / "rows.csv").write_text('{"question": "a", "answer": "b"}\n')
    fault = fault_of({**node("rows.csv"), "loading_params": {"args": ["json"], "kwargs": {"data_files": "rows.csv",
                      "split": "tset"}}})  # fmt: skip
    assert "Unknown split" in fault.message


def test_a_nearly_right_name_is_looked_for_in_the_folder_of_the_data(tmp_path):
    (tmp_path / "base").mkdir()
    for name in ("base/train.jsonl", "trains.jsonl"):
        (tmp_path / name).write_text('{"question": "a", "answer": "b"}\n')
    kwargs = {"data_dir": "base", "data_files": "trian.jsonl", "split": "train"}
    fault = fault_of({**node(), "loading_params": {"args": ["json"], "kwargs": kwargs}}, UsageError)
    assert "did you mean 'train.jsonl'?" in fault.message


def test_only_what_lies_before_the_last_row_of_max_rows_is_told(rows):
    given = quiz(0, 7, 0, 0, 7, 7) * 50
    with pytest.warns(UserWarning, match="1 row dropped: no ground truth; row 1: "):
        sidecar, *_ = load_task(rows(given, **QUIZ, max_rows=2)).build()
    assert (sidecar.rows, sidecar.dropped, [flaw.rows for flaw in sidecar.flaws]) == (
        2,
        {"no ground truth": 1},
        [[1], [0, 2]],  # left out, and without their options
    )
    with pytest.warns(UserWarning, match="without their options"):
        assert load_task(rows(quiz(0, 0, 7), **QUIZ, max_rows=2)).build()[0].dropped == {}


def test_a_place_for_an_image_where_no_row_is_kept_is_no_crash(rows, tmp_path):
    keys = {"prompt_template": "<image>{question}", "ground_truth": "answer"}
    (tmp_path / "rates.json").write_text("{}")
    fault = fault_of(rows(**keys, profile={"path": str(tmp_path / "rates.json"), "min": 0.5}), TreetuneError)
    assert fault.message


def test_rows_that_are_numbered_by_their_own_function_are_all_counted(rows, tmp_path):
    (tmp_path / "own.py").write_text(
        "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        return lambda row, index: (made := make(row, index)) | {\n"
        "            'extra_info': {**made['extra_info'], 'index': 0}}\n"
    )
    given = [{"question": "Square it.", "cases": [{"in": "5"}]}] * 5
    keys = {"ground_truth": "cases", "scorer": "code", "custom_cls": {"path": str(tmp_path / "own.py")}}
    with pytest.warns(UserWarning, match="5 rows among the first 100 that no answer solves"):
        load_task(rows(given, **keys)).build()


def test_two_files_without_a_name_are_told_apart(treetune, tmp_path):
    entry = (
        "  - loading_params: {args: [json], kwargs: {data_files: %s, split: train}}\n"
        "    prompt_template: '{question}'\n    ground_truth: answer\n    scorer: exact\n"
    )
    for name in ("one.jsonl", "two.jsonl"):
        (tmp_path / name).write_text('{"question": "a", "answer": null}\n{"question": "b", "answer": "c"}\n')
    (tmp_path / "tasks.yaml").write_text("train_tasks:\n" + entry % "one.jsonl" + entry % "two.jsonl")
    told = treetune("build", "tasks.yaml").err
    for name in ("one.jsonl", "two.jsonl"):
        assert re.search(rf"\(.*{name}\): 1 row dropped: no ground truth; row 0: answer is None", told)


def test_rows_that_the_config_leaves_out_on_purpose_are_not_warned_of(rows, recwarn):
    task = load_task(rows(filter="level < 3", max_rows=2, ground_truth="answer"))
    assert (task.count(), task.find_flaws(), list(recwarn)) == (2, [], [])


def test_where_every_row_is_dropped_the_error_says_why(rows):
    fault = fault_of(rows(quiz(3, 4), **QUIZ), EmptyTasksetError)
    assert "2 dropped (no ground truth)" in fault.message
    assert "row 0: choices.answer 3 is not an option (numbers count from 0)" in fault.message
    fault = fault_of(rows(quiz(1, 4), **QUIZ, drop_missing=False), TasksetError)
    assert fault.message == "no ground truth: row 1 (choices.answer 4 is not an option (numbers count from 0))"


@pytest.mark.parametrize(
    ("keys", "hidden"),
    [
        ({"prompt_template": "{question}"}, [0, 1]),
        ({"prompt_template": "{question} {options}"}, []),
        ({"prompt_template": "{question} {choices[0]}, {choices[1]} or {choices[2]}?"}, []),
        ({"prompt_template": "{question} {choices[0]} or {choices[1]}?"}, [0, 1]),
        ({"prompt_template": "{listed}"}, []),
    ],
    ids=["no options", "options", "each text", "some texts", "in the question"],
)
def test_prompts_that_do_not_show_the_options_are_told(rows, keys, hidden):
    given = [{**row, "listed": "Which? A) trout B) whale C) wasp"} for row in quiz(0, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        flaws = load_task(rows(given, **QUIZ, **keys)).find_flaws()
    assert [flaw.rows for flaw in flaws] == ([hidden] if hidden else [])
    assert len(caught) == len(flaws)
    assert all("write {options} in prompt_template" in str(one.message) for one in caught)


def test_rows_that_no_answer_solves_are_told_when_they_are_built(rows, monkeypatch):
    monkeypatch.setattr("treetune.data.datasets.build.LOOKED_AT", 3)
    cases = [[{"in": "5", "output": "25"}], [{"input": "5", "output": "25"}]]
    given = [{"question": "Square it.", "cases": cases[number % 2]} for number in range(6)]
    said = "2 rows among the first 3 that no answer solves; row 0: the ground truth has no input and output in case 1"
    with pytest.warns(UserWarning, match=re.escape(said)):
        assert load_task(rows(given, ground_truth="cases", scorer="code")).build()[0].rows == 6


def test_a_scorer_that_cannot_look_at_a_ground_truth_does_not_keep_rows_from_being_built(rows, monkeypatch):
    monkeypatch.setattr("treetune.scorers.texts.Includes.fault", lambda *given: 1 / 0, raising=False)
    with pytest.warns(UserWarning, match="4 rows .* row 0: ZeroDivisionError: division by zero"):
        assert load_task(rows(ground_truth="answer", scorer="includes")).build()[0].rows == 4


# Classes


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("[{'prompt': []}]", "Dataset.from_list"),
        ("{'prompt': []}", "Dataset.from_dict"),
        ("None", "return a datasets.Dataset"),
        ("__import__('datasets').DatasetDict()", "one split of a DatasetDict"),
    ],
)
def test_build_dataset_that_gives_no_dataset_says_what_to_return(rows, custom, given, remedy):
    fault = fault_of(rows(custom_cls=custom(f"def build_dataset(self):\n    return {given}")), TasksetError)
    assert "build_dataset() of Task returned a" in fault.message
    assert remedy in fault.remedy


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def build_dataset(self):\n    return 1 / 0", "build_dataset() of Task failed: ZeroDivisionError"),
        ("def _make_map_fn(self):\n    return 1 / 0", "_make_map_fn() of Task failed: ZeroDivisionError"),
        ("def _make_map_fn(self):\n    return None", "_make_map_fn() of Task returned None"),
        ("def __init__(self, config, cache_dir=None):\n    pass", "made without its config"),
    ],
)
def test_a_class_that_fails_is_told_by_its_method(rows, custom, body, said):
    with pytest.raises(TasksetError) as caught:
        load_task(rows(custom_cls=custom(body))).build()
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{1: 2}", "row 0: "),
        ("{'extra_info': {1: 2}}", "row 0: "),
        ("{'reward_model': {'ground_truth': 'x', 1: 2}}", "row 0: "),
        ("{'prompt': [{'role': 'user', 'content': '\\ud800'}]}", "surrogates not allowed"),
        ("{'reward_model': {'ground_truth': [2**70]}}", "does not fit in 64 bits"),
        ("{'prompt': [{'role': 5, 'content': 'x'}]}", "row 0 has a message without a role"),
        ("{'prompt': [{'role': None, 'content': 'x'}]}", "row 0 has a message without a role"),
        ("{'prompt': [{'role': 'user', 'content': b'x'}]}", "row 0 has a message whose content is a bytes"),
        ("{'env_class': 5}", "row 0 has the env_class 5, which is not a name"),
    ],
)
def test_a_row_that_no_file_can_hold_is_told(rows, custom, row, said):
    body = (
        f"def _make_map_fn(self):\n    make = super()._make_map_fn()\n    return lambda r, i: {{**make(r, i), **{row}}}"
    )
    assert said in fault_of(rows(custom_cls=custom(body)), TasksetError).message


def test_a_process_that_dies_while_it_builds_rows_is_told(rows, custom):
    body = "def _make_map_fn(self):\n    import os\n    return lambda row, index: os._exit(3)"
    assert "ended abruptly" in fault_of(rows(num_proc=2, custom_cls=custom(body)), TasksetError).message


# The disk and the network


def test_a_full_disk_is_told_and_what_makes_room(rows, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    config = rows()
    config["loading_params"]["kwargs"]["on_mixed_types"] = "use_json"  # which only the library reads
    fault = fault_of(config, StorageError)
    assert "No space left on device" in fault.message
    assert "treetune cache prune" in fault.remedy


def test_a_full_disk_of_the_library_is_told(rows, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("datasets.arrow_writer.ArrowWriter.finalize", full)
    config = rows()
    config["loading_params"]["kwargs"]["on_mixed_types"] = "use_json"  # which only the library reads
    fault = fault_of(config, StorageError)
    assert "No space left on device" in fault.message
    assert "HF_HOME" in fault.remedy


def test_a_hub_that_cannot_be_reached_is_told_without_trying_again(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    offline = []

    def load(*_, **__):
        from huggingface_hub import constants

        import datasets

        offline.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    fault = fault_of({"loading_params": {"args": ["openai/gsm8k"]}, "prompt_template": "{question}"})
    assert offline == [(True, True)]
    assert f"the hub cannot be reached: {address}" in fault.message
    assert "network" in fault.remedy
    from huggingface_hub import constants

    assert constants.HF_HUB_OFFLINE is False


def test_rows_of_a_hub_that_cannot_be_reached_speak_of_the_network(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with raises_code("network") as caught:
        list(read_tasks(["openai/gsm8k"]))
    assert "network" in caught.value.remedy


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch):
    assert hub.WAIT < 15
    monkeypatch.setattr(hub, "WAIT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert hub.find_problem(f"http://127.0.0.1:{silent.getsockname()[1]}")


# The command line


def test_no_fault_of_the_user_is_called_a_bug(rows, custom, treetune, tmp_path):
    wrong = rows(prompt_template="{question:.2f}", ground_truth="answer")
    for config in (wrong, rows(custom_cls=custom("def build_dataset(self):\n    return []"))):
        (tmp_path / "t.yaml").write_text(yaml.safe_dump({"val_tasks": [config]}))
        for arguments in (("build", "t.yaml"), ("show", "t.yaml"), ("eval", "t.yaml", "-m", "scripted:gold")):
            result = treetune(*arguments)
            assert result.code == 3
            assert "Traceback" not in result.err
            assert "bug in Treetune" not in result.err


def test_the_copy_of_another_build_that_ends_meanwhile_is_no_fault(rows, tmp_path):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "treetune-another").symlink_to(tmp_path / "gone")  # listed, and not there when it is looked at
    assert load_task(rows(ground_truth="answer")).count() == len(ROWS)


@pytest.mark.parametrize("verb", ["build", "show", "eval"])
@pytest.mark.parametrize("content", ["train_tasks: []\n", "trainer: {}\ntrain_tasks: []\nval_tasks: []\n"])
def test_an_empty_list_of_tasks_is_told_what_it_lacks(treetune, tmp_path, monkeypatch, verb, content):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.yaml").write_text(content)
    model = ("-m", "scripted:echo") if verb == "eval" else ()
    result = treetune(verb, "empty.yaml", *model)
    assert result.code == 2
    assert f"line {content.count('trainer') + 1}, train_tasks: has no tasks: add one, such as" in result.err
    assert "did you mean" not in result.err
    assert "taskset" not in result.err
