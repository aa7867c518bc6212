"""Dataset tasks: what YAML declares is what the rows hold."""

from __future__ import annotations

import gc
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from statistics import fmean

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pass_rates import write_rates
from raising import raises_code

from treetune import Task, load_taskset
from treetune.data.datasets.build import build
from treetune.data.datasets.task_lists import load_task
from treetune.data.rows import read_rows
from treetune.data.rows.formats import FORMATS
from treetune.errors import ConfigError, TasksetError, TreetuneError
from treetune_verl.tasks import Task as DatasetTask
from treetune_verl.tasks import get_dataset_paths, resolve_tasks_into_config

ROWS = [
    {"question": "1 + 1?", "answer": "one and one\n#### 2", "level": 1, "topic": "sums"},
    {"question": "2 * 3?", "answer": "#### 5 is wrong\n#### 6", "level": 2, "topic": None},
    {"question": "why?", "answer": "nobody knows", "level": 3, "topic": "odd"},
]


LOAD = (
    "import json, sys; from treetune.data.datasets.task_lists import load_task; "
    "task = load_task(json.loads(sys.argv[1]))"
)


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture
def source(tmp_path):
    """Writes rows to a JSON lines file and gives the node that loads it."""

    def write(rows=ROWS, name="rows.jsonl", **keys):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        kwargs = {"data_files": str(file), "split": "train"}
        return {"loading_params": {"args": ["json"], "kwargs": kwargs}, **keys}

    return write


def rows_of(node, **more):
    return pq.read_table(load_task({**node, **more}).get_parquet_path()).to_pylist()


# Prompts


def test_a_template_makes_one_user_message_after_the_system_prompt(source):
    rows = rows_of(source(prompt_template="Q: {question}", system_prompt="Be brief.", data_source="sums"))
    assert rows[0]["prompt"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: 1 + 1?"},
    ]
    assert [row["data_source"] for row in rows] == ["sums"] * 3
    assert [row["extra_info"]["index"] for row in rows] == [0, 1, 2]


def test_the_defaults_are_the_seeds(source):
    task = DatasetTask(source([{"text": "only"}]))
    config = task.config
    assert (config.prompt_format, config.prompt_template, config.system_prompt) == ("template", "{}", None)
    assert (config.chat_messages_field, config.data_source, config.extra_fields) == ("messages", "unknown", [])
    assert task.build_dataset()[0]["prompt"] == [{"role": "user", "content": "only"}]


def test_the_default_template_takes_the_only_text_column_or_asks(source):
    assert rows_of(source([{"text": "hello", "n": 1}]))[0]["prompt"][0]["content"] == "hello"
    with raises_code("config", "prompt_template"):
        rows_of(source(name="b.jsonl"))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{qestion}", "did you mean 'question'"),
        ("solve {question} in \\boxed{}", "{{"),
        ("{question.__class__}", "prompt_template"),
        ("{question", "prompt_template"),
    ],
)
def test_a_wrong_template_says_what_to_do(source, template, said):
    with pytest.raises(ConfigError) as caught:
        rows_of(source(prompt_template=template))
    assert said in str(caught.value)


def test_chat_messages_pass_through_with_every_key(source):
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    messages = [
        {"role": "system", "content": "own"},
        {"role": "user", "content": "hi", "name": "ann"},
        call,
    ]
    node = source([{"messages": messages}], prompt_format="chat_messages", system_prompt="not needed")
    (row,) = rows_of(node)
    assert FORMATS["verl"].task_of(row).messages == [
        {"role": "system", "content": "own"},
        {"role": "user", "content": "hi", "name": "ann"},
        {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]},
    ]


def test_chat_messages_get_the_system_prompt_where_there_is_none(source):
    node = source([{"c": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}])
    (row,) = rows_of(node, prompt_format="chat_messages", chat_messages_field="c", system_prompt="sys")
    assert row["prompt"] == [
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
    ]


@pytest.mark.parametrize(
    ("messages", "fact"),
    [
        ([{"rol": "user", "content": "a"}], "message 0"),
        ([{"from": "martian", "value": "x"}], "martian"),
    ],
)
def test_a_malformed_row_is_named(source, messages, fact):
    good = [{"role": "user", "content": "ok"}] if "martian" not in fact else [{"from": "human", "value": "ok"}]
    with raises_code("taskset", "row 1", fact) as caught:
        rows_of(source([{"messages": good}, {"messages": messages}], prompt_format="chat_messages"))
    assert "leave it out with `filter`" in caught.value.remedy


def test_a_chat_with_a_message_without_content_is_left_out_and_counted(source):
    asks, empty = {"role": "user", "content": "hi"}, {"role": "user", "content": None}
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    node = source(
        [{"messages": chat} for chat in ([asks], [asks, empty], [asks, called])], prompt_format="chat_messages"
    )
    assert [len(row["prompt"]) for row in rows_of(node)] == [1, 2]
    sidecar = load_task(node).build()[0]
    assert sidecar.dropped == {"no prompt": 1}
    assert "row 1: messages is [" in str(sidecar.flaws[0])
    with raises_code("taskset", "row 1") as caught:
        rows_of(node, drop_missing=False)
    assert "drop_missing: true" in caught.value.remedy


def test_chats_written_as_json_text_are_read(source):
    chats = [[{"role": "user", "content": f"q{number}", "name": "ann"}] for number in range(3)]
    texts = [json.dumps(chats[0]), "", json.dumps(chats[1]), " " + json.dumps(chats[2])]
    node = source([{"messages": text} for text in texts], prompt_format="chat_messages", system_prompt="sys")
    assert [row["prompt"][1]["content"] for row in rows_of(node)] == ["q0", "q1", "q2"]
    mixed = source([{"messages": chats[0]}, {"messages": texts[2]}], "mixed.jsonl", prompt_format="chat_messages")
    assert [row["prompt"] for row in rows_of(mixed)] == chats[:2]
    plain = source([{"messages": text} for text in ("hello", "[no JSON")], "text.jsonl", prompt_format="chat_messages")
    with raises_code("taskset", "row 0", "JSON", "'hello'") as caught:
        rows_of(plain)
    assert 'prompt_template: "{messages}"' in caught.value.remedy


