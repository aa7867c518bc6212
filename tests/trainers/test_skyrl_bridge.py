"""Both ways with SkyRL: our environments in skyrl-gym, its environments here, tasks in its config."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import paid_turns
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kinds import write_targets
from omegaconf import OmegaConf
from raising import raises_code
from serve_process import serve

from treetune import Action, Environment, Step, Task, make, register
from treetune.config.plugins import environments
from treetune.data.rows import read_rows
from treetune.data.rows.formats import FORMATS
from treetune.data.sources.names import File, FileKind
from treetune.data.validate import validate_dataset, write_tasks
from treetune.errors import (
    ConfigError,
    EnvironmentFault,
    PluginError,
    UnknownNameError,
    UsageError,
)
from treetune.system.threads import call
from treetune.trainers import skyrl
from treetune.trainers.skyrl.tasks import (
    _entries_for,
    _resolve,
    cli_overrides,
    list_environments,
    read_credit,
    shell_words,
)

STAND_INS = Path(__file__).parents[1] / "support" / "stand_ins"
SRC = Path(__file__).parents[2] / "src"


@pytest.fixture
def gym(monkeypatch):
    """A skyrl-gym as just imported."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl_gym"]:
        del sys.modules[name]
    sys.modules.pop("treetune.trainers.skyrl.environment", None)
    import skyrl_gym

    yield skyrl_gym
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl_gym"]:
        del sys.modules[name]
    sys.modules.pop("treetune.trainers.skyrl.environment", None)


def extras_of(task: Task, **further: Any) -> dict[str, Any]:
    """What SkyRL hands over of a row."""
    row = json.loads(json.dumps(FORMATS["skyrl"].row_of(task)))
    return {key: value for key, value in row.items() if key not in ("prompt", "env_class")} | further


def made(gym: Any, task: Task, env_config: Any = None, **further: Any) -> Any:
    return gym.make(task.env_class, env_config=env_config or {}, extras=extras_of(task, **further))


class Echo(Environment):
    """Rewards repeating; remembers who was closed."""

    closed: list[str] = []

    async def start(self) -> list[dict[str, str]]:
        self.closed = Echo.closed  # an environment that an earlier test dropped may be closed while another runs
        return self.task.messages

    async def step(self, action: Action) -> Step:
        if action.text == "crash":
            raise RuntimeError("as asked")
        right = action.text == self.task.ground_truth
        return Step("again" if not right else "", reward=float(right), done=right, info={"metrics": {"length": 4}})

    async def close(self) -> None:
        self.closed.append(str(self.task.ground_truth))


@pytest.fixture
def echo(gym):
    Echo.closed = []
    skyrl.register(Echo, id="echo")

    def task(truth: Any = "word", **extra: Any) -> Task:
        return Task(prompt="Say it.", env_class="echo", reward_spec={"ground_truth": truth}, extra_info=extra)

    return task


# Registering


def test_every_environment_with_an_id_is_known_and_theirs_of_the_same_name_are_kept(gym):
    theirs = gym.registry["gsm8k"]
    ids = skyrl.register()
    assert {"alphabet-sort", "gsm8k_multi_turn", "aime"} <= set(ids)
    assert "gsm8k" not in ids
    assert gym.registry["gsm8k"] is theirs
    assert set(environments.names()) <= set(gym.registry)


def test_registering_again_changes_nothing(gym):
    ids = skyrl.register()
    before = dict(gym.registry)
    assert skyrl.register() == ids
    assert gym.registry == before


def test_theirs_can_be_replaced(gym):
    assert "gsm8k" in skyrl.register(replace=True)
    env = made(gym, Task(prompt="2 + 3?", env_class="gsm8k", reward_spec={"ground_truth": "5"}))
    env.init([{"role": "user", "content": "2 + 3?"}])
    assert env.step("so it is #### 5")["reward"] == 1.0  # theirs, here, wants nothing before it


