"""The one player of environments: who calls them, what it refuses, and what a failure leaves."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import aiohttp
import pytest
from raising import raises_code
from serving import serving

from treetune import Environment, Limits, Outcome, Step, Task, Taskset, run_rollout
from treetune.core.policy import Completion
from treetune.core.trace import decode_trace, encode_trace
from treetune.errors import EnvironmentFault
from treetune.models.scripted import Replay
from treetune.play import streams
from treetune.play.episode import DeadlinePassed, Episode, play_answer
from treetune.play.episode_result import EpisodeResult
from treetune.play.host import LocalHost, always
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.serve.task_signer import WireTask
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.door import ZmqDoor


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def saying(*texts):
    return Replay([Completion(text=text) for text in texts])


# Who calls an environment


def caller() -> str:
    """The module that called the method of the environment; calling user code off the loop is `offload`'s."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("treetune.") and name != "treetune.system.threads":
            return name
        frame = frame.f_back
    return "?"


class Watching(Environment):
    """Shows who called it, and notes who closed it. Its methods are async: then a stack says who waits for them."""

    closed_by: list[str] = []

    async def start(self):
        return caller()

    async def step(self, action):
        return Step(caller(), reward=1.0, done=action.text == "end")

    async def close(self):
        Watching.closed_by.append(caller())


SPEC = f"{Path(__file__)}:Watching"


class Watched(Taskset):
    def load_tasks(self):
        return [Task(prompt="Who calls?", env_class=SPEC, reward_spec={"ground_truth": "end"})]


def shown(observation) -> str:
    return observation.messages()[0]["content"]


async def by_eval():
    host = await LocalHost.open(Watched(), always(saying("go on", "end")))
    trace = await host.run_rollout(await host.sample())
    return [message["content"] for message in trace.messages if message["role"] == "user"]


async def by_a_server(workers):
    async with serving(Watched(), workers=workers) as server, EnvClient(server.address) as client:
        started = await client.start(await client.sample())
        step = await client.step(started.episode, "end", 0)
    return [shown(started.observation), shown(step.observation)]


async def by_http(workers=0):
    doors = [HttpDoor(HttpConfig(address=":0"))]
    async with (
        serving(Watched(), workers=workers, doors=doors) as server,
        aiohttp.ClientSession(f"{server.address}/api/episode/") as session,
    ):
        async with session.post("start", json={}) as reply:
            started = await reply.json()
        async with session.post("step", json={"episode_id": started["episode_id"], "action": "end"}) as reply:
            step = await reply.json()
    return [started["observation"]["content"], step["observation"]["content"]]


async def by_trl():
    from treetune.trainers.episodes import LocalEpisodes

    (episode,) = await LocalEpisodes(await streams.load(Watched())).start_many([0])
    step = await episode.step("end")
    return [shown(episode.observation), shown(step.observation)]


ROUTES = {
    "eval": by_eval,
    "zmq": lambda: by_a_server(0),
    "pool": lambda: by_a_server(1),
    "http": by_http,
    "http through a pool": lambda: by_http(1),
    "trl": by_trl,
}


@pytest.mark.parametrize("route", ROUTES)
def test_only_the_episode_touches_an_environment(route):
    Watching.closed_by.clear()
    assert set(run(ROUTES[route]())) == {"treetune.play.episode"}
    assert set(_closed()) <= {"treetune.play.episode"}


def _closed() -> list[str]:
    # A file is loaded as a module of its own, so its class is another than the one here.
    loaded = [
        vars(module).get("Watching")
        for name, module in sys.modules.items()
        if name.startswith("treetune.config.code_files.")
    ]
    return [name for cls in [Watching, *filter(None, loaded)] for name in cls.closed_by]


