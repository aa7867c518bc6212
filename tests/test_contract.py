"""The contract of an episode: declared once, it holds in evaluations, over the wires and in trainers."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from raising import raises_code
from serving import served

from treetune import Contract, Environment, Limits, Outcome, Step, Task, Taskset, run_rollout, tool
from treetune.core.from_config import build_taskset
from treetune.core.mixture import Mixture
from treetune.core.policy import Completion, Policy
from treetune.core.taskset_config import TasksetConfig
from treetune.core.trace import decode_trace, encode_trace
from treetune.data.rows.taskset import RowsConfig, RowsTaskset
from treetune.errors import ConfigError
from treetune.play.episode import DeadlinePassed, Episode
from treetune.serve.http import HttpConfig
from treetune.serve.http.client import TaskServerClient
from treetune.serve.http.routes import HttpDoor
from treetune.serve.server import EnvServer
from treetune.trainers.token_episode import Hooks
from treetune_verl.tasks import Task as DatasetTaskset


class Climb(Environment):
    """Pays 1 in each turn, and never ends."""

    CONTRACT = Contract(max_turns=30, turn_discount=0.5)

    def step(self, action):
        return Step("go on", reward=1.0)


class Silent(Climb):
    CONTRACT = Contract()


class Climbs(Taskset):
    environments = (Climb, Silent)

    def load_tasks(self):
        for _ in self.environments:
            yield Task(prompt="Climb.")
        yield Task(prompt="Climb.", extra_info={"max_turns": 3})

    def environment(self, task):
        return self.environments[task.idx % 2](task)


class Lower(Climbs):
    CONTRACT = Contract(max_turns=12)


class Says(Policy):
    name = "says"

    async def complete(self, request):
        return Completion("up")


def contract_in(taskset, index, limits=None):
    async def start():
        episode = await Episode.start(taskset, taskset[index], limits)
        await episode.close()
        return episode.contract

    return asyncio.run(start())


def test_an_environment_declares_it_and_the_taskset_and_the_task_replace_parts_of_it():
    assert contract_in(Climbs(), 0) == Contract(max_turns=30, turn_discount=0.5)
    assert (contract_in(Climbs(), 1).turns, contract_in(Climbs(), 1).discount) == (256, 1.0)
    assert contract_in(Lower(), 0) == Contract(max_turns=12, turn_discount=0.5)
    assert contract_in(Climbs(), 2).turns == contract_in(Lower(), 2).turns == 3


def test_a_run_lowers_its_limits_and_never_raises_them():
    assert contract_in(Climbs(), 0, Limits(max_turns=9, max_tool_calls=200)) == Contract(
        max_turns=9, turn_discount=0.5, max_tool_calls=128
    )
    assert contract_in(Climbs(), 0, Limits(max_turns=90)).turns == 30


def test_a_mixture_has_the_contract_of_the_source_of_each_task():
    mixture = Mixture(sources=[Climbs(), Lower()], weights=[1, 1])
    limits = {contract_in(mixture, index).turns for index in range(12)}
    assert limits == {30, 256, 3, 12}


def test_a_task_of_one_answer_takes_as_many_turns_as_its_tools_need():
    class Answers(Taskset):
        def load_tasks(self):
            return [Task(prompt="?")]

        def reward(self, task, answer):
            return 1.0

    class Calls(Answers):
        @tool
        def look(self) -> str:
            """Look."""
            return "a"

    assert contract_in(Answers(), 0).turns == 1
    assert contract_in(Calls(), 0).turns == 256


def test_the_reward_of_a_trace_is_raw_and_its_shaped_reward_has_the_discount():
    trace = asyncio.run(run_rollout(Lower(), Lower()[0], Says()))
    assert (trace.outcome, trace.reward) == (Outcome.TRUNCATED, 12.0)
    assert decode_trace(encode_trace(trace)).shaped_reward == trace.shaped_reward == 12.0 * 0.5**12


@pytest.mark.parametrize("rewards", [[0.0, 0.0, 1.0], [1.0, -2.0, 0.25, 3.0], [], [5.0]])
def test_the_shaped_rewards_of_turns_sum_to_the_shaped_reward_at_every_turn(rewards):
    contract = Contract(turn_discount=0.5)
    for turns in range(len(rewards) + 1):
        assert sum(contract.shape_each(rewards[:turns])) == contract.shape(sum(rewards[:turns]), turns)
    assert Contract().shape_each(rewards) == rewards


def test_the_time_of_a_contract_is_that_of_the_whole_episode():
    class Slow(Climb):
        CONTRACT = Contract(timeout=0.2)

        async def step(self, action):
            await asyncio.sleep(0.15)
            return Step("go on", reward=1.0)

    class Slows(Climbs):
        environments = (Slow, Slow)

    async def play():
        episode = await Episode.start(Slows(), Slows()[0])
        await episode.step("up")
        with pytest.raises(DeadlinePassed, match=r"not finished after 0\.2 seconds"):
            await episode.step("up")

    asyncio.run(play())


def test_servers_declare_it_with_each_start_and_in_their_info():
    async def ask():
        async with served(Climbs()) as client:
            pulled = [(await client.start(await client.sample(index))).contract for index in range(3)]
        door = HttpDoor(HttpConfig(address="127.0.0.1:0"))
        server = EnvServer(Lower(), doors=[door])
        await server.start()
        try:
            async with TaskServerClient(door.address) as client:
                episodes = [await client.start(index) for index in range(3)]
                stepped = await episodes[2].step("up")
                return pulled, (await client.info())["contract"], [each.contract for each in episodes], stepped.reward
        finally:
            await server.close()

    pulled, info, started, reward = asyncio.run(ask())
    assert [each.turns for each in pulled] == [30, 256, 3]
    assert [each.turn_discount for each in pulled] == [0.5, 1.0, 0.5]
    assert [each.turns for each in started] == [12, 12, 3]
    assert (info["max_turns"], info["group_score"]) == (12, False)
    assert reward == 1.0  # a server never discounts


class OfAReaL(Hooks):
    FOREIGN = Contract(turn_discount=0.95)


class EpisodeWith:
    def __init__(self, contract):
        self.contract = contract


@pytest.mark.parametrize(
    ("explicit", "declared", "discount"),
    [(0.8, 0.5, 0.8), (1.0, None, 1.0), (None, 0.5, 0.5), (None, 1.0, 1.0), (None, None, 0.95)],
)
def test_the_users_discount_wins_then_the_declared_one_then_that_of_foreign_servers(explicit, declared, discount):
    contract = None if declared is None else Contract(turn_discount=declared)
    assert OfAReaL(None, explicit).contract_of(EpisodeWith(contract)).turn_discount == discount
    assert Hooks().contract_of(EpisodeWith(None)).turn_discount == 1.0


def test_a_trainers_own_turn_limit_holds_if_it_is_lower_and_is_logged_once(caplog):
    hooks = Hooks(max_turns=7)
    assert hooks.contract_of(EpisodeWith(Contract(max_turns=31))).turns == 7
    assert hooks.contract_of(EpisodeWith(Contract(max_turns=31))).turns == 7
    assert hooks.contract_of(EpisodeWith(Contract(max_turns=5))).turns == 5
    assert [record.message for record in caplog.records] == ["max_turns=7 ends episodes that may have 31 turns"]


def test_a_column_is_the_turn_limit_of_each_row_of_a_dataset_task(tmp_path):
    rows = [{"q": "1 + 1?", "a": "2", "max_turns": 2}, {"q": "1 + 2?", "a": "3", "max_turns": 9}]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"data_files": str(tmp_path / "sums.jsonl"), "split": "train"}
    node = {
        "loading_params": {"args": ["json"], "kwargs": source},
        "prompt_template": "{q}",
        "ground_truth": "a",
        "data_source": "sums",
        "env_class": "gsm8k_multi_turn",
        "extra_fields": ["max_turns"],
    }
    taskset = DatasetTaskset(node, cache_dir=tmp_path / "cache")
    assert [taskset.contract_of(task).turns for task in taskset.draw(2)] == [2, 9]


class Keys(Climbs):
    CONTRACT = Contract(timeout=60.0)


def test_a_config_declares_it_without_a_class_and_a_declared_default_counts():
    declared = {"max_turns": 4, "turn_discount": 1, "max_tool_calls": 128}
    taskset = Keys(TasksetConfig(contract=Contract(**declared)))
    assert contract_in(taskset, 0).declared == {**declared, "timeout": 60.0}
    assert (contract_in(taskset, 1).turns, contract_in(taskset, 2).turns) == (4, 3)
    assert contract_in(Climbs(), 0).discount == 0.5
    entries = [{"id": "reverse-text", "contract": {"timeout": seconds}} for seconds in (7, 8)]
    mixture = build_taskset({"id": "mixture", "sources": entries})
    assert {contract_in(mixture, index).timeout for index in range(12)} == {7, 8}


@pytest.mark.parametrize(
    ("node", "faults"),
    [
        (
            {"id": "reverse-text", "contract": {"max_turn": 3}},
            "contract.max_turn: unknown key; did you mean",
        ),
        ({"id": "reverse-text", "contract": {"turn_discount": 2}}, "contract.turn_discount: "),
        ({"id": "reverse-text", "contract": {"group_score": True}}, "contract.group_score: "),
        ({"id": "wikispeedia", "graph": "g", "contract": {"max_turns": 3}}, "contract.max_turns: .* write max_turns"),
        ({"id": "rows", "files": ["r.jsonl"], "contract": {"max_turns": 3}}, "contract: .*where they are declared"),
        ({"id": "union", "sources": [], "contract": {"max_turns": 3}}, "contract: .*where they are declared"),
    ],
)
def test_a_contract_that_cannot_hold_is_refused_with_its_key(node, faults):
    with pytest.raises(ConfigError) as caught:
        build_taskset(node)
    assert re.search(rf"taskset\.{faults}", str(caught.value))


ROWS = """\
train_tasks:
- loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}}
  prompt_template: "{q}"
  ground_truth: a
  env_class: gsm8k_multi_turn
  contract: {max_turns: 3, turn_discount: 0.5}
