"""A step that is truncated ends its episode, as in Gymnasium, whoever plays it."""

from __future__ import annotations

from http_playing import BOTH, playing
from serving import Numbers, run

from treetune import Environment, Limits, Outcome, Step, run_rollout, tool
from treetune.core.policy import Completion
from treetune.models.scripted import Replay
from treetune.play.episode import Episode
from treetune.serve.zmq.client import EnvClient


class Clock(Environment):
    """Gymnasium's convention: a limit is said by `truncated` alone."""

    def start(self):
        self.turns = 0
        return "begin"

    def step(self, action):
        self.turns += 1
        return Step(f"turn {self.turns}", reward=0.5, truncated=self.turns == 2)


class Clocked(Numbers):
    def environment(self, task):
        return Clock(task)


class Calling(Clock):
    @tool
    def wait(self) -> Step:
        """Waits."""
        return Step("it is late", truncated=True)


def test_a_rollout_ends_truncated_with_what_it_has_earned():
    policy = Replay([Completion(text=text) for text in ("a", "b", "c", "d")])
    trace = run(run_rollout(Clocked(), Clocked()[0], policy, limits=Limits(max_turns=4)))
    assert (trace.outcome, trace.reward, len(trace.turns)) == (Outcome.TRUNCATED, 1.0, 2)


def test_a_tool_may_say_it_too():
    class Tooled(Numbers):
        def environment(self, task):
            return Calling(task)

    async def play():
        episode = await Episode.start(Tooled(), Tooled()[0])
        call = {"id": "1", "type": "function", "function": {"name": "wait", "arguments": "{}"}}
        step = await episode.step({"role": "assistant", "content": None, "tool_calls": [call]})
        return step.done, step.truncated, episode.over

    assert run(play()) == (True, True, True)


@BOTH
def test_servers_end_the_episode(workers):
    async def play():
        async with (
            playing(Clocked(), workers=workers, address="tcp://127.0.0.1:0") as played,
            EnvClient(played.server.address) as client,
        ):
            started = await client.start(await client.sample())
            pulled = [await client.step(started.episode, "go") for _ in range(2)]
            episode = await played.begun(task_index=1)
            stepped = [(await played.step(episode, "go"))[1] for _ in range(2)]
            after = (await played.step(episode, "go"))[0]
            return pulled, stepped, after, len(played.server.host.episodes.live)

    pulled, stepped, after, live = run(play())
    assert [(step.done, step.truncated) for step in pulled] == [(False, False), (True, True)]
    assert [(step["done"], step["info"].get("truncated")) for step in stepped] == [(False, None), (True, True)]
    assert (after, live) == (410, 0)