def test_only_the_episode_touches_an_environment_in_skyrl(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "support" / "stand_ins"))
    for name in [name for name in sys.modules if name.split(".")[0] == "skyrl_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "treetune.trainers.skyrl.environment", raising=False)
    from treetune.trainers.skyrl.environment import TreetuneTextEnv

    Watching.closed_by.clear()
    env = TreetuneTextEnv("watching", Watching, extras={"reward_spec": {"ground_truth": "end"}})
    messages, _ = env.init([{"role": "user", "content": "Who calls?"}])
    output = env.step("end")
    env.close()
    assert output["done"]
    told = [messages[0]["content"], output["observations"][0]["content"], *Watching.closed_by]
    assert told == ["treetune.play.episode"] * 3
    sys.modules.pop("treetune.trainers.skyrl.environment", None)


def test_only_the_episode_touches_an_environment_in_verl(monkeypatch):
    monkeypatch.setenv("TREETUNE_TRUST", "1")
    from treetune.trainers import verl

    Watching.closed_by.clear()
    played = []
    scored = verl.compute_score("watched", "end", "end", {"scorer": f"env:{SPEC}", "env_class": SPEC})
    played += _closed()
    assert scored["score"] == 1.0
    assert played
    assert set(played) == {"treetune.play.episode"}


def test_verl_refuses_an_episode_that_goes_on_instead_of_paying_for_its_first_step(monkeypatch):
    monkeypatch.setenv("TREETUNE_TRUST", "1")
    from treetune.trainers import verl

    with raises_code("taskset", "`run_with_tasks`", "`play_by_tasks`"):
        verl.compute_score("watched", "go on", "end", {"scorer": f"env:{SPEC}", "env_class": SPEC})


# What is checked, by rollouts and by whoever steps from outside alike


class Returning(Environment):
    def step(self, action):
        return RETURNS[self.task.ground_truth]()


RETURNS = {
    "a text as done": lambda: Step(done="no"),
    "a text as truncated": lambda: Step(done=True, truncated="yes"),
    "a list as info": lambda: Step(done=True, info=["x"]),
    "metrics that are no numbers": lambda: Step(done=True, info={"metrics": {"m": "many"}}),
    "metrics that are a list": lambda: Step(done=True, info={"metrics": [1]}),
    "a reward that is not a number": lambda: Step(reward="1", done=True),
    "a reward that is infinite": lambda: Step(reward=float("inf"), done=True),
    "no step at all": lambda: {"reward": 1.0, "done": True},
}


class Returned(Taskset):
    def __init__(self, what):
        super().__init__()
        self._what = what

    def load_tasks(self):
        return [Task(prompt="x", reward_spec={"ground_truth": self._what})]

    def environment(self, task):
        return Returning(task)


@pytest.mark.parametrize("what", RETURNS)
def test_what_an_environment_returns_is_checked_once_for_all(what):
    taskset = Returned(what)

    async def play():
        trace = await run_rollout(taskset, taskset[0], saying("x", "x"))
        episode = await Episode.start(taskset, taskset[0])
        with pytest.raises(EnvironmentFault) as stepped:
            await episode.step("x")
        return trace, stepped.value, episode.over

    trace, error, over = run(play())
    assert trace.outcome is Outcome.ENVIRONMENT_ERROR
    assert trace.failure.message == str(error)
    assert trace.reward is None
    assert over


ONE_STEP = Step("again", reward=0.5)


class Lazy(Environment):
    """Returns the same object every time."""

    def step(self, action):
        return ONE_STEP


class Lazily(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]

    def environment(self, task):
        return Lazy(task)


def test_a_limit_on_turns_leaves_the_step_of_the_environment_as_it_was():
    taskset = Lazily()
    trace = run(run_rollout(taskset, taskset[0], saying("a", "b", "c"), limits=Limits(max_turns=2)))
    assert (trace.outcome, trace.reward) == (Outcome.TRUNCATED, 1.0)
    assert [turn.reward for turn in trace.turns] == [0.5, 0.5]
    assert (ONE_STEP.done, ONE_STEP.truncated) == (False, False)


# Deadlines and clean-up


class Late(Environment):
    """Made late, when its caller has given up."""

    go = threading.Event()
    closed = threading.Event()

    def __init__(self, task):
        super().__init__(task)
        Late.go.wait(20)

    def close(self):
        Late.closed.set()


class MadeLate(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]

    def environment(self, task):
        return Late(task)


@pytest.mark.parametrize("way", ["a rollout", "an episode"])
def test_an_environment_that_is_made_after_its_deadline_is_closed(way):
    Late.go.clear()
    Late.closed.clear()
    taskset, limits = MadeLate(), Limits(timeout=0.05)

    async def play():
        if way == "a rollout":
            trace = await run_rollout(taskset, taskset[0], saying("x"), limits=limits)
            assert (trace.outcome, trace.reward) == (Outcome.TIMEOUT, None)
        else:
            with pytest.raises(DeadlinePassed, match=r"not finished after 0\.05 seconds"):
                await Episode.start(taskset, taskset[0], limits)
        Late.go.set()
        return await asyncio.to_thread(Late.closed.wait, 20)

    assert run(play())


class SlowToClose(Environment):
    def step(self, action):
        return Step(reward=1.0, done=True)

    async def close(self):
        await asyncio.sleep(0.2)


class ClosesSlowly(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]

    def environment(self, task):
        return SlowToClose(task)


def test_a_slow_close_does_not_take_the_reward_of_a_finished_episode():
    taskset = ClosesSlowly()
    trace = run(run_rollout(taskset, taskset[0], saying("x"), limits=Limits(timeout=0.1)))
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 1.0)


