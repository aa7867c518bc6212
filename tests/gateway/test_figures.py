"""What a gateway shows of its sessions: /metrics, /weights and `treetune top`."""

from __future__ import annotations

import asyncio
import json

import aiohttp
from gateway_playing import TOKEN
from test_sessions import OWNER, asking, say, status_of, until


def test_metrics_and_top_show_sessions_calls_and_failures(engine, treetune):
    async def play():
        async with asking(engine) as (place, session, client), aiohttp.ClientSession() as http:
            other = place.gateway.open()
            for _ in range(3):
                await say(client)
            engine.script(fault="500")
            await asyncio.gather(say(client), return_exceptions=True)
            place.gateway.drop(other)
            async with http.get(f"{place.base}/metrics", headers=OWNER) as response:
                text = await response.text()
            for line in (
                "treetune_gateway_sessions 1.0",
                "treetune_gateway_calls_under_way 0.0",
                "treetune_gateway_calls_total 4.0",
                "treetune_gateway_upstream_failures_total 1.0",
                "treetune_gateway_replayed_total 0.0",
            ):
                assert line in text.splitlines(), text
            assert (await http.get(f"{place.base}/metrics")).status == 401
            place.gateway.drop(session)
            assert place.gateway.figures().counts["calls"] == 4, "what a session counted stays"
            place.gateway.open()
            shown = await asyncio.to_thread(treetune, "top", place.base, "--token", TOKEN, "--once")
            assert shown.code == 0
            assert "1 sessions open" in shown.out
            shown = await asyncio.to_thread(treetune, "top", place.base, "--token", TOKEN, "--json")
            assert json.loads(shown.out)["counts"]["calls"] == 4
            denied = await asyncio.to_thread(treetune, "top", place.base, "--token", "wrong", "--once")
            assert denied.code == 3

    asyncio.run(play())


def test_a_trainer_pauses_the_model_over_http(engine):
    async def play():
        async with asking(engine, script={"versions": ["default"]}) as (place, session, client):
            async with aiohttp.ClientSession() as http:
                url = f"{place.base}/weights"
                for body, status in (({"pause": True}, 422), ({"version": -1}, 422), ({"paused": True}, 200)):
                    assert (await status_of(http, "POST", url, headers=OWNER, json=body))[0] == status, body
                asked = asyncio.ensure_future(say(client))
                await until(lambda: session.under_way == 1)
                assert engine.memory()["begun"] == []
                await status_of(http, "POST", url, headers=OWNER, json={"paused": False, "version": 8})
                assert await asked
                assert (await status_of(http, "POST", url, json={"version": 9}))[0] == 401
            (sequence,) = session.tokens().sequences
            assert set(sequence.versions) == {-1, 8}

    asyncio.run(play())
