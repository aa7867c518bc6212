"""Tasks in a verl config, and the scores of their rows, as far as they need no verl."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from command_line import ROOT
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError
from raising import raises_code

import datasets
from treetune.errors import ConfigError
from treetune.trainers.verl import compute_score
from treetune_verl.tasks import play_by_tasks, resolve_tasks_into_config, run_with_tasks, score_by_tasks

# The examples leave scoring to the trainer, which is worth a warning and no more.
pytestmark = pytest.mark.filterwarnings("ignore:nothing here can score:UserWarning")

GSM8K = [
    {"question": f"Ann has {n} pears and buys 2 more. How many?", "answer": f"{n}+2\n#### {n + 2}"} for n in range(5)
]
MATH = [{"problem": f"What is ${n}^2$?", "solution": f"$\\boxed{{{n * n}}}$", "level": "Level 1"} for n in range(3)]
CHATS = [
    {"conversations": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."}]},
    {"conversations": [{"role": "user", "content": "Name a fruit."}]},
]

# The examples of the design that users know, their hub datasets replaced by local files.
BASIC = """
train_tasks:
  - loading_params:
      args: [json]
      kwargs: { data_files: DATA/gsm8k.jsonl, split: train }
    prompt_format: template
    prompt_template: "{question}"
    system_prompt: "You are a math tutor. Solve step by step."
    data_source: "gsm8k"
    extra_fields: ["answer"]

val_tasks:
  - loading_params:
      args: [json]
      kwargs: { data_files: { test: DATA/gsm8k.jsonl }, split: test }
    prompt_format: template
    prompt_template: "{question}"
    data_source: "gsm8k"
    extra_fields: ["answer"]
"""
SEVERAL = """
train_tasks:
  - loading_params: { args: [json], kwargs: { data_files: DATA/gsm8k.jsonl, split: train } }
    prompt_template: "{question}"
    data_source: "gsm8k"

  - loading_params: { args: [json], kwargs: { data_files: DATA/math.jsonl, split: train } }
    prompt_template: "{problem}"
    system_prompt: "Solve step by step."
    data_source: "math"
"""
CHAT = """
train_tasks:
  - loading_params: { args: [json], kwargs: { data_files: DATA/chats.jsonl, split: train } }
    prompt_format: chat_messages
    chat_messages_field: "conversations"
    data_source: "my_chat"
"""
CUSTOM = """
train_tasks:
  - custom_cls:
      path: "treetune_recipe/math/math_task.py"
      name: MathTask
    loading_params:
      args: [json]
      kwargs: { data_files: DATA/gsm8k.jsonl, split: train }
    prompt_template: "{question}"
    answer_key: "answer"
    data_source: "gsm8k"
