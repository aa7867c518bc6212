"""When an aborted completion goes on from its tokens, and when the model is asked anew."""

from __future__ import annotations

import pytest

from treetune import Task
from treetune.core.policy import Completion, Request, Sampling
from treetune.models.openai import can_go_on, continued, join

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def aborted(text="The answer", **fields):
    said = {"role": "assistant", "content": text}
    known = {"message": said, "finish_reason": "abort", "prompt_ids": [1, 2], "completion_ids": [3, 4]}
    return Completion(text, **{**known, **fields})


def asked(messages=None, tools=(), **sampling):
    messages = messages or [{"role": "user", "content": "?"}]
    continues = messages[-1]["role"] == "assistant"
    return Request(messages, Sampling(**sampling), Task(prompt="?"), 0, "key", tools=list(tools), continues=continues)


@pytest.mark.parametrize(
    ("partial", "request_", "call_format", "goes_on"),
    [
        (aborted(), asked(), None, True),
        (aborted(), asked(tools=TOOLS), "hermes", True),
        (aborted(), asked(tools=TOOLS), None, False),  # the server reads calls on its chat route only
        (aborted(prompt_ids=None), asked(), None, False),
        (aborted(completion_ids=[]), asked(), None, False),
        (aborted("half a letter \ufffd"), asked(), None, False),
        (aborted(message={"role": "assistant", "content": "x", "reasoning_content": "hm"}), asked(), None, False),
        (aborted(message={"role": "assistant", "content": "x", "reasoning_content": None}), asked(), None, True),
        (aborted(), asked(max_tokens=2), None, False),  # all of them are sampled
        (aborted(), asked(max_tokens=3), None, True),
    ],
)
def test_only_what_can_be_joined_exactly_goes_on(partial, request_, call_format, goes_on):
    assert can_go_on(partial, request_, call_format) is goes_on


def test_the_rest_is_asked_for_by_its_tokens():
    body = {"model": "m", "messages": [], "tools": TOOLS, "max_tokens": 10, "logprobs": True, "top_k": 5}
    assert continued(body, aborted()) == {
        "model": "m",
        "prompt": [1, 2, 3, 4],
        "max_tokens": 8,
        "logprobs": 1,
        "top_k": 5,
    }


def rest(text=" is 42.", **choice):
    return {"choices": [{"text": text, "token_ids": [5], "finish_reason": "stop", **choice}]}


def test_both_parts_are_one_answer_with_its_beginning():
    request = asked([{"role": "user", "content": "?"}, {"role": "assistant", "content": "The"}])
    whole = join(aborted(), rest(), request)
    (choice,) = whole["choices"]
    assert choice["message"]["content"] == " answer is 42."  # its reader puts the beginning before it
    assert (choice["token_ids"], whole["prompt_token_ids"], choice["finish_reason"]) == ([3, 4, 5], [1, 2], "stop")


@pytest.mark.parametrize(
    ("reply", "request_", "partial"),
    [
        (rest(token_ids=None), asked(), aborted()),
        ({"choices": []}, asked(), aborted()),
        (rest("\ufffd and more"), asked(), aborted()),
        (rest(" is</stop> 42"), asked(stop=["answer is"]), aborted()),  # half of it was sampled before
        (rest(logprobs={"token_logprobs": [-1.0]}), asked(), aborted()),
        (rest(), asked(logprobs=True), aborted(logprobs=[-1.0, -2.0])),
    ],
)
def test_what_does_not_fit_on_is_asked_anew(reply, request_, partial):
    assert join(partial, reply, request_) is None
