"""One server and its client: the same order, the same tasks, answers that can be asked for again."""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil

import msgspec
import pytest
import zmq
import zmq.asyncio
from raising import raises_code
from serving import (
    Colour,
    Colours,
    Dear,
    Flaw,
    Hangs,
    Numbers,
    Ranked,
    Raw,
    Stream,
    Talking,
    run,
    served,
    serving,
    shuffled,
    until,
    until_in_flight,
)

from treetune import Mixture, Outcome, Sampling
from treetune.core.contract import Limits
from treetune.core.trace import Trace
from treetune.play.protocol import PROTOCOL
from treetune.serve.errors import BadRequest, Cancelled, Denied, Misused, ServeError, TaskRefused, Unreachable
from treetune.serve.host import ModelsConfig
from treetune.serve.messages import pack, unpack, unpack_plain
from treetune.serve.task_signer import WireTask
from treetune.serve.zmq.blocking import BlockingEnvClient
from treetune.serve.zmq.client import EnvClient
from treetune.system.access import Access

TASKSETS = {
    "finite": Colours,
    "shuffled": lambda: shuffled(Colours),
    "infinite": lambda: shuffled(Numbers),
    "generator": Stream,
    "mixture": lambda: Mixture.of([shuffled(Colours), Numbers()], [1, 2], seed=1),
    "mixture of a generator": lambda: Mixture.of([Colours(), Stream()], [1, 2]),
}


@pytest.mark.parametrize("make", TASKSETS.values(), ids=TASKSETS)
def test_the_server_gives_the_order_of_the_process(make):
    async def draw():
        async with served(make()) as client:
            return [await client.sample() for _ in range(20)]

    tasks, here = run(draw()), make()
    assert tasks == [here.at(index) for index in range(20)]
    assert tasks[:6] == here.select_tasks(6)


def test_info_says_what_is_served():
    async def infos():
        found = []
        for taskset in (Colours(), Numbers(), Ranked()):
            async with served(taskset, capacity=7) as client:
                await client.sample()
                found.append(await client.info())
        return found

    finite, infinite, ranked = run(infos())
    assert (finite.num_tasks, infinite.num_tasks) == (6, None)
    assert (finite.requires_group_scoring, ranked.requires_group_scoring) == (False, True)
    assert (finite.cursor, finite.capacity, finite.protocol, finite.models) == (1, 7, PROTOCOL, ["scripted:gold"])
    assert finite.fingerprint != infinite.fingerprint


def test_a_subclasss_own_fields_survive_the_whole_way():
    async def whole():
        async with served(Colours()) as client:
            task = await client.sample()
            trace = await client.run_rollout(task)
            traces = await client.run_group(task, 2)
            return task, trace, traces

    task, trace, traces = run(whole())
    assert type(task) is Colour
    assert (task.code, task.shade, task.extra_info["big"]) == (2**70, "r", -(2**90))
    assert task == Colours()[0]
    assert type(trace) is Trace
    assert trace.task == task
    assert type(trace.task) is Colour
    assert (trace.reward, trace.metrics) == (1.0, {"length": 3.0})
    assert [other.task for other in traces] == [task, task]


def test_a_client_without_the_class_keeps_its_fields_and_can_run_the_task():
    async def whole():
        async with serving(Colours()) as server, EnvClient(server.address) as client:
            task = await client.sample()
            trace = await client.run_rollout(task)
            return task, trace

    task, trace = run(whole())
    assert type(task) is WireTask
    assert (task.kind, task.shade, task.code, task.own["weights"]) == ("Colour", "r", 2**70, [0.5, 0])
    assert (trace.reward, trace.task.idx) == (1.0, 0)


def test_a_task_can_be_passed_on_to_another_process():
    async def whole():
        async with (
            serving(Colours()) as server,
            EnvClient(server.address, taskset=Colours()) as one,
            EnvClient(server.address) as other,
        ):
            task = await one.sample()
            with raises_code("refused", "portable"):
                await other.run_rollout(task)
            passed = pickle.loads(pickle.dumps(one.portable(task)))
            return (await other.run_rollout(passed)).reward

    assert run(whole()) == 1.0