"""

# What is in verl's own ppo_trainer where the tasks meet it.
TRAINER = """
data: { train_files: ~/data/train.parquet, val_files: ~/data/test.parquet, train_batch_size: 4, seed: null }
reward: { num_workers: 8, custom_reward_function: { path: null, name: compute_score } }
custom_reward_function: { path: null, name: null }
trainer: { total_epochs: 3, default_local_dir: "checkpoints/${trainer.total_epochs}" }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data, in a folder of its own, with caches beside it."""
    for name, rows in {"gsm8k": GSM8K, "math": MATH, "chats": CHATS}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "library")
    return tmp_path


@pytest.fixture
def declared(folder: Path) -> Callable[..., DictConfig]:
    """A config as hydra hands it over: keys that are not there cannot be set."""

    def make(*texts: str) -> DictConfig:
        config = OmegaConf.merge(*(OmegaConf.create(text.replace("DATA", str(folder))) for text in texts))
        assert isinstance(config, DictConfig)
        OmegaConf.set_struct(config, True)
        return config

    return make


def rows_of(path: str) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


# Tasks become files in the config


def test_tasks_become_the_files_of_a_config_and_nothing_else_in_it_changes(declared):
    config = declared(TRAINER, BASIC, "reward: {custom_reward_function: {path: /my/reward.py}}")
    before = OmegaConf.to_container(config)
    assert resolve_tasks_into_config(config) is config
    after = OmegaConf.to_container(config)
    (train,), (val,) = after["data"].pop("train_files"), after["data"].pop("val_files")
    del before["data"]["train_files"], before["data"]["val_files"]
    assert after == before
    assert list(after) == list(before)
    with pytest.raises(ConfigAttributeError):
        config.data.unknown = 1
    assert train != val
    assert Path(train).is_absolute()
    assert [len(rows_of(path)) for path in (train, val)] == [5, 5]


def test_a_config_is_patched_only_in_the_lists_it_declares(declared):
    config = declared(TRAINER, SEVERAL, "reward: {custom_reward_function: {path: /my/reward.py}}")
    resolve_tasks_into_config(config)
    assert len(config.data.train_files) == 2
    assert config.data.val_files == "~/data/test.parquet"


def test_a_config_without_a_data_section_gets_one(declared):
    config = resolve_tasks_into_config(declared(BASIC))
    assert [len(config.data[key]) for key in ("train_files", "val_files")] == [1, 1]
    plain = OmegaConf.to_container(declared(BASIC))
    assert resolve_tasks_into_config(plain)["data"] == config.data


def test_the_basic_example_gives_the_rows_it_describes(declared):
    config = resolve_tasks_into_config(declared(BASIC))
    system = {"role": "system", "content": "You are a math tutor. Solve step by step."}
    for key, opening in {"train_files": [system], "val_files": []}.items():
        rows = rows_of(config.data[key][0])
        assert [row["prompt"] for row in rows] == [
            [*opening, {"role": "user", "content": row["question"]}] for row in GSM8K
        ]
        assert [row["data_source"] for row in rows] == ["gsm8k"] * 5
        assert [(row["extra_info"]["index"], row["extra_info"]["answer"]) for row in rows] == [
            (index, row["answer"]) for index, row in enumerate(GSM8K)
        ]


def test_the_example_of_several_tasks_gives_a_file_each(declared):
    config = resolve_tasks_into_config(declared(SEVERAL))
    first, second = map(rows_of, config.data.train_files)
    assert [row["prompt"][0]["content"] for row in first] == [row["question"] for row in GSM8K]
    assert [row["prompt"][1]["content"] for row in second] == [row["problem"] for row in MATH]
    assert ({row["data_source"] for row in first}, {row["data_source"] for row in second}) == ({"gsm8k"}, {"math"})


def test_the_chat_example_passes_messages_through(declared):
    config = resolve_tasks_into_config(declared(CHAT))
    (path,) = config.data.train_files
    assert [row["prompt"] for row in rows_of(path)] == [row["conversations"] for row in CHATS]


def test_the_custom_class_example_parses_its_answers(declared, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = resolve_tasks_into_config(declared(CUSTOM))
    (path,) = config.data.train_files
    rows = rows_of(path)
    assert [row["reward_model"] for row in rows] == [{"style": "rule", "ground_truth": str(n + 2)} for n in range(5)]
    assert {row["ability"] for row in rows} == {"math"}


# What nothing could score


def with_ground_truth(config: DictConfig) -> DictConfig:
    for name in ("train_tasks", "val_tasks"):
        OmegaConf.update(config, f"{name}.0.ground_truth", {"column": "answer", "pattern": "#### (.+)"}, force_add=True)
    return config


@pytest.mark.parametrize(
    "function",
    ["reward: {custom_reward_function: {path: null}}", "custom_reward_function: {path: null, name: compute_score}"],
    ids=["now", "before verl 0.7.1"],
)
def test_a_data_source_that_verl_cannot_score_is_scored_by_its_tasks(declared, fake_verl, function):
    config = with_ground_truth(declared(TRAINER, function, BASIC))
    before = OmegaConf.to_container(config)
    with pytest.warns(UserWarning, match="verl itself cannot score data_source 'gsm8k'.*score_by_tasks"):
        resolve_tasks_into_config(config)
    after = OmegaConf.to_container(config)
    assert before | {"data": after["data"]} == after
    assert {key for key in after["data"] if after["data"][key] != before["data"].get(key)} == {
        "train_files",
        "val_files",
    }
    score_by_tasks(config)
    place = config.reward if "reward" in config else config
    named = {"path": "pkg://treetune.trainers.verl", "name": "compute_score"}
    assert place.custom_reward_function == named
    fake_verl(RELEASES["0.9"])
    again = with_ground_truth(declared(TRAINER, function, BASIC))
    run_with_tasks(again)
    assert (again.reward if "reward" in again else again).custom_reward_function == named


@pytest.mark.parametrize(
    "way",
    [
        "reward: {custom_reward_function: {path: null}, reward_model: {enable: true}}",
        "reward: {custom_reward_function: {path: null}, reward_manager: {source: importlib}}",
        "reward: {custom_reward_function: {path: /my/reward.py}}",
        "reward: {custom_reward_function: {path: null}}\nleave_scoring: true",
    ],
)
def test_rows_need_no_scorer_where_something_else_scores_them(declared, fake_verl, way, recwarn):
    main_ppo = fake_verl(RELEASES["0.9"])
    config = declared(TRAINER, way, BASIC)
    before = OmegaConf.to_container(config.get("reward"))
    run_with_tasks(config)
    assert [call[0] for call in main_ppo.calls] == ["main"]
    assert OmegaConf.to_container(config.reward) == before
    assert not [warning for warning in recwarn if "score" in str(warning.message)]


# Several turns


AGENT = "actor_rollout_ref: {rollout: {agent: {agent_loop_config_path: null, default_agent_loop: single_turn_agent}}}"
SINGLE = {"agent_loop_config_path": None, "default_agent_loop": "single_turn_agent"}


def of_several_turns(config, *names):
    for name in names or ("train_tasks", "val_tasks"):
        OmegaConf.update(config, f"{name}.0.env_class", "gsm8k_multi_turn", force_add=True)
    return config


def agents_in(config):
    return {row.get("agent_name") for files in (config.data.train_files, config.data.val_files)
            for file in files for row in rows_of(file)}  # fmt: skip


def test_tasks_of_several_turns_are_played_by_our_loop(declared, fake_verl, folder):
    main_ppo = fake_verl(RELEASES["0.9"])
    settings = "treetune_loop: {max_turns: 7, urls: ['http://127.0.0.1:5000']}"
    config = of_several_turns(with_ground_truth(declared(TRAINER, AGENT, settings, BASIC)), "train_tasks")
    run_with_tasks(config)
    assert [call[0] for call in main_ppo.calls] == ["main"]
    assert agents_in(config) == {"treetune"}  # those of the other list too: verl has the column in all files, or none
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.default_agent_loop == "treetune"
    assert yaml.safe_load(Path(agent.agent_loop_config_path).read_text()) == [
        {
            "name": "treetune",
            "_target_": "treetune.trainers.verl.loop.TreetuneLoop",
            "max_turns": 7,
            "urls": ["http://127.0.0.1:5000"],
        }
    ]
    assert Path(agent.agent_loop_config_path).is_relative_to(folder)


def test_verl_runs_our_trainer_or_refuses_credit_by_turn_before_it_starts(declared, fake_verl):
    main_ppo = fake_verl(RELEASES["0.9"])
    config = of_several_turns(with_ground_truth(declared(TRAINER, AGENT, BASIC)))
    for name in ("train_tasks", "val_tasks"):
        OmegaConf.update(config, f"{name}.0.contract", {"credit": "turn"}, force_add=True)
    run_with_tasks(config)
    assert config.trainer.v1.trainer_mode == "treetune_sync"
    modules = config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_USE_EXTERNAL_MODULES
    assert modules.endswith("treetune.trainers.verl.trainer")
    OmegaConf.update(config, "trainer.use_v1", False, force_add=True)
    with raises_code("credit", "v0"):
        run_with_tasks(config)
    assert len(main_ppo.calls) == 1


def test_tasks_of_one_turn_are_left_to_verls_own_loop(declared, fake_verl):
    fake_verl(RELEASES["0.9"])
    config = with_ground_truth(declared(TRAINER, AGENT, BASIC))
    run_with_tasks(config)
    assert agents_in(config) == {None}
    assert OmegaConf.to_container(config.actor_rollout_ref.rollout.agent) == SINGLE


def test_an_environment_that_does_not_say_is_played_where_that_can_be_set_up(declared, fake_verl, folder):
    fake_verl(RELEASES["0.9"])
    (folder / "silent.py").write_text("from treetune import Environment\n\nclass Silent(Environment):\n    pass\n")
    config = with_ground_truth(declared(TRAINER, AGENT, BASIC))
    for name in ("train_tasks", "val_tasks"):
        OmegaConf.update(config, f"{name}.0.env_class", f"{folder}/silent.py:Silent", force_add=True)
    resolve_tasks_into_config(config)
    assert agents_in(config) == {None}
    run_with_tasks(config)
    assert agents_in(config) == {"treetune"}


def test_tasks_of_several_turns_resolve_into_the_files_and_nothing_else(declared):
    config = of_several_turns(with_ground_truth(declared(TRAINER, AGENT, BASIC)))
    before = OmegaConf.to_container(config)
    with pytest.warns(UserWarning, match="play_by_tasks"):
        resolve_tasks_into_config(config)
    after = OmegaConf.to_container(config)
    assert agents_in(config) == {"treetune"}
    assert {key: value for key, value in after.items() if key != "data"} == {
        key: value for key, value in before.items() if key != "data"
    }


def test_loops_of_the_users_own_stay_beside_ours(folder):
    own = [{"name": "mine", "_target_": "my.Loop", "depth": 3}]
    (folder / "own.yaml").write_text(yaml.safe_dump(own))
    config = OmegaConf.create(AGENT)
    config.actor_rollout_ref.rollout.agent.agent_loop_config_path = str(folder / "own.yaml")
    config.actor_rollout_ref.rollout.agent.default_agent_loop = "mine"
    agent = play_by_tasks(config).actor_rollout_ref.rollout.agent
    loops = yaml.safe_load(Path(agent.agent_loop_config_path).read_text())
    assert [loop["name"] for loop in loops] == ["mine", "treetune"]
    assert loops[0] == own[0]
    assert agent.default_agent_loop == "mine"
    again = play_by_tasks(config).actor_rollout_ref.rollout.agent
    assert yaml.safe_load(Path(again.agent_loop_config_path).read_text()) == loops


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"max_turn": 3}, "treetune_loop.max_turn: unknown key; did you mean 'max_turns'"),
        ({"on_failure": "zero"}, "treetune_loop.on_failure"),
        ({"urls": "http://127.0.0.1:1"}, "treetune_loop.urls"),
    ],
)
def test_a_wrong_setting_of_the_loop_is_told_before_anything_starts(settings, fault):
    config = OmegaConf.merge(OmegaConf.create(AGENT), {"treetune_loop": settings})
    with pytest.raises(ConfigError) as error:
        play_by_tasks(config)
    assert fault in str(error.value)


PYTHON = """
from treetune import Environment, Step, Task, Taskset