# Ground truth and selection


def test_a_ground_truth_is_extracted_and_what_has_none_is_reported(source):
    node = source(prompt_template="{question}", ground_truth={"column": "answer", "pattern": "#### (.+)"})
    sidecar, _, _ = load_task(node).build()
    assert [row["reward_model"] for row in rows_of(node)] == [
        {"style": "rule", "ground_truth": "2"},
        {"style": "rule", "ground_truth": "6"},
    ]
    assert sidecar.dropped == {"no ground truth": 1}


MISSING = [
    {"question": "1 + 1?", "answer": "2"},
    {"question": None, "answer": "3"},
    {"question": "", "answer": "4"},
    {"question": " \n", "answer": "5"},
    {"question": "2 + 4?", "answer": None},
    {"question": None, "answer": None},
    {"question": "3 + 4?", "answer": "7"},
]
SAME = (
    "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
    "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n        return lambda row, index: {}\n"
)


@pytest.mark.parametrize("made", [None, "make(row, index)"], ids=["columns", "rows"])
def test_rows_without_a_question_are_left_out_and_counted_as_those_without_a_truth(source, tmp_path, made):
    node = source(MISSING, prompt_template="Q: {question}", ground_truth="answer")
    if made is not None:
        (tmp_path / "same.py").write_text(SAME.format(made))
        node["custom_cls"] = {"path": str(tmp_path / "same.py")}
    assert [row["prompt"][0]["content"] for row in rows_of(node)] == ["Q: 1 + 1?", "Q: 3 + 4?"]
    assert [row["extra_info"]["index"] for row in rows_of(node)] == [0, 6]
    assert load_task(node).build()[0].dropped == {"no prompt": 4, "no ground truth": 1}
    with raises_code("taskset", "rows 1, 2, 3, 5"):
        rows_of(node, drop_missing=False)
    with raises_code("taskset", "row 1"):
        rows_of(source([MISSING[0], MISSING[4]], "two.jsonl", prompt_template="{question}", ground_truth="answer"),
                drop_missing=False)  # fmt: skip


def test_what_a_prompt_lacks_is_a_null_or_everything(source):
    rows = [
        {"context": "", "question": "why?", "meta": {"hint": "x"}},
        {"context": None, "question": "why?", "meta": {"hint": "x"}},
        {"context": "", "question": " ", "meta": {"hint": "x"}},
        {"context": "c", "question": "how?", "meta": {"hint": None}},
    ]
    assert len(rows_of(source(rows), prompt_template="{context}{question}")) == 2
    assert len(rows_of(source(rows), prompt_template="{question} {meta[hint]}")) == 3
    assert len(rows_of(source(rows), prompt_template="Say something.")) == 4


def test_chats_in_which_nobody_asks_are_left_out_and_counted(source):
    asks, silent = {"role": "user", "content": "hi"}, {"role": "user", "content": ""}
    chats = [[asks], None, [], [silent], [{"role": "system", "content": "be kind"}, silent]]
    node = source([{"messages": chat} for chat in chats], prompt_format="chat_messages")
    assert [row["prompt"] for row in rows_of(node)] == [[asks]]
    assert load_task(node).build()[0].dropped == {"no prompt": 4}
    with raises_code("taskset", "rows 1, 2, 3, 4"):
        rows_of(node, drop_missing=False)


def test_prompts_of_a_class_s_own_that_say_nothing_are_left_out_and_counted(source, tmp_path):
    (tmp_path / "own.py").write_text(
        SAME.format("{'prompt': [{'role': 'user', 'content': row['question']}], 'extra_info': {'index': index}}")
    )
    node = source(MISSING[:4], custom_cls={"path": str(tmp_path / "own.py")})
    assert [row["prompt"][0]["content"] for row in rows_of(node)] == ["1 + 1?"]
    assert load_task(node).build()[0].dropped == {"no prompt": 3}
    with raises_code("taskset", "rows 1, 2, 3"):
        rows_of(node, drop_missing=False)


def test_a_number_becomes_text_and_a_list_stays_a_list(source):
    assert rows_of(source(prompt_template="{question}", ground_truth="level"))[1]["reward_model"]["ground_truth"] == "2"
    rows = [{"q": "capital?", "a": ["Paris", "paris"]}, {"q": "river?", "a": ["Seine"]}]
    node = source(rows, "lists.jsonl", prompt_template="{q}", ground_truth="a")
    assert rows_of(node)[0]["reward_model"]["ground_truth"] == ["Paris", "paris"]
    taskset = load_task(node)
    assert taskset.reward(taskset[0], "paris").reward == 1.0
    assert taskset.reward(taskset[0], "London").reward == 0.0


@pytest.mark.parametrize(
    ("keys", "kept"),
    [
        ({"filter": "level > 1"}, [1, 2]),
        ({"filter": "topic is not None and 'o' in topic"}, [2]),
        ({"max_rows": 2}, [0, 1]),
        ({"filter": "level > 1", "max_rows": 1}, [1]),
        ({"repeat": 2, "max_rows": 2}, [0, 1, 0, 1]),
    ],
)
def test_rows_are_selected(source, keys, kept):
    node = source(prompt_template="{question}", **keys)
    assert [row["extra_info"]["index"] for row in rows_of(node)] == kept


def test_a_filter_may_be_a_function_in_a_file(source, tmp_path):
    (tmp_path / "keep.py").write_text("def hard(row):\n    return row['level'] >= 2\n")
    node = source(prompt_template="{question}", filter=f"{tmp_path}/keep.py:hard")
    assert [row["extra_info"]["index"] for row in rows_of(node)] == [1, 2]


def test_nothing_left_is_a_clear_error(source):
    with raises_code("no-tasks", "3 dropped", "filter"):
        rows_of(source(prompt_template="{question}", filter="level > 9"))


