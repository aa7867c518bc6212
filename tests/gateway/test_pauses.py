"""Calls while the weights change: they wait during a pause, and an aborted one goes on from its tokens."""

from __future__ import annotations

import asyncio

import pytest
from gateway_playing import check_exact
from openai import APIError
from test_sessions import HI, asking, say, until

from treetune.gateway import SessionLimits
from treetune.play.weights import MOST_ABORTS, Weights

ANSWER = " ".join(["A long answer."] * 4)


async def stream(client, heard, **options):
    parts = await client.chat.completions.create(model="m", messages=HI, stream=True, **options)
    async for part in parts:
        heard.append(part.choices[0].delta.content or "")
    return "".join(heard)


async def call(client, streamed, **options):
    return await (stream(client, [], **options) if streamed else say(client, **options))


def versions_of(session):
    (sequence,) = session.tokens().sequences
    return [version for version, sampled in zip(sequence.versions, sequence.mask, strict=True) if sampled]


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_call_that_the_engine_aborts_goes_on_from_its_tokens(engine, streamed):
    async def play():
        script = {"answer": ANSWER, "aborts": {"0": 3, "1": 0}, "versions": [1, 2, 2]}
        async with asking(engine, script=script) as (place, session, client):
            assert await call(client, streamed, max_tokens=500) == ANSWER
            first, *others = engine.memory()["begun"]
            ((given, out),) = engine.memory()["sampled"]
            assert [one["prompt"] for one in others] == [given + out[:3]] * 2
            assert [one["max_tokens"] for one in others] == [497, 497]
            assert given == first["prompt"]
            check_exact(engine, session.tokens().sequences, 1)
            assert versions_of(session) == [1] * 3 + [2] * (len(out) - 3)
            assert place.gateway.weights.counts["aborted_calls"] == 2
            assert session.counts["completion_tokens"] == len(out)

    asyncio.run(play())


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_call_that_a_pause_aborts_goes_on_when_the_pause_ends(engine, streamed):
    async def play():
        weights, heard = Weights(), []
        script = {"answer": ANSWER, "pause": 0.02, "delay": 0.0 if streamed else 0.5, "versions": [1, 2]}
        async with asking(engine, script=script, weights=weights) as (_, session, client):
            asked = asyncio.ensure_future(stream(client, heard) if streamed else say(client))
            await until(lambda: len(heard) > 6 if streamed else engine.memory()["begun"])
            assert await weights.pause("abort")
            await until(lambda: engine.memory()["cancelled"] == 1)
            await asyncio.sleep(0.3)
            before = "".join(heard)
            await asyncio.sleep(0.3)
            assert ("".join(heard), len(engine.memory()["begun"])) == (before, 1), "it waits"
            weights.resume(2)
            assert await asked == ANSWER
            check_exact(engine, session.tokens().sequences, 1)
            versions = versions_of(session)
            assert versions == sorted(versions)
            assert set(versions) == ({1, 2} if streamed else {2})
            assert weights.counts["aborted_calls"] == 1

    asyncio.run(play())


def test_a_call_waits_for_the_end_of_a_pause_and_the_time_of_its_session_with_it(engine):
    async def play():
        weights = Weights()
        async with asking(engine, SessionLimits(seconds=1.0), weights=weights) as (_, session, client):
            await weights.pause()
            asked = asyncio.ensure_future(say(client))
            await asyncio.sleep(1.3)
            assert engine.memory()["begun"] == []
            assert session.over is None
            weights.resume()
            assert await asked

    asyncio.run(play())


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_client_that_leaves_during_a_pause_leaves_no_call_behind(engine, streamed):
    async def play():
        weights = Weights()
        async with asking(engine, weights=weights) as (_, session, client):
            await weights.pause()
            asked = asyncio.ensure_future(call(client, streamed))
            await until(lambda: session.under_way == 1)
            asked.cancel()
            await until(lambda: session.under_way == 0)
            weights.resume()
            assert await call(client, streamed, max_tokens=7)
            assert [one["max_tokens"] for one in engine.memory()["begun"]] == [7]
            assert session.counts["abandoned"] == 1
            check_exact(engine, session.tokens().sequences, 1)

    asyncio.run(play())


def test_tokens_have_the_version_that_the_trainer_set_if_the_engine_knows_none(engine):
    async def play():
        weights = Weights()
        weights.set_version(4)
        script = {"answer": "Yes.", "versions": ["default"]}
        async with asking(engine, script=script, weights=weights) as (_, session, client):
            await say(client)
            assert set(versions_of(session)) == {4}

    asyncio.run(play())


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_an_engine_that_aborts_every_call_is_an_error(engine, streamed, monkeypatch):
    monkeypatch.setattr("treetune.play.weights.LONGEST_WAIT", 0.001)

    async def play():
        script = {"aborts": {str(number): 0 for number in range(MOST_ABORTS)}}
        async with asking(engine, script=script) as (_, session, client):
            with pytest.raises(APIError, match="times in a row"):
                await call(client, streamed)
            assert len(engine.memory()["begun"]) == MOST_ABORTS
            assert session.trace().sequences == []
            assert await call(client, streamed), "the next call is a call as any other"

    asyncio.run(play())


def test_an_abort_at_the_last_token_ends_the_answer(engine):
    async def play():
        async with asking(engine, script={"answer": ANSWER, "aborts": {"0": 5}}) as (_, session, client):
            found = await client.chat.completions.create(model="m", messages=HI, max_tokens=5)
            assert (found.choices[0].finish_reason, found.usage.completion_tokens) == ("length", 5)
            assert len(engine.memory()["begun"]) == 1
            assert len(versions_of(session)) == 5

    asyncio.run(play())


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_an_aborted_call_without_token_ids_begins_anew_unless_it_was_shown(engine, streamed):
    async def play():
        async with asking(engine, script={"answer": ANSWER, "ids": False, "aborts": {"0": 5}}) as (_, session, client):
            if streamed:
                with pytest.raises(APIError, match="without token ids"):
                    await call(client, streamed)
            else:
                assert await call(client, streamed) == ANSWER
            assert session.trace().sequences == []

    asyncio.run(play())