def test_one_of_your_own_is_registered_by_its_file(gym, tmp_path, monkeypatch):
    (tmp_path / "shout.py").write_text(
        "from treetune import Environment, Step\n"
        "class Shout(Environment):\n"
        "    def step(self, action):\n"
        "        return Step(reward=float(action.text.isupper()), done=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert skyrl.register("shout.py:Shout", id="shout") == ["shout"]
    monkeypatch.chdir("/")  # wherever the worker is
    env = made(gym, Task(prompt="Shout!", env_class="shout"))
    assert env.init([{"role": "user", "content": "Shout!"}]) == ([{"role": "user", "content": "Shout!"}], {})
    assert env.step("HEY")["reward"] == 1.0
    assert skyrl.register(f"{tmp_path}/shout.py:Shout") == [f"{tmp_path}/shout.py:Shout"]


def test_an_environment_registered_in_process_travels_with_its_entry(gym, monkeypatch):
    monkeypatch.setattr(environments, "_registered", {})
    environments.register("echo-here", Echo)
    skyrl.register()
    assert gym.registry["echo-here"].kwargs["environment"] is Echo


@pytest.mark.parametrize(
    ("arguments", "settings", "error", "says"),
    [
        (["nowhere.py:Env"], {"id": "env"}, PluginError, "no such file"),
        (["json:JSONDecoder"], {"id": "env"}, PluginError, "not a Treetune environment"),
        (["gsm9k"], {}, UnknownNameError, "did you mean 'gsm8k'"),
        (["aime"], {"id": "gsm8k"}, UsageError, "replace=True"),
        ([], {"id": "env"}, UsageError, "not the id of an environment"),
    ],
)
def test_what_cannot_be_registered_is_told_now_and_leaves_no_trace(gym, arguments, settings, error, says):
    before = dict(gym.registry)
    with pytest.raises(error, match=says):
        skyrl.register(*arguments, **settings)
    assert gym.registry == before


def test_without_skyrl_gym_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl_gym", None)
    with raises_code("missing-extra", "treetune[skyrl]"):
        skyrl.register()
    with raises_code("missing-extra", "treetune[skyrl]"):
        make("skyrl:gsm8k", Task(prompt="?"))


# An episode


def test_an_episode_is_played_as_skyrl_plays_it(gym, echo):
    env = made(gym, echo(), max_turns=5)
    messages, info = env.init([{"role": "user", "content": "Say it."}])
    assert (messages, info) == ([{"role": "user", "content": "Say it."}], {})
    assert env.step("no") == {
        "observations": [{"role": "user", "content": "again"}],
        "reward": 0.0,
        "done": False,
        "metadata": {"metrics": {"length": 4}, "truncated": False},
    }
    output = env.step("word")
    assert (output["reward"], output["done"], output["observations"]) == (1.0, True, [])
    counted = {"turns": 2, "truncated": 0.0, "raw_reward": 1.0, "length": 4.0}
    assert env.get_metrics() == {f"echo/{name}": value for name, value in counted.items()}
    env.close()
    env.close()
    assert Echo.closed == ["word"]


def test_a_begun_answer_is_refused_because_skyrl_does_not_go_on_with_it(gym, echo):
    begun = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "wo"}]
    env = made(gym, msgspec.structs.replace(echo(), prompt=begun))
    with pytest.raises(UsageError, match="beginning of an answer"):
        env.init(begun)
    assert Echo.closed == ["word"]


def test_what_the_trainer_appends_to_the_conversation_does_not_reach_the_task(gym, echo):
    env = made(gym, echo())
    prompt = [{"role": "user", "content": "Say it."}]
    messages, _ = env.init(prompt)
    messages.append({"role": "assistant", "content": "no"})
    messages[0]["content"] = "changed"
    assert env.task.messages == [{"role": "user", "content": "Say it."}]


@pytest.mark.parametrize("truth", ["007", 42, 4.5, ["a", "b"], {"target": ["x"]}, "[1, 2]", 2**70])
def test_the_task_is_the_one_that_the_row_was_written_from(gym, echo, truth):
    task = Task(
        prompt=[{"role": "system", "content": "é"}, {"role": "user", "content": "Say it."}],
        env_class="echo",
        reward_spec={"method": "rule", "ground_truth": truth},
        data_source="words",
        ability="speech",
        extra_info={"index": 3, "split": "train"},
    )
    env = made(gym, task)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.init(json.loads(json.dumps(task.messages)))
    assert env.task.uid == task.uid
    assert env.task == task


def test_nulls_that_parquet_fills_in_and_keys_it_holds_as_json_do_not_change_the_task(gym, echo, tmp_path):
    tasks = [
        Task(prompt="Say it.", env_class="echo", reward_spec={"ground_truth": "a", "weights": {}}),
        Task(prompt="Say it.", env_class="echo", reward_spec={"ground_truth": "b", "weights": {"x": 1}, "bonus": 1}),
        Task(prompt="Say it.", env_class="echo", reward_spec={"ground_truth": "c"}, extra_info={"note": "n"}),
    ]
    write_tasks(tasks, tmp_path / "rows.parquet", "skyrl", environments=["echo"])
    import pyarrow.parquet as pq

    for row, task in zip(pq.read_table(tmp_path / "rows.parquet").to_pylist(), tasks, strict=True):
        prompt, env_class = row.pop("prompt"), row.pop("env_class")
        env = gym.make(env_class, env_config={}, extras=row)
        env.init(prompt)
        assert env.task.uid == task.uid
        assert env.task.reward_spec == task.reward_spec


def test_a_row_that_was_changed_on_the_way_is_told(gym, echo):
    extras = extras_of(echo("007"))
    extras["reward_spec"]["ground_truth"] = 7  # what reading JSON lines can do
    env = gym.make("echo", env_config={}, extras=extras)
    with pytest.warns(UserWarning, match="not the task it was written from"):
        env.init([{"role": "user", "content": "Say it."}])


@pytest.mark.parametrize(
    ("row", "trainer", "turns"),
    [({"max_turns": 3}, 1, 3), ({"max_turns": 2}, 10, 2), ({}, 4, 4), ({"max_turns": 2}, None, 2)],
)
def test_a_rows_own_max_turns_holds_or_a_lower_one_that_the_user_set(gym, echo, row, trainer, turns):
    env = made(gym, echo(**row), **({} if trainer is None else {"max_turns": trainer}))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        env.init([{"role": "user", "content": "Say it."}])
    lower = [f"echo: generator.max_turns={turns} ends episodes that may have 256 turns"]
    assert [str(each.message) for each in said] == ([] if row else lower)
    steps = [env.step("no") for _ in range(turns)]
    assert [step["done"] for step in steps] == [False] * (turns - 1) + [True]
    assert steps[-1]["metadata"]["truncated"]
    assert (env.task.extra_info["max_turns"], env.max_turns) == (turns, turns)