def test_pass_rates_select_rows_and_those_left_out_are_counted(source, tmp_path):
    node = source([{"q": f"{n} + 1?", "a": str(n + 1)} for n in range(10)], prompt_template="{q}", ground_truth="a")
    uids = [row["extra_info"]["uid"] for row in rows_of(node)]
    write_rates(tmp_path / "rates.jsonl", {uid: number / 8 for number, uid in enumerate(uids[:9])})
    profile = {"path": str(tmp_path / "rates.jsonl"), "min_solve_rate": 0.2, "drop_solved": True}
    taskset = DatasetTask({**node, "profile": profile})
    sidecar, _, _ = taskset.build()
    assert [task.uid for task in taskset.draw()] == uids[2:8]
    assert sidecar.dropped == {"pass rate": 3, "no pass rate": 1}
    kept = DatasetTask({**node, "profile": {**profile, "unrated": 0.5}})
    assert [task.uid for task in kept.draw()] == [*uids[2:8], uids[9]]


def test_a_built_file_has_the_draws_of_a_schedule_and_others_draw_by_the_same(source, tmp_path):
    node = source([{"q": f"{n} + 1?", "a": str(n + 1)} for n in range(90)], prompt_template="{q}", ground_truth="a")
    uids = [row["extra_info"]["uid"] for row in rows_of(node)]
    rates = {uid: number % 9 / 8 for number, uid in enumerate(uids)}
    write_rates(tmp_path / "rates.jsonl", rates)
    schedule = {"kind": "gaussian", "start": 0.9, "end": 0.1, "over": 600}
    profile = {"path": str(tmp_path / "rates.jsonl"), "schedule": schedule, "rows": 600}
    keys = {"profile": profile, "shuffle": {"seed": 1}}
    drawn = [row["extra_info"]["uid"] for row in rows_of(node, **keys)]
    taskset = DatasetTask({**node, **keys})
    assert (len(drawn), taskset.count()) == (600, 90)
    assert [task.uid for task in taskset.draw(600)] == drawn
    means = [fmean(rates[uid] for uid in drawn[start : start + 100]) for start in range(0, 600, 100)]
    assert means == sorted(means, reverse=True), "what comes first is easy"
    skyrl = pq.read_table(taskset.get_parquet_path("skyrl")).to_pylist()
    assert [row["extra_info"]["uid"] for row in skyrl] == drawn


def test_a_file_of_a_schedule_gives_mixed_values_as_they_are(source, tmp_path):
    rows = [{"q": f"{n} + 1?", "a": str(n + 1), "mixed": n if n % 2 else f"{n}"} for n in range(20)]
    node = source(rows, prompt_template="{q}", ground_truth="a", extra_fields=["mixed"])
    write_rates(tmp_path / "rates.jsonl", {row["extra_info"]["uid"]: 0.5 for row in rows_of(node)})
    profile = {"path": str(tmp_path / "rates.jsonl"), "schedule": {"kind": "pools"}, "rows": 20}
    drawn = [row["extra_info"] for row in read_rows(DatasetTask({**node, "profile": profile}).get_parquet_path())]
    assert [extra["mixed"] for extra in drawn] == [rows[extra["index"]]["mixed"] for extra in drawn]


def test_extra_fields_are_carried_and_reserved_names_refused(source):
    row = rows_of(source(prompt_template="{question}", extra_fields=["level", "topic"]))[1]
    assert (row["extra_info"]["level"], row["extra_info"]["topic"]) == (2, None)
    with raises_code("config", "'topic'"):
        rows_of(source(prompt_template="{question}", extra_fields=["topics"]))
    with raises_code("config", "['source_index'] = row['index']"):
        rows_of(source([{"q": "a", "index": 1}], "i.jsonl", prompt_template="{q}", extra_fields=["index"]))


def test_a_column_index_is_shown_compared_and_carried_by_another_name(source, tmp_path):
    (tmp_path / "own.py").write_text(
        "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        def fn(row, index):\n            made = make(row, index)\n"
        "            made['extra_info']['source_index'] = row['index']\n            return made\n        return fn\n"
    )
    node = source([{"q": "a", "index": "x-7"}], prompt_template="{q} {index}", ground_truth="index")
    (row,) = rows_of(node, custom_cls={"path": str(tmp_path / "own.py")})
    assert (row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) == ("a x-7", "x-7")
    assert (row["extra_info"]["index"], row["extra_info"]["source_index"]) == (0, "x-7")


@pytest.mark.parametrize(
    ("truth", "found"),
    [
        ("lst[0]", ["a", "c"]),
        ("lst[-1]", ["b", "c"]),
        ("lst[1]", ["b"]),
        ("meta[deep][1]", ["2", "4"]),
        ("meta[k.l]", ["x", "y"]),
        ({"column": "meta[text]", "pattern": "#### (.+)"}, ["7", "8"]),
        ({"column": "lst[0]"}, ["a", "c"]),
    ],
)
@pytest.mark.parametrize("by", ["columns", "rows"])
def test_a_ground_truth_is_an_item_as_templates_name_it(source, tmp_path, truth, found, by):
    rows = [
        {"q": "1", "lst": ["a", "b"], "meta": {"deep": [1, 2], "k.l": "x", "text": "#### 7"}},
        {"q": "2", "lst": ["c"], "meta": {"deep": [3, 4], "k.l": "y", "text": "so\n#### 8"}},
    ]
    node = source(rows, prompt_template="{q}", ground_truth=truth)
    if by == "rows":
        (tmp_path / "same.py").write_text(SAME.format("make(row, index)"))
        node["custom_cls"] = {"path": str(tmp_path / "same.py")}
    assert [row["reward_model"]["ground_truth"] for row in rows_of(node)] == found
    if isinstance(truth, str):
        shown = rows_of(node, prompt_template=f"{{{truth}}}", filter="len(lst) > 1" if truth == "lst[1]" else None)
        assert [row["prompt"][0]["content"] for row in shown] == found


@pytest.mark.parametrize(
    ("template", "facts", "remedy"),
    [
        ("{lst[7]}", ["lst[7]", "1 item", "lst[0]"], "leave it out"),
        ("{q:.2f}", ["'high'", ":.2f"], "a field without a format, {column}"),
    ],
)
@pytest.mark.parametrize("by", ["columns", "rows"])
def test_a_row_that_a_template_does_not_fit_is_named_with_what_to_do(source, tmp_path, template, facts, remedy, by):
    node = source([{"q": "1.5", "lst": list("abcdefgh")}, {"q": "high", "lst": ["a"]}], prompt_template=template)
    if by == "rows":
        (tmp_path / "same.py").write_text(SAME.format("make(row, index)"))
        node["custom_cls"] = {"path": str(tmp_path / "same.py")}
    with raises_code("taskset", "row 1", *facts) as caught:
        rows_of(node)
    assert remedy in caught.value.remedy
    assert "64 bits" not in caught.value.remedy


