"""An agent plays in each trainer: what its classes train on is what the session alone records, token by token.

The session is `agent_session.py`. What samples is fixed by the prompt; the loops, batches and samples are the trainers'
own, in environments of their own."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import agent_session
import pytest
import sides
import venvs
from agent_session import AGENT, MACHINES, REWARD, SEVERAL, SILENT, TARGET
from chat_templates import trims
from trl_speaker import Speaker, rollout

from treetune.cli.listing import ContractKind, cells
from treetune.core.agent import AGENTS_ON_SERVERS
from treetune.errors import UsageError
from treetune.trainers.trl import TrlTasks
from treetune.trainers.verl.config import LOOPS, load_tasksets, name_agents

PROGRAM = f"{sys.executable} {Path(agent_session.__file__).absolute()}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("agents")
    (folder / "questions.py").write_text(agent_session.TASKS)
    return folder


def check(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """The rows of one episode are the sequences of the session."""
    assert [row["ids"] for row in rows] == [each["ids"] for each in expected]
    assert [row["mask"] for row in rows] == [each["mask"] for each in expected]
    for row, each in zip(rows, expected, strict=True):
        assert row["logprobs"] == pytest.approx(each["logprobs"], abs=1e-6)
        assert sum(each["mask"]) > 0
        assert row["reward"] == REWARD


def by_episode(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row["rollout"]].append(row)
    return list(found.values())


# Plans and settings


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(folder / "cache"))
    return folder


def test_the_commands_hand_the_agent_on(here):
    agent = Path("mine.py")
    agent.write_text("async def play(task, client):\n    return '4'\n")
    keys = {"verl": LOOPS, "slime": "custom-config-path"}
    for trainer in ("verl", "trl", "areal", "slime"):
        number = [] if trainer == "slime" else ["-n", "2"]
        planned = sides.plan(trainer, TARGET, "model", "agent=mine.py:play", *number)
        assert planned["data"]["agent"] == f"{here}/mine.py:play"
        told = Path(planned["config"][keys[trainer]]).read_text() if trainer in keys else " ".join(planned["command"])
        assert "mine.py:play" in told


@pytest.mark.parametrize(
    ("trainer", "target", "agent", "said"),
    [
        ("trl", TARGET, "claud-code", "did you mean 'claude-code'"),
        ("trl", SEVERAL, AGENT, "agents play tasks with one answer, or on a machine"),
        ("areal", MACHINES, AGENT, AGENTS_ON_SERVERS),
        ("skyrl", TARGET, AGENT, str(cells()["contract"][ContractKind.AGENTS]["SkyRL"])),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_start(here, trainer, target, agent, said):
    with pytest.raises(sides.Refused, match=re.escape(said)):
        sides.plan(trainer, target, "model", f"agent={agent}", "-n", "1")


def test_the_tasks_of_a_machine_are_trained_in_the_trainers_own_process(here):
    assert sides.plan("trl", MACHINES, "model", f"agent={AGENT}", "-n", "1")["data"]["agent"] == AGENT


def test_rows_of_one_answer_name_the_loop_that_plays_agents(here):
    (here / "sums.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n')
    task = {"loading_params": {"args": ["json"], "kwargs": {"data_files": "sums.jsonl", "split": "train"}}}
    task |= {"prompt_template": "{question}", "ground_truth": "answer", "data_source": "sums"}
    lists = load_tasksets({"train_tasks": [task]})
    assert name_agents(lists, {}) == {"train": None}
    assert name_agents(lists, {"treetune_loop": {"agent": AGENT}}) == {"train": ["treetune"]}


# TRL's rollouts, without TRL


class Model(Speaker):
    """Answers as the session is answered, for each prompt."""

    def _generate_single_turn(self, prompts, images, fields, num_generations):
        self.calls.append(prompts)
        said = [agent_session.sample(self.processing_class, prompt) for prompt in prompts]
        return [ids for ids, _ in said], [logprobs for _, logprobs in said]


def test_rollouts_have_the_main_conversation_of_each_agent(here):
    model = Model(template=trims)
    with TrlTasks(TARGET, agent=AGENT) as tasks:
        found = rollout(tasks, model, [0, 0, 0])
    expected = agent_session.alone(model.processing_class)[-1]
    for at in range(3):
        prompt, answer = found["prompt_ids"][at], found["completion_ids"][at]
        assert prompt + answer == expected["ids"]
        assert [0] * len(prompt) + found["env_mask"][at] == expected["mask"]
        assert [0.0] * len(prompt) + found["logprobs"][at] == pytest.approx(expected["logprobs"])
        assert (found["task_reward"][at], found["num_turns"][at]) == (REWARD, 1)
    assert sum(map(len, model.calls)) == 3 * agent_session.CALLS
    assert len(model.calls) < 3 * agent_session.CALLS  # several agents at once


def test_an_agent_that_works_for_long_does_not_keep_others_from_the_model(here):
    Path("waiting.py").write_text(WAITING)
    with TrlTasks(TARGET, agent="waiting.py:play") as tasks:
        found = rollout(tasks, Model(template=trims), [0, 0])
    assert found["task_reward"] == [REWARD, REWARD]


WAITING = """
import asyncio

