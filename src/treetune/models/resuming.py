"""Going on with a completion that a model's server aborted, from its tokens: the server is given them as a prompt.

    if can_go_on(partial, request, call_format):
        answer = join(partial, await post(continued(body, partial), "completions"), request)

The chat route takes only messages, so the rest is asked for at `/completions`, which vLLM and SGLang give token ids.
Where the text could not be what it would have been in one piece, there is no going on, and the model is asked anew.
"""

from __future__ import annotations

from typing import Any

from treetune.core.policy import Completion, Request

_OF_CHATS = (
    "messages",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
)
_INCOMPLETE = "\ufffd"
"""What stands for a part of a character in text."""


def can_go_on(partial: Completion, request: Request, call_format: str | None) -> bool:
    """Only where its tokens are known and its text is all that the server made of them."""
    if not partial.prompt_ids or not partial.completion_ids or partial.text.endswith(_INCOMPLETE):
        return False
    if request.tools and call_format is None:
        return False  # the server reads calls, and only on its chat route
    said = partial.message or {}
    if any(value for key, value in said.items() if key not in ("role", "content")):
        return False  # reasoning apart from the answer, say
    most = request.sampling.max_tokens
    return most is None or most > len(partial.completion_ids)


def continued(body: dict[str, Any], partial: Completion) -> dict[str, Any]:
    """The body of a request for the rest."""
    sampled = partial.completion_ids or []
    rest = {key: value for key, value in body.items() if key not in _OF_CHATS}
    rest["prompt"] = [*(partial.prompt_ids or []), *sampled]
    if (most := rest.get("max_tokens")) is not None:
        rest["max_tokens"] = most - len(sampled)
    if rest.get("logprobs"):
        rest["logprobs"] = 1
    return rest


def join(partial: Completion, rest: Any, request: Request) -> Any | None:
    """The whole as the chat route would have given it; None where the rest has no tokens, or does not fit on."""
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
        return None  # half of it was sampled before, so the server did not see it
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