# Tasks


def test_what_is_built_is_a_taskset_with_the_same_uids(source):
    node = source(
        prompt_template="{question}",
        ground_truth={"column": "answer", "pattern": "#### (.+)"},
        extra_fields=["topic"],
        env_class="some-env",
        system_prompt="s",
    )
    taskset = load_task(node)
    for row, task in zip(rows_of(node), taskset.select_tasks(), strict=True):
        assert task.uid == row["extra_info"]["uid"]
        assert task.env_class == "some-env"
        assert task.ground_truth == row["reward_model"]["ground_truth"]
    assert taskset[0].extra_info == {"index": 0, "topic": "sums"}


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.lists(st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=8)), min_size=1, max_size=4),
    st.sampled_from([None, "sys", "null"]),
    st.sampled_from([None, "env"]),
)
def test_columns_and_rows_give_the_same_table(pairs, system_prompt, env_class):
    """The fast way, the row-by-row way, and `Task` itself agree, byte for byte."""
    from treetune.data.datasets.row_builder import RowBuilder

    class ByRow(DatasetTask):
        def _make_map_fn(self):
            make = super()._make_map_fn()
            return lambda row, index: make(row, index)

    try:
        table = pa.table({"q": [q for q, _ in pairs], "a": [a for _, a in pairs], "n": list(range(len(pairs)))})
    except UnicodeEncodeError:
        return
    node = {
        "loading_params": {"args": ["x"]}, "prompt_template": "Q{n}: {q}", "ground_truth": "a", "extra_fields": ["n"],
        "system_prompt": system_prompt, "env_class": env_class, "ability": "math",
    }  # fmt: skip
    columns = {field.name: field.type for field in table.schema}
    (fast, one), (slow, other) = (
        RowBuilder(cls(node), columns, made=False).build(table, 0) for cls in (DatasetTask, ByRow)
    )
    assert one.dropped == other.dropped
    assert [flaw.rows for flaw in one.flaws] == [flaw.rows for flaw in other.flaws]
    assert fast.select(sorted(fast.column_names)).to_pylist() == slow.select(sorted(slow.column_names)).to_pylist()
    for row, (question, answer) in zip(fast.to_pylist(), pairs, strict=True):
        assert FORMATS["verl"].task_of(row).uid == row["extra_info"]["uid"]
        assert FORMATS["verl"].task_of(row).messages[-1]["content"] == f"Q{row['extra_info']['n']}: {question}"
        assert row["reward_model"]["ground_truth"] == answer


def test_a_subclass_adds_columns_and_scores(source, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from treetune_verl.tasks import Task\n"
        "class Mine(Task):\n"
        "    def _make_map_fn(self):\n"
        "        make = super()._make_map_fn()\n"
        "        def fn(row):\n"
        "            made = make(row)\n"
        "            truth = row[self.config.answer_key]\n"
        "            made['reward_model'] = {'ground_truth': truth, 'style': 'mine', 'extra': 1}\n"
        "            made['agent_name'] = 'tool_agent'\n"
        "            return made if row['level'] != 3 else None\n"
        "        return fn\n"
        "    def reward(self, task, answer):\n"
        "        return 0.5 if answer == str(task.reward_spec['extra']) else 0.0\n"
    )
    node = source(custom_cls={"path": str(tmp_path / "mine.py"), "name": "Mine"}, prompt_template="{question}",
                  answer_key="level")  # fmt: skip
    rows = rows_of(node)
    assert rows[0]["reward_model"] == {"style": "mine", "ground_truth": "1", "extra": 1}
    assert [row["agent_name"] for row in rows] == ["tool_agent"] * 2
    assert [row["extra_info"]["index"] for row in rows] == [0, 1]
    taskset = load_task(node)
    assert taskset.build()[0].dropped == {"map function": 1}
    assert taskset[0].reward_spec == {"method": "mine", "ground_truth": "1", "extra": 1}
    assert taskset.reward(taskset[0], "1") == 0.5
    assert pickle.loads(pickle.dumps(taskset)).select_tasks() == taskset.select_tasks()