class TimesOutItself(Environment):
    def step(self, action):
        raise TimeoutError("the database did not answer")


class OwnTimeout(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]

    def environment(self, task):
        return TimesOutItself(task)


def test_a_timeout_of_the_environment_itself_is_its_failure_and_no_deadline():
    taskset = OwnTimeout()

    async def play():
        trace = await run_rollout(taskset, taskset[0], saying("x"), limits=Limits(timeout=30))
        async with serving(taskset, limits=Limits(timeout=30)) as server, EnvClient(server.address) as client:
            started = await client.start(await client.sample())
            with raises_code("failed", "the database did not answer") as stepped:
                await client.step(started.episode, "x", 0)
        return trace.outcome, stepped.value.kind

    assert run(play()) == (Outcome.ENVIRONMENT_ERROR, "failed")


# What an episode comes to


class Counts(Environment):
    def step(self, action):
        done = action.text == "end"
        return Step("more", reward=0.75, done=done, info={"answer": action.text, "metrics": {"length": 3}})


class Counted(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]

    def environment(self, task):
        return Counts(task)


def test_an_episode_keeps_the_reward_of_every_step():
    async def play():
        episode = await Episode.start(Counted(), Counted()[0])
        await episode.step("a")
        last = episode.with_ending(await episode.step("end"))
        return episode.result, last

    result, last = run(play())
    assert (result.rewards, result.reward, result.answer) == ([0.75, 0.75], 1.5, "end")
    assert result.metrics == {"length": 3.0}
    # The whole episode is what succeeds, not its last step.
    assert last.info["success"] is True


def test_one_answer_is_played_and_closed_whether_or_not_that_was_all():
    async def play():
        whole = await play_answer(Counted(), Counted()[0], "end")
        part = await play_answer(Counted(), Counted()[0], "a")
        return whole.finished, whole.over, part.finished, part.over

    assert run(play()) == (True, True, False, True)


def test_a_step_after_the_end_is_refused():
    async def play():
        episode = await Episode.start(Counted(), Counted()[0])
        await episode.step("end")
        with raises_code("usage", "start another"):
            await episode.step("again")

    run(play())


# A failure has no reward, here, on disk and on the wire


class Breaks(Environment):
    def step(self, action):
        if action.text == "break":
            raise RuntimeError("broken")
        return Step("more", reward=1.0)


class Breaking(Taskset):
    def load_tasks(self):
        return [Task(prompt="x")]

    def environment(self, task):
        return Breaks(task)

    def gold(self, task):
        return ["go on", "break"]


def test_a_failed_rollout_has_no_reward_though_it_earned_some_before():
    taskset = Breaking()
    trace = run(run_rollout(taskset, taskset[0], saying("go on", "break")))
    assert trace.outcome is Outcome.ENVIRONMENT_ERROR
    assert trace.reward is None
    assert not trace.passed(0.0)
    assert trace.turns[0].reward == 1.0
    line = encode_trace(trace)
    assert b'"reward":null' in line
    assert decode_trace(line).reward is None


def test_a_failed_rollout_has_no_reward_on_the_wire():
    async def play():
        async with serving(Breaking()) as server, EnvClient(server.address) as client:
            trace = await client.run_rollout(await client.sample())
            stats = await client.stats()
        return trace, stats

    trace, stats = run(play())
    assert (trace.outcome, trace.reward) == (Outcome.ENVIRONMENT_ERROR, None)
    assert stats["sources"]["Breaking"]["mean_reward"] is None


def test_a_client_of_another_protocol_is_told_so(monkeypatch):
    async def play():
        async with serving(Counted()) as server, EnvClient(server.address) as client:
            task = await client.sample()
            assert isinstance(client.portable(task), WireTask)
            monkeypatch.setattr("treetune.serve.zmq.client.PROTOCOL", 2)
            async with EnvClient(server.address) as other:
                with raises_code("usage", "protocol 3", "protocol 2"):
                    await other.run_rollout(client.portable(task))

    run(play())


