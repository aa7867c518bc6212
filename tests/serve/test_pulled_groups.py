"""Which rollouts a trainer gets: the first that are scored, and groups whose rewards differ."""

from __future__ import annotations

import asyncio

import pytest
from raising import raises_code
from serving import Numbers, run
from trained_serving import all_closed, names

from treetune.core.trace import Outcome
from treetune.models import load_policy
from treetune.play.group import sample_groups
from treetune.play.host import LocalHost, always
from treetune.play.protocol import GroupOptions
from treetune.serve import BlockingEnvClient
from treetune.serve.errors import ServeError
from treetune.serve.messages import RunGroupRequest


def test_the_wire_has_every_option_of_rollouts_and_groups():
    fields = {name for name in RunGroupRequest.__struct_fields__ if name not in ("ack", "task", "n", "rollouts")}
    assert fields == GroupOptions.__annotations__.keys() - {"request"}  # which is the id of the request there


def test_the_first_that_are_scored_are_the_group_and_the_others_leave_nothing(play, pulled):
    async def test(client, watch):
        before = (await client.stats())["counts"].get("stragglers", 0)
        await watch.control(permits=0)
        running = asyncio.create_task(client.run_group(await client.sample(), 3, of=5, **watch.ask))
        await watch.wait(asked=5, open=5)
        while not running.done():
            await watch.control(permits=1)
            await asyncio.sleep(0.02)
        seen = await watch.wait(open=0)
        stats = await client.stats()
        return running.result(), seen, stats["counts"]["stragglers"] - before, stats["in_flight"]

    traces, seen, stragglers, in_flight = play(test)
    assert len(traces) == 3
    assert all(trace.outcome is Outcome.COMPLETED and len(trace.turns) == 3 for trace in traces)
    assert sorted({trace.rollout for trace in traces}) == [trace.rollout for trace in traces]
    assert (stragglers, in_flight, seen["open"]) == (2, 0, 0)
    assert all_closed(pulled)


def test_failures_do_not_count_towards_the_group(play):
    async def test(client, watch):
        await watch.control(answers=["raise", "raise"])
        task = await client.sample()
        good = await client.run_group(task, 2, of=4, **watch.ask)
        await watch.control(answer="raise")
        return good, await client.run_group(task, 2, of=3, **watch.ask)

    good, bad = play(test)
    assert [trace.outcome for trace in good] == [Outcome.COMPLETED] * 2
    assert [(trace.outcome, trace.reward) for trace in bad] == [(Outcome.ENVIRONMENT_ERROR, None)] * 2


def test_a_group_of_fewer_than_it_has_is_refused(play):
    async def test(client, watch):
        task = await client.sample()
        with pytest.raises(Exception, match="is the number of rollouts to start"):
            await client.run_group(task, 4, of=3, **watch.of)
        with pytest.raises(Exception, match="a group must have"):
            await client.run_group(task, 4, of=5000, **watch.of)

    play(test)


def test_a_client_that_gives_up_takes_the_whole_group_with_it(play):
    async def test(client, watch):
        await watch.control(permits=0)
        running = asyncio.create_task(client.run_group(await client.sample(), 2, of=4, **watch.of))
        await watch.wait(asked=4, open=4)
        running.cancel()
        await watch.wait(open=0, dropped=4)

    play(test)


# Groups without variance


def test_a_group_whose_rewards_are_all_the_same_is_dropped_or_kept(play):
    async def test(client, watch):
        task, before = await client.sample(), (await client.stats())["counts"]
        kept = await client.run_group(task, 2, **watch.ask)
        dropped = await client.run_group(task, 2, no_variance="drop", **watch.ask)
        await watch.control(answers=["0.25"])
        differs = await client.run_group(task, 2, no_variance="drop", **watch.ask)
        return kept, dropped, differs, await counted(client, before)

    kept, dropped, differs, counts = play(test)
    assert (len(kept), dropped, len(differs)) == (2, [], 2)
    assert sorted(trace.reward for trace in differs) == [2.25, 3.0]
    assert counts == {"groups_without_variance": 1, "dropped_groups": 1}


def test_a_group_is_played_anew_until_its_rewards_differ_or_it_was_often_enough(play):
    async def test(client, watch):
        task, before = await client.sample(), (await client.stats())["counts"]
        # The first six calls are those of the first group of two, which has three turns.
        await watch.control(answers=["1"] * 6 + ["0.5"])
        found = await client.run_group(task, 2, no_variance="refill", refills=3, **watch.ask)
        between = await counted(client, before)
        gone = await client.run_group(task, 2, no_variance="refill", refills=2, **watch.ask)
        return found, between, gone, await counted(client, before), len((await watch.seen())["bodies"])

    found, between, gone, after, asked = play(test)
    assert [trace.rollout for trace in found] == [2, 3]
    assert between == {"groups_without_variance": 1, "refilled_groups": 1}
    assert (gone, asked) == ([], 6 * (2 + 3))
    assert after == {"groups_without_variance": 4, "refilled_groups": 3, "dropped_groups": 1}


def test_failures_make_no_variance(play):
    async def test(client, watch):
        await watch.control(answers=["raise"])
        return await client.run_group(await client.sample(), 2, no_variance="drop", **watch.ask)

    assert play(test) == []


