"""Configs of dataset tasks: what is wrong in them is told at once, with the path of the key."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest
import yaml
from omegaconf import OmegaConf
from raising import raises_code

import datasets
from treetune.config.interpolation import with_overrides
from treetune.core.from_config import build_taskset
from treetune.data.arrow_values import drop_nulls, find_clashes
from treetune.data.datasets.task_lists import load_tasks, read_declared
from treetune.data.rows import read_tasks
from treetune.errors import ConfigError
from treetune.tasksets.target import load_taskset
from treetune.trainers.verl import compute_score, get_dataset_paths, resolve_tasks_into_config
from treetune.trainers.verl.reward import OURS, leaves_scoring, reward_function

ROWS = [{"question": f"{n} + 1?", "answer": str(n + 1), "level": n} for n in range(4)]
OWN = "from treetune_verl.tasks import Task\n\nclass My(Task):\n    pass\n"
WITH_AGENT = """
from treetune_verl.tasks import Task

class Agent(Task):
    def _make_map_fn(self):
        make = super()._make_map_fn()
        return lambda row, index: {**make(row, index), "agent_name": "tool_agent"}
"""


@pytest.fixture(autouse=True)
def _own_caches(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))


@pytest.fixture
def source(tmp_path):
    def write(rows=ROWS, name="rows.jsonl", **keys):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        params = {"args": ["json"], "kwargs": {"data_files": str(tmp_path / name), "split": "train"}}
        return {
            "loading_params": params,
            "prompt_template": "{question}",
            "data_source": name.partition(".")[0],
            "ground_truth": "answer",
            **keys,
        }

    return write


@pytest.fixture
def recipe(tmp_path):
    """Writes a YAML file in a folder of its own, which is not the current one."""

    def write(**data):
        (tmp_path / "sub").mkdir(exist_ok=True)
        file = tmp_path / "sub" / "tasks.yaml"
        file.write_text(yaml.safe_dump(data))
        return str(file)

    return write


def faults_of(call, *arguments, **keys):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keys)
    return dict(caught.value.faults)


def built_nothing(tmp_path):
    return not list((tmp_path / "cache").rglob("*.parquet"))


# Files that are joined


def test_null_beside_a_mapping_cannot_be_joined_but_beside_text_and_lists_it_can():
    assert find_clashes({"a": {"b": "null"}}, {"a": {"b": {"x": "string"}}}) == ["a.b (null and keys x)"]
    assert find_clashes({"a": {"x": "string"}}, {"a": "null"}) == ["a (keys x and null)"]
    assert find_clashes({"a": "null", "b": "null"}, {"a": "string", "b": ["int64"]}) == []


def test_a_task_without_truths_beside_one_with_mappings_needs_join(source):
    rows = [{"question": "x", "answer": {"low": 1, "high": 2}}]
    with raises_code("taskset", "0 (bare)", "1 (spans)", "ground_truth", "null"):
        get_dataset_paths([source(name="bare.jsonl", ground_truth=None), source(rows, "spans.jsonl")])
    bare = source(name="bare.jsonl", ground_truth=None, join=True)
    assert len(read_joined(get_dataset_paths([bare, source(rows, "spans.jsonl")]))) == 5


def read_joined(paths):
    """The rows as verl joins them, without what is null."""
    parts = [datasets.Dataset.from_parquet(path) for path in paths]
    return drop_nulls(datasets.concatenate_datasets(parts).to_list())


def test_a_list_of_truths_beside_a_text_is_joined_where_the_task_says_so(source):
    lists = source([{"question": "capital?", "answer": ["Paris", "paris"]}], "lists.jsonl")
    with raises_code("taskset", "0 (lists)", "1 (rows)", "ground_truth") as caught:
        get_dataset_paths([lists, source()])
    assert "set join: true in task 1 (rows)" in caught.value.remedy
    paths = get_dataset_paths([lists, source(join=True)])
    truths = [row["reward_model"]["ground_truth"] for row in read_joined(paths)]
    assert truths == [["Paris", "paris"], ["1"], ["2"], ["3"], ["4"]]
    assert get_dataset_paths([lists, source(join=True)]) == paths
    row = pq.read_table(paths[1]).to_pylist()[2]
    scores = [
        compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])["score"]
        for answer in ("3", "4")
    ]
    assert scores == [1.0, 0.0]


def test_chats_with_tool_calls_beside_plain_ones_are_joined_where_the_task_says_so(source):
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
    asks = [{"role": "user", "content": "hi"}, call]
    tools = source(
        [{"messages": asks, "answer": "1"}], "tools.jsonl", prompt_format="chat_messages", ground_truth="answer"
    )
    with raises_code("taskset", "prompt") as caught:
        get_dataset_paths([tools, source()])
    assert "set join: true in task 1 (rows), which then gets the types of the others: prompt" in caught.value.remedy
    rows = read_joined(get_dataset_paths([tools, source(join=True)]))
    assert [row["prompt"] for row in rows[:2]] == [asks, [{"role": "user", "content": "0 + 1?"}]]


def test_contents_in_parts_beside_text_are_joined_where_the_task_says_so(source):
    parts = [{"role": "user", "content": [{"type": "text", "text": "look"}]}]
    chats = source([{"messages": parts, "answer": "1"}], "parts.jsonl", prompt_format="chat_messages")
    rows = read_joined(get_dataset_paths([source(join=True), chats]))
    assert rows[0]["prompt"] == [{"role": "user", "content": [{"type": "text", "text": "0 + 1?"}]}]
    assert rows[-1]["prompt"] == parts


def test_extra_fields_of_other_types_are_joined_where_the_task_says_so(source):
    words = source([{"question": "x", "answer": "y", "level": "hard"}], "words.jsonl", extra_fields=["level"])
    with raises_code("taskset", "extra_info.level") as caught:
        get_dataset_paths([words, source(extra_fields=["level"])])
    assert "join: true in task 1" in caught.value.remedy
    paths = get_dataset_paths([words, source(extra_fields=["level"], join=True)])
    assert len(read_joined(paths)) == 5
    assert [task.extra_info["level"] for task in read_tasks(paths)] == ["hard", 0, 1, 2, 3]


def test_truths_that_no_key_makes_alike_say_so(source, tmp_path):
    spans = source([{"question": "x", "answer": {"low": 1, "high": 2}}], "spans.jsonl", join=True)
    with raises_code("taskset", "ground_truth") as caught:
        get_dataset_paths([spans, source(join=True)])
    assert "custom_cls" in caught.value.remedy


def test_agent_name_in_one_file_only_is_refused(source, tmp_path):
    (tmp_path / "agent.py").write_text(WITH_AGENT)
    agent = source(name="agents.jsonl", custom_cls={"path": str(tmp_path / "agent.py"), "name": "Agent"})
    assert len(get_dataset_paths([agent, agent])) == 2
    with raises_code("taskset", "1 (rows)"):
        get_dataset_paths([agent, source()])


# Who scores


ELSEWHERE = {"path": "my.py"}


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"reward": {"custom_reward_function": {"path": None}}, "custom_reward_function": ELSEWHERE}, "my.py"),
        ({"reward": {"custom_reward_function": {"path": OURS}}, "custom_reward_function": ELSEWHERE}, OURS),
        ({"reward": {"custom_reward_function": {"path": None}}}, ""),
        ({"custom_reward_function": {"path": None}}, ""),
        ({"reward": "foo"}, None),
        ({"reward": None, "custom_reward_function": "foo"}, None),
        ({}, None),
    ],
)
def test_the_reward_function_is_the_first_that_either_place_names(config, named):
    for given in (config, OmegaConf.create(config)):
        assert reward_function(given) == named
        assert leaves_scoring(given) is (named == "my.py")


def test_an_unknown_environment_is_told_before_anything_is_built(source, tmp_path):
    config = {
        "reward": {"custom_reward_function": {"path": OURS, "name": "compute_score"}},
        "train_tasks": [source(), source(env_class="gsm8")],
        "val_tasks": [source(env_class="gsm8k")],
    }
    faults = faults_of(resolve_tasks_into_config, config)
    assert list(faults) == ["train_tasks[1].env_class"]
    assert "did you mean 'gsm8k'" in faults["train_tasks[1].env_class"]
    assert built_nothing(tmp_path)


def test_build_refuses_an_unknown_environment_of_a_plain_file(source, recipe, treetune, tmp_path):
    result = treetune("build", recipe(train_tasks=[source(), source(env_class="gsm8")]))
    assert result.code == 2
    assert "train_tasks[1].env_class" in result.err
    assert "did you mean 'gsm8k'" in result.err
    assert built_nothing(tmp_path)


def test_an_unknown_environment_is_told_by_every_way_to_build(source, tmp_path):
    node = source(env_class="gsm8")
    assert list(faults_of(get_dataset_paths, [source(), node])) == ["tasks[1].env_class"]
    assert list(faults_of(resolve_tasks_into_config, {"train_tasks": [node]})) == ["train_tasks[0].env_class"]
    assert built_nothing(tmp_path)


def test_build_refuses_an_unknown_environment_of_a_single_taskset(source, recipe, treetune, tmp_path):
    result = treetune("build", recipe(taskset={"id": "dataset", **source(env_class="gsm8")}))
    assert result.code == 2
    assert "taskset.env_class: " in result.err
    assert built_nothing(tmp_path)


def test_an_environment_that_only_skyrl_may_know_is_warned_of(source, recipe, treetune):
    node = source(env_class="gsm8")
    for data, key in (
        ({"train_tasks": [node]}, "train_tasks[0]"),
        ({"taskset": {"id": "dataset", **node}}, "taskset"),
    ):
        result = treetune("build", recipe(**data), "--format", "skyrl")
        assert result.code == 0
        assert f"{key}.env_class: unknown environment 'gsm8'; did you mean 'gsm8k'?" in result.err


def test_an_unknown_environment_of_rows_is_told(source, tmp_path):
    (tmp_path / "named.py").write_text(WITH_AGENT.replace('"agent_name": "tool_agent"', '"env_class": "gsm8"'))
    node = source(custom_cls={"path": str(tmp_path / "named.py"), "name": "Agent"})
    with raises_code("taskset", "'gsm8k'"):
        get_dataset_paths([node])


# Columns


def test_column_faults_of_all_tasks_are_told_together_before_anything_is_built(source, recipe, treetune, tmp_path):
    (tmp_path / "agent.py").write_text(WITH_AGENT)
    wrong = [
        source(),
        source(prompt_template="{qestion}", ground_truth="anser", extra_fields=["levle"], filter="lvl > 1"),
        source(prompt_format="chat_messages"),
        source(custom_cls={"path": str(tmp_path / "agent.py"), "name": "Agent"}, prompt_template="{qestion}"),
    ]
    keys = ["[1].extra_fields", "[1].filter", "[1].prompt_template", "[1].ground_truth", "[2].chat_messages_field"]
    expected = [*keys, "[3].prompt_template"]
    assert list(faults_of(get_dataset_paths, wrong)) == [f"tasks{key}" for key in expected]
    faults = faults_of(resolve_tasks_into_config, {"train_tasks": [source()], "val_tasks": wrong})
    assert list(faults) == [f"val_tasks{key}" for key in expected]
    result = treetune("build", recipe(train_tasks=wrong))
    assert result.code == 2
    assert all(f"train_tasks{key}: " in result.err for key in expected)
    assert "did you mean 'question'" in result.err
    for verb in (("show",), ("validate",), ("eval", "-m", "scripted:gold")):
        result = treetune(*verb, recipe(val_tasks=wrong))
        assert result.code == 2
        assert all(f"val_tasks{key}: " in result.err for key in expected)
    assert built_nothing(tmp_path)


def test_a_column_that_only_a_scorer_reads_is_told_under_the_scorer(source):
    wrong = source(scorer={"kind": "choice", "choices": "optoins"}, extra_fields=["levle"])
    assert sorted(faults_of(get_dataset_paths, [wrong])) == ["tasks[0].extra_fields", "tasks[0].scorer"]


def test_a_source_that_cannot_be_read_is_told_beside_the_column_faults(source, tmp_path):
    broken = source(name="broken.jsonl")
    (tmp_path / "broken.jsonl").write_text('{"question": \n')
    faults = faults_of(get_dataset_paths, [source(ground_truth="anser"), broken])
    assert list(faults) == ["tasks[0].ground_truth", "tasks[1]"]
    assert "broken.jsonl, line 1" in faults["tasks[1]"]


# Overrides


@pytest.mark.parametrize("text", ["Q: {question}", "{question}", "{question}!", "[{question}]", "7"])
def test_an_override_of_a_text_key_is_text(source, recipe, text):
    file = recipe(train_tasks=[source()])
    declared = read_declared(file, {"train_tasks[0].prompt_template": text, "train_tasks[0].system_prompt": "Note: x"})
    config = declared["train"][0].config
    assert (config.prompt_template, config.system_prompt) == (text, "Note: x")


def test_an_override_stays_yaml_where_the_key_takes_it(source, recipe):
    overrides = {
        "train_tasks[0].max_rows": "3",
        "train_tasks[0].system_prompt": "null",
        "train_tasks[0].ground_truth": "{column: answer}",
        "train_tasks[0].ground_truth.pattern": "[0-9]",
        "train_tasks[0].loading_params.kwargs.split": "train[:2]",
    }
    config = read_declared(recipe(train_tasks=[source(system_prompt="S")]), overrides)["train"][0].config
    assert (config.max_rows, config.system_prompt) == (3, None)
    assert (config.ground_truth.column, config.ground_truth.pattern) == ("answer", "[0-9]")
    assert config.loading_params.kwargs["split"] == "train[:2]"


def test_an_override_of_a_class_s_own_text_is_text(source, recipe, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    node = source(custom_cls={"path": str(tmp_path / "mine.py"), "name": "My"}, hint="none", sizes={"a": 1})
    overrides = {"train_tasks[0].hint": "Note: {x}", "train_tasks[0].sizes": "{b: 2}"}
    extra = read_declared(recipe(train_tasks=[node]), overrides)["train"][0].config.extra
    assert extra == {"hint": "Note: {x}", "sizes": {"a": 1, "b": 2}}


def test_an_override_that_is_no_yaml_is_text():
    assert with_overrides({"a": 1}, {"a": "{x}!"}) == {"a": "{x}!"}


def test_a_key_of_a_list_is_set_alike_in_every_verb(source, recipe, treetune):
    file = recipe(train_tasks=[source()], val_tasks=[source(), source(name="more.jsonl")])
    built = treetune("build", file, "--val_tasks[0].max_rows", "1", "--val_tasks[1].data_source", "other", "--json")
    assert [task["rows"] for task in built.json["tasks"] if task["split"] == "val"] == [1, 4]
    keys = ("--val_tasks[0].max_rows", "1", "--val_tasks[1].prompt_template", "{question} Say it: {level}")
    shown = treetune("show", file, *keys, "-n", "9", "--json").json["tasks"]
    assert [task["prompt"][0]["content"] for task in shown[:2]] == ["0 + 1?", "0 + 1? Say it: 0"]
    assert len(shown) == 5
    played = treetune("eval", file, *keys, "-m", "scripted:gold", "--json").json
    assert (played["tasks"], played["mean_reward"]) == (5, 1.0)
    assert treetune("validate", file, *keys, "--json").json["tasks"] == 5


def test_an_override_of_a_list_that_is_not_used_is_told(source, recipe):
    file = recipe(train_tasks=[source()], val_tasks=[source()])
    assert list(faults_of(load_taskset, file, {"train_tasks[0].max_rows": "1"})) == ["train_tasks[0].max_rows"]
    assert load_taskset(file, {"train_tasks[0].max_rows": "1"}, split="train").config.max_rows == 1
    faults = faults_of(load_taskset, "arithmetic", {"val_tasks[0].max_rows": "1"})
    assert "--taskset." in faults["val_tasks[0].max_rows"]
    assert list(faults_of(load_taskset, file, {"val_tasks[7].max_rows": "1"})) == ["val_tasks[7].max_rows"]


def test_a_value_that_is_no_choice_lists_the_choices(source):
    faults = faults_of(load_tasks, [source(prompt_format="templat")])
    assert faults == {
        "tasks[0].prompt_format": "expected one of template, chat_messages, got 'templat'; did you mean 'template'?"
    }


# Files beside the YAML


def test_files_that_a_recipe_names_are_found_beside_it_by_build_and_by_show(source, recipe, tmp_path, monkeypatch):
    keys = {
        "custom_cls": {"path": "mytask.py", "name": "My"},
        "filter": "keep.py:keep",
        "profile": {"path": "rates.json"},
    }
    file = recipe(train_tasks=[source(**keys)])
    folder = tmp_path / "sub"
    (folder / "mytask.py").write_text(OWN)
    (folder / "keep.py").write_text("def keep(row):\n    return row['level'] < 2\n")
    (folder / "rates.json").write_text("{}")
    for taskset in (read_declared(file, {})["train"][0], load_taskset(file, split="train")):
        assert type(taskset).__name__ == "My"
        assert taskset.config.filter == f"{folder / 'keep.py'}:keep"
        assert taskset.config.profile.path == str(folder / "rates.json")
    # Else from where we are, and an override is always meant from there.
    (folder / "keep.py").rename(tmp_path / "keep.py")
    (tmp_path / "rates.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    config = read_declared(file, {"train_tasks[0].profile.path": "rates.json"})["train"][0].config
    assert (config.filter, config.profile.path) == ("keep.py:keep", "rates.json")
    config = read_declared(file, {"train_tasks[0].profile.drop_solved": "true"})["train"][0].config
    assert (config.profile.path, config.profile.drop_solved) == (str(folder / "rates.json"), True)


def test_a_filter_file_that_is_nowhere_is_a_fault(source, recipe):
    faults = faults_of(read_declared, recipe(train_tasks=[source(filter="absent.py:keep")]), {})
    assert faults == {"train_tasks[0].filter": "no such file: absent.py"}


# Entries that are none


def test_entries_that_are_no_mappings_are_told_by_their_place(recipe):
    file = recipe(train_tasks=["foo", None])
    expected = {
        "train_tasks[0]": "expected keys and values, got 'foo'",
        "train_tasks[1]": "expected keys and values, got None",
    }
    assert faults_of(read_declared, file, {}) == expected
    assert faults_of(load_taskset, file, split="train") == expected
    assert faults_of(resolve_tasks_into_config, {"train_tasks": ["foo", None]}) == expected
    assert faults_of(resolve_tasks_into_config, OmegaConf.create({"train_tasks": ["foo", None]})) == expected


@pytest.mark.parametrize("tasks", [{"a": 1}, "foo", 3])
@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_a_list_of_tasks_that_is_none_is_told(tasks, make, recipe):
    faults = faults_of(resolve_tasks_into_config, make({"train_tasks": tasks}))
    assert list(faults) == ["train_tasks"]
    assert "expected a list of tasks" in faults["train_tasks"]
    assert faults_of(read_declared, recipe(train_tasks=tasks), {}) == {"train_tasks": "expected a list of tasks"}


@pytest.mark.parametrize("make", [dict, OmegaConf.create])
def test_paths_are_put_into_a_config_whose_data_is_empty(source, make, tmp_path):
    config = resolve_tasks_into_config(make({"data": None, "train_tasks": [source()]}))
    assert len(config["data"]["train_files"]) == 1
    assert "data" in faults_of(resolve_tasks_into_config, make({"data": "foo", "train_tasks": [source()]}))


# Classes


def test_a_custom_cls_that_names_no_class_is_told_beside_all_other_faults(source, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    path = str(tmp_path / "mine.py")
    customs = ["x.py", {"name": "My"}, {"path": path}, {"path": path, "name": "Absent"}, {"path": "absent.py"}]
    nodes = [source(custom_cls=custom) for custom in customs]
    faults = faults_of(load_tasks, [*nodes, source(max_row=1)], path="train_tasks")
    assert list(faults) == [
        "train_tasks[0].custom_cls",
        "train_tasks[1].custom_cls.path",
        "train_tasks[2].custom_cls",
        "train_tasks[3].custom_cls",
        "train_tasks[4].custom_cls",
        "train_tasks[5].max_row",
    ]
    assert "got 'x.py'" in faults["train_tasks[0].custom_cls"]
    assert "is only the base class" in faults["train_tasks[2].custom_cls"]
    assert "one of: My" in faults["train_tasks[2].custom_cls"]
    assert "no class 'Absent'" in faults["train_tasks[3].custom_cls"]
    with raises_code("usage", "'Task'", "taskset.custom_cls.name"):
        build_taskset(nodes[2])


def test_a_custom_cls_that_is_spelled_out_as_empty_is_none(source, recipe):
    file = recipe(train_tasks=[source(custom_cls={"path": None, "name": None})])
    for taskset in (read_declared(file, {})["train"][0], load_taskset(file, split="train")):
        assert type(taskset).__name__ == "DatasetTaskset"


def test_values_that_are_still_missing_are_faults(source, recipe):
    node = source(data_source="???", extra_fields=["???"])
    expected = ["train_tasks[0].data_source", "train_tasks[0].extra_fields[0]"]
    file = recipe(train_tasks=[node])
    assert sorted(faults_of(resolve_tasks_into_config, OmegaConf.create({"train_tasks": [node]}))) == expected
    assert sorted(faults_of(read_declared, file, {})) == expected
    assert list(faults_of(resolve_tasks_into_config, OmegaConf.create({"train_tasks": "???"}))) == ["train_tasks"]
    assert "taskset.data_source" in faults_of(load_taskset, file, split="train")
    given = {"train_tasks[0].data_source": "sums", "train_tasks[0].extra_fields": "[level]"}
    assert read_declared(file, given)["train"][0].config.data_source == "sums"


def test_faults_that_no_single_key_shows_are_found_with_the_others(source, tmp_path):
    nodes = [source(), source(max_prompt_length=5), source(promt_template="x")]
    faults = faults_of(resolve_tasks_into_config, {"train_tasks": nodes})
    assert list(faults) == ["train_tasks[1].tokenizer", "train_tasks[2].promt_template"]
    assert built_nothing(tmp_path)


def test_a_key_that_nobody_reads_and_is_nearly_another_is_a_fault(source, recipe, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    node = source(custom_cls={"path": str(tmp_path / "mine.py"), "name": "My"})
    typo = {**node, "max_row": 1, "answer_key": "answer"}
    expected = "is not a key, and My does not read it; did you mean 'max_rows'?"
    assert faults_of(load_tasks, [typo]) == {"tasks[0].max_row": expected}
    assert faults_of(load_taskset, recipe(val_tasks=[typo])) == {"taskset.max_row": expected}
    assert list(faults_of(load_tasks, [{**node, "extra": {"a": 1}}])) == ["tasks[0].extra"]


def test_a_key_that_the_class_or_its_helper_reads_is_its_own(source, tmp_path):
    (tmp_path / "reads_it.py").write_text("KEY = 'max_row'\n")
    (tmp_path / "reader.py").write_text(f"import reads_it\n{OWN}")
    node = source(custom_cls={"path": str(tmp_path / "reader.py"), "name": "My"}, max_row=1)
    assert load_tasks([node])[0].config.extra == {"max_row": 1}