"""


@pytest.mark.parametrize("format", ["verl", "skyrl", "trl"])
def test_rows_carry_the_contract_of_their_yaml_and_show_prints_it(format, tmp_path, treetune, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"q": "1 + 1?", "a": "2"}\n')
    (tmp_path / "sums.yaml").write_text(ROWS)
    (path,) = treetune("build", "sums.yaml", "--format", format, "--json").json["train_files"]
    taskset = RowsTaskset(RowsConfig(files=[path]))
    declared = {"max_turns": 3, "turn_discount": 0.5}
    (row,) = RowsTaskset(RowsConfig(files=[path]))
    assert json.loads(row.extra_info["scorer"])["contract"] == declared
    assert contract_in(taskset, 0).declared == declared
    for target in ("sums.yaml", path):
        (task,) = treetune("show", target, "--json").json["tasks"]
        assert task["contract"] == declared
    (tmp_path / "sums.yaml").write_text(ROWS.replace("max_turns", "max_turn"))
    assert "line 6, train_tasks[0].contract.max_turn: unknown key; did you mean" in treetune("build", "sums.yaml").err


@pytest.mark.parametrize("format", ["verl", "trl"])
def test_rows_with_a_contract_are_played_where_only_the_cache_is_shared(format, tmp_path, treetune, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"q": "1 + 1?", "a": "2"}\n')
    (tmp_path / "sums.yaml").write_text(ROWS.replace("gsm8k_multi_turn", "climb.py:Up"))
    (tmp_path / "climb.py").write_text(UP)
    (path,) = treetune("build", "sums.yaml", "--format", format, "--json").json["train_files"]
    (tmp_path / "climb.py").unlink()
    taskset = RowsTaskset(RowsConfig(files=[path]))
    trace = asyncio.run(run_rollout(taskset, taskset[0], Says()))
    assert (trace.outcome, trace.reward, trace.shaped_reward) == (Outcome.TRUNCATED, 3.0, 3.0 * 0.5**3)


UP = """
from treetune import Environment, Step


class Up(Environment):
    def step(self, action):
        return Step("go on", reward=1.0)
"""


@pytest.mark.parametrize(
    "value", [{"credit": "turns"}, {"max_turns": "7"}, {"turn_discount": 3}, {"max_tool_calls": -1}]
)
def test_a_contract_in_python_has_the_values_that_a_config_may_have(value):
    class Wrong(Taskset):
        CONTRACT = Contract(**value)

        def load_tasks(self):
            yield Task(prompt="a")

    taskset = Wrong()
    with raises_code("environment", *value):
        taskset.contract_of(taskset[0])