def test_a_single_rollout_cannot_be_asked_to_differ(play):
    async def test(client, watch):
        with pytest.raises(ServeError, match="never differs"):
            await client.run_group(await client.sample(), 1, no_variance="drop", **watch.ask)

    play(test)


async def counted(client, before):
    counts = (await client.stats())["counts"]
    more = {name: count - before.get(name, 0) for name, count in counts.items()}
    return {name: count for name, count in more.items() if count}


# Groups one after the other


def answers(trained, name, drops):
    """Of the groups of two that one client after the other asks for: those whose rewards are the same, in turn."""
    trained.control(name, answers=[one for drop in drops for one in (["1"] * 6 if drop else ["0.5"] + ["1"] * 5)])


def test_only_groups_that_differ_are_given_and_each_draw_is_done_once(play, pulled, trained):
    async def test(client, watch):
        answers(trained, watch.name, [True, False, True, True, False, False])
        first = (await client.info()).cursor
        given = [group async for group in client.sample_groups(2, count=3, **watch.ask)]
        stats = await client.stats()
        return first, given, (await client.info()).cursor, stats["leases"]

    first, given, cursor, leases = play(test)
    assert [task.idx - first for task, _ in given] == [1, 4, 5]
    assert all(len({trace.reward for trace in traces}) == 2 for _, traces in given)
    assert (cursor - first, leases) == (6, 0)


def test_a_checkpoint_has_what_is_under_way_or_waits_to_be_given(play, trained):
    async def test(client, watch):
        stream = f"stream-{watch.name}"
        answers(trained, watch.name, [False] * 20)
        groups = client.sample_groups(2, ahead=4, stream=stream, no_variance="keep", **watch.ask)
        given = [(await anext(groups)).task.idx for _ in range(2)]
        await watch.wait(open=0)  # the others wait to be given
        checkpoint = await client.state(stream)
        await groups.aclose()
        left = (await client.stats())["leases"]
        await client.restore(checkpoint)
        again = [(await client.sample(stream=stream)).idx for _ in range(6)]
        return given, left, again

    given, left, again = play(test)
    assert left == 0
    assert sorted(given + again) == list(range(8))


def test_who_leaves_the_loop_gives_back_what_was_under_way(play):
    async def test(client, watch):
        stream = f"stream-{watch.name}"
        await watch.control(permits=0)
        groups = client.sample_groups(2, ahead=3, stream=stream, **watch.ask)
        waiting = asyncio.create_task(anext(groups))
        await watch.wait(open=6)
        waiting.cancel()
        await asyncio.wait([waiting])
        await groups.aclose()
        seen = await watch.wait(open=0)
        stats = await client.stats()
        return seen["dropped"], stats["leases"], [(await client.sample(stream=stream)).idx for _ in range(4)]

    assert play(test) == (6, 0, [0, 1, 2, 3])


def test_too_many_groups_without_variance_in_a_row_are_an_error(play):
    async def test(client, watch):
        with raises_code("no-variance", "3 groups"):
            async for _ in client.sample_groups(2, most_dropped=3, **watch.ask):
                pass

    play(test)


@pytest.mark.parametrize("no_variance", ["keep", "drop"])
def test_what_was_cut_off_is_drawn_again(play, trained, no_variance):
    async def test(client, watch):
        stream = f"stream-{watch.name}"
        await watch.control(permits=0)
        await client.set_version(1, **watch.of)
        options = {"no_variance": no_variance, "max_staleness": 0, "stream": stream, "count": 2}
        groups = client.sample_groups(2, **options, **watch.ask)
        first = asyncio.create_task(anext(groups))
        await watch.wait(open=2)
        answers(trained, watch.name, [False, False])
        await client.set_version(2, **watch.of)
        await watch.control(permits=None)
        return [(await first).task.idx, *[group.task.idx async for group in groups]]

    assert play(test) == [0, 1]


def test_the_blocking_client_gives_groups_too(pulled, trained):
    name = next(names)
    answers(trained, name, [False, True, False])
    of = {"model": name, "endpoint": trained.url, "stream": name}
    with BlockingEnvClient(pulled.address) as client:
        assert [group.task.idx for group in client.sample_groups(2, count=2, **of)] == [0, 2]
        for group in client.sample_groups(2, no_variance="keep", **of):
            assert group.task.idx == 3
            break


def test_the_host_of_this_process_has_the_same_groups():
    class Alternates(Numbers):
        async def reward(self, task, answer):
            self.played = getattr(self, "played", -1) + 1
            return float(task.idx % 2 and self.played % 2)

    async def test():
        host = await LocalHost.open(taskset := Alternates(), always(load_policy("scripted:gold", taskset)))
        await host.set_version(4)
        given = [group async for group in sample_groups(host, 2, count=2, ahead=1)]
        return given, host.counts["dropped_groups"], host.streams.pending.leased

    given, dropped, leased = run(test())
    assert ([group.task.idx for group in given], dropped, leased) == ([1, 3], 2, 0)
    assert {trace.version for group in given for trace in group.traces} == {4}