def test_a_subclass_may_build_the_whole_dataset(source, tmp_path):
    (tmp_path / "whole.py").write_text(
        "from treetune_verl.tasks import Task as Base\n"
        "class Task(Base):\n"
        "    def build_dataset(self):\n"
        "        dataset = super().build_dataset()\n"
        "        return dataset.filter(lambda row: row['extra_info']['level'] < 3).select([1, 0])\n"
    )
    node = source(custom_cls={"path": str(tmp_path / "whole.py")}, prompt_template="{question}", extra_fields=["level"])
    assert [row["prompt"][0]["content"] for row in rows_of(node)] == ["2 * 3?", "1 + 1?"]


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.quick_cases(1)
def test_mixed_and_late_types_are_held_without_loss(tmp_path, source, num_proc):
    """A key that appears late, nulls first, and values no column can hold: the file grows, or keeps JSON."""
    (tmp_path / "odd.py").write_text(
        "from treetune_verl.tasks import Task as Base\n"
        "VALUES = [1, 'two', [3], {'four': 4}, None]\n"
        "class Task(Base):\n"
        "    def _make_map_fn(self):\n"
        "        def fn(row, index):\n"
        "            extra = {'mixed': VALUES[index // 10000 % 5], 'same': VALUES[index % 5], 'empty': {}}\n"
        "            if index >= 20000:\n"
        "                extra['late'] = index\n"
        "            return {'prompt': [{'role': 'user', 'content': str(index)}], 'extra_info': extra}\n"
        "        return fn\n"
    )
    node = source([{"q": "x"}] * 50_001, custom_cls={"path": str(tmp_path / "odd.py")}, num_proc=num_proc)
    taskset = load_task(node)
    values = [1, "two", [3], {"four": 4}, None]
    for index in (0, 3, 10_001, 20_002, 39_999, 49_999, 50_000):
        extra = taskset[index].extra_info
        assert extra.get("mixed") == values[index // 10000 % 5]
        assert extra.get("same") == values[index % 5]
        assert extra.get("late") == (index if index >= 20000 else None)
        assert extra["empty"] == {}
    assert taskset.count() == 50_001


def test_text_beside_lists_as_ground_truth_is_refused(source):
    node = source([{"q": "a", "t": "x"}], prompt_template="{q}")

    class Mixed(DatasetTask):
        def _make_map_fn(self):
            prompt = [{"role": "user", "content": "x"}]
            return lambda row, index: {"prompt": prompt, "reward_model": {"ground_truth": row["t"]}}

    from treetune.data.datasets.row_builder import RowBuilder

    builder = RowBuilder(Mixed(node), {"q": pa.string(), "t": pa.string()}, made=False)
    with raises_code("taskset", "'x'", "5, ['y']", "row 7"):
        builder.build([{"q": "a", "t": "x"}, {"q": "c", "t": "z"}, {"q": "b", "t": ["y"]}, {"q": "d", "t": "z"}], 5)


def test_ground_truths_of_mixed_types_name_their_rows(source):
    rows = [{"q": "a", "t": ["x"]}, {"q": None, "t": ["n"]}, {"q": "b", "t": ["y"]}, {"q": "c", "t": {"k": 1}}]
    with raises_code("taskset", "['x']", "0, {'k': 1}", "row 3"):
        rows_of(source(rows, prompt_template="{q}", ground_truth="t"))
    one = source(
        [{"q": "a", "t": ["x"]}, {"q": "b", "t": [1, "y"]}], "one.jsonl", prompt_template="{q}", ground_truth="t"
    )
    with raises_code("taskset", "[1, 'y']", "row 1"):
        rows_of(one)


def test_ground_truths_of_another_type_in_a_later_batch_name_the_row(source, tmp_path, monkeypatch):
    (tmp_path / "odd.py").write_text(
        SAME.format("{**make(row, index), 'reward_model': {'ground_truth': 'x' if index < 4 else ['y']}}")
    )
    monkeypatch.setattr("treetune.data.datasets.build.ROWS", 2)
    node = source([{"q": str(number)} for number in range(6)], custom_cls={"path": str(tmp_path / "odd.py")})
    with raises_code("taskset", "['y']", "row 4"):
        rows_of(node, prompt_template="{q}")


def test_columns_of_mixed_types_reach_the_map_function_as_they_were(source):
    rows = rows_of(
        source([{"q": "a", "x": 1}, {"q": "b", "x": "two"}, {"q": "c", "x": {"k": [1]}}], prompt_template="{q} {x}")
    )
    assert [row["prompt"][0]["content"] for row in rows] == ["a 1", "b two", "c {'k': [1]}"]


# Lists of tasks


def test_any_two_built_files_can_be_joined_or_are_refused(source):
    one = source(prompt_template="{question}", ground_truth="level", extra_fields=["level"], data_source="one")
    other = source([{"q": "x", "a": "y", "size": 2.5}], "o.jsonl", prompt_template="{q}", ground_truth="a",
                   extra_fields=["size"], data_source="two")  # fmt: skip
    from datasets import concatenate_datasets, load_dataset

    paths = get_dataset_paths([one, other])
    joined = concatenate_datasets([load_dataset("parquet", data_files=path, split="train") for path in paths])
    assert len(joined) == 4
    clash = source([{"q": "x", "level": "high"}], "c.jsonl", prompt_template="{q}", extra_fields=["level"],
                   data_source="three")  # fmt: skip
    with raises_code("taskset", "0 (one)", "1 (three)", "extra_info.level (int64", "string"):
        get_dataset_paths([one, clash])


def test_a_config_with_three_faults_reports_all_and_writes_nothing(source, tmp_path, treetune):
    good = source(prompt_template="{question}")
    faulty = {
        "train_tasks": [{**good, "promt_template": "x"}, {**good, "max_rows": "many"}],
        "val_tasks": [{"repeat": 1}],
    }
    (tmp_path / "t.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(faulty)))
    result = treetune("build", "t.yaml", "--json")
    assert result.code == 2
    assert "3 faults" in result.err
    for path in ("train_tasks[0].promt_template", "train_tasks[1].max_rows", "val_tasks[0].loading_params"):
        assert path in result.err
    assert "did you mean 'prompt_template'" in result.err
    assert not (tmp_path / "cache").exists()


def test_build_misses_then_hits_the_same_path(source, tmp_path, treetune):
    config = {"train_tasks": [source(prompt_template="{question}", extra_fields=["answer"])]}
    (tmp_path / "t.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    first, second = (treetune("build", "t.yaml", "--json").json for _ in range(2))
    assert [first["tasks"][0]["hit"], second["tasks"][0]["hit"]] == [False, True]
    assert first["train_files"] == second["train_files"]
    assert first["val_files"] == []
    assert treetune("build", "t.yaml", "--json", "--force").json["tasks"][0]["hit"] is False
    text = treetune("build", "t.yaml")
    assert "hit" in text.out
    assert first["train_files"][0] in text.out


def test_a_hydra_recipe_is_read_for_its_tasks_only(source, tmp_path, treetune):
    recipe = {
        "hydra": {"searchpath": ["pkg://verl.trainer.config"]}, "defaults": ["ppo_trainer", "_self_"],
        "train_tasks": [source(prompt_template="{question}", data_source="${name}")], "name": "sums",
        "trainer": {"project_name": "${nowhere.to.be.found}"},
    }  # fmt: skip
    (tmp_path / "r.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(recipe)))
    result = treetune("build", "r.yaml", "--json", "--train_tasks[0].max_rows", 2)
    assert result.code == 0, result.err
    assert (result.json["tasks"][0]["name"], result.json["tasks"][0]["rows"]) == ("sums", 2)


@pytest.mark.parametrize("format", ["verl", "skyrl", "trl"])
def test_each_format_has_its_columns(source, tmp_path, treetune, format):
    node = source(prompt_template="{question}", ground_truth="level", env_class="gsm8k")
    (tmp_path / "t.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"train_tasks": [node]})))
    (path,) = treetune("build", "t.yaml", "--format", format, "--json").json["train_files"]
    row = pq.read_table(path).to_pylist()[0]
    truths = {"verl": lambda: row["reward_model"]["ground_truth"], "skyrl": lambda: row["reward_spec"]["ground_truth"],
              "trl": lambda: row["ground_truth"]}  # fmt: skip
    assert truths[format]() == "1"
    assert row["prompt"] == [{"role": "user", "content": "1 + 1?"}]
    assert (row.get("env_class") == "gsm8k") == (format == "skyrl")


def test_skyrl_rows_hold_the_ground_truth_as_the_environment_reads_it(source, tmp_path, treetune):
    rows = [{"q": "capital?", "a": ["Paris", "paris"]}, {"q": "river?", "a": ["Seine"]}]
    node = source(rows, prompt_template="{q}", ground_truth="a", env_class="search", data_source="geo")
    (tmp_path / "t.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"train_tasks": [node]})))
    (path,) = treetune("build", "t.yaml", "--format", "skyrl", "--json").json["train_files"]
    row = pq.read_table(path).to_pylist()[0]
    assert (row["env_class"], row["reward_spec"]["ground_truth"]) == ("search", {"target": ["Paris", "paris"]})
    from treetune.data.rows import read_tasks

    (task, _) = read_tasks([path])
    assert task.ground_truth == ["Paris", "paris"]
    assert task.uid == row["extra_info"]["uid"] == load_task(node)[0].uid


def test_several_tasks_are_evaluated_as_a_union_or_by_weight(source, tmp_path):
    nodes = [
        source(prompt_template="{question}", ground_truth="level", data_source="a"),
        source([{"q": str(n)} for n in range(7)], "b.jsonl", prompt_template="{q}", ground_truth="q", data_source="b"),
    ]
    (tmp_path / "u.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"val_tasks": nodes})))
    union = load_taskset(str(tmp_path / "u.yaml"))
    assert "".join(task.data_source for task in union.select_tasks()) == "abbbabbabb"
    weighted = [{**nodes[0], "weight": 1}, {**nodes[1], "weight": 3}]
    (tmp_path / "w.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"train_tasks": weighted})))
    mixture = load_taskset(str(tmp_path / "w.yaml"), split="train")
    drawn = [task.data_source for task in mixture.select_tasks(40)]
    assert abs(drawn.count("b") - 30) <= 2
    # The only list needs no --split; a list that is not there is told by the names of those that are.
    assert load_taskset(str(tmp_path / "w.yaml")).weights == [1, 3]
    with raises_code("config", "--split", "val"):
        load_taskset(str(tmp_path / "w.yaml"), split="val")


def test_some_tasks_of_a_list_are_of_all_its_tasks_in_proportion(source, tmp_path, treetune):
    nodes = [
        source(
            [{"q": f"{name}{n}"} for n in range(size)],
            f"{name}.jsonl",
            prompt_template="{q}",
            ground_truth="q",
            data_source=name,
        )
        for name, size in {"a": 40, "b": 20, "c": 20, "d": 2}.items()
    ]
    (tmp_path / "tasks.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"train_tasks": nodes})))
    run = treetune("eval", "tasks.yaml", "-n", "41", "-m", "scripted:gold", "--json")
    found = {name: source["tasks"] for name, source in run.json["data_sources"].items()}
    assert found == {"a": 20, "b": 10, "c": 10, "d": 1}
    shown = treetune("eval", "tasks.yaml", "-n", "41", "-m", "scripted:gold")
    lines = [line.split() for line in shown.out.splitlines()]
    at = lines.index("source tasks rollouts scored mean reward over all".split())
    assert lines[at + 1 : at + 5] == [[name, *[str(n)] * 3, "1.0000", "1.0000"] for name, n in found.items()]


# The cache


def test_the_cache_folder_is_the_argument_then_the_variable(source, tmp_path):
    node = source(prompt_template="{question}")
    assert DatasetTask(node).get_parquet_path().startswith(str(tmp_path / "cache"))
    assert DatasetTask(node, cache_dir=tmp_path / "mine").get_parquet_path().startswith(str(tmp_path / "mine"))
    assert DatasetTask(OmegaConf.create(node)).cache_key() == DatasetTask(node).cache_key()


def test_what_can_change_the_rows_changes_the_key(source, tmp_path):
    node = source(prompt_template="{question}")
    file = tmp_path / "mine.py"
    file.write_text("from treetune_verl.tasks import Task\nclass Mine(Task): pass\n")
    custom = {**node, "custom_cls": {"path": str(file), "name": "Mine"}}

    def keys(*nodes):
        code = (
            "import json, sys; from treetune.data.datasets.task_lists import load_task\n"
            "for node in json.loads(sys.argv[1]): print(load_task(node).cache_key())"
        )
        command = [sys.executable, "-c", code, json.dumps(nodes)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    same, reordered, divided, shorter, plain = keys(
        custom, dict(reversed(custom.items())), {**custom, "num_proc": 4}, {**custom, "max_rows": 2}, node
    )
    assert reordered == same == divided
    assert same not in (shorter, plain)
    file.write_text(file.read_text() + " ")
    (changed,) = keys(custom)
    assert changed != same
    data = tmp_path / "rows.jsonl"
    data.write_text(data.read_text().replace("1 + 1", "1 + 2"))
    assert keys(custom) != [changed]


def test_editing_what_a_class_imports_is_a_miss(source, tmp_path):
    (tmp_path / "by_helper.py").write_text(
        "from row_helper import change\nfrom treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        return lambda row, index: change(make(row, index))\n"
    )
    helper = tmp_path / "row_helper.py"
    helper.write_text("def change(row):\n    return {**row, 'data_source': 'old'}\n")
    node = source(prompt_template="{question}", custom_cls={"path": str(tmp_path / "by_helper.py")})
    assert rows_of(node)[0]["data_source"] == "old"
    # Of another size: Python keeps bytecode by the size and the second of its source.
    helper.write_text("def change(row):\n    return {**row, 'data_source': 'newer'}\n")
    assert rows_of(node)[0]["data_source"] == "old"  # this process still runs the old code, under the old key
    code = f"{LOAD}; print(task.get_parquet_path())"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(node)], capture_output=True, text=True, check=True)
    assert pq.read_table(done.stdout.strip()).to_pylist()[0]["data_source"] == "newer"


def test_a_hit_loads_neither_datasets_nor_pyarrow(source):
    node = source(prompt_template="{question}")
    path = DatasetTask(node).get_parquet_path()
    code = (
        "import json, sys; from treetune_verl.tasks import Task; "
        "print(Task(json.loads(sys.argv[1])).get_parquet_path()); "
        "heavy = {'datasets', 'pyarrow', 'omegaconf', 'asyncio', 'rich'}; "
        "heavy |= {'treetune.tasksets.target', 'treetune.data.rows.reading'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(node)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [path, "[]"]


def test_a_damaged_file_is_rebuilt_with_a_warning(source):
    task = DatasetTask(source(prompt_template="{question}"))
    path = Path(task.get_parquet_path())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.warns(UserWarning, match="damaged"):
        assert Path(task.get_parquet_path()).read_bytes()[-4:] == b"PAR1"
    path.unlink()
    with pytest.warns(UserWarning, match="building it again"):
        assert len(pq.read_table(task.get_parquet_path())) == 3


def test_a_build_that_is_killed_leaves_nothing_that_looks_finished(source, tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        def fn(row, index):\n"
        f"            open({str(tmp_path / 'started')!r}, 'w').close() if index == 15000 else None\n"
        "            time.sleep(60 if index == 15000 and __import__('os').environ.get('SLOW') else 0)\n"
        "            return make(row, index)\n        return fn\n"
    )
    node = source(
        [{"q": str(n)} for n in range(20_000)], custom_cls={"path": str(tmp_path / "slow.py")}, prompt_template="{q}"
    )
    code = f"{LOAD}; task.get_parquet_path()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(node)], cwd=tmp_path, env={**os.environ, "SLOW": "1"}
    )
    import time

    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert not list((tmp_path / "cache").glob("*.parquet"))
    assert len(rows_of(node)) == 20_000
    assert not list((tmp_path / "cache").glob(".*tmp*"))


def test_a_copy_of_a_source_goes_with_the_build(source, tmp_path):
    left = tmp_path / "hf" / "treetune-left"
    left.mkdir(parents=True)
    os.utime(left, (10**9, 10**9))

    def of_library(template):
        node = source(prompt_template=template)
        node["loading_params"]["kwargs"]["on_mixed_types"] = "use_json"  # which only the library reads
        return load_task(node)

    task = of_library("{question}")
    opened = task.open_source()
    (copy,) = (tmp_path / "hf").glob("treetune-*")  # what a killed process left is gone
    assert list(copy.rglob("*.arrow"))
    batches = opened.batches()
    del opened
    assert sum(map(len, batches)) == 3
    task.get_parquet_path()
    with pytest.raises(TreetuneError):
        of_library("{absent}").get_parquet_path()
    del batches
    gc.collect()
    assert not list((tmp_path / "hf").glob("treetune-*"))


def test_a_task_whose_source_was_checked_can_be_pickled(source):
    task = load_task(source(prompt_template="{question}"))
    task.check_source()
    assert pickle.loads(pickle.dumps(task)).count() == 3


# Faults


@pytest.mark.parametrize(
    ("kwargs", "fact"),
    [
        ({"data_files": "/nowhere.jsonl", "split": "train"}, "'/nowhere.jsonl'"),
        ({"data_files": "FILE", "split": "absent"}, "'absent'"),
    ],
)
def test_a_source_that_cannot_be_loaded_says_why(source, kwargs, fact):
    node = source(prompt_template="{question}")
    own = node["loading_params"]["kwargs"]
    file = own["data_files"] if kwargs["data_files"] == "FILE" else kwargs["data_files"]
    node["loading_params"]["kwargs"] = {**kwargs, "data_files": file}
    with raises_code("usage", fact):
        rows_of(node)


def test_a_dataset_of_several_splits_asks_for_one(source, tmp_path):
    node = source(prompt_template="{question}")
    file = node["loading_params"]["kwargs"]["data_files"]
    node["loading_params"]["kwargs"] = {"data_files": {"train": file, "test": file}}
    with raises_code("usage", "loading_params.kwargs.split", "train, test"):
        rows_of(node)
    node["loading_params"]["kwargs"] = {"data_files": file}
    assert len(rows_of(node)) == 3


@pytest.mark.parametrize(
    "kwargs", [{"split": "train[:2]"}, {"split": "train", "streaming": True}, {"split": "train+train"}]
)
def test_every_way_to_load_gives_the_rows_it_names(source, kwargs):
    node = source(prompt_template="{question}", extra_fields=["level"])
    node["loading_params"]["kwargs"].update(kwargs)
    expected = {"train[:2]": [1, 2], "train": [1, 2, 3], "train+train": [1, 2, 3, 1, 2, 3]}[kwargs["split"]]
    assert [row["extra_info"]["level"] for row in rows_of(node)] == expected


@pytest.mark.thorough
def test_a_long_source_keeps_its_order_over_batches_and_processes(source, tmp_path):
    node = source([{"q": str(n)} for n in range(25_003)], prompt_template="{q}")
    rows = rows_of(node)
    assert [int(row["prompt"][0]["content"]) for row in rows] == list(range(25_003))
    task = load_task({**node, "num_proc": 2})
    build(task, task.open_source(), tmp_path / "two.parquet", "verl")
    assert pq.read_table(tmp_path / "two.parquet").to_pylist() == rows


def test_configs_are_resolved_in_place(source):
    node = source(prompt_template="{question}", ground_truth="level")
    config = OmegaConf.create({"train_tasks": [node], "data": {"train_files": "old", "val_files": "old", "seed": 1}})
    OmegaConf.set_struct(config, True)
    assert resolve_tasks_into_config(config) is config
    assert config.data.train_files == get_dataset_paths([node])
    assert (config.data.val_files, config.data.seed) == ("old", 1)
    untouched = OmegaConf.create({"data": {"train_files": "mine"}})
    before = OmegaConf.to_container(untouched)
    assert resolve_tasks_into_config(untouched) is untouched
    assert OmegaConf.to_container(untouched) == before


def test_gsm8k_is_declared_in_a_few_lines(gsm8k):
    """The real data, where there is some."""
    node = {
        "loading_params": {"args": ["json"], "kwargs": {"data_files": str(gsm8k / "test.jsonl"), "split": "train"}},
        "prompt_template": "{question}",
        "ground_truth": {"column": "answer", "pattern": "#### (.+)"},
    }
    taskset = load_task(node)
    raw = [json.loads(line) for line in (gsm8k / "test.jsonl").read_text().splitlines()]
    assert taskset.count() == len(raw)
    for position in (0, 7, len(raw) - 1):
        task: Task = taskset[position]
        assert task.messages == [{"role": "user", "content": raw[position]["question"]}]
        assert taskset.reward(task, raw[position]["answer"]).reward == 1.0
        assert taskset.reward(task, "I do not know").reward == 0.0


# What must never be silently wrong


def test_a_file_changed_and_dated_back_gives_its_new_rows(source, tmp_path):
    node = source([{"q": "old"}], prompt_template="{q}")
    file = tmp_path / "rows.jsonl"
    os.utime(file, (10**9, 10**9))
    assert rows_of(node)[0]["prompt"][0]["content"] == "old"
    file.write_text('{"q": "new and longer"}\n')
    os.utime(file, (10**9, 10**9))
    assert rows_of(node)[0]["prompt"][0]["content"] == "new and longer"


def test_code_edited_after_it_was_loaded_does_not_poison_the_cache(source, tmp_path):
    keep = tmp_path / "keeps.py"
    keep.write_text("def f(row):\n    return row['level'] == 1\n")
    node = source(prompt_template="{question}", filter=f"{keep}:f", extra_fields=["level"])
    assert [row["extra_info"]["level"] for row in rows_of(node)] == [1]
    keep.write_text("def f(row):\n    return row['level'] == 2\n")
    assert [row["extra_info"]["level"] for row in rows_of(node)] == [1]  # this process still runs the old code
    code = f"{LOAD}; print(task.get_parquet_path())"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(node)], capture_output=True, text=True, check=True)
    assert [row["extra_info"]["level"] for row in pq.read_table(done.stdout.strip()).to_pylist()] == [2]


def test_a_column_called_pass_rate_is_a_column(source):
    node = source([{"q": str(n), "pass_rate": n / 10} for n in range(10)], prompt_template="{q}")
    assert len(rows_of(node, filter="0.1 < pass_rate < 0.9")) == 7


def test_rows_of_a_subclass_without_a_ground_truth_are_dropped_and_counted(source, tmp_path):
    (tmp_path / "empty.py").write_text(
        "from treetune_verl.tasks import Task as Base\nclass Task(Base):\n"
        "    def _make_map_fn(self):\n        make = super()._make_map_fn()\n"
        "        truths = ['2', '', [], None]\n"
        "        return lambda row, i: {**make(row, i), 'reward_model': {'ground_truth': truths[i]}}\n"
    )
    node = source(
        [{"q": str(n)} for n in range(4)], prompt_template="{q}", custom_cls={"path": str(tmp_path / "empty.py")}
    )
    assert [row["reward_model"]["ground_truth"] for row in rows_of(node)] == ["2"]
    assert load_task(node).build()[0].dropped == {"no ground truth": 3}


def test_text_and_parts_in_prompts_become_one_type(source):
    parts = [{"role": "user", "content": [{"type": "text", "text": "look"}]}]
    text = [{"role": "user", "content": "hello"}]
    node = source([{"messages": parts}], prompt_format="chat_messages", system_prompt="be kind")
    (row,) = rows_of(node)
    assert row["prompt"][0] == {"role": "system", "content": [{"type": "text", "text": "be kind"}]}
    from treetune.data.rows.parquet import messages_column

    assert messages_column([parts, text]).to_pylist()[1][0]["content"] == [{"type": "text", "text": "hello"}]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("#### 72 apples", 1), ("#### 72\n\nHope it helps!", 1), ("#### \\boxed{72}", 1), ("It costs 70-72", 0),
        ("so 72.0", 1), ("$72", 1), ("#### 1,072", 0), ("72 or 73", 0), ("", 0), ("####", 0),
        ("\\boxed{\\frac{72}{2}}", 0),
    ],
)  # fmt: skip
def test_the_rule_reads_answers_as_people_write_them(answer, reward):
    from treetune.scorers import rule

    score = rule().score

    assert score(answer, "72").reward == reward


def test_the_recipe_parses_nested_boxes():
    from treetune_recipe.math.math_task import parse_answer

    assert parse_answer("so \\boxed{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert parse_answer("first\n#### 1,234") == "1234"


def test_build_dataset_has_the_rows_of_the_file(source):
    node = source([{"q": str(n)} for n in range(30)], prompt_template="{q}", filter="int(q) > 3", max_rows=5, repeat=2)
    task = load_task(node)
    assert [row["prompt"] for row in task.build_dataset()] == [row["prompt"] for row in rows_of(node)]
    assert len(rows_of(node)) == 10
    assert task.build()[0].dropped == {"filter": 4}


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("lambda row, index: {'prompt': ['hello']}", "row 0 has a message without a role"),
        ("lambda row, index: {'prompt': []}", "row 0 has no prompt"),
        ("lambda row, index: 5", "row 0 is a int"),
        ("lambda row, index: {'prompt': [{'role': 'user', 'content': 'x'}], 'reward_model': '5'}", "reward_model"),
        (
            "lambda row, index: {'prompt': [{'role': 'user', 'content': 'x'}], 'extra_info': {'index': 'a'}}",
            "index 'a'",
        ),
        ("lambda row, index: 1 / 0", "row 0 could not be made: ZeroDivisionError"),
    ],
)
def test_a_map_function_that_gives_no_row_is_told_where(source, tmp_path, function, said):
    (tmp_path / "bad.py").write_text(
        "from treetune_verl.tasks import Task as Base\n"
        f"class Task(Base):\n    def _make_map_fn(self): return {function}\n"
    )
    with pytest.raises(TasksetError, match=said):
        rows_of(source(custom_cls={"path": str(tmp_path / "bad.py")}))


def test_files_must_be_named(source):
    with raises_code("config", "data_files"):
        rows_of({"loading_params": {"args": ["json"]}, "prompt_template": "{q}"})