def test_the_rewards_of_turns_have_the_declared_discount_and_metrics_the_reward_without(gym, tmp_path, monkeypatch):
    (tmp_path / "halves.py").write_text(
        """
from treetune import Contract, Environment, Step

class Halves(Environment):
    CONTRACT = Contract(max_turns=3, turn_discount=0.5)

    def step(self, action):
        return Step("go on", reward=float(action.text), info={"metrics": {"letters": len(action.text)}})
"""
    )
    monkeypatch.chdir(tmp_path)
    skyrl.register("halves.py:Halves", id="halves")
    env = made(gym, Task(prompt="?", env_class="halves"), max_turns=1)
    env.init([{"role": "user", "content": "?"}])
    steps = [env.step(said) for said in ("0", "4", "8")]
    assert [step["reward"] for step in steps] == [0.0, 1.0, 0.5]  # 4 / 2^2, then 12 / 2^3
    assert env.get_metrics() == {
        **{"halves/turns": 3, "halves/truncated": 1.0, "halves/raw_reward": 12.0, "halves/letters": 1.0}
    }


def test_what_a_taskset_declares_replaces_what_its_environments_declare(gym, treetune, tmp_path, monkeypatch):
    (tmp_path / "halves.py").write_text(
        """
from treetune import Contract, Environment, Step, Task, Taskset

class Ones(Environment):
    CONTRACT = Contract(max_turns=9, turn_discount=0.9)

    def step(self, action):
        return Step("go on", reward=1.0)

class Halves(Taskset):
    CONTRACT = Contract(max_turns=2, turn_discount=0.5)

    def load_tasks(self):
        yield Task(prompt="?", env_class="halves.py:Ones")
"""
    )
    monkeypatch.chdir(tmp_path)
    built = treetune("build", "halves.py:Halves", "--format", "skyrl", "--json")
    (row,) = pq.read_table(built.json["train_files"][0]).to_pylist()
    skyrl.register(row["env_class"])
    env = gym.make(row["env_class"], env_config={}, extras=row)
    env.init(row["prompt"])
    steps = [env.step("1"), env.step("1")]
    assert [(step["reward"], step["done"]) for step in steps] == [(0.5, False), (0.0, True)]  # 2 / 2^2 in all


def test_the_credit_of_a_training_is_what_its_tasks_declare_and_one_for_all(gym, treetune, tmp_path, monkeypatch):
    paid_turns.write(tmp_path)
    monkeypatch.chdir(tmp_path)

    def rows_of(name):
        built = treetune("build", f"paid_turns_tasks.py:{name}", "--format", "skyrl", "--json")
        return File(Path(built.json["train_files"][0]), FileKind.PARQUET)

    files = [rows_of(name) for name in ("ByTurn", "Discounted", "ByOutcome")]
    skyrl.register()
    for ids in map(list_environments, files):
        for id in ids:
            skyrl.register(id)
    assert [read_credit([file], gym.registry) for file in files] == [("turn", 1.0), ("turn", 0.5), ("outcome", 1.0)]
    assert read_credit(files[2:], {}) == ("outcome", 1.0)
    with raises_code("credit", "turn, 1", "outcome, 1"):
        read_credit([files[0], files[2]], gym.registry)


def test_an_environment_that_ends_by_itself_at_its_last_turn_is_not_cut(gym):
    skyrl.register()
    task = Task(prompt="?", env_class="gsm8k_multi_turn", reward_spec={"ground_truth": "5"})
    env = made(gym, task, max_turns=2)
    env.init([{"role": "user", "content": "?"}])
    env.step("#### 4")
    output = env.step("#### 4")
    assert output["done"]
    assert output["metadata"]["truncated"]


def test_without_any_limit_the_environment_alone_decides(gym, echo):
    env = made(gym, echo())
    env.init([{"role": "user", "content": "Say it."}])
    assert not any(env.step("no")["done"] for _ in range(50))


def test_rows_of_an_openenv_server_are_played_there_over_all_their_turns(gym, treetune, tmp_path, monkeypatch):
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)
    with serve(tmp_path, "kinds_of.py:Countdowns", "--openenv", "127.0.0.1:0") as server:
        planned = treetune("train", "skyrl", f"openenv:{server.report['openenv']}", "-n", "2", "--dry-run", "--json")
        assert planned.code == 0, planned.err
        (file,) = planned.json["data"]["train"]
        row = pq.read_table(file).to_pylist()[1]
        skyrl.register()
        turns = int(planned.json["config"]["generator.max_turns"])
        env = gym.make(row["env_class"], env_config={}, extras={**row, "max_turns": turns})
        assert env.init(row["prompt"]) == (row["prompt"], {})
        steps = [env.step("2"), env.step("1")]
    assert [(step["reward"], step["done"]) for step in steps] == [(0.5, False), (0.5, True)]


def test_a_max_turns_that_is_no_number_is_told_with_its_row(gym, echo):
    env = made(gym, echo(max_turns="many", index=7))
    with raises_code("environment", "extra_info.max_turns", "many") as caught:
        env.init([{"role": "user", "content": "Say it."}])
    assert "row 7" in caught.value.__notes__[0]


@dataclass
class SqlConfig:
    db_path: str = "/home/ray/default/sql_data"
    top: int = 3


@pytest.mark.parametrize(
    ("config", "seen"),
    [
        (SqlConfig(), None),
        (SqlConfig(db_path="/mine"), "/mine"),
        ({"db_path": "/mine"}, "/mine"),
        (OmegaConf.create({"db_path": "/mine"}), "/mine"),
    ],
    ids=["the trainer's default", "a dataclass", "a dict", "OmegaConf"],
)
def test_what_a_user_sets_for_the_environment_in_skyrls_config_is_there(gym, echo, config, seen):
    env = made(gym, echo(), env_config=config)
    env.init([{"role": "user", "content": "Say it."}])
    assert env.task.extra_info.get("db_path") == seen
    assert "top" not in env.task.extra_info
    env = made(gym, echo(db_path="/the row's"), env_config=config)
    env.init([{"role": "user", "content": "Say it."}])
    assert env.task.extra_info["db_path"] == "/the row's"


