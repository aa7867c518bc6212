"""Configs: YAML and overrides become typed, and every fault is named with its path."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune import Limits, Sampling, TasksetConfig
from treetune.config.aliases import OTHER_NAMES
from treetune.config.interpolation import conceal, deep_merge, override_values, with_overrides
from treetune.config.structs import convert, dump_yaml, field_docs, load_yaml, to_plain
from treetune.data.datasets.config import DatasetConfig
from treetune.errors import ConfigError, suggest_file
from treetune.evaluation.config import EvalConfig, ValidateConfig, read_config
from treetune.models import EndpointConfig
from treetune.tasksets.alphabet_sort import AlphabetSortConfig
from treetune.tasksets.arithmetic import ArithmeticConfig
from treetune.tasksets.target import read_target


def test_overrides_lie_over_yaml_and_interpolations_see_them(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("size: 1\nnested: {half: '${size}', other: 1e-3}\n")
    data = with_overrides(load_yaml(file), {"size": "4", "nested.new.key": "[1, 2]"})
    assert data == {"size": 4, "nested": {"half": 4, "other": 0.001, "new": {"key": [1, 2]}}}


def test_all_faults_are_reported_at_once_with_their_paths():
    with pytest.raises(ConfigError) as caught:
        read_config(
            {
                "taskset": {"id": "arithmetic", "levl": 2, "shuffle": {"seeed": 1}},
                "model": 7,
                "num_tasks": 0,
                "sampling": {"temperature": "hot", "stop": "x"},
                "num_rolouts": 2,
            },
            EvalConfig,
        )
    faults = dict(caught.value.faults)
    assert set(faults) == {
        "taskset.levl", "taskset.shuffle.seeed", "model", "num_tasks", "sampling.temperature", "sampling.stop",
        "num_rolouts",
    }  # fmt: skip
    assert "did you mean 'level'" in faults["taskset.levl"]
    assert "did you mean 'num_rollouts'" in faults["num_rolouts"]


def test_a_number_given_for_text_on_the_command_line_is_text():
    overrides = {"taskset.id": "arithmetic", "model": "7"}
    data = with_overrides({"num_tasks": 1}, overrides)
    assert read_config(data, EvalConfig, overrides).config.model == "7"


def test_missing_keys_are_named():
    with raises_code("config", "model"):
        convert({"taskset": {}}, EvalConfig)


@pytest.mark.parametrize("content", ["a: [", "- 1\n- 2", "\x00", "a: ${nowhere}"])
def test_a_file_that_is_no_config_is_a_clear_error(tmp_path, content):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    with raises_code("config", "c.yaml"):
        with_overrides(load_yaml(file), {}, source=str(file))


@given(st.text(alphabet="\\${}a ", max_size=12))
def test_text_survives_a_saved_config(text):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "c.yaml"
        file.write_text(dump_yaml({"stop": [text], "nested": {"key": text}}))
        assert with_overrides(load_yaml(file), {}) == {"stop": [text], "nested": {"key": text}}


class WithPath(TasksetConfig, frozen=True, kw_only=True):
    data: Path = Path("x.jsonl")


def test_a_config_may_hold_a_path_and_saves_it_absolute():
    assert convert({"data": "y.jsonl"}, WithPath).data == Path("y.jsonl")
    assert to_plain(WithPath())["data"] == str(Path.cwd() / "x.jsonl")
    with raises_code("config", "data", "Path"):
        convert({"data": 5}, WithPath)


@pytest.mark.parametrize(
    ("struct", "data"),
    [
        (EndpointConfig, {"max_retries": -1}),
        (EndpointConfig, {"timeout": 0}),
        (EndpointConfig, {"max_connections": 0}),
        (EndpointConfig, {"base_url": "127.0.0.1:8000/v1"}),
        (Limits, {"timeout": -1}),
        (Limits, {"max_turns": 0}),
        (Sampling, {"temperature": -1}),
        (Sampling, {"top_p": 0}),
        (Sampling, {"max_tokens": 0}),
        (AlphabetSortConfig, {"turns": 0}),
        (AlphabetSortConfig, {"turns": 30}),
    ],
)
def test_numbers_out_of_range_are_refused(struct, data):
    with pytest.raises(ConfigError):
        convert(data, struct)


def test_one_file_serves_every_verb_and_a_typo_is_told_by_each(treetune, tmp_path):
    file = tmp_path / "all.yaml"
    file.write_text("taskset: {id: reverse-text}\nmodel: scripted:gold\ngold: false\n")
    assert treetune("eval", "all.yaml", "--json").json["mean_reward"] == 1.0
    assert treetune("show", "all.yaml").code == 0
    assert treetune("validate", "all.yaml", "--json").json["gold_checked"] == 0
    assert treetune("validate", "all.yaml", "--gold", "--json").json["gold_checked"] == 8
    file.write_text(file.read_text() + "num_taks: 3\n")
    for verb in ("eval", "show", "validate"):
        result = treetune(verb, "all.yaml")
        assert result.code == 2
        assert "did you mean 'num_tasks'" in result.err


def faults_in(treetune, tmp_path, text, verb="show", file="c.yaml"):
    (tmp_path / file).write_text(text)
    result = treetune(verb, file)
    assert result.code == 2
    assert f"in {file}:" in result.err
    return [line.strip() for line in result.err.splitlines()[1:]]


MIXED = """taskset:
  id: mixture
  sources:
    - id: arithmetic
      wieght: 2
    - {id: mixture, sources: [{id: arithmetic, levle: 2}]}
