"""What rollouts and episodes came to, whichever door they came through: in the figures, the log, `top`, and on disk."""

from __future__ import annotations

import logging
import signal
import time

from http_playing import BOTH, playing
from serve_process import post, serve
from serving import Colours, Numbers, Talking, run, until

from treetune import Environment, Observation, Step
from treetune.core.contract import Contract, Limits
from treetune.evaluation import EvalConfig, Evaluation
from treetune.runs.folder import TRACES
from treetune.runs.rolling import RollingRun
from treetune.serve.zmq.client import EnvClient


def kept(folder, taskset):
    return RollingRun(folder, Evaluation(EvalConfig(taskset={}, model=""), taskset), 1 << 30)


class Fails(Environment):
    def start(self):
        if self.task.idx == 3:
            raise OSError("no room")
        return "go"

    def step(self, action):
        if action.text == "fail":
            raise ValueError("broken")
        return Step("on", reward=0.25, done=action.text == "stop", info={"metrics": {"n": 1}})


class Failing(Numbers):
    def environment(self, task):
        return Fails(task)


@BOTH
def test_episodes_over_http_are_counted_by_source_as_rollouts_are(workers, caplog):
    caplog.set_level(logging.INFO, "treetune.serve")

    async def play():
        async with playing(Failing(), workers=workers, http={"idle_seconds": 0.4}) as client:
            good, cancelled, failed = [await client.begun(task_index=index) for index in range(3)]
            await client.begun(task_index=4)  # which nobody steps
            for action in ("a", "b", "stop"):
                await client.step(good, action)
            await client.post("cancel", {"episode_id": cancelled})
            await client.step(failed, "fail")
            assert (await client.post("start", {"task_index": 3}))[0] == 500
            await until(lambda: not client.http.live)
            headers = {"Accept": "application/json"}
            _, stats = await client.get("/metrics", headers=headers)
            async with client.session.get(client.http.address + "/metrics") as reply:
                return stats, await reply.text()

    stats, text = run(play())
    outcomes = {"completed": 1, "cancelled": 1, "environment_error": 2, "timeout": 1}
    assert stats["outcomes"] == outcomes
    assert stats["sources"]["Failing"]["outcomes"] == outcomes
    assert stats["sources"]["Failing"]["mean_reward"] == 0.75
    assert 'treetune_rollouts_total{outcome="environment_error",source="Failing"} 2.0' in text
    assert 'treetune_reward_sum_total{source="Failing"} 0.75' in text
    assert 'treetune_reward_count_total{source="Failing"} 1.0' in text
    assert "Failing: 5 ended (cancelled 1, completed 1, environment_error 2, timeout 1)" in caplog.text
    assert "mean reward 0.750" in caplog.text


def test_an_episode_that_a_limit_ends_is_truncated_and_scored():
    async def play():
        async with playing(Talking(), limits=Limits(max_turns=2)) as client:
            episode = await client.begun()
            for _ in range(2):
                await client.step(episode, "x")
            return client.server.metrics.stats()["sources"]["Talking"]

    found = run(play())
    assert (found["outcomes"], found["mean_reward"]) == ({"truncated": 1}, 2.0)


def test_the_log_tells_only_what_is_new():
    async def play():
        async with playing(Talking()) as client:
            told = []
            for _ in range(2):
                await client.step(await client.begun(), "stop")
                told += client.server.metrics.report_ended()
            return told + client.server.metrics.report_ended()

    assert run(play()) == ["Talking: 1 ended (completed 1), mean reward 1.000"] * 2


@BOTH
def test_every_door_and_kind_is_kept_with_its_step(workers, tmp_path):
    taskset = Colours()

    async def play():
        traces = kept(tmp_path, taskset)
        async with (
            playing(taskset, workers=workers, traces=traces, address="tcp://127.0.0.1:0") as client,
            EnvClient(client.server.addresses["zmq"], taskset=taskset) as zmq,
        ):
            episode = await client.begun(task_index=1, step=7)
            await client.step(episode, "green")
            await client.begun(task_index=2)
            task = await zmq.sample(3)
            await zmq.step((await zmq.start(task, step=8)).episode, "red", 0)
            await zmq.run_rollout(task, step=9)
            await zmq.run_group(task, 2, step=10)
            stats = client.server.metrics.stats()
        return stats, traces.figures()

    stats, figures = run(play())
    found = sorted(TRACES.read(tmp_path), key=lambda trace: (trace.step or 0, trace.rollout))
    assert [(trace.step, trace.outcome.value, trace.reward) for trace in found] == [
        (None, "cancelled", None),
        (7, "completed", 1.0),
        (8, "completed", 0.0),
        (9, "completed", 1.0),
        (10, "completed", 1.0),
        (10, "completed", 1.0),
    ]
    assert figures["traces_lost"] == 0
    assert stats["outcomes"] == {"completed": 5}
    episode = found[1]
    assert [turn.observed[0]["content"] for turn in episode.turns] == ["Say green."]
    assert episode.turns[0].message == {"role": "assistant", "content": "green"}
    assert (episode.turns[0].reward, episode.metrics, episode.task.reward_spec["ground_truth"]) == (
        1.0,
        {"length": 5.0},
        "green",
    )
    assert episode.uid == next(task.uid for task in taskset.draw() if task.idx == episode.task.idx)
    assert episode.timing.total >= episode.timing.environment == episode.turns[0].environment_seconds > 0
    assert episode.timing.policy >= episode.turns[0].policy_seconds > 0
    assert time.time() - 60 < episode.timing.began < time.time()


