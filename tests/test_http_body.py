"""A server that never ends its reply costs every HTTP client a bounded number of bytes, and is named in the error."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import textwrap
import urllib.request

import pytest
from aiohttp import web
from endless_server import endless_server
from model_endpoint import Ask, ask

from treetune import Sampling, run_rollout
from treetune.core.trace import Outcome
from treetune.errors import NetworkError, TreetuneError
from treetune.models import EndpointConfig
from treetune.models.endpoint import check_endpoint
from treetune.models.openai import OpenAIPolicy
from treetune.models.vllm import find_server
from treetune.scorers.judges.model import JudgeModel
from treetune.scorers.judges.model import ask as ask_judge
from treetune.scorers.judges.question import Question
from treetune.serve import ServeError
from treetune.serve.http.transport import HttpTransport
from treetune.system.http_body import MOST_BYTES, MOST_TOGETHER, BodyTooLarge, read_blocking
from treetune.tasksets.mcp import McpServer
from treetune.tasksets.mcp.tools import McpSession
from treetune.tasksets.search import RetrieverError, ask_retriever

TOO_MUCH = r"sent more than \d+ MB in one reply"


def test_a_completion_without_end_fails_its_rollout_and_is_not_asked_for_again():
    async def play(url: str):
        policy = OpenAIPolicy("m", EndpointConfig(base_url=f"{url}/v1", timeout=60))
        try:
            return await run_rollout(Ask(), Ask()[0], policy)
        finally:
            await policy.close()

    with endless_server() as server:
        trace = asyncio.run(play(server.url))
        sent = server.sent
    assert trace.outcome is Outcome.POLICY_ERROR
    assert f"{server.url}/v1/chat/completions sent more than 64 MB" in trace.failure.message
    assert trace.retries == 0
    assert sent < 2 * MOST_BYTES  # what sockets hold on the way varies with load


@pytest.mark.thorough
def test_many_endless_replies_together_stay_within_one_bound():
    program = """
        import asyncio, sys
        from treetune import Task, Taskset, run_rollout
        from treetune.models import EndpointConfig
        from treetune.models.openai import OpenAIPolicy

        class Ask(Taskset):
            def load_tasks(self): return [Task(prompt="?")]
            def reward(self, task, answer): return 1.0

        async def main():
            policy = OpenAIPolicy("m", EndpointConfig(base_url=sys.argv[1], timeout=120))
            traces = await asyncio.gather(*(run_rollout(Ask(), Ask()[0], policy) for _ in range(64)))
            await policy.close()
            with open("/proc/self/status") as status:  # not ru_maxrss, which begins with what the parent had
                peak = next(int(line.split()[1]) >> 10 for line in status if line.startswith("VmHWM"))
            print({trace.outcome.value for trace in traces}, peak)

        asyncio.run(main())
    """
    with endless_server() as server:
        command = [sys.executable, "-c", textwrap.dedent(program), f"{server.url}/v1"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    outcomes, megabytes = said.rsplit(maxsplit=1)
    assert outcomes == "{'policy_error'}"
    assert int(megabytes) < 4 * (MOST_TOGETHER >> 20) + 400  # without a bound it is 64 times 64 MB


def test_few_bytes_that_decode_to_a_lot_are_refused():
    def answer(number: int, request: web.Request) -> web.Response:
        return web.Response(text='{"choices": [' + "[]," * 5_000_000 + "[]]}", content_type="application/json")

    trace, _ = ask(answer)
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "sent more than 4,000,000 values in one reply" in trace.failure.message


def test_a_long_text_with_many_commas_is_no_such_reply():
    text = "one, two [three] " * 400_000
    trace, _ = ask(lambda n, r: {"choices": [{"message": {"role": "assistant", "content": text}}]})
    assert trace.outcome is Outcome.COMPLETED


def test_an_answer_of_more_tokens_than_max_tokens_is_refused():
    choice = {"message": {"role": "assistant", "content": "42"}, "token_ids": [5] * 40, "finish_reason": "length"}
    trace, _ = ask(lambda n, r: {"choices": [choice], "prompt_token_ids": [1]}, Sampling(max_tokens=8))
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "sent 40 tokens, but max_tokens allows 8" in trace.failure.message


def test_a_preflight_ends_at_an_endless_list_of_models():
    with endless_server(b'{"data": [') as server, pytest.raises(NetworkError, match=TOO_MUCH):
        check_endpoint("m", EndpointConfig(base_url=f"{server.url}/v1"))


def test_looking_for_a_vllm_server_ends_at_an_endless_list():
    with endless_server() as server:
        assert find_server("m", EndpointConfig(base_url=f"{server.url}/v1")) is None


def test_a_judge_that_never_ends_its_reply_gives_no_verdict():
    async def judge(url: str):
        model = JudgeModel(model="judge", endpoint=EndpointConfig(base_url=f"{url}/v1", timeout=60))
        return await ask_judge(model, Question.of("grade", "Right?", {"answer": "4"}, {"grade": ("I", "C")}))

    with endless_server() as server:
        asked = asyncio.run(judge(server.url))
    assert asked.verdict is None
    assert "sent more than 64 MB" in asked.failure


def test_a_search_server_that_never_ends_its_reply_fails_the_search():
    with endless_server() as server, pytest.raises(RetrieverError, match="too large"):
        asyncio.run(ask_retriever(server.url, "query"))


def test_a_task_server_that_never_ends_its_reply_is_an_error():
    async def get(url: str):
        async with HttpTransport(url) as transport:
            await transport.ask("GET", "/api/info", None, timeout=60)

    with endless_server() as server, pytest.raises(ServeError, match=TOO_MUCH):
        asyncio.run(get(server.url))


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_an_mcp_server_that_never_ends_its_reply_does_not_open(kind):
    async def connect(url: str):
        session = McpSession(McpServer(url=f"{url}/mcp", start_timeout=30))
        try:
            await session.open()
        finally:
            await session.close()

    with endless_server(b"data: {", b"0,", kind) as server:
        with pytest.raises(TreetuneError):
            asyncio.run(connect(server.url))
        assert server.sent < 100 << 20


def test_a_blocking_reader_ends_too():
    with (
        endless_server() as server,
        urllib.request.urlopen(server.url, timeout=10) as response,
        pytest.raises(BodyTooLarge, match=TOO_MUCH),
    ):
        read_blocking(response, 60)


def test_a_reply_that_is_compressed_counts_as_what_it_becomes():
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.Response(body=json.dumps({"a": "0" * (80 << 20)}).encode(), content_type="application/json")
        response.enable_compression(web.ContentCoding.gzip)
        return response

    trace, _ = ask(lambda n, r: answer(r))
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "sent more than 64 MB" in trace.failure.message
