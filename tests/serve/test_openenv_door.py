"""`serve --openenv`: sessions over `/ws`, the routes beside it, and tools over JSON-RPC."""

from __future__ import annotations

import pytest
from http_playing import BOTH
from openenv_playing import Echo, Echoes, Shopping, playing
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
        (Echoes, {"index": 5}, "EXECUTION_ERROR", "indices go from 0 to 4"),
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


# Tools


def test_calls_come_in_three_forms_and_earn_the_same():
    call = {"id": "a", "type": "function", "function": {"name": "buy", "arguments": '{"item": "red 1"}'}}

    async def play():
        async with playing(Shopping()) as client, client.socket() as socket:
            first = (await socket.ask("reset", {"index": 1}))["data"]
            assert [tool["function"]["name"] for tool in first["metadata"]["tools"]] == ["search", "buy"]
            listed = (await socket.ask("step", {"type": "list_tools"}))["data"]["observation"]["tools"]
            assert [(tool["name"], tool["input_schema"]["type"]) for tool in listed] == [
                ("search", "object"),
                ("buy", "object"),
            ]
            told = await socket.ask("step", {"message": "I buy.", "tool_calls": [call]})
            assert (told["data"]["reward"], told["data"]["done"]) == (1.0, True)
            assert told["data"]["observation"]["messages"][0]["tool_call_id"] == "a"
            await socket.ask("reset", {"index": 1})
            action = {"type": "call_tool", "tool_name": "buy", "arguments": {"item": "red 1"}}
            called = (await socket.ask("step", action))["data"]
            assert (called["reward"], called["done"]) == (1.0, True)
            assert (called["observation"]["tool_name"], called["observation"]["result"]) == ("buy", "bought")
            await socket.ask("reset", {"index": 1})
            over_rpc = (await socket.call("tools/call", name="buy", arguments={"item": "red 1"}))["result"]
            assert over_rpc["structured_content"]["reward"] == 1.0
            assert (over_rpc["data"], over_rpc["is_error"]) == ("bought", False)

    run(play())


def test_what_a_call_does_wrong_is_told_to_the_model_and_costs_a_turn():
    async def play():
        async with playing(Shopping()) as client, client.socket() as socket:
            await socket.ask("reset", {})
            wrong = (await socket.ask("step", {"type": "call_tool", "tool_name": "serach"}))["data"]
            assert "there is no tool 'serach'" in wrong["observation"]["error"]["message"]
            assert (wrong["reward"], wrong["done"]) == (0.0, False)
            assert (await socket.call("tools/call", name="serach"))["error"]["code"] == -32602
            assert [tool["name"] for tool in (await socket.call("tools/list"))["result"]["tools"]] == [
                "search",
                "buy",
                "answer",
            ]
            said = (await socket.call("tools/call", name="answer", arguments={"text": "hello"}))["result"]
            assert said["data"] == "Use the tools."

    run(play())


# HTTP


def test_a_request_over_http_has_an_environment_of_its_own():
    async def play():
        async with playing(Numbers()) as client:
            status, first = await client.ask("POST", "/reset", {"seed": 4})
            assert (status, first["observation"]["text"], first["reward"]) == (200, "0/4", None)
            status, step = await client.ask("POST", "/step", {"action": {"message": "4"}, "seed": 4})
            assert (status, step["reward"], step["done"]) == (200, 1.0, True)
            assert (await client.ask("GET", "/state"))[1]["step_count"] == 0
            assert not client.live
            assert not client.door.sessions.by_id

    run(play())


def test_tasks_are_listed_by_split_and_index_and_what_is_told_begins_them():
    async def play():
        async with playing(Echoes(), split="val") as client:
            assert (await client.ask("GET", "/list_environments"))[1] == ["echoes"]
            assert (await client.ask("GET", "/Echoes/splits"))[1] == [{"name": "val", "type": "validation"}]
            asked = {"split": "val"}
            assert (await client.ask("POST", "/echoes/num_tasks", asked))[1] == {"num_tasks": 5}
            assert len((await client.ask("POST", "/echoes/tasks", asked))[1]["tasks"]) == 5
            task = (await client.ask("POST", "/echoes/task", {**asked, "index": -1}))[1]["task"]
            assert task == {"split": "val", "index": 4}
            ranged = (await client.ask("POST", "/echoes/task_range", {**asked, "start": 1, "stop": -2}))[1]["tasks"]
            assert [one["index"] for one in ranged] == [1, 2]
            for path, body, status in [
                ("/other/tasks", asked, 404),
                ("/echoes/tasks", {"split": "train"}, 400),
                ("/echoes/task", {**asked, "index": 5}, 400),
                ("/echoes/task", asked, 422),
                ("/echoes/tasks", {**asked, "more": 1}, 422),
            ]:
                assert (await client.ask("POST", path, body))[0] == status, path
            async with client.socket() as socket:
                assert (await socket.ask("reset", task))["data"]["observation"]["text"] == "task 4"

    run(play())


def test_an_endless_taskset_has_tasks_by_index_and_no_number_of_them():
    async def play():
        async with playing(Numbers()) as client:
            asked = {"split": "train"}
            for path in ("num_tasks", "tasks", "task_range"):
                assert (await client.ask("POST", f"/numbers/{path}", asked))[0] == 501
            assert (await client.ask("POST", "/numbers/task", {**asked, "index": 9}))[1]["task"]["index"] == 9
            ranged = await client.ask("POST", "/numbers/task_range", {**asked, "start": 7, "stop": 9})
            assert [one["index"] for one in ranged[1]["tasks"]] == [7, 8]
            assert (await client.ask("POST", "/numbers/task_range", {**asked, "start": 0, "stop": 10**9}))[0] == 400

    run(play())
