"""A model behind an OpenAI-compatible endpoint: chat completions over HTTP, with retries and back-off.

Token ids are kept if the server returns them (vLLM: `return_token_ids`), and logprobs with `sampling.logprobs`.

A completion that the server aborted is continued from its tokens. The chat route takes only messages, so the rest comes
from `/completions`, where vLLM and SGLang accept token ids. If the text could differ from an answer generated in one
call, the model is asked again from the start.
"""

from __future__ import annotations

import hashlib
from typing import Any

from treetune.chat.call_formats import check_name, parse_calls
from treetune.chat.calls import call_id, function_of, write_call
from treetune.chat.message import Message, text_of
from treetune.chat.tool_template import with_tools, write_as_text
from treetune.core.policy import Completion, Request, Sampling, Usage, cannot_continue
from treetune.errors import PolicyError
from treetune.models import EndpointConfig
from treetune.models.endpoint import Endpoint
from treetune.play.weights import parse_version

_EXTRA_TOKENS = 16
"""Some servers count the end token separately, or overshoot by a speculative step."""
_OTHER_LIMITS = {"max_tokens", "max_completion_tokens"}
"""The parameters that `sampling.extra` may set instead of `sampling.max_tokens`."""
_CHAT_KEYS = (
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_INCOMPLETE = "\ufffd"
"""The replacement for an incomplete character in text."""


class OpenAIPolicy:
    def __init__(self, model: str, endpoint: EndpointConfig, called: str | None = None) -> None:
        """`called` is the model's name at the server, if it differs."""
        self.name = model
        self.called = called or model
        self.endpoint = endpoint
        self._call_format = check_name(endpoint.call_format)
        self._server = Endpoint(endpoint)

    async def complete(self, request: Request) -> Completion:
        if request.continues and not self.endpoint.continue_final_message:
            raise cannot_continue(
                f"{self.endpoint.base_url} is not known to continue one",
                "set endpoint.continue_final_message: true if the server supports it (vLLM, SGLang)",
            )
        if (partial := request.partial) is not None and can_go_on(partial, request, self._call_format):
            try:
                rest = await self._server.post("/completions", continued(self._body(request), partial))
                answer = join(partial, rest, request)
            except PolicyError:
                answer = None
            if answer is not None:
                completion = self._read(answer, request)
                completion.resumed = len(partial.completion_ids or ())
                return completion
        answer = await self._server.post("/chat/completions", self._body(request), self._call_headers(request))
        return self._read(answer, request)

    def _read(self, answer: Any, request: Request) -> Completion:
        try:
            completion = _completion(answer, request, self._call_format)
            self._check_length(completion, request.sampling)
            return completion
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise PolicyError(f"{self.endpoint.base_url} sent no usable completion: {answer!r:.300}") from error

    def _check_length(self, completion: Completion, sampling: Sampling) -> None:
        """Refuse an answer that clearly exceeds the requested tokens: a trainer has no room for it."""
        most, count = sampling.max_tokens, len(completion.completion_ids or ())
        if most is not None and count > most + _EXTRA_TOKENS and not _OTHER_LIMITS & sampling.extra.keys():
            raise PolicyError(
                f"{self.endpoint.base_url} sent {count} tokens, but max_tokens allows {most}",
                remedy="the server ignores max_tokens: set a limit there, or raise sampling.max_tokens",
            )

    async def close(self) -> None:
        await self._server.close()

    def _body(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {"model": self.called, "messages": request.messages}
        for name in ("temperature", "top_p", "max_tokens"):
            if (value := getattr(sampling, name)) is not None:
                body[name] = value
        if sampling.stop:
            body["stop"] = sampling.stop
        if sampling.logprobs:
            body["logprobs"] = True
        if sampling.seed is not None:
            # The same seed for all rollouts would make all rollouts of a task identical.
            key = hashlib.blake2b(f"{sampling.seed}/{request.key}/{request.turn}".encode(), digest_size=4).digest()
            body["seed"] = int.from_bytes(key, "little") >> 1
        if request.continues:
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        if request.tools and self._call_format is not None:
            body["messages"] = with_tools(
                write_as_text(request.messages, self._call_format), request.tools, self._call_format
            )
        elif request.tools:
            if "tools" in sampling.extra:
                raise PolicyError(
                    "the task has tools, and so has sampling.extra", remedy="leave `tools` out of sampling.extra"
                )
            body["tools"] = request.tools
        return {**body, **sampling.extra}

    def _call_headers(self, request: Request) -> dict[str, str]:
        """Return extra headers for one call, the same in each attempt."""
        return {}


def _completion(answer: Any, request: Request, call_format: str | None = None) -> Completion:
    choice = answer["choices"][0]
    message = dict(choice["message"])
    if request.prefix:  # the server returns what comes after the prefix
        message["content"] = request.prefix + (text_of(message.get("content")) or "")
    calls = _read_calls(message, request.turn)
    if not calls and request.tools and call_format is not None:
        text, calls = parse_calls(text_of(message.get("content")) or "", call_format, request.tools, request.turn)
        if calls:
            message["content"] = text or None
    message = {"role": "assistant", **{key: value for key, value in message.items() if value is not None}}
    if calls:
        message["tool_calls"] = calls
    finish = choice.get("finish_reason") or "stop"
    usage = answer.get("usage") or {}
    logprobs = (choice.get("logprobs") or {}).get("content")
    return Completion(
        text=text_of(message.get("content")) or "",
        message=message,
        finish_reason="tool_calls" if calls and finish != "length" else finish,
        usage=Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)),
        prompt_ids=answer.get("prompt_token_ids") or choice.get("prompt_token_ids"),
        completion_ids=choice.get("token_ids"),
        logprobs=[float(entry["logprob"]) for entry in logprobs] if logprobs else None,
        version=_version(answer),
    )