class Doubles(Taskset):
    def load_tasks(self):
        for n in range(5):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

class Twice(Environment):
    MULTI_TURN = True

class Several(Doubles):
    def load_tasks(self):
        return [Task(prompt="Again.", env_class="python.py:Twice")]

class Endless(Doubles):
    INFINITE = True
    load_tasks = Taskset.load_tasks

    def task_at(self, index):
        return Task(prompt=f"Double {index}.", reward_spec={"ground_truth": str(2 * index)})
"""


def python_tasks(config, folder, train):
    (folder / "python.py").write_text(PYTHON)
    config["train_tasks"] = [{"id": f"{folder}/python.py:{train}"}]
    config["val_tasks"] = [{"id": f"{folder}/python.py:Doubles", "max_rows": 3}]
    return config


def test_tasks_in_python_stand_in_the_lists_too(declared, fake_verl, folder):
    main_ppo = fake_verl(RELEASES["0.9"])
    config = python_tasks(declared(TRAINER, AGENT, BASIC), folder, "Doubles")
    run_with_tasks(config)
    assert [call[0] for call in main_ppo.calls] == ["main"]
    train, val = rows_of(config.data.train_files[0]), rows_of(config.data.val_files[0])
    assert (len(train), len(val), agents_in(config)) == (5, 3, {None})
    assert config.reward.custom_reward_function.name == "compute_score"
    source, truth, extra = (train[2][name] for name in ("data_source", "reward_model", "extra_info"))
    assert compute_score(source, "4", truth["ground_truth"], extra)["score"] == 1.0


def test_tasks_in_python_of_several_turns_are_played_by_our_loop(declared, fake_verl, folder):
    fake_verl(RELEASES["0.9"])
    config = python_tasks(declared(TRAINER, AGENT, BASIC), folder, "Several")
    run_with_tasks(config)
    assert agents_in(config) == {"treetune"}
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "treetune"


def test_tasks_in_python_without_an_end_need_one(declared, folder):
    config = python_tasks(declared(TRAINER, BASIC), folder, "Endless")
    with raises_code("config", "train_tasks[0]", "INFINITE"):
        run_with_tasks(config)


def test_nothing_is_played_where_scoring_is_left_alone(declared, fake_verl):
    fake_verl(RELEASES["0.9"])
    config = of_several_turns(with_ground_truth(declared(TRAINER, AGENT, "leave_scoring: true", BASIC)))
    run_with_tasks(config)
    assert agents_in(config) == {None}
    assert OmegaConf.to_container(config.actor_rollout_ref.rollout.agent) == SINGLE


def test_prompts_that_end_with_the_beginning_of_an_answer_are_not_trained_on(declared, fake_verl, folder):
    main_ppo = fake_verl(RELEASES["0.9"])
    chats = [{"conversations": chat["conversations"] + [{"role": "assistant", "content": "A"}] * at}
             for at, chat in enumerate(CHATS)]  # fmt: skip
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    config = declared(TRAINER, CHAT, "reward: {custom_reward_function: {path: /my/reward.py}}")
    with raises_code("usage", "row 1"):
        run_with_tasks(config)
    assert main_ppo.calls == []


def test_a_data_source_that_verl_knows_is_left_to_verl(declared):
    config = with_ground_truth(declared(TRAINER, BASIC))
    for name in ("train_tasks", "val_tasks"):
        config[name][0].data_source = "openai/gsm8k"
    resolve_tasks_into_config(config)
    assert rows_of(config.data.train_files[0])[0]["data_source"] == "openai/gsm8k"


@pytest.mark.parametrize("path", ["null", "'pkg://treetune.trainers.verl'"])
def test_rows_without_a_ground_truth_resolve_with_a_warning_and_do_not_run(declared, folder, fake_verl, path):
    fake_verl(RELEASES["0.9"])
    reward = f"reward: {{custom_reward_function: {{path: {path}}}}}"
    with raises_code("taskset", "data_source", "gsm8k") as error:
        run_with_tasks(declared(TRAINER, reward, BASIC))
    assert "leave_scoring" in (error.value.remedy or "")
    assert not list(folder.rglob("*.parquet"))
    config = declared(TRAINER, reward, BASIC)
    with pytest.warns(UserWarning, match="data_source 'gsm8k'"):
        resolve_tasks_into_config(config)
    assert len(rows_of(config.data.val_files[0])) == 5


# Into verl, whichever release


@pytest.fixture
def fake_verl(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A fake of a verl release: nothing but `verl.trainer.main_ppo`, whose functions record how they were called."""

    def make(functions: str) -> ModuleType:
        package = folder / "fake" / "verl" / "trainer"
        package.mkdir(parents=True)
        for place in (package.parent, package):
            (place / "__init__.py").touch()
        (package / "main_ppo.py").write_text(f"calls = []\n{functions}")
        monkeypatch.syspath_prepend(package.parent.parent)
        return import_module("verl.trainer.main_ppo")

    forget_verl()
    yield make
    forget_verl()