"""


@pytest.mark.parametrize("verb", ["show", "validate", "serve", "build", "audit", "profile"])
def test_faults_inside_mixtures_have_their_file_line_and_nearest_key(treetune, tmp_path, verb):
    assert faults_in(treetune, tmp_path, MIXED, verb) == [
        "line 5, taskset.sources[0].wieght: unknown key; did you mean 'weight'?",
        "line 6, taskset.sources[1].sources[0].levle: unknown key; did you mean 'level'?",
    ]


def test_a_key_is_found_by_what_other_tools_call_it(treetune, tmp_path):
    text = """taskset: {id: arithmetic, difficulty: 3, temperature: 1}
model: scripted:gold
temperature: 0.5
level: 2
limit: 3
sampling: {max_new_tokens: 9, num_generations: 4}
endpoint: {api_base: x}
limits: {max_steps: 3}
"""
    assert sorted(faults_in(treetune, tmp_path, text, "eval")) == [
        "line 1, taskset.difficulty: unknown key; did you mean 'level'?",
        "line 1, taskset.temperature: unknown key; did you mean 'sampling.temperature', at the top of the file?",
        "line 3, temperature: unknown key; did you mean 'sampling.temperature'?",
        "line 4, level: unknown key; did you mean 'taskset.level'?",
        "line 5, limit: unknown key; did you mean 'num_tasks'?",
        "line 6, sampling.max_new_tokens: unknown key; did you mean 'max_tokens'?",
        "line 6, sampling.num_generations: unknown key; did you mean 'num_rollouts', at the top of the file?",
        "line 7, endpoint.api_base: unknown key; did you mean 'base_url'?",
        "line 8, limits.max_steps: unknown key; did you mean 'max_turns'?",
    ]


def test_faults_of_declared_tasks_stand_where_the_file_has_them(treetune, tmp_path):
    one = "val_tasks:\n  - path: openai/gsm8k\n    prompt: x\n"
    expected = ["line 2, val_tasks[0].path: unknown key; did you mean 'loading_params'?",
                "line 3, val_tasks[0].prompt: unknown key; did you mean 'prompt_template'?",
                "val_tasks[0].loading_params: is required"]  # fmt: skip
    assert faults_in(treetune, tmp_path, one) == expected
    # Of two lists, one that has the missing key is not named in the place of the other.
    both = f"train_tasks:\n  - {{loading_params: {{args: [json]}}}}\n{one}"
    assert faults_in(treetune, tmp_path, both)[2] == "taskset.loading_params: is required"


@pytest.mark.parametrize("verb", ["show", "validate", "build", "audit"])
def test_faults_that_only_the_data_shows_have_their_file_and_line(treetune, tmp_path, verb):
    (tmp_path / "rows.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    loading = "loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}"
    text = f"val_tasks:\n  - {loading}\n    prompt_template: '{{question}}'\n    ground_truth: anwser\n"
    said = "no column 'anwser'; did you mean 'answer'?; available: question, answer"
    assert faults_in(treetune, tmp_path, text, verb) == [f"line 4, val_tasks[0].ground_truth: {said}"]
    if verb != "build":
        both = f"{text}{text.replace('val_tasks', 'train_tasks')}"
        places = "line 8 or 4, train_tasks[0].ground_truth or val_tasks[0].ground_truth"
        assert faults_in(treetune, tmp_path, both, verb) == [f"{places}: {said}"]
        assert f"\n  --taskset.ground_truth: {said}" in treetune(verb, "c.yaml", "--taskset.ground_truth", "anwser").err


def test_an_unknown_kind_of_scorer_has_its_line_and_is_called_as_in_the_file(treetune, tmp_path):
    text = "train_tasks:\n  - loading_params: {args: [x]}\n    scorer: chocie\n"
    assert faults_in(treetune, tmp_path, text)[0].startswith("line 3, train_tasks[0].scorer: 'chocie' is not a kind of")
    text = text.replace("chocie", "{kind: chocie}")
    assert faults_in(treetune, tmp_path, text)[0].startswith(
        "line 3, train_tasks[0].scorer.kind: 'chocie' is not a kind"
    )


def test_a_fault_of_an_override_is_not_put_down_to_the_file(treetune, tmp_path):
    (tmp_path / "c.yaml").write_text("taskset: {id: arithmetic, level: 1}\n")
    result = treetune("show", "c.yaml", "--taskset.level", "x")
    assert "\n  --taskset.level: expected int, got str ('x')" in result.err


def test_every_key_with_other_names_is_a_key():
    structs = {"sampling": Sampling, "limits": Limits, "endpoint": EndpointConfig}
    known = {*EvalConfig.__struct_fields__, *DatasetConfig.__struct_fields__, *ArithmeticConfig.__struct_fields__}
    known |= {f"{name}.{key}" for name, struct in structs.items() for key in struct.__struct_fields__}
    known |= {"taskset.shuffle.seed", "id", "weight", "column"}
    assert {re.sub(r"^sampling\.extra\..*", "sampling.extra", key) for key in OTHER_NAMES} <= known


def test_a_typed_config_returns_to_what_it_was():
    sampling = Sampling(temperature=0.5, stop=["a"])
    assert convert(to_plain(sampling), Sampling) == sampling


@pytest.mark.parametrize("config", [EvalConfig, ValidateConfig, Sampling, Limits, EndpointConfig, TasksetConfig])
def test_every_config_field_says_what_it_means(config):
    assert set(field_docs(config)) == set(config.__struct_fields__)


def test_the_resolved_config_builds_the_same_evaluation():
    taskset = {"id": "arithmetic", "level": 3, "shuffle": {"seed": 9}}
    evaluation = read_config({"taskset": taskset, "model": "scripted:gold", "num_tasks": 2}, EvalConfig)
    again = read_config(evaluation.resolved(), EvalConfig)
    assert again.resolved() == evaluation.resolved()
    assert again.taskset.select_tasks(2) == evaluation.taskset.select_tasks(2)
    assert evaluation.overridden() == {
        "model": "scripted:gold",
        "num_tasks": 2,
        "taskset.id": "arithmetic",
        "taskset.level": 3,
        "taskset.shuffle": {"seed": 9},
    }


def test_a_missing_file_and_a_value_of_a_wrong_type_come_with_a_remedy(treetune, tmp_path):
    (tmp_path / "tasks.yaml").write_text("taskset: arithmetic\n")
    missing = treetune("show", "task.yaml", "--json")
    assert missing.code == 2
    assert "did you mean 'tasks.yaml'?" in missing.json["error"]
    assert f"taken from {tmp_path}" in missing.json["remedy"]
    assert "write a whole number" in treetune("show", "arithmetic", "--taskset.level", "many").err
    assert "write a list" in treetune("eval", "arithmetic", "-m", "scripted:gold", "--sampling.stop", "3").err
    assert "write {NAME: VALUE}" in treetune("eval", "arithmetic", "-m", "x", "--sampling.extra", "{top_k 20}").err


@pytest.mark.parametrize(
    ("there", "named"),
    [
        ("colours.py", "colour.py:Colours"),
        ("train.jsonl", "trian.jsonl"),
        ("data/train.jsonl", "data/trian.jsonl"),
        ("train.parquet", "train.parqet.gz.parquet"),
        ("tasks.yaml", "taks.yaml"),
    ],
)
def test_a_file_that_is_nearly_called_so_is_proposed(treetune, tmp_path, there, named):
    (tmp_path / there).parent.mkdir(exist_ok=True)
    (tmp_path / there).write_text("")
    told = treetune("show", named, "--json")
    assert told.code == 2
    assert f"did you mean {there.rpartition('/')[2]!r}?" in told.json["error"]


def test_nothing_is_proposed_for_a_user_or_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    assert [suggest_file(name) for name in ("~nobody-here/x.jsonl", "none/x.jsonl", "data")] == ["", "", ""]
    (tmp_path / "date").mkdir()
    assert suggest_file("data") == "; did you mean 'date'?"


def test_files_of_a_dataset_that_are_nearly_called_so_are_proposed(treetune, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    (tmp_path / "tasks.yaml").write_text(
        "train_tasks:\n  - loading_params: {args: [json], kwargs: {data_files: trian.jsonl, split: train}}\n"
        "    prompt_template: '{question}'\n    ground_truth: answer\n    scorer: exact\n"
    )
    told = treetune("build", "tasks.yaml").err
    assert "'trian.jsonl'; did you mean 'train.jsonl'?" in told


def test_values_from_the_environment_are_written_as_they_were(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_ONE", "s3cret")
    monkeypatch.setenv("SECRET_TWO", "other")
    (tmp_path / "a.yaml").write_text(
        "direct: ${oc.env:SECRET_ONE}\nwithin: x-${oc.env:SECRET_TWO}-\\${no}\nindirect: [plain, '${direct}!']\n"
        "absent: ${oc.env:NOT_SET,usual}\nplain: other\nnumber: ${oc.decode:${oc.env:NUMBER,3}}\n"
    )
    written = load_yaml(tmp_path / "a.yaml")
    read = with_overrides(written, {})
    assert read == {
        "direct": "s3cret", "within": "x-other-${no}", "indirect": ["plain", "s3cret!"], "absent": "usual",
        "plain": "other", "number": 3,
    }  # fmt: skip
    dumped = dump_yaml(read)
    assert "s3cret" not in dumped
    assert "x-other" not in dumped
    (tmp_path / "b.yaml").write_text(dumped)
    again = load_yaml(tmp_path / "b.yaml")
    assert again["direct"] == "${oc.env:SECRET_ONE}"
    assert again["indirect"] == ["plain", "${oc.env:SECRET_ONE}!"]
    assert again["plain"] == "other"  # the same text under another key is not a secret
    assert with_overrides(again, {}) == read
    assert dump_yaml(conceal(read)) == dumped


# A config is resolved once


def test_an_interpolation_that_leads_nowhere_names_its_line_its_key_and_how_to_escape_it(tmp_path):
    file = tmp_path / "c.yaml"
    for text in ("costs ${price}", "costs ${price:.2f}", "costs ${", "${oc.env:NOT_SET_ANYWHERE}"):
        file.write_text(f'top: 1\nnested:\n  - say: "{text}"\n')
        with pytest.raises(ConfigError) as caught:
            with_overrides(load_yaml(file), {}, source=str(file))
        said = str(caught.value)
        assert f"in {file}" in said
        assert "line 3, nested[0].say: " in said
        assert r"for plain text write `\${`, in double quotes `\\${`" in said
    file.write_text('nested:\n  - say: "costs \\\\${price:.2f}"\n')
    assert with_overrides(load_yaml(file), {}) == {"nested": [{"say": "costs ${price:.2f}"}]}


def test_an_override_that_leads_nowhere_is_named_as_it_was_given(tmp_path):
    (tmp_path / "c.yaml").write_text("taskset: {id: arithmetic, level: 1}\n")
    with raises_code("config", "--taskset.level", "'x'"):
        read_target(str(tmp_path / "c.yaml"), {"taskset.level": "${x}"})


def test_resolved_values_stay_as_they_are_where_overrides_are_laid_over_them():
    data = {"a": "${x} ${oc.env:HOME} \\${y}", "list": [{"b": "${"}, {"c": 1}]}
    assert override_values(data, {"list[1].c": "2", "d": "\\${z}"}) == {
        **data, "list": [{"b": "${"}, {"c": 2}], "d": "${z}",
    }  # fmt: skip
    with raises_code("config", "list[2]", "entry 2", "are 2"):
        override_values(data, {"list[2].c": "2"})
    assert deep_merge({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}}) == {"a": {"b": 1, "c": 3}}


@pytest.mark.parametrize("target", ["a${b.jsonl", "a${oc.env:HOME}.jsonl"])
def test_the_name_of_a_file_is_no_interpolation(tmp_path, monkeypatch, target):
    monkeypatch.chdir(tmp_path)
    Path(target).write_text("{}\n")
    assert read_target(target, {"taskset.trust": "true"}) == {
        "taskset": {"id": "rows", "files": [target], "trust": True}
    }


def test_an_interpolated_name_of_a_file_is_looked_for_beside_the_config(tmp_path, monkeypatch):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "rows.jsonl").write_text("{}\n")
    (tmp_path / "beside" / "c.yaml").write_text("taskset: {id: rows, files: ['${name}.jsonl']}\nname: rows\n")
    monkeypatch.chdir(tmp_path)
    found = read_target("beside/c.yaml", {})["taskset"]["files"]
    assert found == [str(tmp_path / "beside" / "rows.jsonl")]
    # One of an override is not.
    assert read_target("beside/c.yaml", {"taskset.files": "[rows.jsonl]"})["taskset"]["files"] == ["rows.jsonl"]
    assert read_target("beside/c.yaml", {"name": "other"})["taskset"]["files"] == ["other.jsonl"]


def test_a_value_from_the_environment_is_concealed_behind_an_interpolation_of_a_whole_mapping(monkeypatch):
    monkeypatch.setenv("SECRET_THREE", "s3cret-three")
    read = with_overrides(
        {"first": "${base}", "base": {"a": "x", "key": "${oc.env:SECRET_THREE}"}, "last": {"key": "plain"}}, {}
    )
    assert read["first"] == {"a": "x", "key": "s3cret-three"}
    assert "s3cret-three" not in dump_yaml(read)
