"""OpenAI's older completions: `POST /completions`, a prompt as text or token ids, without a chat template."""

from __future__ import annotations

import time
from collections.abc import Iterator

from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.dialects import Body, check_fields, read_sampling, write_error
from treetune.gateway.dialects.chat import usage
from treetune.gateway.streaming import Part
from treetune.system.http_error import HttpError, encode

_KNOWN = "prompt model max_tokens temperature top_p top_k stop seed stream stream_options n best_of"
_OPTIONAL = "user frequency_penalty presence_penalty logit_bias logprobs echo suffix"


def read(body: Body) -> Call:
    ignored = check_fields(body, _KNOWN, _OPTIONAL)
    for name in ("n", "best_of"):
        if (body.get(name) or 1) != 1:
            raise Refused(400, f"{name} must be 1: a call is answered once; send several calls")
    for name in ("echo", "suffix"):
        if body.get(name):
            raise Refused(400, f"{name} is not supported")
    prompt = body["prompt"]
    is_ids = isinstance(prompt, list) and all(isinstance(each, int) and 0 <= each < 2**31 for each in prompt)
    if not prompt or not (isinstance(prompt, str) or is_ids):
        raise Refused(400, "the prompt must be a single string or a single list of token ids")
    asked = {name: body.get(name) for name in ("temperature", "top_p", "stop", "seed", "max_tokens")}
    return Call(
        text=prompt,
        sampling=read_sampling(asked, top_k=body.get("top_k")),
        stream=bool(body.get("stream")),
        model=str(body.get("model") or ""),
        ignored=ignored,
        stream_usage=bool((body.get("stream_options") or {}).get("include_usage")),
    )


def _whole(call: Call, number: int, text: str, finish: str | None) -> Body:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
    head = {"id": f"cmpl-{number}", "object": "text_completion", "created": int(time.time()), "model": call.model}
    return {**head, "choices": [choice]}


def write(call: Call, reply: Reply) -> bytes:
    whole = _whole(call, reply.number, reply.message["content"] or "", reply.finish)
    return encode({**whole, "usage": usage(reply)})


class CompletionEvents:
    def __init__(self, call: Call) -> None:
        self._call, self._number = call, time.monotonic_ns()

    def _event(self, text: str, finish: str | None = None) -> bytes:
        return b"data: " + encode(_whole(self._call, self._number, text, finish)) + b"\n\n"

    def begin(self) -> bytes:
        return b""

    def part(self, part: Part) -> bytes:
        return self._event(part[1])

    def end(self, reply: Reply) -> Iterator[bytes]:
        yield self._event("", reply.finish)
        if self._call.stream_usage:
            whole = {**_whole(self._call, self._number, "", None), "choices": [], "usage": usage(reply)}
            yield b"data: " + encode(whole) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def fail(self, error: HttpError) -> bytes:
        return b"data: " + encode({"error": write_error(error)}) + b"\n\n"
