"""`serve --openenv`: sessions over `/ws`, the routes beside it, and tools over JSON-RPC."""

from __future__ import annotations

import pytest
from http_playing import BOTH
from openenv_playing import Echo, Echoes, playing
from serving import Numbers, Stream, run, until


@BOTH
def test_a_session_plays_one_episode_after_the_other(workers):
    async def play():
        async with playing(Echoes(), workers=workers) as client, client.socket() as socket:
            first = (await socket.ask("reset", {}))["data"]
            assert first == {
                "observation": {
                    "text": "task 0",
                    "messages": [{"role": "user", "content": "task 0"}],
                    "metadata": {"task_index": 0, "data_source": "Echoes"},
                },
                "reward": None,
                "done": False,
                "metadata": {"task_index": 0, "data_source": "Echoes"},
            }
            step = await socket.step("hello")
            assert (step["observation"]["text"], step["reward"], step["done"]) == ("hello", 0.5, False)
            assert step["metadata"] == step["observation"]["metadata"] == {"said": "hello"}
            state = (await socket.ask("state"))["data"]
            assert state["step_count"] == 1
            end = await socket.step("end")
            assert (end["done"], end["metadata"]["success"]) == (True, False)
            over = await socket.ask("step", {"message": "more"})
            assert (over["type"], over["data"]["code"]) == ("error", "EXECUTION_ERROR")
            assert "over" in over["data"]["message"]
            second = (await socket.ask("reset"))["data"]
            assert second["observation"]["text"] == "task 1"
            assert len(client.live) == 1
        await until(lambda: not client.live)

    run(play())


def test_a_step_before_the_first_reset_begins_the_next_task_and_a_reset_shows_it_once():
    async def play():
        async with playing(Echoes()) as client:
            async with client.socket() as socket:
                assert (await socket.step("hello"))["reward"] == 0.5
                assert (await socket.ask("reset", {}))["data"]["observation"]["text"] == "task 1"
            async with client.socket() as socket:
                assert "error" in await socket.call("tools/list")  # which needs an episode to know
                assert (await socket.ask("reset", {}))["data"]["observation"]["text"] == "task 2"

    run(play())


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"seed": 3}, "task 3"),
        ({"seed": 8}, "task 3"),
        ({"split": "train", "index": 2}, "task 2"),
        ({"task_index": 4, "seed": 1, "anything": "else"}, "task 4"),
    ],
)
def test_a_reset_names_a_task_by_seed_or_index(asked, shown):
    async def play():
        async with playing(Echoes()) as client, client.socket() as socket:
            for _ in range(2):
                assert (await socket.ask("reset", asked))["data"]["observation"]["text"] == shown
            assert client.server.streams.cursor() == 0

    run(play())


@pytest.mark.parametrize(
    ("taskset", "asked", "code", "words"),
    [
        (Echoes, {"index": 5}, "EXECUTION_ERROR", "they are 0 to 4"),
        (Echoes, {"index": -1}, "VALIDATION_ERROR", "no task -1"),
        (Echoes, {"seed": "three"}, "VALIDATION_ERROR", "Invalid message"),
        (Echoes, {"split": "test", "index": 0}, "EXECUTION_ERROR", "there is only 'train'"),
        (Stream, {"seed": 3}, "EXECUTION_ERROR", "generator"),
    ],
)
def test_a_reset_that_cannot_be_is_told_and_the_session_goes_on(taskset, asked, code, words):
    async def play():
        async with playing(taskset()) as client, client.socket() as socket:
            refused = (await socket.ask("reset", asked))["data"]
            assert (refused["code"], words in refused["message"]) == (code, True), refused
            assert (await socket.ask("reset", {}))["type"] == "observation"

    run(play())


def test_a_seed_of_an_endless_taskset_is_an_index():
    async def play():
        async with playing(Numbers()) as client, client.socket() as socket:
            found = await socket.ask("reset", {"seed": 2**40})
            assert found["data"]["metadata"]["task_index"] == 2**40
            assert (await socket.step(str(2**40)))["reward"] == 1.0

    run(play())


def test_a_failed_step_is_an_error_and_no_reward_and_the_episode_is_closed():
    async def play():
        async with playing(Echoes()) as client, client.socket() as socket:
            await socket.ask("reset", {})
            closed = Echo.closed
            failed = await socket.ask("step", {"message": "fail"})
            assert (failed["type"], failed["data"]["code"]) == ("error", "EXECUTION_ERROR")
            assert "the machine is gone" in failed["data"]["message"]
            assert Echo.closed == closed + 1
            again = await socket.ask("step", {"message": "more"})
            assert again["data"]["code"] == "EXECUTION_ERROR"
            assert client.server.metrics.outcomes == {"environment_error": 1}

    run(play())
