"""Weights that change under rollouts: the version of each token, staleness, pauses. Servers and model are processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import urllib.request

import pytest
from raising import raises_code
from serve_process import serve
from serving import run
from trained_model import END
from trained_serving import TASKS, all_closed, begin, names, pull_server, watching

from treetune.core.contract import Limits
from treetune.core.trace import Outcome
from treetune.serve import BlockingEnvClient, EnvClient
from treetune.serve.errors import BadRequest, Cancelled


def versions_of(trace):
    """The version of each sampled token, by turns."""
    (sequence,) = trace.tokens.sequences
    assert len(sequence.versions) == len(sequence.ids) == len(sequence.mask)
    assert all((version == -1) == (mine == 0) for version, mine in zip(sequence.versions, sequence.mask, strict=True))
    found = [version for version in sequence.versions if version >= 0]
    size = len(found) // len(trace.turns)
    return [found[at : at + size] for at in range(0, len(found), size)]


def sampled(trace):
    (sequence,) = trace.tokens.sequences
    return "".join(chr(id) for id, mine in zip(sequence.ids, sequence.mask, strict=True) if mine)


# Versions


@pytest.mark.parametrize("tells", ["metadata", "meta_info"])
def test_the_version_that_the_endpoint_tells_is_on_every_token(play, tells):
    async def test(client, watch):
        await watch.control(version=5, tells=tells)
        _, running = await begin(client, watch)
        await watch.control(permits=1)
        await watch.wait(asked=2)
        await watch.control(version=6, permits=1)
        await watch.wait(asked=3)  # the second call began with version 5
        await watch.control(permits=1)
        return await running

    trace = play(test)
    size = len("answer" + END)
    assert versions_of(trace) == [[5] * size, [5] * size, [6] * size]
    assert (trace.version, trace.last_version, trace.reward) == (5, 6, 3.0)


def test_the_version_that_the_trainer_tells_is_on_what_begins_afterwards(play):
    async def test(client, watch):
        await client.set_version(3, **watch.of)
        _, running = await begin(client, watch)
        await client.set_version(4, **watch.of)
        await watch.control(permits=1)
        await watch.wait(asked=2)
        other = asyncio.create_task(client.run_rollout(await client.sample(), version=9, **watch.ask))
        await watch.wait(asked=3)  # so the server has heard of version 9
        await watch.control(permits=None)
        return await running, await other

    trace, other = play(test)
    size = len("answer" + END)
    assert versions_of(trace) == [[3] * size, [4] * size, [9] * size]
    assert (trace.version, trace.last_version) == (3, 9)
    assert (other.version, other.last_version) == (9, 9)


def test_where_nobody_tells_there_are_no_versions(play):
    async def test(client, watch):
        return await client.run_rollout(await client.sample(), **watch.ask)

    trace = play(test)
    assert (trace.version, trace.last_version, trace.tokens.sequences[0].versions) == (None, None, [])


def test_a_version_that_is_told_late_breaks_no_sequence(play):
    async def test(client, watch):
        _, running = await begin(client, watch)
        await watch.control(permits=1)
        await watch.wait(asked=2)
        await client.set_version(1, **watch.of)
        await watch.control(permits=None)
        return await running

    trace = play(test)
    (sequence,) = trace.tokens.sequences
    found = [version for version, mine in zip(sequence.versions, sequence.mask, strict=True) if mine]
    size = len("answer" + END)
    assert found == [-1] * 2 * size + [1] * size
    assert (trace.version, trace.last_version) == (1, 1)


def test_weights_without_a_number_have_no_version(play):
    async def test(client, watch):
        await watch.control(version="default")
        return await client.run_rollout(await client.sample(), **watch.ask)

    assert play(test).version is None


def test_a_trace_of_a_policy_without_tokens_has_its_version_too(play):
    async def test(client, watch):
        await watch.control(gives_ids=False)
        return await client.run_group(await client.sample(), 2, version=2, **watch.of)

    assert [(trace.version, trace.tokens) for trace in play(test)] == [(2, None)] * 2


def test_a_version_in_a_header_is_read_where_the_endpoint_is_said_to_have_one(trained, tmp_path):
    (tmp_path / "tasks.py").write_text(TASKS)
    name = next(names)
    trained.control(name, version=12, tells="header")
    models = ("-m", name, "--endpoint.base_url", trained.url, "--endpoint.version_header", "X-Weights")
    marks = {"TREETUNE_TEST_MARKS": str(tmp_path / "marks")}
    with (
        serve(tmp_path, "tasks.py:Single", "--zmq", "tcp://127.0.0.1:0", *models, **marks) as server,
        BlockingEnvClient(server.address) as client,
    ):
        trace = client.run_rollout(client.sample())
        assert (trace.version, client.stats()["version"]) == (12, 12)


# Staleness


def test_a_rollout_that_is_too_old_is_cut_off_where_it_is(play, pulled):
    async def test(client, watch):
        await client.set_version(1, **watch.of)
        _, running = await begin(client, watch, max_staleness=1)
        await client.set_version(2, **watch.of)
        await watch.control(permits=1)
        await watch.wait(asked=2, open=1)  # one version later is fresh enough
        await client.set_version(3, **watch.of)
        trace = await running
        await watch.wait(open=0, dropped=1)
        return trace, (await client.stats())["outcomes"]

    trace, outcomes = play(test)
    assert (trace.outcome, trace.reward, trace.stale, trace.version) == (Outcome.STALE, None, True, 1)
    assert trace.failure.message == "it began with version 1 of the weights, and they are at 3"
    assert (len(trace.turns), outcomes["stale"] > 0, all_closed(pulled)) == (2, True, True)


def test_one_that_is_only_marked_is_played_to_its_end(play):
    async def test(client, watch):
        before = (await client.stats())["counts"].get("marked_stale", 0)
        _, running = await begin(client, watch, version=1, max_staleness=0, stale="mark")
        fresh = asyncio.create_task(
            client.run_rollout(await client.sample(), max_staleness=5, stale="mark", **watch.ask)
        )
        await watch.wait(asked=2)
        await client.set_version(2, **watch.of)
        await watch.control(permits=None)
        return await running, await fresh, (await client.stats())["counts"]["marked_stale"] - before

    old, fresh, marked = play(test)
    assert (old.outcome, old.reward, old.stale) == (Outcome.COMPLETED, 3.0, True)
    assert (fresh.outcome, fresh.reward, fresh.stale, marked) == (Outcome.COMPLETED, 3.0, False, 1)


def test_what_the_endpoint_tells_is_enough_to_know_what_is_too_old(play):
    async def test(client, watch):
        await watch.control(version=1)
        _, running = await begin(client, watch, max_staleness=0)
        await watch.control(permits=1, version=2)
        await watch.wait(asked=2)
        await watch.control(permits=1)
        return await running

    trace = play(test)
    assert (trace.outcome, trace.version, trace.last_version) == (Outcome.STALE, 1, 2)


def test_the_draw_of_what_was_cut_off_is_given_out_again(play):
    async def test(client, watch):
        await watch.control(permits=0)
        await client.set_version(1, **watch.of)
        task = await client.sample(lease=600)
        running = asyncio.create_task(client.run_group(task, 2, max_staleness=0, **watch.ask))
        await watch.wait(asked=2, open=2)
        await client.set_version(2, **watch.of)
        traces = await running
        again = await client.sample(lease=600)
        await watch.control(permits=None)
        played = await client.run_group(again, 2, max_staleness=0, **watch.ask)
        after = await client.sample()
        return task, traces, again, client.attempt_of(again), played, after, await client.finish(again)

    task, traces, again, attempt, played, after, still_out = play(test)
    assert [trace.outcome for trace in traces] == [Outcome.STALE] * 2
    assert (again.idx, attempt, still_out) == (task.idx, 1, False)
    assert [(trace.outcome, trace.attempt) for trace in played] == [(Outcome.COMPLETED, 1)] * 2
    assert after.idx == task.idx + 1


# Pauses


def test_a_rollout_goes_on_after_a_pause_in_the_same_sequence(play):
    async def test(client, watch):
        await client.set_version(7, **watch.of)
        _, running = await begin(client, watch)
        pausing = asyncio.create_task(client.pause(**watch.of))
        other = asyncio.create_task(client.run_rollout(await client.sample(), **watch.ask))
        await asyncio.sleep(0.2)
        waits = not pausing.done()
        await watch.control(permits=None)
        quiet = await pausing
        await asyncio.sleep(0.2)
        asked = len((await watch.seen())["bodies"])
        paused = (await client.stats())["paused_models"]
        await client.resume(8, **watch.of)
        return waits, quiet, asked, paused, await running, await other

    waits, quiet, asked, paused, trace, other = play(test)
    assert (waits, quiet, asked, paused) == (True, True, 1, 1)
    size = len("answer" + END)
    assert versions_of(trace) == [[7] * size, [8] * size, [8] * size]
    assert sampled(trace) == ("answer" + END) * 3
    assert (trace.reward, trace.timing.paused > 0, other.version) == (3.0, True, 8)


def test_a_call_that_a_pause_aborts_is_made_again_afterwards(play):
    async def test(client, watch):
        await client.set_version(1, **watch.of)
        _, running = await begin(client, watch)
        quiet = await client.pause(calls="abort", **watch.of)
        seen = await watch.wait(open=0)
        await client.resume(2, **watch.of)
        await watch.wait(open=1)
        await watch.control(permits=None)
        return quiet, seen, await running

    quiet, seen, trace = play(test)
    assert (quiet, seen["asked"], seen["dropped"]) == (True, 1, 1)
    assert (trace.version, trace.last_version, trace.reward) == (2, 2, 3.0)


def test_what_the_server_of_the_model_aborts_goes_on_from_its_tokens(play):
    async def test(client, watch):
        await client.set_version(1, **watch.of)
        _, running = await begin(client, watch)
        left = await client.pause(calls="leave", **watch.of)
        await watch.control(abort=True)
        quiet = await client.pause(calls="finish", **watch.of)
        await client.resume(2, **watch.of)
        seen = await watch.wait(asked=2, open=1)
        await watch.control(abort=True)  # and once more, with no pause
        await watch.wait(asked=3, open=1)
        await client.set_version(3, **watch.of)
        await watch.control(permits=None)
        return left, quiet, seen, await running

    left, quiet, seen, trace = play(test)
    assert (left, quiet) == (False, True)
    body = seen["bodies"][1]
    assert body["path"].endswith("/v1/completions")
    assert "".join(map(chr, body["prompt"])).endswith("\x01aans")
    first, *others = versions_of(trace)
    assert first == [1] * 3 + [2] * 1 + [2] * 3
    assert others == [[3] * 7] * 2
    assert sampled(trace) == ("answer" + END) * 3
    (sequence,) = trace.tokens.sequences
    assert [round(one, 3) for one in sequence.logprobs] == [
        round(-0.5 - 0.001 * id, 3) if mine else 0.0 for id, mine in zip(sequence.ids, sequence.mask, strict=True)
    ]
    assert [turn.message["content"] for turn in trace.turns] == ["answer"] * 3
    assert trace.usage.completion_tokens == 7  # of the call that was aborted: the scripted model counts none of its own


def test_without_tokens_an_aborted_call_is_asked_again(play):
    async def test(client, watch):
        await watch.control(gives_ids=False)
        _, running = await begin(client, watch, sampling=None)
        await client.pause(calls="leave", **watch.of)
        await watch.control(abort=True)
        await client.pause(**watch.of)
        await watch.control(permits=None)
        await client.resume(4, **watch.of)
        return await running, await watch.seen()

    trace, seen = play(test)
    assert [body["path"] for body in seen["bodies"]] == ["/v1/chat/completions"] * 4
    assert [turn.message["content"] for turn in trace.turns] == ["answer"] * 3
    assert (trace.version, trace.reward) == (4, 3.0)


def test_a_pause_takes_no_time_from_a_rollout(play):
    async def test(client, watch):
        _, running = await begin(client, watch, limits=Limits(timeout=1.5, timeout_reward=-1.0))
        await client.pause(calls="abort", **watch.of)
        await asyncio.sleep(2)
        await watch.control(permits=None)
        await client.resume(**watch.of)
        return await running

    trace = play(test)
    assert (trace.outcome, trace.reward) == (Outcome.COMPLETED, 3.0)


def test_a_pause_whose_client_is_gone_ends_by_itself(play, pulled, trained):
    async def test(client, watch):
        before = (await client.stats())["counts"].get("expired_pauses", 0)
        async with EnvClient(pulled.address) as other:
            await other.pause(seconds=0.5, **watch.of)
        trace = await client.run_rollout(await client.sample(), **watch.ask)
        return trace, (await client.stats())["counts"]["expired_pauses"] - before

    trace, expired = play(test)
    assert (trace.reward, expired) == (3.0, 1)


def test_rollouts_that_wait_can_be_cancelled_and_leave_nothing(play, pulled):
    async def test(client, watch):
        await client.pause(**watch.of)
        running = asyncio.create_task(client.run_rollout(await client.sample(), request="mine", **watch.ask))
        while not (await client.stats())["in_flight"]:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        found = await client.cancel("mine")
        with pytest.raises(Cancelled):
            await running
        await client.resume(**watch.of)
        return found, await watch.seen(), (await client.stats())["in_flight"]

    found, seen, in_flight = play(test)
    assert (found, seen["bodies"], in_flight, all_closed(pulled)) == (True, [], 0, True)


def test_a_pause_holds_only_the_model_that_it_names(play, trained):
    async def test(client, watch):
        await client.pause(**watch.of)
        other = {**watch.ask, "model": f"{watch.name}-other"}
        trace = await client.run_rollout(await client.sample(), **other)
        await client.resume(**watch.of)
        return trace

    assert play(test).reward == 3.0


def test_what_makes_no_sense_is_refused_with_the_reason(play):
    async def test(client, watch):
        task = await client.sample()
        with raises_code("denied", "--allow-endpoint"):
            await client.set_version(1, model="m", endpoint="http://127.0.0.1:1/v1")
        with raises_code("denied", "-m MODEL"):
            await client.pause()
        with raises_code("usage", "2147483647", "-1"):
            await client.set_version(-1, **watch.of)
        with raises_code("usage", "'finish', 'abort'", "'leave'"):
            await client.pause(calls="stop", **watch.of)
        with pytest.raises(BadRequest):
            await client.run_rollout(task, max_staleness=-1, **watch.ask)
        with pytest.raises(BadRequest):
            await client.run_rollout(task, max_staleness=1, stale="drop", **watch.ask)

    play(test)


def test_a_worker_that_dies_in_a_pause_is_replaced_by_one_that_waits_too(trained, tmp_path):
    with pull_server(tmp_path, trained, "Talks", "-w", 2) as server:

        async def test():
            async with watching(server, trained) as (client, watch):
                await client.set_version(1, **watch.of)
                _, running = await begin(client, watch)
                await watch.control(permits=1)
                await watch.wait(asked=2)
                await client.pause(calls="abort", **watch.of)
                for pid in children_of(server.process.pid):
                    os.kill(pid, signal.SIGKILL)
                while (stats := await client.stats())["replaced_workers"] < 2 or stats["workers"] < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                await asyncio.sleep(0.3)  # it has been given the rollout by now
                asked = len((await watch.seen())["bodies"])
                await watch.control(permits=None)
                await client.resume(2, **watch.of)
                return asked, await running

        asked, trace = run(test())
    assert asked == 2
    assert (trace.version, trace.last_version, trace.reward) == (2, 2, 3.0)


def test_the_blocking_client_pauses_and_resumes_too(pulled, trained):
    name = next(names)
    of = {"model": name, "endpoint": trained.url}
    with BlockingEnvClient(pulled.address) as client:
        client.set_version(1, **of)
        assert client.pause(**of)
        client.resume(2, **of)
        assert client.run_rollout(client.sample(), **of).version == 2


def children_of(pid):
    """The workers of a server."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=True).stdout.split()
    return [int(one) for one in found]


def test_what_happened_is_shown_by_top_and_to_prometheus(trained, tmp_path, treetune):
    with pull_server(tmp_path, trained, "Single", "--metrics", "127.0.0.1:0") as server:

        async def test():
            async with watching(server, trained) as (client, watch):
                await client.set_version(5, **watch.of)
                await client.pause(**watch.of)
                await client.resume(6, **watch.of)
                await client.run_group(await client.sample(), 2, no_variance="drop", **watch.of)
                await client.run_group(await client.sample(), 1, of=2, **watch.of)

        run(test())
        shown = treetune("top", server.address, "--once").out
        with urllib.request.urlopen(server.report["metrics"]) as reply:
            text = reply.read().decode()
    for words in ("version 6", "dropped groups: 1", "stragglers: 1", "pauses: 1"):
        assert words in shown
    for line in ("dropped_groups_total 1.0", "stragglers_total 1.0", "pauses_total 1.0", "version 6.0"):
        assert f"treetune_{line}" in text