def test_a_changed_or_invented_task_is_refused_before_anything_of_it_is_used():
    async def tamper():
        async with serving(Colours()) as server, EnvClient(server.address) as client:
            task = await client.sample()
            changed = [
                msgspec.structs.replace(task, prompt="Say nothing."),
                msgspec.structs.replace(task, reward_spec={"ground_truth": ""}),
                msgspec.structs.replace(task, own={**task.own, "code": 1}),
                msgspec.structs.replace(task, env_class="/etc/passwd.py:Evil"),
                msgspec.structs.replace(task, idx=2**80),
                msgspec.structs.replace(task, seal=b""),
                msgspec.structs.replace(task, seal=task.seal[::-1]),
                WireTask(prompt="made up"),
            ]
            for other in changed:
                for call in (client.run_rollout(other), client.run_group(other, 2), client.start(other)):
                    with raises_code("refused", "--key-file", "--state"):
                        await call
                with pytest.raises(TaskRefused):
                    await client.observe(other, 1.0)
            return (await client.run_rollout(task)).reward

    assert run(tamper()) == 1.0


def test_the_order_of_keys_makes_no_difference_to_a_task_that_comes_back():
    async def reorder():
        async with serving(Colours()) as server:
            with Raw(server.address) as raw:
                task = (await raw.ask(b"1", "sample"))["task"]
                back = {key: task[key] for key in reversed(task)}
                back["extra_info"] = {key: task["extra_info"][key] for key in reversed(task["extra_info"])}
                return await raw.ask(b"2", "run_rollout", task=back)

    answer = run(reorder())
    assert answer["success"], answer
    assert answer["trace"]["task"]["code"] == 2**70


def test_repeating_a_request_repeats_its_answer_and_not_the_work():
    async def repeat():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw, Raw(server.address) as other:
                first = await raw.ask(b"id-1", "sample")
                again = await raw.ask(b"id-1", "sample")
                elsewhere = await other.ask(b"id-1", "sample")  # a client that has connected anew
                after = await raw.ask(b"id-2", "sample", ack=[b"id-1"])
                late = await raw.ask(b"id-1", "sample")  # a repetition that comes late, or an id that is taken twice
                assert late["kind"] == "usage"
                last = await raw.ask(b"id-4", "sample")
                rollouts = [await raw.ask(b"id-3", "run_rollout", task=first["task"]) for _ in range(3)]
                outcomes = dict(server.metrics.outcomes)
                return first, again, elsewhere, after, last, rollouts, outcomes

    first, again, elsewhere, after, last, rollouts, outcomes = run(repeat())
    assert first == again == elsewhere
    assert [answer["index"] for answer in (first, after, last)] == [0, 1, 2]
    assert rollouts[0] == rollouts[1] == rollouts[2]
    assert outcomes == {"completed": 1}


