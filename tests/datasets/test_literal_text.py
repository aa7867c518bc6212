"""A config is resolved once: an escaped `${` is the same text in every place that reads it."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from raising import raises_code

from treetune import load_taskset
from treetune.tasksets.target import read_target
from treetune.trainers.skyrl.gym import _make_config as make_config
from treetune.trainers.skyrl.tasks import resolve_tasks_into_config as resolve_for_skyrl
from treetune.trainers.verifiers import export_package
from treetune.trainers.verifiers import package as exported
from treetune_verl.tasks import resolve_tasks_into_config

SYSTEM = "Say ${oc.env:WHO,nobody}, it costs ${price:.2f} and ${"
TASKS = r"""
train_tasks: &tasks
  - loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}
    prompt_template: "{question} \\${{x}}"
    system_prompt: "Say \\${oc.env:WHO,nobody}, it costs \\${price:.2f} and \\${"
    data_source: prices
    ground_truth: answer
    scorer: {kind: pattern, pattern: '^\${(\d+)}$'}
val_tasks: *tasks
"""
OWN_CLASS = r"""
from treetune_verl.tasks import Task

class Mine(Task):
    def reward(self, task, answer):
        return float(answer == self.config.extra["marker"])

    def gold(self, task):
        return self.config.extra["marker"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    rows = [{"question": f"How much is {n}?", "answer": str(n)} for n in range(3)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("tasks.yaml").write_text(TASKS)
    return tmp_path


def said(messages):
    return [message["content"] for message in messages]


FIRST = [SYSTEM, "How much is 0? ${x}"]


def test_what_is_built_is_what_is_shown_validated_and_played(treetune):
    built = treetune("build", "tasks.yaml", "--json")
    assert built.code == 0, built.err
    for path in (*built.json["train_files"], *built.json["val_files"]):
        assert said(pq.read_table(path).to_pylist()[0]["prompt"]) == FIRST
    for target in ("tasks.yaml", built.json["train_files"][0]):
        shown = treetune("show", target, "-n", 1, "--json")
        assert shown.code == 0, shown.err
        assert SYSTEM in shown.json["tasks"][0]["prompt"][0]["content"]
        played = treetune("eval", target, "-m", "scripted:echo", "-o", f"run-{len(target)}", "--json")
        assert played.code == 0, played.err
        assert treetune("validate", target).code == 0


def test_a_saved_run_goes_on_and_is_scored_again_with_the_same_text(treetune, folder):
    assert treetune("eval", "tasks.yaml", "-m", "scripted:echo", "-n", 1, "-o", "run").code == 0
    saved = read_target("run/config.yaml", {})["taskset"]
    assert (saved["system_prompt"], saved["scorer"]["pattern"]) == (SYSTEM, r"^${(\d+)}$")
    resumed = treetune("eval", "--resume", "-o", "run", "-n", 3)
    assert resumed.code == 0, resumed.err
    assert read_target("run/config.yaml", {})["taskset"] == saved
    assert treetune("rescore", "run", "--json").json["changed"] == 0
    lines = (folder / "run" / "traces.jsonl").read_text().splitlines()
    assert len(lines) == 3
    assert all(SYSTEM in json.dumps(json.loads(line), ensure_ascii=False) for line in lines)


def test_an_exported_package_and_the_trainers_configs_have_the_same_text(folder):
    export_package("tasks.yaml", folder / "my-env")
    taskset = exported.open_taskset(folder / "my-env" / "my_env" / "taskset.yaml", {})
    assert said(taskset[0].prompt) == FIRST
    from omegaconf import OmegaConf

    config = OmegaConf.merge(OmegaConf.load("tasks.yaml"), {"data": {}})
    (path,) = resolve_tasks_into_config(config).data.train_files
    assert said(pq.read_table(path).to_pylist()[0]["prompt"]) == FIRST
    (path,) = resolve_for_skyrl({"data": {}}, "tasks.yaml")["data"]["train_data"]
    assert said(pq.read_table(path).to_pylist()[0]["prompt"]) == FIRST


@pytest.mark.thorough
def test_rows_that_a_class_scores_know_its_text_in_another_process(treetune, treetune_process):
    Path("mine.py").write_text(OWN_CLASS)
    Path("mine.yaml").write_text(
        TASKS[: TASKS.index("    scorer")] + "    custom_cls: {path: mine.py, name: Mine}\n"
        "    marker: '\\${oc.env:HOME} \\${'\n"
    )
    built = treetune("build", "mine.yaml", "--json")
    assert built.code == 0, built.err
    played = treetune_process("eval", built.json["train_files"][0], "-m", "scripted:gold", "--json")
    assert played.code == 0, played.err
    assert played.json["mean_reward"] == 1.0
    assert load_taskset("mine.yaml").config.extra["marker"] == "${oc.env:HOME} ${"


def test_a_ready_set_in_a_taskset_is_resolved_once(folder, monkeypatch):
    Path("mix.yaml").write_text("taskset: {id: mixture, sources: [{id: prices, split: train, weight: 2}]}\n")
    monkeypatch.setattr(
        "treetune.config.plugins.find_ready_file", lambda name: Path("tasks.yaml") if name == "prices" else None
    )
    assert said(load_taskset("mix.yaml").at(0).prompt) == FIRST
    Path("lone.yaml").write_text("taskset: prices\n")
    assert load_taskset("lone.yaml", {"taskset.max_rows": "2"}).count() == 2


def test_an_unescaped_reference_names_the_file_the_line_the_key_and_how_to_escape_it(treetune):
    Path("tasks.yaml").write_text(TASKS.replace(r"it costs \\${price:.2f}", "it costs ${price}"))
    for verb in ("build", "show", "validate"):
        result = treetune(verb, "tasks.yaml")
        assert result.code == 2
        assert "in tasks.yaml" in result.err
        assert "line 5, train_tasks[0].system_prompt: Interpolation key 'price' not found" in result.err
        assert r"write `\${`, in double quotes `\\${`" in result.err
    from omegaconf import OmegaConf

    with raises_code("config", "train_tasks[0].system_prompt", "'price'"):
        resolve_tasks_into_config(OmegaConf.merge(OmegaConf.load("tasks.yaml"), {"data": {}}))


def test_the_settings_that_a_row_gives_a_skyrl_environment_read_no_variable(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "s3cret")
    config = make_config(lambda **settings: None, {"url": "${oc.env:SECRET_OF_MINE}", "more": [{"half": "${"}]})
    assert (config.url, config.more[0].half) == ("${oc.env:SECRET_OF_MINE}", "${")