# When something fails


def test_a_step_that_raises_closes_the_environment_and_names_the_row(gym, echo):
    env = made(gym, echo("x", index=12))
    env.init([{"role": "user", "content": "Say it."}])
    with pytest.raises(RuntimeError, match="as asked") as caught:
        env.step("crash")
    assert Echo.closed == ["x"]
    assert "row 12" in caught.value.__notes__[0]
    assert env.task.uid in caught.value.__notes__[0]
    with pytest.raises(EnvironmentFault, match="after an error"):
        env.step("word")
    env.close()
    assert Echo.closed == ["x"]


class Faulty(Echo):
    def start(self):
        raise OSError("no room")


class Dumb(Echo):
    async def step(self, action):
        return "a string"


class Endless(Echo):
    async def step(self, action):
        return Step(reward=float("nan"))


class Sticky(Echo):
    async def close(self):
        raise OSError("stuck")


def test_a_start_that_raises_closes_the_environment(gym, echo):
    skyrl.register(Faulty, id="echo", replace=True)
    env = made(gym, echo("x"))
    with pytest.raises(OSError, match="no room"):
        env.init([{"role": "user", "content": "Say it."}])
    assert Echo.closed == ["x"]


@pytest.mark.parametrize(("cls", "says"), [(Dumb, "returned a str"), (Endless, "must be finite")])
def test_a_step_that_breaks_its_contract_is_an_error_not_a_reward(gym, echo, cls, says):
    skyrl.register(cls, id="echo", replace=True)
    env = made(gym, echo("x"))
    env.init([{"role": "user", "content": "Say it."}])
    with pytest.raises(EnvironmentFault, match=says):
        env.step("word")
    assert Echo.closed == ["x"]


def test_a_close_that_fails_is_a_warning_because_the_reward_stands(gym, echo):
    skyrl.register(Sticky, id="echo", replace=True)
    env = made(gym, echo())
    env.init([{"role": "user", "content": "Say it."}])
    with pytest.warns(UserWarning, match="close failed: OSError: stuck"):
        assert env.step("word")["reward"] == 1.0
    env.close()


def test_an_environment_that_the_trainer_drops_is_closed(gym, echo):
    env = made(gym, echo("dropped"))
    env.init([{"role": "user", "content": "Say it."}])
    del env
    gc.collect()
    for _ in range(500):
        if Echo.closed:
            break
        time.sleep(0.01)
    assert Echo.closed == ["dropped"]


def test_many_threads_play_at_once(gym, echo):
    """Each its own episode, sixteen at a time waiting for each other inside the environment."""
    everybody = threading.Barrier(16)

    class Meeting(Echo):
        def step(self, action):
            everybody.wait(timeout=30)
            return Step(reward=float(action.text == self.task.ground_truth), done=True)

    skyrl.register(Meeting, id="echo", replace=True)

    def play(number: int) -> float:
        env = made(gym, echo(str(number)))
        env.init([{"role": "user", "content": "Say it."}])
        reward = env.step(str(number))["reward"]
        env.close()
        return float(reward)

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(play, range(64))) == [1.0] * 64
    assert len(Echo.closed) == 64


