"""The server keeps what its OpenAPI description says, also to those who send garbage."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import urllib.error
import urllib.request

import aiohttp
import openapi
import pytest
from serve_process import serve
from venvs import SCHEMATHESIS, venv

SETTINGS = """
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 404, 409, 410, 429]  # no such episode, not its turn, over, too many: no fault of the body
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One for all tests; none of them makes it fail."""
    with serve(tmp_path_factory.mktemp("served"), "arithmetic", "--port", "0", "--drain", "0") as server:
        yield server
        assert "Traceback" not in server.stop()


def description(url):
    with urllib.request.urlopen(url + "/openapi.json", timeout=30) as reply:
        return json.load(reply)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--token", "abc", "-w", "1"]], ids=["alone", "pool with a token"])
def test_schemathesis_finds_no_fault(tmp_path, options):
    python = venv(*SCHEMATHESIS)
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    with serve(tmp_path, "arithmetic", "--port", "0", "--drain", "0", "--max-episodes", "5000", *options) as server:
        url = server.report["http"]
        header = ["--header", "Authorization: Bearer abc"] if options else []
        done = subprocess.run(
            [
                python.with_name("st"), "run", f"{url}/openapi.json", "--checks", "all", "--max-examples", "30",
                "--request-timeout", "20", "--seed", "1", "--no-color", *header,
            ],
            cwd=tmp_path, capture_output=True, text=True, timeout=500,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
        assert "7 selected / 7 total" in done.stdout  # every operation
        assert "2 covered / " in done.stdout  # and steps in episodes that live
        assert urllib.request.urlopen(url + "/api/health", timeout=30).status == 200
        assert "Traceback" not in server.stop()


def test_the_description_is_made_of_what_the_server_takes():
    assert json.loads(openapi.FILE.read_text()) == openapi.describe_api(), "run: python tests/support/openapi.py"


def test_the_description_refers_to_nothing_that_is_not_in_it(server):
    whole = description(server.report["http"])
    operations = {
        operation["operationId"]: operation for path in whole["paths"].values() for operation in path.values()
    }
    assert set(operations) == {"start", "step", "cancel", "start_batch", "step_batch", "info", "health"}

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            value = list(value.values())
        for item in value if isinstance(value, list) else []:
            yield from references(item)

    named = set(references(whole))
    assert named
    assert {name.removeprefix("#/components/schemas/") for name in named} <= set(whole["components"]["schemas"])
    links = operations["start"]["responses"]["200"]["links"]
    assert {link["operationId"] for link in links.values()} <= set(operations)


def test_it_says_whether_a_token_is_needed(server, tmp_path):
    assert description(server.report["http"])["security"] == []
    with serve(tmp_path, "arithmetic", "--port", "0", "--token", "abc") as other:
        assert description(other.report["http"])["security"] == [{"token": []}]


def test_a_whole_number_is_an_integer_however_it_is_written(server):
    def begun(index):
        body = f'{{"task_index": {index}}}'.encode()
        with urllib.request.urlopen(server.report["http"] + "/api/episode/start", body, timeout=30) as reply:
            return json.load(reply)["info"]["task_index"]

    assert [begun(index) for index in ("3", "3.0", "3e0")] == [3, 3, 3]
    following = begun("null")
    assert begun("null") == following + 1
    for wrong in ("3.5", "1e400", "-3.0", '"3.0"'):
        with pytest.raises(urllib.error.HTTPError, match="422"):
            begun(wrong)


GARBAGE = ["", "{", "[]", "null", '"x"', "1e999", '{"action": {}}', '{"action": NaN}', '{"task_index": -1}', "[" * 9000]
GARBAGE += ['{"task_index": 1e400}', '{"episode_id": []}', "\ud7ff\x00", '{"action": "\\ud800"}', '{"turn": "0"}']


def garbage() -> list[str]:
    letters = random.Random(0)
    return [*GARBAGE, *("".join(letters.choices('{}[]":,\\ueE-019 action\x00é', k=40)) for _ in range(100))]


def test_garbage_over_a_websocket_is_answered_and_harms_nobody(server):
    async def talk(url):
        async with aiohttp.ClientSession() as session:
            async with session.get(url + "/api/health") as reply:
                before = (await reply.json())["episodes"]
            statuses = set()
            for first in ([], [{}]):  # before an episode has begun, and in one
                async with session.ws_connect(url + "/api/episode/ws") as socket:
                    for said in first:
                        await socket.send_json(said)
                        assert "episode_id" in await socket.receive_json(timeout=30)
                    for text in garbage():
                        await socket.send_str(text)
                        answer = await socket.receive(timeout=30)
                        if answer.type is not aiohttp.WSMsgType.TEXT:
                            break  # it was an action after all, and the last
                        statuses.add(json.loads(answer.data).get("status", 200))
                    if not socket.closed:
                        await socket.send_bytes(b"\xff\xfe\x00")
                        await socket.receive(timeout=30)
            async with session.get(url + "/api/health") as reply:
                return statuses, (await reply.json())["episodes"] - before

    statuses, left = asyncio.run(talk(server.report["http"]))
    assert 422 in statuses
    assert max(statuses) < 500
    assert left == 0


def test_garbage_that_asks_for_events_is_an_ordinary_error(server):
    async def ask(url):
        async with aiohttp.ClientSession(headers={"Accept": "text/event-stream"}) as session:
            statuses = set()
            for text in [*garbage(), '{"episode_id": "none", "action": "1"}']:
                async with session.post(url + "/api/episode/step", data=text.encode()) as reply:
                    statuses.add(reply.status)
                    assert (await reply.json())["error"]
            return statuses

    assert asyncio.run(ask(server.report["http"])) == {404, 422}


def test_bytes_that_are_no_http_end_the_connection_only(server):
    async def ask(port):
        for noise in (
            b"\x16\x03\x01\x02\x00",
            b"GET / HTTP/9.9\r\n\r\n",
            os.urandom(2000),
            b"POST / HTTP/1.1\r\n" * 100,
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(noise)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 30)
            assert not answer.startswith(b"HTTP/1.1 5"), answer
            writer.close()

    url = server.report["http"]
    asyncio.run(ask(int(url.rpartition(":")[2])))
    assert urllib.request.urlopen(url + "/api/health", timeout=30).status == 200