def forget_verl() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        del sys.modules[name]


RELEASES = {
    "0.4 to 0.6.0": "def run_ppo(config): calls.append(('run_ppo', config))",
    "0.6.1 to 0.8": "def run_ppo(config, task_runner_class=None): calls.append(('run_ppo', config, task_runner_class))",
    # Which runner belongs to a config is known to main() alone.
    "0.9": "def run_ppo(config, task_runner_class): calls.append('without main')\n"
    "def main(config): calls.append(('main', config))",
}
CALLED = {"0.4 to 0.6.0": ("run_ppo",), "0.6.1 to 0.8": ("run_ppo", None), "0.9": ("main",)}


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_of_verl_is_started_with_the_resolved_config_in_its_own_way(declared, fake_verl, release):
    main_ppo = fake_verl(RELEASES[release])
    config = declared(TRAINER, BASIC, "reward: {custom_reward_function: {path: /my/reward.py}}")
    run_with_tasks(config)
    ((function, given, *rest),) = main_ppo.calls
    assert (function, *rest) == CALLED[release]
    assert given is config
    assert [len(rows_of(path)) for path in (*given.data.train_files, *given.data.val_files)] == [5, 5]


def test_a_config_without_tasks_is_handed_on_as_it_is(declared, fake_verl, folder):
    main_ppo = fake_verl(RELEASES["0.4 to 0.6.0"])
    config = declared(TRAINER)
    before = OmegaConf.to_container(config)
    run_with_tasks(config)
    ((_, given),) = main_ppo.calls
    assert given is config
    assert OmegaConf.to_container(given) == before
    assert not (folder / "cache").exists()