asked, first = asyncio.Event(), []


async def play(task, client):
    \"\"\"The first one to start waits until the other has its answer.\"\"\"
    first.append(task)
    if len(first) == 1:
        await asked.wait()
    answer = await client.chat([{"role": "user", "content": "Sure?"}])
    asked.set()
    return answer["content"]
"""


def test_rollouts_in_several_processes_are_refused(here):
    model = Model(template=trims)
    model.accelerator = SimpleNamespace(num_processes=2)
    with TrlTasks(TARGET, agent=AGENT) as tasks, pytest.raises(UsageError, match="agents play in one process"):
        rollout(tasks, model, [0])


# verl


@pytest.fixture(scope="module")
def verl(folder):
    with sides.open_side(venvs.VERL, "agent_verl_side.py", folder) as ask:
        yield lambda agent, way="v1", *overrides: ask("play", agent=agent, way=way, overrides=list(overrides))


@pytest.mark.slow
@pytest.mark.xdist_group("verl")
class TestVerl:
    @pytest.mark.parametrize("agent", [AGENT, PROGRAM])
    def test_each_conversation_is_a_row_of_the_v1_trainer(self, verl, agent):
        played = verl(agent)
        episodes = by_episode(played["rows"])
        assert len(episodes) == 2
        for rows in episodes:
            check(rows, played["alone"])
            assert len(rows) == 2

    @pytest.mark.parametrize(
        ("way", "overrides"), [("v0", ["trainer.use_v1=false"]), ("v1", ["algorithm.adv_estimator=rloo"])]
    )
    def test_a_trainer_of_one_row_gets_the_main_conversation_and_says_what_it_does_not_get(self, verl, way, overrides):
        played = verl(AGENT, way, *overrides)
        episodes = by_episode(played["rows"])
        assert len(episodes) == 2
        for rows in episodes:
            check(rows, played["alone"][-1:])
        assert any("main conversation, and not 1 others" in text for text in played["heard"])

    def test_an_agent_that_asks_nothing_trains_nothing_and_its_reward_counts(self, verl):
        for row in verl(SILENT)["rows"]:
            assert (row["reward"], row["failed"], sum(row["mask"])) == (REWARD, 0.0, 0)
            assert row["credited"] == [REWARD]


# AReaL


@pytest.fixture(scope="module")
def areal(folder):
    with sides.open_side(venvs.AREAL, "agent_areal_side.py", folder) as ask:

        def play(agent, target=TARGET, **further):
            return ask("play", agent=agent, planned_target=TARGET, target=target, **further)

        yield play


@pytest.mark.slow
class TestAReaL:
    @pytest.mark.parametrize("agent", [AGENT, PROGRAM])
    def test_each_conversation_is_a_row_with_the_versions_of_its_weights(self, areal, agent):
        played = areal(agent)
        episodes = by_episode(played["rows"])
        assert len(episodes) == 2
        for rows in episodes:
            check(rows, played["alone"])
            assert [row["versions"] for row in rows] == [each["versions"] for each in played["alone"]]
            assert len({version for row in rows for version in row["versions"]} - {-1}) > 1

    def test_an_agent_that_asks_nothing_gives_no_row(self, areal):
        assert areal(SILENT)["rows"] == []

    def test_tasks_whose_machine_is_on_a_server_are_refused(self, areal):
        assert AGENTS_ON_SERVERS in areal(AGENT, target=SEVERAL)["refused"]


# TRL


@pytest.fixture(scope="module")
def trl(folder):
    with sides.open_side(venvs.TRL, "agent_trl_side.py", folder) as ask:
        yield ask


@pytest.mark.slow
class TestTrl:
    @pytest.mark.parametrize("agent", [AGENT, PROGRAM])
    def test_grpo_gets_the_main_conversation_and_samples_for_all_agents_together(self, trl, agent):
        played = trl("play", agent=agent)
        assert len(played["rows"]) == 8
        for row in played["rows"]:
            check([row], played["alone"][-1:])
        assert sum(played["batches"]) == 8 * agent_session.CALLS
        assert max(played["batches"]) > 1
        assert any("main conversation, and not 1 others" in text for text in played["warned"])

    def test_an_error_of_the_trainer_ends_all_agents(self, trl):
        played = trl("play", agent=AGENT, error="no memory")
        assert played["raised"] == "ValueError: no memory"
        assert len(played["batches"]) == 1

    def test_an_agent_that_asks_nothing_trains_nothing_and_its_reward_counts(self, trl):
        for row in trl("play", agent=SILENT)["rows"]:
            assert (row["reward"], sum(row["mask"])) == (REWARD, 0)

    @pytest.mark.parametrize("agent", [AGENT, PROGRAM])
    def test_asynchronous_grpo_gets_each_conversation(self, trl, agent):
        played = trl("play_async", agent=agent)
        first = [row for row in played["rows"] if row["group"] == 0]
        assert len(first) == 4 * 2
        for sub, main in zip(first[::2], first[1::2], strict=True):
            assert sub["reward"] == REWARD
            check([{**row, "reward": REWARD} for row in (sub, main)], played["alone"])