def _version(answer: Any) -> int | None:
    """Return the version of the weights if the server reports it: SGLang does in `metadata` or `meta_info`."""
    version = answer.get("weight_version")
    for place in ("metadata", "meta_info"):
        if version is None and isinstance(found := answer.get(place), dict):
            version = found.get("weight_version")
    return None if version is None else parse_version(version)


def _read_calls(message: Message, turn: int) -> list[Message]:
    """Remove the tool calls from a message, in any server's form, and return them in one form."""
    calls = message.pop("tool_calls", None) or []
    old = message.pop("function_call", None)  # the older form, with a single call
    return [_normalize(call, turn, number) for number, call in enumerate(calls or ([old] if old else []))]


def _normalize(call: Message, turn: int, number: int) -> Message:
    function = function_of(call)
    id, name = call.get("id") or call_id(turn, number), function.get("name") or ""
    return write_call(str(id), str(name), function.get("arguments"))


def can_go_on(partial: Completion, request: Request, call_format: str | None) -> bool:
    """Whether a completion can be continued: its tokens are known, and its text is everything the server made of
    them."""
    if not partial.prompt_ids or not partial.completion_ids or partial.text.endswith(_INCOMPLETE):
        return False
    if request.tools and call_format is None:
        return False  # the server parses calls, and only on its chat route
    said = partial.message or {}
    if any(value for key, value in said.items() if key not in ("role", "content")):
        return False  # such as separate reasoning
    most = request.sampling.max_tokens
    return most is None or most > len(partial.completion_ids)


def continued(body: dict[str, Any], partial: Completion) -> dict[str, Any]:
    """Return the request body for the rest."""
    sampled = partial.completion_ids or []
    rest = {key: value for key, value in body.items() if key not in _CHAT_KEYS}
    rest["prompt"] = [*(partial.prompt_ids or []), *sampled]
    if (most := rest.get("max_tokens")) is not None:
        rest["max_tokens"] = most - len(sampled)
    if rest.get("logprobs"):
        rest["logprobs"] = 1
    return rest


def join(partial: Completion, rest: Any, request: Request) -> Any | None:
    """Return the whole answer as the chat route would return it; None if the rest has no tokens or does not fit."""
    try:
        choice = rest["choices"][0]
        ids, text = choice["token_ids"], choice["text"]
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs")
        whole_text = partial.text.removeprefix(request.prefix) + text
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if not isinstance(ids, list) or text.startswith(_INCOMPLETE) or (partial.logprobs is None) != (logprobs is None):
        return None
    if any(stop in whole_text for stop in request.sampling.stop):
        return None  # part of it was sampled before, so the server missed the stop
    whole: dict[str, Any] = {
        **choice,
        "message": {"role": "assistant", "content": whole_text},
        "token_ids": [*(partial.completion_ids or []), *ids],
        "logprobs": None,
    }
    if logprobs is not None:
        whole["logprobs"] = {"content": [{"logprob": each} for each in [*(partial.logprobs or []), *logprobs]]}
    return {
        **rest,
        "choices": [whole],
        "prompt_token_ids": partial.prompt_ids,
        "usage": {
            "prompt_tokens": len(partial.prompt_ids or []),
            "completion_tokens": len(whole["token_ids"]),
        },
    }