# Rows scored one by one


def test_a_row_that_says_nothing_of_its_scorer_is_refused(declared):
    with raises_code("taskset", "gsm8k"):
        compute_score(data_source="gsm8k", solution_str="4", ground_truth="4", extra_info={"index": 0})


ECHO = """
from treetune import Environment, Step
from treetune_verl.tasks import Task

class Echo(Task):
    def reward(self, task, answer):
        return float(answer == task.messages[-1]["content"] and task.uid == task.extra_info["expected"])

class Parrot(Environment):
    def step(self, action):
        return Step(reward=float(action.text == self.task.messages[-1]["content"]), done=True)

class ByRow(Task):
    def _make_map_fn(self):
        make_row = super()._make_map_fn()
        return lambda row, index: {**make_row(row, index), "env_class": f"{__file__}:Parrot"}
"""


@pytest.mark.parametrize(
    "declaration",
    [
        "{custom_cls: {path: DATA/echo.py, name: Echo}}",
        "{env_class: 'DATA/echo.py:Parrot'}",
        "{custom_cls: {path: DATA/echo.py, name: ByRow}}",
    ],
    ids=["reward", "environment", "environment of the row"],
)
def test_a_scorer_sees_the_task_with_its_prompt(declared, folder, declaration):
    (folder / "echo.py").write_text(ECHO)
    config = declared(BASIC)
    further = OmegaConf.create(declaration.replace("DATA", str(folder)))
    config.train_tasks[0] = OmegaConf.merge(OmegaConf.create(OmegaConf.to_container(config.train_tasks[0])), further)
    row = rows_of(resolve_tasks_into_config(config).data.train_files[0])[2]
    extra = {**row["extra_info"], "expected": row["extra_info"]["uid"]}
    assert row["reward_model"]["ground_truth"] is None

    def scored(answer: str) -> float:
        return compute_score("gsm8k", answer, row["reward_model"]["ground_truth"], extra_info=extra)["score"]

    assert (scored(GSM8K[2]["question"]), scored("something else")) == (1.0, 0.0)