def test_a_request_that_is_under_way_is_joined_by_its_repetitions(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def repeat():
        async with serving(Hangs()) as server:
            with Raw(server.address) as raw, Raw(server.address) as other:
                task = (await raw.ask(b"1", "sample"))["task"]
                for sender in (raw, raw, other):
                    await sender.send(b"2", b"run_rollout", raw.head, pack({"task": task}))
                await until((tmp_path / "begun-0").exists)
                await raw.ask(b"3", "cancel", id=b"2")
                return [await raw.receive(), await other.receive()]

    answers = run(repeat())
    assert [data["kind"] for _, data in answers] == ["cancelled"] * 2
    assert len((tmp_path / "begun-0").read_text().split()) == 1


def test_what_is_asked_wrongly_is_told():
    async def wrong():
        async with serving(Ranked()) as server:
            with Raw(server.address) as raw:
                task = (await raw.ask(b"0", "sample"))["task"]
                return [
                    await raw.ask(b"1", "sing"),
                    await raw.ask(b"2", "sample", index="x"),
                    await raw.ask(b"3", "sample", index=-1),
                    await raw.ask(b"4", "sample", index=2**200),
                    await raw.ask(b"5", "run_rollout"),
                    await raw.ask(b"6", "run_rollout", task=task),
                    await raw.ask(b"7", "run_group", task=task, n=0),
                    await raw.ask(b"8", "run_group", task=task, n=2, sampling={"extra": {"model": "other"}}),
                    await raw.ask(b"9", "step", episode="none", action="x"),
                    await raw.ask(b"10", "restore", state={}),
                    await raw.ask(b"11", "run_group", task=task, n=2),
                ]

    answers = run(wrong())
    assert [answer["success"] for answer in answers] == [False] * 10 + [True]
    assert all(answer["error"] for answer in answers[:-1])
    kinds = [answer["kind"] for answer in answers]
    assert kinds[:3] == ["bad_request", "bad_request", "usage"]
    assert "run_group" in answers[5]["remedy"]
    assert "must not set model" in answers[7]["error"]


def test_without_the_token_only_health_answers():
    async def ask():
        async with serving(Numbers(), access=Access(token="s3cret")) as server:
            answers = {}
            methods = [name.decode() for name in server.doors[0].methods]
            for token in (None, "wrong", "s3cre", "é"):
                with Raw(server.address, token=token) as raw:
                    for number, method in enumerate(methods):
                        kind = (await raw.ask(b"%d" % number, method))["kind"]
                        answers.setdefault(method, set()).add(kind)
            async with EnvClient(server.address, token="s3cret") as client:
                good = (await client.run_rollout(await client.sample())).reward
            return answers, good, server.streams.cursor()

    answers, good, cursor = run(ask())
    assert answers.pop("health") == {None}
    assert len(answers) == 18
    assert set(map(frozenset, answers.values())) == {frozenset({"denied"})}
    assert (good, cursor) == (1.0, 1)


def test_models_and_endpoints_come_from_the_servers_own_lists(monkeypatch):
    from treetune.models import EndpointConfig

    monkeypatch.setenv("SECRET", "a key that must never leave")
    allowed = EndpointConfig(base_url="http://127.0.0.1:9/v1", max_retries=0)
    models = ModelsConfig(model="scripted:gold", models={"scripted:echo": allowed}, allowed_endpoints=[allowed])

    async def ask():
        async with served(Numbers(), models=models) as client:
            task = await client.sample()
            echo = await client.run_rollout(task, model="scripted:echo")
            refused = []
            for model, endpoint in (
                ("local:/etc/passwd", None),
                ("gpt-5", None),
                ("m", "http://evil.example/v1"),
                ("m", "http://127.0.0.1:9/v1/../../x"),
                ("local:/etc/passwd", "http://127.0.0.1:9/v1"),
                (None, "http://127.0.0.1:9/v1"),
            ):
                with pytest.raises(Denied) as error:
                    await client.run_rollout(task, model=model, endpoint=endpoint)
                refused.append(str(error.value))
            reached = await client.run_rollout(task, model="m", endpoint="http://127.0.0.1:9/v1/")
            return echo, refused, reached

    echo, refused, reached = run(ask())
    assert echo.reward == 0.0
    assert not any("a key that" in text for text in refused)
    assert reached.outcome is Outcome.POLICY_ERROR  # it was tried: nothing listens there


def test_a_request_cannot_name_an_environment_variable():
    async def ask():
        async with serving(Numbers()) as server:
            with Raw(server.address) as raw:
                task = (await raw.ask(b"1", "sample"))["task"]
                for key in ("api_key_env", "base_url", "client", "headers"):
                    named = await raw.ask(key.encode(), "run_rollout", task=task, **{key: "SECRET"})
                    assert named["success"], "unknown fields are not read"
                    sampled = await raw.ask(b"s" + key.encode(), "run_rollout", task=task, sampling={key: "SECRET"})
                    assert sampled["kind"] == "bad_request"

    run(ask())


def test_work_beyond_the_capacity_is_answered_with_busy_and_a_group_counts_as_many(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def fill():
        async with served(Hangs(), capacity=4, run_deadline=0.5) as client:
            task = await client.sample()
            group = asyncio.create_task(client.run_group(task, 3, request="group"))
            await until_in_flight(client, 3)
            with raises_code("busy", "3 rollouts", "of 4"):
                await client.run_group(task, 2)
            with pytest.raises(Unreachable):
                await client.run_rollout(task)  # there is room for one; it hangs like all of them
            with pytest.raises((Cancelled, Unreachable)):
                await group
            await until_in_flight(client, 0)

    run(fill())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_group_larger_than_the_capacity_runs_alone_and_both_sides_are_warned(caplog, workers):
    async def fill():
        async with serving(Numbers(), capacity=2, workers=workers) as server, EnvClient(server.address) as client:
            with Raw(server.address) as raw:
                answers = [
                    await raw.ask(b"%d" % n, "run_group", task=(await raw.ask(b"t%d" % n, "sample"))["task"], n=n)
                    for n in (2, 5)
                ]
            return len(await client.run_group(await client.sample(), 5)), [answer["warnings"] for answer in answers]

    warning = "a group of 5 is larger than the server's capacity of 2"
    assert run(fill()) == (5, [[], [warning]])
    assert ("treetune.serve", logging.WARNING) in [(name, level) for name, level, _ in caplog.record_tuples]
    assert ("treetune.serve.zmq.client", logging.WARNING, warning) in caplog.record_tuples


def test_a_cancelled_rollout_stops(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TEST_MARKS", str(tmp_path))

    async def cancel():
        async with served(Hangs()) as client:
            tasks = [await client.sample() for _ in range(2)]
            named = asyncio.create_task(client.run_rollout(tasks[0], request="mine"))
            dropped = asyncio.create_task(client.run_rollout(tasks[1]))
            await until(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
            assert await client.cancel("mine")
            with pytest.raises(Cancelled):
                await named
            dropped.cancel()  # a caller that gives up is enough
            await until(lambda: len(list(tmp_path.glob("ended-*"))) == 2)
            assert not await client.cancel("mine")
            return (await client.health()).in_flight

    assert run(asyncio.wait_for(cancel(), 20)) == 0


def test_episodes_are_stepped_over_the_wire():
    async def play():
        async with served(Talking(), capacity=2) as client:
            one = await client.start(await client.sample())
            two = await client.start(await client.sample())
            in_flight = (await client.health()).in_flight
            first = await client.step(one.episode, "hello", 0)
            assert await client.step(one.episode, "hello", 0) == first
            with raises_code("usage", "turn 1"):
                await client.step(one.episode, "x", 7)
            last = await client.step(one.episode, {"tool": 2**70}, 1)
            done = await client.step(one.episode, "stop", 2)
            assert await client.cancel(two.episode)
            with pytest.raises(ServeError):
                await client.step(two.episode, "x", 0)
            return one.observation.content, in_flight, first, last, done, (await client.health()).in_flight

    shown, in_flight, first, last, done, after = run(play())
    assert shown == [{"role": "user", "content": "0/0"}]
    assert (in_flight, after) == (2, 0)
    assert (first.observation.content, first.reward, first.done) == ("you said hello", 1.0, False)
    assert str(2**70) in last.observation.content
    assert done.done


def test_a_state_puts_the_server_back_and_another_tasksets_is_refused():
    async def restore():
        async with served(shuffled(Colours)) as client:
            for _ in range(9):
                await client.sample()
            await client.sample(stream="other")
            state = await client.state(stream="")
            expected = [await client.sample() for _ in range(5)]
            await client.restore(state)
            again = [await client.sample() for _ in range(5)]
            cursors = (await client.info()).cursors
        async with served(Colours()) as client:
            with raises_code("usage", "shuffle"):
                await client.restore(state)
        return expected, again, cursors, len(pack(state))

    expected, again, cursors, size = run(restore())
    assert again == expected
    assert cursors == {"": 14, "other": 1}
    assert size < 2000


def test_a_server_goes_on_where_it_was_killed(tmp_path):
    async def twice(taskset):
        folder = tmp_path / type(taskset).__name__
        async with serving(taskset, state=folder) as server:
            with Raw(server.address) as raw:
                before = [await raw.ask(f"a{number}".encode(), "sample") for number in range(7)]
            shutil.copytree(folder, tmp_path / "killed" / folder.name)  # as a kill would leave it
        async with serving(taskset, state=tmp_path / "killed" / folder.name) as server:
            with Raw(server.address) as raw:
                again = await raw.ask(b"a5", "sample")  # its reply had got lost
                after = [await raw.ask(f"b{number}".encode(), "sample") for number in range(3)]
                run = await raw.ask(b"r", "run_rollout", task=before[2]["task"])
        return before, again, after, run

    for taskset in (shuffled(Colours), Numbers(), Stream()):
        before, again, after, rollout = run(twice(taskset))
        assert [answer["index"] for answer in before + after] == list(range(10))
        assert again["task"] == before[5]["task"]
        assert rollout["success"]


def test_a_state_of_other_tasks_is_refused_at_the_start(tmp_path):
    async def start(taskset, **options):
        async with served(taskset, state=tmp_path, **options) as client:
            return await client.sample()

    run(start(shuffled(Colours, 1)))
    with raises_code("cannot-resume", "shuffle.seed: 1 -> 2"):
        run(start(shuffled(Colours, 2)))
    assert run(start(shuffled(Colours, 2), accept_changes=True)) == shuffled(Colours, 2).at(1)


def test_two_servers_cannot_share_a_state(tmp_path):
    async def both():
        async with serving(Numbers(), state=tmp_path), serving(Numbers(), state=tmp_path):
            pass

    with raises_code("usage", "--state"):
        run(both())


def test_without_a_kept_key_tasks_from_before_a_restart_are_refused_and_with_a_key_file_they_are_not(tmp_path):
    async def twice(**options):
        async with serving(Numbers(), **options) as server, EnvClient(server.address) as client:
            task = client.portable(await client.sample())
        async with serving(Numbers(), **options) as server, EnvClient(server.address) as client:
            return (await client.run_rollout(task)).reward

    with raises_code("refused", "--key-file", "--state"):
        run(twice())
    assert run(twice(key_file=tmp_path / "key")) == 1.0
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_a_full_disk_loses_no_task(tmp_path):
    from treetune.errors import StorageError

    async def fill():
        async with served(Numbers(), state=tmp_path) as client:
            pass
        async with serving(Numbers(), state=tmp_path) as server, EnvClient(server.address) as client:
            commit, server.order.store.commit = server.order.store.commit, _fails
            with raises_code("failed", "the disk is full"):
                await client.sample()
            state = await client.state(stream="")
            earlier = msgspec.structs.replace(state, streams={"": msgspec.structs.replace(state.streams[""], index=9)})
            with raises_code("failed", "the disk is full"):
                await client.restore(earlier)
            server.order.store.commit = commit
            return (await client.sample()).idx

    def _fails(*arguments):
        raise StorageError("the disk is full")

    assert run(fill()) == 0


def test_a_tasksets_own_failure_is_told_between_the_next_tasks_and_after_three_tries_it_is_skipped(caplog):
    async def draw():
        async with serving(Flaw()) as server, EnvClient(server.address) as client:
            for _ in range(9):
                await client.sample()
            others = []
            for _ in range(3):
                with raises_code("failed", "nine is missing"):
                    await client.sample()
                others.append((await client.sample()).idx)
            return [*others, (await client.sample()).idx], (await client.stats())["skipped_draws"]

    assert run(draw()) == ([10, 11, 12, 13], 1)
    assert "index 9 is skipped, after 3 tries: Flaw.task_at(9) failed: ValueError: nine is missing" in caplog.text


def test_tasks_that_are_dear_to_make_do_not_hold_up_others():
    async def draw():
        async with serving(Dear()) as server, EnvClient(server.address) as client:
            tasks = await asyncio.gather(*(client.sample() for _ in range(30)))
            return server.streams.cheap, sorted(task.idx for task in tasks)

    assert run(draw()) == (False, list(range(30)))


def test_a_client_gives_up_at_its_deadline_and_waits_for_a_server_that_comes_later(sockets):
    address = f"ipc://{sockets}/late"

    async def late():
        async with EnvClient(address, deadline=0.5) as client:
            with raises_code("unreachable"):
                await client.sample()
        async with EnvClient(address, deadline=20) as client:
            asked = asyncio.create_task(client.sample())
            await asyncio.sleep(0.3)
            async with serving(Numbers(), address=address):
                return (await asked).idx

    assert run(late()) == 0


def test_an_encrypted_server_answers_only_who_has_its_key(tmp_path):
    async def encrypted():
        async with serving(Numbers(), access=Access(curve_key=tmp_path / "key")) as server:
            async with EnvClient(server.address, server_key=server.public_key) as client:
                reward = (await client.run_rollout(await client.sample())).reward
            for wrong in (None, zmq.curve_keypair()[0]):
                async with EnvClient(server.address, server_key=wrong, deadline=0.7) as client:
                    with pytest.raises(Unreachable):
                        await client.health()
            return reward

    assert run(encrypted()) == 1.0


def test_an_open_address_needs_a_token():
    async def start(**access):
        async with serving(Numbers(), address="tcp://0.0.0.0:0", access=Access(**access)) as server:
            return server.address

    with raises_code("usage", "--token"):
        run(start())
    assert run(start(token="x"))
    assert run(start(open=True))
    with raises_code("usage", "127.0.0.1:5555", "tcp://HOST:PORT"):
        run(_start_at("127.0.0.1:5555"))


def test_a_port_alone_is_one_of_this_machine_only():
    assert run(_start_at(":0")).startswith("tcp://127.0.0.1:")


async def _start_at(address):
    async with serving(Numbers(), address=address) as server:
        return server.address


def test_the_blocking_client_does_the_same():
    async def both():
        async with serving(Talking()) as server:
            return await asyncio.to_thread(_blocking, server.address)

    def _blocking(address):
        with BlockingEnvClient(address, taskset=Talking()) as client:
            task = client.sample()
            started = client.start(task)
            step = client.step(started.episode, "stop", 0)
            assert not client.cancel("nothing")
            client.observe(task, 1.0)
            client.restore(client.state())
            group = client.run_group(task, 2, sampling=Sampling(seed=1), limits=Limits(max_turns=1))
            return task, step.done, len(group), client.info().cursor, client.health().ready, client.stats()["requests"]

    task, done, group, cursor, ready, requests = run(both())
    assert (task, done, group, cursor, ready) == (Talking().at(0), True, 2, 1, True)
    assert requests["run_group"] == 1


def test_a_server_that_stops_lets_work_end_and_takes_no_more():
    class Brief(Numbers):
        async def reward(self, task, answer):
            await asyncio.sleep(0.4)
            return 1.0

    async def stop():
        async with serving(Brief(), drain_seconds=20) as server, EnvClient(server.address, deadline=0.3) as client:
            task = await client.sample()
            under_way = asyncio.create_task(client.run_rollout(task))
            await until_in_flight(client, 1)
            stopping = asyncio.create_task(server.stop())
            await asyncio.sleep(0.05)
            with pytest.raises(ServeError, match=r"stopping|no answer"):
                await client.sample()
            trace = await under_way
            await stopping
            return trace.reward, server.streams.cursor()

    assert run(stop()) == (1.0, 1)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, 2**200, {"a": [2**70]}, "x\ud800", float("inf"), b"\x00", None])
def test_values_travel_and_return_equal(value):
    back = unpack_plain(pack(value))
    assert back == (value if value != "x\ud800" else "x\\ud800")


def test_big_integers_fit_typed_fields():
    assert unpack(pack(Colours()[1]), Colour) == Colours()[1]


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\x91" * 100_000, b"\xc7\x05\x01abcde"])
def test_what_is_no_msgpack_is_a_bad_request(data):
    with pytest.raises(BadRequest):
        unpack_plain(data)
    with pytest.raises(BadRequest):
        unpack(data, Colour)


def test_streams_are_bounded_and_one_too_many_leaves_no_trace(tmp_path):
    from treetune.play.streams import MOST_STREAMS

    async def many():
        async with served(Numbers(), state=tmp_path) as client:
            await asyncio.gather(*(client.sample(stream=f"s{number}") for number in range(MOST_STREAMS)))
            for name in ("one more", "x" * 200):
                with pytest.raises(Misused):
                    await client.sample(stream=name)
            return len((await client.info()).cursors), (await client.sample(stream="s7")).idx

    assert run(many()) == (MOST_STREAMS, 1)
    from treetune.serve.store import Store

    store = Store(tmp_path)
    assert len(store.streams()) == MOST_STREAMS
    store.close()
