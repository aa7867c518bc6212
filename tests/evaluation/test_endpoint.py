"""The policy behind an endpoint, against a real HTTP server on loopback."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from model_endpoint import GOOD, Ask, ask
from raising import raises_code

from treetune import Outcome, run_rollout
from treetune.core.policy import Sampling
from treetune.core.trace import decode_trace, encode_trace
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy


def test_an_answer_is_scored_with_its_usage():
    trace, requests = ask(lambda n, r: web.json_response(GOOD), Sampling(temperature=0.5, max_tokens=9, stop=["x"]))
    assert (trace.reward, trace.usage.prompt_tokens, trace.usage.completion_tokens) == (1.0, 7, 2)
    assert requests[0]["body"] == {
        "model": "m", "messages": [{"role": "user", "content": "6 * 7?"}],
        "temperature": 0.5, "max_tokens": 9, "stop": ["x"],
    }  # fmt: skip
    assert "Authorization" not in requests[0]["headers"]


def test_an_answer_in_parts_is_their_text():
    parts = [{"type": "text", "text": "42"}]
    choice = {**GOOD["choices"][0], "message": {"role": "assistant", "content": parts}}
    trace, _ = ask(lambda n, r: web.json_response({**GOOD, "choices": [choice]}))
    assert trace.reward == 1.0


def test_busy_and_broken_servers_are_asked_again():
    answers = [
        web.Response(status=503),
        web.Response(status=429, headers={"Retry-After": "0"}),
        web.Response(text="not json"),
        web.json_response(GOOD),
    ]
    trace, requests = ask(lambda n, r: answers[n])
    assert trace.outcome is Outcome.COMPLETED
    assert (len(requests), trace.retries) == (4, 3)


def test_a_refusal_is_a_policy_error_at_once():
    trace, requests = ask(lambda n, r: web.Response(status=400, text="context too long"))
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "context too long" in trace.failure.message
    assert (len(requests), trace.retries) == (1, 0)


def test_it_gives_up_after_its_retries():
    trace, requests = ask(lambda n, r: web.Response(status=500, headers={"Retry-After": "0"}), max_retries=1)
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "gave up after 2 attempts" in trace.failure.message
    assert (len(requests), trace.retries) == (2, 1)


def test_a_server_that_hangs_runs_into_the_timeout():
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(1)
        return web.json_response(GOOD)

    trace, _ = ask(lambda n, r: hang(r), timeout=0.3, max_retries=0)
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "gave up after 1 attempts: http://127.0.0.1:" in trace.failure.message
    assert "/v1/chat/completions did not answer within 0.3 seconds\n  -> is the server" in trace.failure.message


def test_a_cut_connection_is_tried_again():
    def cut(n: int, request: web.Request) -> web.Response:
        if n == 0:
            request.transport.abort()
        return web.json_response(GOOD)

    trace, requests = ask(cut)
    assert trace.outcome is Outcome.COMPLETED
    assert (len(requests), trace.retries) == (2, 1)


def test_an_address_that_is_none_is_not_tried_again():
    async def run():
        taskset, policy = Ask(), OpenAIPolicy("m", EndpointConfig(base_url="nowhere", max_retries=1000))
        try:
            return await run_rollout(taskset, taskset[0], policy)
        finally:
            await policy.close()

    trace = asyncio.run(run())
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "nowhere/chat/completions is not an address" in trace.failure.message


@pytest.mark.parametrize("answer", [{}, {"choices": []}, [], {"choices": [{"message": None}]}])
def test_an_answer_without_a_completion_is_a_policy_error(answer):
    trace, _ = ask(lambda n, r: web.json_response(answer), max_retries=0)
    assert trace.outcome is Outcome.POLICY_ERROR
    assert "no usable completion" in trace.failure.message


def test_logprobs_that_do_not_come_are_told():
    trace, _ = ask(lambda n, r: web.json_response(GOOD), Sampling(logprobs=True))
    assert trace.warnings == ["sampling.logprobs was requested, but the model returned none"]


def test_token_ids_and_logprobs_are_kept_where_the_server_gives_them():
    choice = {**GOOD["choices"][0], "token_ids": [5, 6], "logprobs": {"content": [{"logprob": -1}, {"logprob": -2}]}}
    trace, requests = ask(
        lambda n, r: web.json_response({"choices": [choice], "prompt_token_ids": [1, 2, 3]}),
        Sampling(logprobs=True, extra={"return_token_ids": True}),
    )
    (sequence,) = trace.tokens.sequences
    assert (sequence.ids, sequence.mask) == ([1, 2, 3, 5, 6], [0, 0, 0, 1, 1])
    assert sequence.logprobs == [0, 0, 0, -1, -2]
    assert requests[0]["body"]["logprobs"] is True
    assert requests[0]["body"]["return_token_ids"] is True


@pytest.mark.parametrize(
    ("ids", "logprobs", "told"),
    [
        ("[5, 6]", "[-1, NaN]", "m: the logprob of sampled token 1 of 2 is nan"),
        ("[5, 6]", "[-1, 1e999]", "m: the logprob of sampled token 1 of 2 is inf"),
        ("[5, 6]", "[-1, 3.5]", "m: the logprob of sampled token 1 of 2 is 3.5"),
        ("[5, -6]", "[-1, -1]", "m: sampled token 1 of 2 is -6"),
        ("[5, 6.5]", "[-1, -1]", "m: sampled token 1 of 2 is 6.5"),
        ('[5, "six"]', "[-1, -1]", "m: sampled token 1 of 2 is 'six'"),
        ('"five"', "[-1, -1]", "m: sampled token: expected a list, got 'five'"),
        ("56", "[-1, -1]", "sent no usable completion"),
    ],
)
def test_a_sample_that_cannot_be_trained_on_is_the_endpoints_fault(ids, logprobs, told):
    entries = ", ".join(f'{{"logprob": {value.strip()}}}' for value in logprobs[1:-1].split(","))
    body = (
        '{"choices": [{"message": {"role": "assistant", "content": "42"}, "finish_reason": "stop", '
        f'"token_ids": {ids}, "logprobs": {{"content": [{entries}]}}}}], "prompt_token_ids": [1, 2]}}'
    )
    trace, requests = ask(lambda n, r: web.Response(text=body, content_type="application/json"))
    assert trace.outcome is Outcome.POLICY_ERROR
    assert trace.reward is None
    assert told in trace.failure.message
    assert len(requests) == 1
    assert trace.tokens is None
    assert decode_trace(encode_trace(trace)).outcome is Outcome.POLICY_ERROR


def test_the_openai_key_goes_to_openai_only(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    _, requests = ask(lambda n, r: web.json_response(GOOD))
    assert "secret" not in str(requests)
    monkeypatch.setenv("MY_KEY", "mine")
    _, requests = ask(lambda n, r: web.json_response(GOOD), api_key_env="MY_KEY")
    assert requests[0]["headers"]["Authorization"] == "Bearer mine"


def test_a_missing_key_is_told_before_anything_runs(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with raises_code("usage", "OPENAI_API_KEY"):
        OpenAIPolicy("gpt", EndpointConfig())


def test_an_answer_with_half_a_surrogate_pair_is_an_answer():
    halved = web.json_response({**GOOD, "choices": [{"message": {"role": "assistant", "content": "\ud83d"}}]})
    trace, requests = ask(lambda n, r: halved)
    assert (trace.outcome, trace.reward, len(requests)) == (Outcome.COMPLETED, 0.0, 1)
    assert trace.turns[0].message["content"] == "\\ud83d"


def test_a_server_that_has_no_room_for_the_prompt_says_so():
    too_long = "This model's maximum context length is 4096 tokens."
    trace, requests = ask(lambda n, r: web.json_response({"error": {"message": too_long}}, status=400))
    assert (trace.outcome, trace.failure.type, len(requests)) == (Outcome.POLICY_ERROR, "ContextFullError", 1)