STRICT = """
from treetune_verl.tasks import Task

class Strict(Task):
    def reward(self, task, answer):
        if not answer:
            raise ValueError("an empty answer")
        if "broken" in __file__:
            raise KeyError("no table")
        return 0.5 if answer.isdigit() else 0.0
"""


@pytest.mark.parametrize("file", ["strict.py", "broken.py"])
def test_a_reward_that_fails_for_every_answer_is_an_error_and_never_a_zero(declared, folder, file):
    (folder / file).write_text(STRICT)
    config = declared(BASIC)
    OmegaConf.update(config, "train_tasks.0.custom_cls", {"path": f"{folder}/{file}", "name": "Strict"}, force_add=True)
    resolve_tasks_into_config(config)
    row = rows_of(config.data.train_files[0])[3]

    def scored(answer: str) -> dict[str, Any]:
        return compute_score("gsm8k", answer, None, extra_info=row["extra_info"], reward_router_address=None)

    if file == "strict.py":  # which fails for one answer: that one earns nothing
        assert [scored(answer)["score"] for answer in ("5", "five", "")] == [0.5, 0.0, 0.0]
        return
    with raises_code("taskset", "row 3 of gsm8k"):
        scored("5")


INSTALLED = """
import json, sys, treetune, treetune_recipe, yaml
from pathlib import Path
from treetune_verl.tasks import get_dataset_paths
site = Path(sys.argv[1])
assert all(Path(module.__file__).is_relative_to(site) for module in (treetune, treetune_recipe))
recipe = yaml.safe_load((site / "treetune_recipe/math/config/math_grpo.yaml").read_text())
tasks = recipe["train_tasks"] + recipe["val_tasks"]
for task in tasks:
    task["loading_params"] = {"args": ["json"], "kwargs": {"data_files": "gsm8k.jsonl", "split": "train"}}
print(json.dumps(get_dataset_paths(tasks)))
"""


def test_the_recipe_works_where_only_the_wheel_is_installed(folder):
    """The packages that the wheel is made of, in a folder of their own; run from a folder that knows no clone."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    site = folder / "site"
    for package in wheel["packages"]:
        shutil.copytree(ROOT / package, site / Path(package).name, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED, site],
        cwd=folder, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = pq.read_table(json.loads(done.stdout)[0]).to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in rows] == [str(n + 2) for n in range(5)]