def test_rewards_of_steps_are_summed_exactly():
    """Ten times 0.1 is 0.9999999999999999 where each sum is rounded."""
    result = EpisodeResult()
    for _ in range(10):
        result.add(Step(reward=0.1))
    assert (result.reward, result.passed()) == (1.0, True)


# Whose doing it is


class Napping(Environment):
    def step(self, action):
        if action.text == "sleep":
            time.sleep(1)
        return Step("on", 0.25)


class Naps(Taskset):
    def load_tasks(self):
        return [Task(prompt="?")]

    def environment(self, task):
        return Napping(task)


LATE = Limits(timeout=0.2, timeout_reward=-0.5)


def test_a_step_over_its_time_ends_the_episode_with_the_reward_that_the_limits_give():
    async def play():
        taskset = Naps()
        episode = await Episode.start(taskset, taskset[0], LATE)
        return [await episode.step(text) for text in ("go", "sleep")], episode

    (_, last), episode = run(play())
    assert (last.done, last.truncated, episode.result.reward, episode.result.success) == (True, True, -0.5, False)
    assert episode.over


@pytest.mark.parametrize("workers", [0, 1])
def test_over_both_doors_too(workers):
    async def play():
        doors = [ZmqDoor("tcp://127.0.0.1:0"), HttpDoor(HttpConfig(address=":0"))]
        async with serving(Naps(), doors=doors, workers=workers, limits=LATE):
            pulled, spoken = (door.address for door in doors)
            async with EnvClient(pulled) as client, aiohttp.ClientSession() as session:
                begun = await client.start(await client.sample())
                steps = [await client.step(begun.episode, text, turn) for turn, text in enumerate(("go", "sleep"))]
                answers = [await post(session, f"{spoken}/api/episode/start", {})]
                for text in ("go", "sleep"):
                    body = {"episode_id": answers[0]["episode_id"], "action": text}
                    answers.append(await post(session, f"{spoken}/api/episode/step", body))
                return (
                    [step.reward for step in steps],
                    [answer["reward"] for answer in answers[1:]],
                    answers[-1]["done"],
                )

    assert run(play()) == ([0.25, -0.75], [0.25, -0.75], True)


async def post(session, url, body):
    async with session.post(url, json=body) as response:
        return await response.json()


def test_the_host_and_whoever_asks_say_what_a_timeout_earns():
    def narrowed(own, asked):
        return LocalHost(streams.Streams(Naps()), always(saying("x")), own).narrow(asked)

    given = Limits(timeout_reward=0.0)
    assert narrowed(LATE, Limits(max_turns=3)) == Limits(timeout=0.2, timeout_reward=-0.5, max_turns=3)
    assert narrowed(LATE, Limits(timeout_reward=-1.0)).timeout_reward == -1.0
    assert narrowed(Limits(), given) == given
    for own, reward in ((LATE, 0.0), (Limits(), 0.5), (given, 1.0)):
        with raises_code("usage", "--limits.timeout_reward", "limits.timeout_reward"):
            narrowed(own, Limits(timeout_reward=reward))


def test_whoever_asks_can_only_narrow_the_limits_of_a_host():
    own = Limits(max_turns=4, timeout=8.0, max_tool_calls=16, timeout_reward=0.0)
    host = LocalHost(streams.Streams(Naps()), always(saying("x")), own)
    wider = Limits(max_turns=5, timeout=9.0, max_tool_calls=17)
    tighter = Limits(max_turns=3, timeout=7.0, max_tool_calls=15, timeout_reward=-1.0)
    assert host.narrow(wider) == host.narrow(Limits()) == own
    assert host.narrow(tighter) == tighter


class Silent(Environment):
    """Its `start` forgot to return something."""

    def start(self):
        self.count = 0

    def step(self, action):
        return Step(reward=1.0, done=True)


class Silence(Taskset):
    prompt: str | None = "What now?"

    def load_tasks(self):
        return [Task(prompt=self.prompt)]

    def environment(self, task):
        return Silent(task)


def test_a_start_that_returns_nothing_shows_the_prompt_and_fails_where_there_is_none():
    silence = Silence()
    episode = asyncio.run(Episode.start(silence, silence[0]))
    assert episode.observation.messages() == [{"role": "user", "content": "What now?"}]
    silence = Silence()
    silence.prompt = None
    with raises_code("environment", "Silent.start()"):
        asyncio.run(Episode.start(silence, silence[0]))