def test_a_forked_child_plays_too(gym, echo):
    env = made(gym, echo())
    env.init([{"role": "user", "content": "Say it."}])  # the parent's loop runs
    child = os.fork()
    if child == 0:
        try:
            env = made(gym, echo())
            env.init([{"role": "user", "content": "Say it."}])
            os._exit(0 if env.step("word")["reward"] == 1.0 else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


# The other way round


def played(task: Task, *actions: str) -> tuple[list[Any], list[Step]]:
    async def play() -> tuple[list[Any], list[Step]]:
        environment = make(str(task.env_class), task)
        first = await call(environment.start)
        steps = [await call(environment.step, Action.of(action)) for action in actions]
        await call(environment.close)
        return first, steps

    return asyncio.run(play())


def test_a_skyrl_gym_environment_is_a_treetune_one(gym, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEXT2SQL_DB", "/databases")
    from skyrl_gym.envs.theirs import Counting

    task = Task(prompt="Go.", env_class="skyrl:counting", extra_info={"max_turns": 2})
    first, steps = played(task, "one", "two")
    assert first == [{"role": "user", "content": "Go."}, {"role": "user", "content": "Count."}]
    assert task.messages == [{"role": "user", "content": "Go."}]
    assert [(step.reward, step.done) for step in steps] == [(1.0, False), (2.0, True)]
    assert steps[0].observation.messages() == [{"role": "user", "content": "1"}]
    assert steps[1].info["metrics"] == {"counted": 2.0}
    assert steps[1].info["db_path"] == "/databases"
    assert isinstance(steps[1].info["object"], str)
    assert Counting.closed == 1


def test_its_config_may_stand_in_the_row(gym):
    task = Task(prompt="Go.", env_class="skyrl:counting", extra_info={"env_config": {"step": 5, "db_path": "/d"}})
    _, [step] = played(task, "one")
    assert (step.reward, step.done, step.info["db_path"]) == (5.0, True, "/d")


def test_it_is_given_the_row_that_skyrl_would_read(gym):
    _, [step] = played(Task(prompt="?", env_class="skyrl:gsm8k", reward_spec={"ground_truth": 5}), "#### 5")
    assert step.reward == 1.0  # the number as the text that it compares with


def test_one_that_is_not_registered_is_named_by_its_class(gym):
    task = Task(prompt="?", env_class="skyrl:skyrl_gym.envs.theirs:Gsm8k", reward_spec={"ground_truth": "5"})
    _, [step] = played(task, "#### 5")
    assert step.reward == 1.0


@pytest.mark.parametrize(
    ("name", "error", "says"),
    [
        ("skyrl:countin", UnknownNameError, "did you mean 'counting'"),
        ("skyrl:json:JSONDecoder", PluginError, "is not a skyrl_gym.Env"),
        ("skyrl:nowhere:Env", PluginError, "could not be imported"),
    ],
)
def test_a_wrong_name_says_what_is_wrong(gym, name, error, says):
    with pytest.raises(error, match=says):
        make(name, Task(prompt="?"))


@pytest.fixture
def registered(monkeypatch):
    """Ids that are registered in a test are forgotten after it."""
    for table in ("_registered", "_resolved"):
        monkeypatch.setattr(environments, table, dict(getattr(environments, table)))


@pytest.mark.parametrize("by_name", [False, True])
def test_a_class_of_skyrls_that_treetune_registers_is_played(gym, registered, by_name):
    from skyrl_gym.envs.theirs import Counting

    register(id="own-count", entry_point="skyrl_gym.envs.theirs:Counting" if by_name else Counting)
    task = Task(prompt="Go.", env_class="own-count", extra_info={"max_turns": 2})
    first, steps = played(task, "one", "two")
    assert first[-1] == {"role": "user", "content": "Count."}
    assert [(step.reward, step.done) for step in steps] == [(1.0, False), (2.0, True)]
    # SkyRL plays the class itself.
    assert "own-count" not in gym.registry
    skyrl.register()
    assert gym.registry["own-count"].entry_point is Counting


def test_what_skyrl_gym_registers_in_this_process_is_known_to_validate(gym, tmp_path):
    gym.register(id="my_env", entry_point="skyrl_gym.envs.theirs:Counting")
    row = {"prompt": [{"role": "user", "content": "Go."}], "env_class": "my_env", "reward_spec": {"ground_truth": "1"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert validate_dataset(tmp_path / "rows.jsonl").ok
    (tmp_path / "other.jsonl").write_text(json.dumps({**row, "env_class": "my_emv"}) + "\n")
    (finding,) = validate_dataset(tmp_path / "other.jsonl").findings
    assert (finding.rule, "did you mean 'my_env'" in finding.found) == ("unknown-env-class", True)


def test_a_row_that_names_one_in_treetunes_way_can_be_trained_on(gym):
    skyrl.register("skyrl:counting")
    assert gym.registry["skyrl:counting"].entry_point.__name__ == "Counting"


# Tasks into a config


@pytest.fixture
def declared(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    rows = [{"question": f"{n} + 1?", "answer": n + 1} for n in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def entry(**further: Any) -> dict[str, Any]:
        return {
            "loading_params": {
                "args": ["json"],
                "kwargs": {"data_files": str(tmp_path / "sums.jsonl"), "split": "train"},
            },
            "prompt_template": "{question}",
            "ground_truth": "answer",
            "data_source": "sums",
            "env_class": "gsm8k",
            **further,
        }

    return entry


@dataclass
class Data:
    train_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/train.parquet"])
    val_data: list[str] = field(default_factory=lambda: ["~/data/gsm8k/validation.parquet"])


@dataclass
class Config:
    data: Data = field(default_factory=Data)


def test_a_skyrl_config_gets_the_files_of_a_yaml_file(declared, tmp_path):
    tasks = {"train_tasks": [declared(), declared(max_rows=1)], "val_tasks": [declared(max_rows=2)]}
    OmegaConf.save(OmegaConf.create(tasks), tmp_path / "tasks.yaml")
    config = skyrl.resolve_tasks_into_config(Config(), tmp_path / "tasks.yaml")
    assert [len(list(read_rows(path))) for path in config.data.train_data] == [3, 1]
    assert [len(list(read_rows(path))) for path in config.data.val_data] == [2]
    assert next(read_rows(config.data.train_data))["reward_spec"]["ground_truth"] == "1"


def test_a_mapping_may_hold_the_tasks_itself(declared):
    for config in ({"train_tasks": [declared()]}, OmegaConf.create({"train_tasks": [declared()], "data": {"x": 1}})):
        if not isinstance(config, dict):
            OmegaConf.set_struct(config, True)
        skyrl.resolve_tasks_into_config(config)
        assert len(list(read_rows(list(config["data"]["train_data"])))) == 3
        assert "val_data" not in config["data"]


def test_every_fault_is_told_before_anything_is_built(declared, tmp_path):
    config = OmegaConf.create(
        {"train_tasks": [declared(propmt_template="x"), declared(max_rows=0)], "val_tasks": "???"}
    )
    with pytest.raises(ConfigError) as caught:
        skyrl.resolve_tasks_into_config(config)
    assert {path for path, _ in caught.value.faults} >= {"val_tasks", "train_tasks[0].propmt_template"}
    assert not (tmp_path / "cache").exists()
    with raises_code("config", "train_tasks"):
        skyrl.resolve_tasks_into_config(Config())


def test_column_faults_of_all_tasks_are_told_before_anything_is_built(declared, tmp_path):
    config = {"train_tasks": [declared(), declared(ground_truth="anser")], "val_tasks": [declared(extra_fields=["x"])]}
    with pytest.raises(ConfigError) as caught:
        skyrl.resolve_tasks_into_config(config)
    assert [path for path, _ in caught.value.faults] == ["train_tasks[1].ground_truth", "val_tasks[0].extra_fields"]
    assert not list((tmp_path / "cache").glob("*.parquet"))


def test_an_environment_that_nobody_knows_is_told_before_skyrl_is_started(gym, declared):
    with raises_code("unknown-name", "gsm8k"):
        skyrl.run_with_tasks({"train_tasks": [declared(env_class="gsm9k")]})


def test_without_skyrl_it_says_so(gym, declared, monkeypatch):
    monkeypatch.setitem(sys.modules, "skyrl", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_code("missing-extra", "SkyRL"):
        skyrl.run_with_tasks({"train_tasks": [declared()]})


def test_the_entries_of_all_environments_that_rows_name_go_to_the_worker(gym, declared, tmp_path):
    (tmp_path / "mine.py").write_text("from treetune import Environment\nclass Mine(Environment):\n    pass\n")
    tasks = [declared(env_class=name) for name in ("gsm8k", "aime", "mine.py:Mine", "skyrl:counting")]
    OmegaConf.save(OmegaConf.create({"train_tasks": tasks}), tmp_path / "tasks.yaml")
    used = _resolve({}, tmp_path / "tasks.yaml", None)
    specs = pickle.loads(pickle.dumps(_entries_for(used, replace=False)))
    assert set(specs) == {"gsm8k", "aime", "mine.py:Mine", "skyrl:counting"}
    assert specs["gsm8k"].entry_point == "skyrl_gym.envs.theirs:Gsm8k"
    assert specs["aime"].kwargs["environment"] == "aime"
    assert specs["mine.py:Mine"].kwargs == {"id": "mine.py:Mine", "environment": f"{tmp_path}/mine.py:Mine"}


@pytest.fixture
def sandboxed(monkeypatch):
    """Whether or not this machine has one."""
    found = SimpleNamespace(available=True, cause="no bubblewrap", remedy="install it")
    monkeypatch.setattr("treetune.sandbox.probe", lambda: found)
    return found


UNSANDBOXED = ("lcb", "searchcode", "text2sql")
"""Of skyrl-gym's environments those that run what a model writes."""


def unsafe(gym: Any) -> None:
    for id in UNSANDBOXED:
        gym.register(id=id, entry_point="skyrl_gym.envs.theirs:Gsm8k")


def test_what_runs_a_models_code_is_ours_unless_told_otherwise(gym, sandboxed):
    unsafe(gym)
    used = {id: id for id in (*UNSANDBOXED, "gsm8k", "skyrl:lcb")}
    specs = _entries_for(used)
    assert {id: specs[id].kwargs.get("environment") for id in used} == {
        **{id: id for id in UNSANDBOXED},
        "gsm8k": None,
        "skyrl:lcb": None,
    }
    theirs = _entries_for(used, {"lcb": "skyrl:lcb"})
    assert theirs["lcb"].entry_point is theirs["skyrl:lcb"].entry_point
    assert theirs["lcb"].entry_point.__name__ == "Gsm8k", "though ours have taken its place"
    assert _entries_for(used, replace=True)["gsm8k"].kwargs["environment"] == "gsm8k"
    sandboxed.available = False
    with raises_code("usage", "--env", "lcb=skyrl:lcb"):
        _entries_for(used)


def test_skyrl_gyms_own_can_be_kept(gym, sandboxed):
    unsafe(gym)
    kept = _entries_for({id: id for id in UNSANDBOXED}, replace=False)
    assert {spec.entry_point for spec in kept.values()} == {"skyrl_gym.envs.theirs:Gsm8k"}


@pytest.fixture
def rows_of(tmp_path):
    def write(name: str, *ids: str | None) -> str:
        row = {"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"ground_truth": "1"}}
        rows = [{**row, "env_class": id} for id in ids]
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(one) + "\n" for one in rows))
        return str(path)

    return write


def test_files_of_rows_are_trained_on_as_they_are(gym, rows_of, tmp_path):
    files = [rows_of("a.parquet", "gsm8k"), rows_of("b.jsonl", "aime", None)]
    held_out = rows_of("val.parquet", "gsm8k")
    config = Config()
    skyrl.resolve_tasks_into_config(config, files, val_tasks=held_out)
    assert (config.data.train_data, config.data.val_data) == (files, [held_out])
    assert set(_resolve(config, files, None, held_out, {})) == {"gsm8k", "aime"}
    with raises_code("usage", "train"):
        skyrl.resolve_tasks_into_config(config, tmp_path)
    trained = rows_of("train.parquet", "gsm8k")
    skyrl.resolve_tasks_into_config(config, tmp_path)
    assert config.data.train_data == [trained]


def test_rows_of_files_choose_no_code_that_was_not_named(gym, rows_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("from treetune import Environment\nclass Mine(Environment):\n    pass\n")
    file = rows_of("a.jsonl", "mine.py:Mine", "mine")
    with raises_code("usage", "mine.py:Mine"):
        skyrl.run_with_tasks({}, file)
    given = {"mine.py:Mine": "mine.py:Mine", "mine": "mine.py:Mine"}
    specs = _entries_for(_resolve({}, file, None, (), given), given)
    assert {id: spec.kwargs["environment"] for id, spec in specs.items()} == {
        "mine.py:Mine": f"{tmp_path}/mine.py:Mine",
        "mine": f"{tmp_path}/mine.py:Mine",
    }
    with pytest.raises(UsageError, match="no row names other"):
        _entries_for({"gsm8k": "gsm8k"}, {"other": "mine.py:Mine"})


def test_files_that_skyrl_would_not_read_are_told(gym, rows_of, tmp_path):
    Path(verl := tmp_path / "verl.jsonl").write_text('{"prompt": [], "reward_model": {"ground_truth": "1"}}\n')
    other = rows_of("a.ndjson", "gsm8k")
    for file, said in ((verl, "has rows of verl"), (other, "SkyRL does not read"), ("nobody/nothing", "no such file")):
        with pytest.raises(UsageError, match=said):
            skyrl.resolve_tasks_into_config({}, file)
    with raises_code("usage", "YAML", "val_tasks"):
        skyrl.resolve_tasks_into_config({}, {"train_tasks": []}, val_tasks=other)


def test_a_python_that_is_too_old_for_skyrl_is_told_in_one_line(monkeypatch, tmp_path, capsys):
    package = tmp_path / "skyrl" / "train" / "entrypoints"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "main_base.py").write_text("raise RuntimeError('Please use another on Python < 3.12.\\n\\nMore')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "version_info", (3, 11, 9, "final", 0))
    said = "SkyRL's trainer needs Python 3.12 or later, this is 3.11 (Please use another on Python < 3.12.)"
    with pytest.raises(UsageError) as caught:
        skyrl.run_with_tasks({}, "absent.parquet")
    assert str(caught.value) == said
    with pytest.raises(SystemExit) as ended:
        skyrl.main(["tasks=absent.parquet"])
    assert str(ended.value) == f"error: {said}"
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl"]:
        del sys.modules[name]


def test_the_overrides_to_paste_are_one_word_each_for_the_shell():
    files = {"train": ["/a b/it's.parquet", "/x/$HOME/y.parquet"], "val": ["/plain.parquet"], "test": []}
    files.pop("test")
    overrides = cli_overrides(files)
    assert overrides[1] == "data.val_data=['/plain.parquet']"
    assert shell_words(overrides[1:]) == "data.val_data=\"['/plain.parquet']\""
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {shell_words(overrides)}"], capture_output=True, text=True, check=True
    )
    assert words.stdout.splitlines() == overrides
    # SkyRL reads them this way.
    assert OmegaConf.to_container(OmegaConf.from_cli(overrides), resolve=True) == {
        "data": {"train_data": files["train"], "val_data": files["val"]}
    }


def test_build_prints_the_overrides(treetune, declared, tmp_path):
    OmegaConf.save(OmegaConf.create({"train_tasks": [declared()]}), tmp_path / "tasks.yaml")
    found = treetune("build", "tasks.yaml", "--format", "skyrl", "--json").json
    assert found["overrides"] == [f"data.train_data=['{found['train_files'][0]}']"]
    assert (
        f"data.train_data=\"['{found['train_files'][0]}']\"" in treetune("build", "tasks.yaml", "--format", "skyrl").out
    )
    assert "overrides" not in treetune("build", "tasks.yaml", "--json").json


# The hook


@pytest.fixture
def packages(tmp_path):
    """A folder of installed packages, and a Python that has it: what it prints."""
    folder = tmp_path / "packages"
    folder.mkdir()

    def python(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", f"import site; site.addsitedir({str(folder)!r})\n{code}"],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": f"{STAND_INS}:{SRC}"},
        )

    return folder, python


KNOWN = "import skyrl_gym; print(sorted(skyrl_gym.registry))"


def test_the_hook_registers_when_skyrl_gym_is_imported_and_not_before(packages, tmp_path):
    folder, python = packages
    (tmp_path / "naïve.py").write_text("from treetune import Environment\nclass Mine(Environment):\n    pass\n")
    path = skyrl.install_hook({"mine": f"{tmp_path}/naïve.py:Mine"}, folder=folder)
    assert path.read_bytes().isascii()
    done = python(f"import sys; print('treetune' in sys.modules, 'typing' in sys.modules); {KNOWN}")
    assert done.stdout.startswith("False False\n"), done.stderr
    assert {"mine", "alphabet-sort", "gsm8k", "counting"} <= set(eval(done.stdout.splitlines()[1]))  # noqa: S307
    assert done.stderr == ""
    assert "theirs" in python("import skyrl_gym; print(skyrl_gym.registry['gsm8k'].entry_point)").stdout


def test_the_hook_outlives_a_mere_look_for_skyrl_gym(packages):
    folder, python = packages
    skyrl.install_hook(folder=folder)
    done = python(
        f"import importlib.util as u; assert u.find_spec('skyrl_gym'); assert u.find_spec('nope') is None; {KNOWN}"
    )
    assert "alphabet-sort" in done.stdout


def test_the_hook_works_where_pth_files_are_read_twice_and_others_ask_all_finders(packages):
    folder, python = packages
    skyrl.install_hook(folder=folder)
    code = f"""
import sys
sys.path.remove({str(folder)!r})
site.addsitedir({str(folder)!r})

class Curious:
    def find_spec(self, name, path=None, target=None):
        others = [finder for finder in sys.meta_path if finder is not self]
        return next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)

sys.meta_path.insert(0, Curious())
{KNOWN}
"""
    done = python(code)
    assert "alphabet-sort" in done.stdout, done.stderr


def test_the_hook_can_replace_theirs(packages):
    folder, python = packages
    skyrl.install_hook(replace=True, folder=folder)
    assert "treetune" in python("import skyrl_gym; print(skyrl_gym.registry['gsm8k'].entry_point)").stdout


def test_the_hook_can_be_installed_again_and_removed(packages):
    folder, python = packages
    skyrl.install_hook(folder=folder)
    skyrl.install_hook(replace=True, folder=folder)
    assert len(list(folder.glob("*.p*"))) == 2
    assert skyrl.remove_hook(folder=folder)
    assert [path for path in folder.rglob("*") if path.is_file()] == []
    assert not skyrl.remove_hook(folder=folder)
    done = python(KNOWN)
    assert (done.stdout, done.stderr) == ("['counting', 'gsm8k']\n", "")


def test_an_environment_that_is_gone_is_a_warning_and_skyrl_gym_works(packages, tmp_path):
    folder, python = packages
    (tmp_path / "mine.py").write_text("from treetune import Environment\nclass Mine(Environment):\n    pass\n")
    skyrl.install_hook({"mine": f"{tmp_path}/mine.py:Mine"}, folder=folder)
    (tmp_path / "mine.py").unlink()
    done = python(KNOWN)
    assert "alphabet-sort" in done.stdout
    assert "not known to skyrl-gym: no such file" in done.stderr


def test_a_python_without_skyrl_gym_or_treetune_is_not_disturbed(packages):
    folder, python = packages
    skyrl.install_hook(folder=folder)
    (folder / "_treetune_skyrl.py").write_text("raise RuntimeError\n")  # as bad as it gets
    done = python("print('well')")
    assert done.stdout == "well\n"


def test_what_is_wrong_is_told_when_the_hook_is_installed(packages, tmp_path):
    folder, _ = packages
    with raises_code("code-not-loaded"):
        skyrl.install_hook({"mine": "nowhere.py:Mine"}, folder=folder)
    assert list(folder.iterdir()) == []
    with raises_code("storage"):
        skyrl.install_hook(folder=tmp_path / "nowhere")


# From a shell


def test_the_command_line_wants_tasks(monkeypatch, capsys):
    with pytest.raises(SystemExit) as caught:
        skyrl.main(["trainer.epochs=1"])
    assert "tasks=FILE is missing" in str(caught.value)


@pytest.fixture
def trained(gym, monkeypatch):
    """A SkyRL that only notes the config that it is to train with, its overrides, and what skyrl-gym knows then."""
    runs: list[Any] = []

    class Training:
        def __init__(self, config: Any) -> None:
            self.config = config

        def run(self) -> None:
            runs.append((self.config, dict(gym.envs.registration.registry)))

    class TrainConfig(Config):
        @classmethod
        def from_cli_overrides(cls, overrides: list[str]) -> Any:
            config = cls()
            config.overrides = overrides
            return config

    def remote(**_: Any) -> Any:
        return lambda function: SimpleNamespace(remote=function)

    for name, contents in {
        "ray": {"remote": remote, "get": lambda result: result},
        "skyrl": {},
        "skyrl.train": {},
        "skyrl.train.config": {"SkyRLTrainConfig": TrainConfig},
        "skyrl.train.utils": {"validate_cfg": lambda config: None},
        "skyrl.train.utils.utils": {"initialize_ray": lambda config: None},
        "skyrl.train.entrypoints": {},
        "skyrl.train.entrypoints.main_base": {"BasePPOExp": Training},
    }.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return runs


def test_the_command_line_takes_files_and_environments_of_your_own(trained, rows_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spell.py").write_text("from treetune import Environment\nclass Spell(Environment):\n    pass\n")
    files = [rows_of("a.parquet", "spell"), rows_of("b.jsonl", "gsm8k")]
    held_out = rows_of("val.parquet", "spell.py:Spell")
    given = [f"tasks={files[0]}", f"tasks={files[1]}", f"val_tasks={held_out}", "trainer.epochs=1"]
    skyrl.main([*given, "--env", "spell=spell.py:Spell", "--env=spell.py:Spell"])
    ((config, known),) = trained
    assert (config.data.train_data, config.data.val_data) == (files, [held_out])
    assert config.overrides == ["trainer.epochs=1"]
    for id in ("spell", "spell.py:Spell"):
        assert known[id].kwargs["environment"] == f"{tmp_path}/spell.py:Spell"


def test_the_command_line_takes_yaml(trained, declared, tmp_path):
    OmegaConf.save(OmegaConf.create({"train_tasks": [declared()]}), tmp_path / "tasks.yaml")
    skyrl.main([f"tasks={tmp_path / 'tasks.yaml'}"])
    ((config, _),) = trained
    assert len(list(read_rows(config.data.train_data))) == 3
    assert config.data.val_data == [], "and not the file that SkyRL has by default"


@pytest.mark.parametrize("theirs", [(), UNSANDBOXED], ids=["ours", "theirs"])
def test_the_command_line_plays_our_sandboxed_environments_unless_told_otherwise(
    trained, gym, sandboxed, rows_of, theirs
):
    unsafe(gym)
    file = rows_of("a.parquet", *UNSANDBOXED, "gsm8k")
    skyrl.main([f"tasks={file}", *(f"--env={id}=skyrl:{id}" for id in theirs)])
    ((_, known),) = trained
    ours = {id for id in (*UNSANDBOXED, "gsm8k") if known[id].kwargs.get("environment") == id}
    assert ours == set(UNSANDBOXED) - set(theirs)
