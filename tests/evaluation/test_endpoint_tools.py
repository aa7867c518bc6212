"""Tools behind an endpoint: what is sent, and calls in every shape that servers give them."""

from __future__ import annotations

import pytest
from call_chats import TOOLS
from model_endpoint import calls, complete, said
from raising import raises_code

from treetune.core.policy import Sampling
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy


def call(name: str = "find", arguments: str = '{"what": "tea"}', id: str = "c00000000"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_tools_of_the_task_are_sent_and_its_calls_are_read():
    completion, body = complete(calls(("find", {"what": "tea"}), ("buy_it", {})), tools=TOOLS)
    assert body["tools"] == TOOLS
    assert completion.message == {
        "role": "assistant",
        "tool_calls": [call(id="call_0"), call("buy_it", "{}", id="call_1")],
    }
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")


def test_without_tools_none_are_sent():
    _, body = complete(said("42"))
    assert "tools" not in body


@pytest.mark.parametrize(
    "message",
    [
        {"tool_calls": [{"type": "function", "function": {"name": "find", "arguments": {"what": "tea"}}}]},
        {"tool_calls": [{"id": "", "function": {"name": "find", "arguments": '{"what":"tea"}'}}]},
        {"tool_calls": [], "function_call": {"name": "find", "arguments": '{"what":"tea"}'}},
        {"tool_calls": None, "function_call": {"name": "find", "arguments": {"what": "tea"}}},
    ],
)
def test_calls_in_any_shape_are_calls_in_one(message):
    completion, _ = complete(said(None, **message), tools=TOOLS, turn=3)
    (found,) = completion.message["tool_calls"]
    assert found == call(arguments='{"what":"tea"}', id="c00030000")
    assert "function_call" not in completion.message
    assert completion.finish_reason == "tool_calls"


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them():
    broken = {"tool_calls": [call(arguments='{"what": ')]}
    completion, _ = complete(said(None, **broken), tools=TOOLS)
    assert completion.message["tool_calls"][0]["function"]["arguments"] == '{"what": '


def test_a_call_without_arguments_has_none():
    completion, _ = complete(said(None, tool_calls=[{"function": {"name": "find"}}]), tools=TOOLS)
    assert completion.message["tool_calls"][0]["function"] == {"name": "find", "arguments": "{}"}


def test_an_empty_list_of_calls_is_an_answer():
    completion, _ = complete(said("42", tool_calls=[]), tools=TOOLS)
    assert completion.message == {"role": "assistant", "content": "42"}
    assert completion.finish_reason == "stop"


def test_what_was_thought_beside_a_call_is_kept():
    answer = calls(("find", {}), content="I look.")
    answer["choices"][0]["message"]["reasoning_content"] = "Hm."
    completion, _ = complete(answer, tools=TOOLS)
    assert completion.message["reasoning_content"] == "Hm."
    assert completion.message["content"] == completion.text == "I look."


def test_calls_that_were_cut_off_say_so():
    completion, _ = complete(said(None, finish="length", tool_calls=[call()]), tools=TOOLS)
    assert completion.finish_reason == "length"


def test_tokens_and_logprobs_are_kept_with_calls():
    answer = {**calls(("find", {})), "prompt_token_ids": [1, 2]}
    answer["choices"][0] |= {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -2.0}]}}
    completion, _ = complete(answer, tools=TOOLS)
    assert (completion.prompt_ids, completion.completion_ids) == ([1, 2], [3, 4])
    assert completion.logprobs == [-1.0, -2.0]


@pytest.mark.parametrize("broken", [[1], "find", {"function": {}}])
def test_what_is_no_call_at_all_is_no_completion(broken):
    with raises_code("policy", "/v1", "tool_calls"):
        complete(said(None, tool_calls=broken), tools=TOOLS)


def test_tools_of_the_settings_go_as_they_are_but_not_beside_those_of_a_task():
    sampling = Sampling(extra={"tools": TOOLS[:1], "tool_choice": "auto"})
    completion, body = complete(calls(("find", {})), sampling=sampling)
    assert (body["tools"], body["tool_choice"]) == (TOOLS[:1], "auto")
    assert completion.message["tool_calls"]
    with raises_code("policy", "sampling.extra"):
        complete(calls(("find", {})), sampling=sampling, tools=TOOLS)


def test_a_server_that_reads_no_calls_is_told_and_asked_in_text():
    messages = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call()]},
        {"role": "tool", "tool_call_id": "c00000000", "name": "find", "content": "There."},
    ]
    answer = said('I see.\n<tool_call>\n{"name": "buy_it", "arguments": {}}\n</tool_call>')
    completion, body = complete(answer, messages=messages, tools=TOOLS, turn=1, call_format="hermes")
    assert "tools" not in body
    system, question, called, result = body["messages"]
    assert system["role"] == "system"
    assert "buy_it" in system["content"]
    assert question == messages[0]
    assert called["content"] == '<tool_call>\n{"name": "find", "arguments": {"what": "tea"}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\nThere.\n</tool_response>"}
    assert completion.message["tool_calls"] == [call("buy_it", "{}", id="c00010000")]
    assert completion.text == "I see."


def test_a_format_that_is_none_is_told_before_anything_runs():
    with raises_code("unknown-name", "'hermes'"):
        OpenAIPolicy("m", EndpointConfig(base_url="http://127.0.0.1/v1", call_format="herms"))
