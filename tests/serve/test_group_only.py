"""A taskset that has `score_group` and no `reward` scores groups everywhere, and refuses an answer that is alone."""

from __future__ import annotations

import pytest
from http_playing import BOTH, playing
from raising import raises_code
from serving import Numbers, run

from treetune import Mixture, Taskset
from treetune.models import load_policy
from treetune.play import streams
from treetune.play.episode import Episode
from treetune.play.host import LocalHost, always
from treetune.serve.zmq.client import EnvClient
from treetune.trainers.episodes import LocalEpisodes

TASKS = """
from treetune import Task, Taskset

class Ranked(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"say {n}") for n in range(4)]

    def gold(self, task):
        return task.prompt

    def score_group(self, task, traces):
        assert all(trace.answer for trace in traces)
        return [trace.rollout / (len(traces) - 1) for trace in traces]
"""


class OnlyRanked(Numbers):
    reward = Taskset.reward

    def score_group(self, task, traces):
        return [float(trace.rollout) for trace in traces]


MADE = {"alone": OnlyRanked, "in a mixture": lambda: Mixture.of([OnlyRanked(), Numbers()], [1, 1])}
every_one = pytest.mark.parametrize("make", MADE.values(), ids=MADE)


def test_an_evaluation_has_the_rewards_of_the_groups(treetune, tmp_path):
    (tmp_path / "ranked.py").write_text(TASKS)
    done = treetune("eval", "ranked.py:Ranked", "-m", "scripted:gold", "-r", 2, "-o", "run", "--json").json
    assert (done["mean_reward"], done["scored"], done["outcomes"]) == (0.5, 8, {"completed": 8})
    again = treetune("rescore", "run", "--json").json
    assert (again["after"]["mean_reward"], again["changed"]) == (0.5, 0)


def test_its_gold_answers_are_not_judged_by_a_reward_that_it_does_not_have(treetune, tmp_path):
    (tmp_path / "ranked.py").write_text(TASKS)
    done = treetune("validate", "ranked.py:Ranked")
    assert "4 unchecked" in done.out


@every_one
def test_in_process_its_groups_are_scored(make):
    async def play():
        host = await LocalHost.open(taskset := make(), always(load_policy("scripted:gold", taskset)))
        return [trace.reward for trace in await host.run_group(taskset[0], 3)]

    assert run(play()) == [0.0, 1.0, 2.0]


@BOTH
@every_one
def test_servers_score_its_groups_and_refuse_an_episode_that_is_alone(make, workers):
    async def play():
        async with (
            playing(make(), workers=workers, address="tcp://127.0.0.1:0") as played,
            EnvClient(played.server.address) as client,
        ):
            task = await client.sample(0)
            rewards = [trace.reward for trace in await client.run_group(task, 3)]
            with raises_code("usage", "task 0", "run_group"):
                await client.start(task)
            status, answer = await played.post("start", {"task_index": 0})
            return rewards, status, answer["error"], len(played.server.host.episodes.live)

    rewards, status, error, live = run(play())
    assert rewards == [0.0, 1.0, 2.0]
    assert (status, live) == (422, 0)
    assert "task 0" in error
    assert "is scored with its group" in error


def test_trainers_that_score_single_episodes_are_refused():
    async def play():
        (await LocalEpisodes(await streams.load(OnlyRanked())).start(0)).refuse_alone()

    with raises_code("usage", "task 0", "run_group"):
        run(play())
    with raises_code("usage", "task 0", "run_group"):
        run(Episode.start(OnlyRanked(), OnlyRanked()[0]))