@BOTH
def test_the_turns_of_an_episode_are_what_went_to_and_fro(workers, tmp_path):
    taskset = Failing()

    async def play():
        async with playing(taskset, workers=workers, traces=kept(tmp_path, taskset)) as client:
            good, bad = await client.begun(task_index=0), await client.begun(task_index=1)
            calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
            await client.step(good, "\ud83d")
            await client.post("step", {"episode_id": good, "action": {"type": "json", "content": calls}})
            await client.post("step", {"episode_id": good, "action": {"type": "json", "content": {"a": [1]}}})
            await client.step(good, "stop")
            await client.step(bad, "fail")
            await client.post("start", {"task_index": 3})

    run(play())
    found = {trace.task.idx: trace for trace in TRACES.read(tmp_path)}
    good, bad, unborn = found[0], found[1], found[3]
    assert [turn.observed[0]["content"] for turn in good.turns] == ["go", "on", "on", "on"]
    contents = [turn.message["content"] for turn in good.turns]
    assert contents[1:] == [None, '{"a":[1]}', "stop"]
    assert good.turns[1].message["tool_calls"][0]["id"] == "1"
    assert (good.reward, [turn.reward for turn in good.turns], good.final[0]["content"]) == (1.0, [0.25] * 4, "on")
    assert (bad.outcome, bad.reward, bad.turns[-1].message) == ("environment_error", None, None)
    assert "broken" in bad.failure.message
    assert (unborn.outcome, unborn.failure.phase, unborn.turns) == ("environment_error", "start", [])


class Credited(Failing):
    CONTRACT = Contract(turn_discount=0.5, credit="turn", credit_discount=0.9)


@BOTH
def test_the_trace_of_a_stepped_episode_has_the_discount_and_the_credit_that_its_contract_declares(workers, tmp_path):
    taskset = Credited()

    async def play():
        async with playing(taskset, workers=workers, traces=kept(tmp_path, taskset)) as client:
            await client.step(await client.begun(task_index=0), "stop")

    run(play())
    (trace,) = TRACES.read(tmp_path)
    assert (trace.reward, trace.shaped_reward) == (0.25, 0.125)
    assert (trace.credit, trace.credit_discount) == ("turn", 0.9)


class Odd(Environment):
    def step(self, action):
        if action.text == "long":
            return Step("x" * 3_000_000, reward=1.0)
        return Step(Observation("json", {1, 2}), reward=1.0, done=True, info={"metrics": {"n": True}, "odd": object()})


class Oddities(Numbers):
    def environment(self, task):
        return Odd(task)


@BOTH
def test_what_cannot_be_written_never_harms_the_episode(workers, tmp_path, monkeypatch):
    monkeypatch.setattr("treetune.play.episode_record.MOST_BYTES", 5_000_000)
    taskset = Oddities()

    async def play():
        traces = kept(tmp_path, taskset)
        async with playing(taskset, workers=workers, traces=traces) as client:
            odd, long = await client.begun(task_index=0), await client.begun(task_index=1)
            answers = [await client.step(odd, "x")]
            answers += [await client.step(long, action) for action in ("long", "long", "x")]
            return [status for status, _ in answers], client.server.metrics.stats()["outcomes"], traces

    statuses, outcomes, traces = run(play())
    assert statuses == [200] * 4
    assert outcomes == {"completed": 2}
    assert (traces.kept, traces.lost) == (1, 1)
    assert [trace.task.idx for trace in TRACES.read(tmp_path)] == [0]


def test_a_killed_server_leaves_a_run_that_is_scored_again_and_gone_on_with(tmp_path, treetune):
    with serve(tmp_path, "arithmetic", "--http", ":0", "--traces", "kept") as running:
        url = running.report["http"]
        for index in range(3):
            begun = post(f"{url}/api/episode/start", {"task_index": index, "step": 5})
            post(f"{url}/api/episode/step", {"episode_id": begun["episode_id"], "action": "no idea"})
        path = tmp_path / "kept" / TRACES.file
        run(until(lambda: path.read_bytes().count(b"\n") == 3))
        running.stop(signal.SIGKILL)
    with open(path, "ab") as file:
        file.write(b'{"task": {"idx": 0, "pro')
    again = treetune("rescore", tmp_path / "kept", "--json")
    assert (again.code, again.json["after"]["rollouts"], again.json["changed"]) == (0, 3, 0), again.err
    assert treetune("validate", tmp_path / "kept" / "config.yaml", "-n", "3").code == 0
    with serve(tmp_path, "arithmetic", "--http", ":0", "--traces", "kept") as running:
        begun = post(f"{running.report['http']}/api/episode/start", {})
        post(f"{running.report['http']}/api/episode/step", {"episode_id": begun["episode_id"], "action": "1"})
        running.stop()
    assert len(list(TRACES.read(tmp_path / "kept"))) == 4
