"""Sessions: who may use them, their limits, retries, calls that are given up, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import aiohttp
import pytest
from gateway_playing import BASH, TOKEN, check_exact, playing
from openai import APIStatusError, APITimeoutError, AsyncOpenAI

from treetune.core.policy import Sampling
from treetune.gateway import SessionLimits

HI = [{"role": "user", "content": "hi"}]
RETRIED = {"x-stainless-retry-count": "1"}
OWNER = {"Authorization": f"Bearer {TOKEN}"}


@contextlib.asynccontextmanager
async def asking(engine, limits=None, **options):
    """A gateway, a session, and a client that does not retry."""
    async with playing(engine, **options) as place:
        session = place.gateway.open(limits)
        yield place, session, AsyncOpenAI(base_url=place.url(session) + "/v1", api_key="any", max_retries=0)


async def say(client, text="hi", **options):
    messages = [{"role": "user", "content": text}]
    found = await client.chat.completions.create(model="m", messages=messages, **options)
    return found.choices[0].message.content


async def say_ten_times(client):
    for _ in range(10):
        await say(client)


async def until(condition):
    """Waits for another process or task, at most ten seconds."""
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        await asyncio.sleep(0.02)


async def status_of(http, method, url, **options):
    async with http.request(method, url, **options) as response:
        return response.status, await response.json()


# Who may use a session


def test_an_agent_has_the_key_of_its_session_and_no_more(engine):
    async def play():
        async with playing(engine) as place, aiohttp.ClientSession() as http:
            body = {"model": "m", "messages": HI}
            opened = await status_of(
                http, "POST", f"{place.base}/sessions", headers=OWNER, json={"limits": {"calls": 3}}
            )
            assert opened[0] == 200
            key, environment = opened[1]["key"], opened[1]["environment"]
            agent = {"Authorization": f"Bearer {key}"}
            chat = f"{place.base}/v1/chat/completions"
            assert (await status_of(http, "POST", chat, headers=agent, json=body))[0] == 200
            assert (await status_of(http, "POST", chat, headers={"x-api-key": key}, json=body))[0] == 200
            client = AsyncOpenAI(base_url=environment["OPENAI_BASE_URL"], api_key=environment["OPENAI_API_KEY"])
            assert await say(client)
            # Another key, the token of the run, no key at all.
            for headers in ({"Authorization": f"Bearer {key}x"}, OWNER, {}):
                assert (await status_of(http, "POST", chat, headers=headers, json=body))[0] == 401
            assert (await status_of(http, "POST", f"{place.base}/sessions/nothing/v1/messages", json=body))[0] == 401
            for path in ("/sessions/KEY/v1/nothing", "/sessions/KEY/", "/nothing"):
                where = place.base + path.replace("KEY", key)
                assert (await status_of(http, "POST", where, headers=agent, json=body))[0] == 404, path
            assert (await status_of(http, "GET", f"{place.base}/sessions/{key}/v1/chat/completions"))[0] == 405
            # Sessions are opened, read and ended with the token alone.
            for headers, status in ((agent, 401), ({}, 401), (OWNER, 200)):
                assert (await status_of(http, "GET", f"{place.base}/sessions", headers=headers))[0] == status
                assert (await status_of(http, "GET", f"{place.base}/sessions/{key}", headers=headers))[0] == status
                assert (await status_of(http, "POST", f"{place.base}/sessions", headers=headers, json={}))[0] == status
            ended = await status_of(http, "DELETE", f"{place.base}/sessions/{key}", headers=OWNER)
            assert ended[1]["counts"]["calls"] == 3
            assert (await status_of(http, "POST", chat, headers=agent, json=body))[0] == 410
            assert (await status_of(http, "GET", f"{place.base}/sessions/{key}", headers=OWNER))[0] == 404

    asyncio.run(play())


@pytest.mark.parametrize("path", ["/sessions", "/sessions/guessed/v1/chat/completions", "/v1/messages"])
def test_the_key_is_checked_before_the_body_is_read(engine, path):
    async def play():
        async with playing(engine) as place:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(place.base.rpartition(":")[2]))
            writer.write(f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 60000000\r\n\r\n".encode())
            async with asyncio.timeout(10):
                assert b" 401 " in await reader.readline()
            writer.close()

    asyncio.run(play())


def test_a_session_with_wrong_settings_is_not_opened(engine):
    async def play():
        async with playing(engine) as place, aiohttp.ClientSession() as http:
            for body in ({"limits": {"cals": 3}}, {"limits": {"calls": 0}}, {"sampling": {"top_p": 7}}, {"of": 1}):
                status, answer = await status_of(http, "POST", f"{place.base}/sessions", headers=OWNER, json=body)
                assert status == 422, answer
            assert not place.gateway.sessions

    asyncio.run(play())


# Limits


@pytest.mark.parametrize("limits", [SessionLimits(calls=2), SessionLimits(tokens=60)], ids=["calls", "tokens"])
def test_a_session_that_has_spent_its_limits_takes_no_more_calls(engine, limits):
    async def play():
        async with asking(engine, limits) as (_, session, client):
            with pytest.raises(APIStatusError) as over:
                await say_ten_times(client)
            assert over.value.status_code == 410
            assert session.over in str(over.value)
            calls = session.counts["calls"]
            assert calls == 2 if limits.calls == 2 else 1 <= calls < 10
            check_exact(engine, session.tokens().sequences, calls)

    asyncio.run(play())


def test_a_call_under_way_ends_with_the_time_of_its_session(engine):
    async def play():
        async with asking(engine, SessionLimits(seconds=0.5), script={"fault": "hang"}) as (_, session, client):
            with pytest.raises(APIStatusError) as over:
                await say(client)
            assert over.value.status_code == 410
            await until(lambda: engine.memory()["cancelled"] == 1)
            assert session.trace().sequences == []

    asyncio.run(play())


def test_more_calls_at_once_than_allowed_are_told_to_wait(engine):
    async def play():
        async with asking(engine, SessionLimits(parallel=2), script={"delay": 0.5}) as (_, session, client):
            found = await asyncio.gather(*(say(client, f"hi {at}") for at in range(4)), return_exceptions=True)
            refused = [one for one in found if isinstance(one, APIStatusError)]
            assert [one.status_code for one in refused] == [429, 429]
            assert await say(client), "and later there is room again"
            check_exact(engine, session.tokens().sequences, 3)

    asyncio.run(play())


def test_ending_a_session_cancels_its_calls(engine):
    async def play():
        async with asking(engine, script={"fault": "hang"}) as (place, session, client):
            waiting = [asyncio.ensure_future(say(client, f"hi {at}", stream=at == 1)) for at in range(2)]
            await until(lambda: len(engine.memory()["begun"]) == 2)
            place.gateway.drop(session)
            found = await asyncio.gather(*waiting, return_exceptions=True)
            assert [one.status_code for one in found] == [410, 410]
            await until(lambda: engine.memory()["cancelled"] == 2)

    asyncio.run(play())


# Retries, and calls that are given up


def test_a_retry_gets_the_answer_of_the_request_that_it_repeats(engine):
    async def play():
        async with asking(engine) as (_, session, client):
            first = await say(client)
            assert await say(client, extra_headers=RETRIED) == first
            assert await say(client) != first, "a request that is not marked as a retry is a new sample"
            stream = await client.chat.completions.create(model="m", messages=HI, stream=True, extra_headers=RETRIED)
            assert "".join([part.choices[0].delta.content or "" async for part in stream])
            assert session.counts["replayed"] == 1, "the body of the stream is another request"
            check_exact(engine, session.tokens().sequences, 3)

    asyncio.run(play())


def test_a_retry_joins_a_request_that_is_still_under_way(engine):
    async def play():
        async with asking(engine, script={"delay": 0.4}) as (_, session, client):
            both = await asyncio.gather(say(client), _later(0.1, say(client, extra_headers=RETRIED)))
            assert both[0] == both[1]
            assert session.counts["joined"] == 1
            check_exact(engine, session.tokens().sequences, 1)

    asyncio.run(play())


async def _later(seconds, answer):
    await asyncio.sleep(seconds)
    return await answer


def test_a_joined_call_goes_on_until_no_one_waits_for_it(engine):
    async def play():
        async with asking(engine, script={"delay": 1.0}) as (_, session, client):
            impatient = asyncio.ensure_future(say(client, timeout=0.3))
            patient = asyncio.ensure_future(_later(0.1, say(client, extra_headers=RETRIED)))
            with pytest.raises(APITimeoutError):
                await impatient
            assert await patient
            check_exact(engine, session.tokens().sequences, 1)
            engine.script(delay=5.0)
            both = [say(client, "b", timeout=0.3), _later(0.1, say(client, "b", timeout=0.3, extra_headers=RETRIED))]
            found = await asyncio.gather(*both, return_exceptions=True)
            assert all(isinstance(one, APITimeoutError) for one in found)
            await until(lambda: engine.memory()["cancelled"] == 1)
            assert len(engine.memory()["begun"]) == 1

    asyncio.run(play())


def test_an_sdk_that_times_out_and_retries_leaves_nothing_behind(engine):
    async def play():
        async with asking(engine, script={"delay": 5.0}) as (_, session, client):
            with pytest.raises(APITimeoutError):
                await say(client.with_options(timeout=0.2, max_retries=2))
            await until(lambda: engine.memory()["cancelled"] == 3)
            assert session.trace().sequences == []

    asyncio.run(play())


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_call_that_is_given_up_trains_nothing_and_stops_the_engine(engine, stream):
    async def play():
        script = {"answer": "A long answer. " * 30, "pause": 0.02, "delay": 0.0 if stream else 5.0}
        async with asking(engine, script=script) as (_, session, client):
            if stream:
                parts = await client.chat.completions.create(model="m", messages=HI, stream=True)
                for _ in range(4):
                    await anext(parts)
                await parts.close()
            else:
                given_up = asyncio.ensure_future(say(client))
                await until(lambda: engine.memory()["begun"])
                given_up.cancel()
            await until(lambda: engine.memory()["cancelled"] == 1)
            await until(lambda: session.counts["abandoned"] == 1)
            assert session.trace().sequences == []
            assert engine.memory()["sampled"] == []

    asyncio.run(play())


# Settings and refusals


def test_the_settings_of_the_run_stand_over_those_of_the_agent(engine):
    async def play():
        async with asking(engine, sampling=Sampling(temperature=0.7)) as (_, session, client):
            await say(client, temperature=0.1, top_p=0.5, stop="END", seed=3)
            (asked,) = engine.memory()["begun"]
            assert (asked["temperature"], asked["top_p"], asked["stop"], asked["seed"]) == (0.7, 0.5, ["END"], 3)
            assert session.trace().notes == {"temperature is set by the run": 1}

    asyncio.run(play())


def test_an_answer_has_the_room_that_the_prompt_leaves_in_the_context(engine):
    async def play():
        async with asking(engine, script={"context": 200}) as (place, session, client):
            await place.gateway.sampler.connect()
            await say(client, max_tokens=32_000)
            (asked,) = engine.memory()["begun"]
            assert asked["max_tokens"] == 200 - len(asked["prompt"])
            with pytest.raises(APIStatusError) as full:
                await say(client, "word " * 100)
            assert full.value.status_code == 400
            assert full.value.code == "context_length_exceeded"
            engine.script(fault="full")
            with pytest.raises(APIStatusError) as full:
                await say(client)
            assert full.value.code == "context_length_exceeded"
            assert session.counts["upstream_failures"] == 0

    asyncio.run(play())


PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
REFUSED = [
    ("chat/completions", {"messages": HI, "n": 2}, "n must be 1"),
    ("chat/completions", {"messages": HI, "temprature": 1}, "'temprature'; did you mean 'temperature'"),
    ("chat/completions", {"messages": HI, "temperature": -1}, "temperature"),
    ("chat/completions", {"messages": HI, "tools": [{"type": "web_search"}]}, "web_search"),
    ("chat/completions", {"messages": [{"role": "oracle", "content": "x"}]}, "oracle"),
    ("chat/completions", {"messages": "hi"}, "malformed"),
    ("chat/completions", {"messages": []}, "no messages"),
    ("chat/completions", {}, "'messages' is missing"),
    ("chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]}, "images"),
    ("responses", {"input": "hi", "previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"input": "hi", "tools": [{"type": "computer"}]}, "computer"),
    ("messages", {"messages": HI, "max_tokens": 5, "tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5}, "image"),
    ("completions", {"prompt": ["a", "b"]}, "single string"),
    ("completions", {"prompt": "a", "best_of": 3}, "best_of"),
    ("completions", {"prompt": "a", "echo": True}, "echo"),
]  # fmt: skip


def test_what_cannot_be_done_exactly_is_refused_by_name(engine):
    async def play():
        async with playing(engine) as place, aiohttp.ClientSession() as http:
            session = place.gateway.open()
            for path, body, why in REFUSED:
                status, answer = await status_of(http, "POST", f"{place.url(session)}/v1/{path}", json=body)
                assert status == 400, (path, body, answer)
                assert why in answer["error"]["message"], answer
            for content in (b"{", b"[1]", b"[" * 100_000, b'"text"'):
                url = f"{place.url(session)}/v1/chat/completions"
                assert (await status_of(http, "POST", url, data=content))[0] == 400
            assert engine.memory()["begun"] == []

    asyncio.run(play())


def test_optional_kinds_are_left_out_and_noted(engine):
    async def play():
        async with playing(engine) as place, aiohttp.ClientSession() as http:
            session = place.gateway.open()
            tools = [{"type": "namespace", "name": "web"}, {"type": "function", **BASH["function"]}]
            body = {"input": "hi", "tools": tools, "tool_choice": "required", "reasoning": {"effort": "low"}}
            assert (await status_of(http, "POST", f"{place.url(session)}/v1/responses", json=body))[0] == 200
            notes = session.trace().notes
            assert set(notes) == {
                "tool web is left out", "tool_choice is not enforced", "field reasoning is left out",
            }  # fmt: skip
            (asked,) = engine.memory()["begun"]
            assert "namespace" not in json.dumps(asked)

    asyncio.run(play())
