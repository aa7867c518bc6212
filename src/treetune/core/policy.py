"""A Policy answers prompts: a model behind an endpoint, a local model, or a script.

class Shout:
    name = "shout"
    async def complete(self, request): return Completion(text=request.messages[-1]["content"].upper())
    async def close(self): ...
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import Annotated, Any, Literal, Protocol, Self

import msgspec

from treetune.chat.message import Message, text_of
from treetune.chat.tokens import Prompt, Tokens
from treetune.core.task import Task
from treetune.errors import PolicyError


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    temperature: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Absent: the default of the model or its server."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Nucleus sampling: keep the likeliest tokens up to this probability."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The maximum number of tokens of one completion."""
    stop: list[str] = []
    """Strings that end a completion."""
    seed: int | None = None
    """Makes sampling reproducible if the model supports it. Each rollout derives its own seed from it."""
    logprobs: bool = False
    """Request the log-probability of each sampled token from the endpoint."""
    extra: dict[str, Any] = {}
    """Further fields of an endpoint's request body, passed unchanged (`top_k`, `chat_template_kwargs`)."""

    def __post_init__(self) -> None:
        for field in self.extra:
            if " " in str(field):
                raise ValueError(f"extra has a field {field!r}, which has a space in it: write {{NAME: VALUE}}")

    def over(self, usual: Sampling) -> Sampling:
        """These settings, with values of `usual` for those that are not set here."""
        unsaid = Sampling()
        if usual == unsaid or self == unsaid:
            return self if usual == unsaid else usual
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        said = {name: value for name, value in values if value != getattr(unsaid, name)}
        return msgspec.structs.replace(usual, **{**said, "extra": {**usual.extra, **self.extra}})


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    """The prompt tokens, summed over all turns."""
    completion_tokens: int = 0
    """The sampled tokens."""


class Request(msgspec.Struct):
    """One call to a policy within a rollout."""

    messages: list[Message]
    sampling: Sampling
    task: Task
    turn: int
    key: str
    """Identifies the rollout (task, occurrence, number). A policy derives its random seed from it."""
    tokens: Tokens | None = None
    """The tokens of the rollout so far, if the policy returned any. The policy's next prompt extends them."""
    continues: bool = False
    """Whether the last message is the beginning of the answer. A policy continues it and returns the whole message; one
    that cannot raises `cannot_continue`."""
    tools: list[dict[str, Any]] = []
    """The tools that it may call, in OpenAI's form. Calls are returned in `tool_calls` of the answer's message."""
    partial: Completion | None = None
    """The partial answer of an aborted call (`finish_reason: abort`). A policy that works on tokens continues it and
    returns the whole answer with `resumed` set; other policies start over."""

    @property
    def prefix(self) -> str:
        """The given beginning of the answer; empty if there is none."""
        return (text_of(self.messages[-1].get("content")) or "") if self.continues else ""


class Completion(msgspec.Struct):
    """A policy's answer to one `Request`.

    A policy returns it from `complete`:

        class Shout:
            name = "shout"

            async def complete(self, request):
                return Completion(text=request.messages[-1]["content"].upper())

            async def close(self):
                pass
    """

    text: str = ""
    """The answer as text."""
    message: Message | None = None
    """The whole assistant message, if it has more than text (tool calls, reasoning)."""
    finish_reason: Literal["stop", "length", "tool_calls"] | str = "stop"
    usage: Usage | None = None
    prompt_ids: list[int] | None = None
    """The exact prompt tokens."""
    completion_ids: list[int] | None = None
    """The exact sampled tokens, including the end token."""
    logprobs: list[float] | None = None
    """The model's own log-probability of each sampled token, before temperature and top-p."""
    prompt: Prompt | None = None
    """The prompt tokens with their text, if the chat template was applied locally, for the next turn to extend."""
    version: int | None = None
    """The version of the weights that answered, if the server reports it."""
    versions: list[int] | None = None
    """The version of the weights for each sampled token, if known."""
    tokens: Tokens | None = None
    """All tokens of the rollout, if the policy is an agent that called its model itself. The trace takes them over."""
    warnings: list[str] = []
    """Notes for the trace, such as an agent that ended with an error."""
    resumed: int = 0
    """How many of its first tokens come from `Request.partial`."""

    def as_message(self) -> Message:
        return self.message if self.message is not None else {"role": "assistant", "content": self.text}


def check_continues(request: Request, completion: Completion, name: str) -> None:
    """Raise if an answer does not start with the beginning that it was given to continue. An answer with tool calls is
    not checked, because it holds only the text next to them."""
    message = completion.as_message()
    if message.get("tool_calls"):
        return
    if request.continues and not (text_of(message.get("content")) or "").startswith(request.prefix):
        raise cannot_continue(f"{name} answered that message instead of continuing it")


def cannot_continue(problem: str, remedy: str = "use a model that can: local:PATH, or one behind vLLM") -> PolicyError:
    return PolicyError(
        f"the prompt ends with the beginning of an answer, an assistant message: {problem}",
        remedy=f"{remedy}; or leave that message out",
    )


class RetryCount:
    """Counts how often model calls made inside the `with` block were retried (429, 5xx, a cut connection, a timeout),
    whichever code made them:

    with retries:
        await policy.complete(request)
    """

    __slots__ = ("_outer", "number")

    def __init__(self) -> None:
        self.number = 0
        self._outer: Token[RetryCount | None] | None = None

    def __enter__(self) -> Self:
        self._outer = _retries.set(self)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._outer is not None:
            _retries.reset(self._outer)


_retries: ContextVar[RetryCount | None] = ContextVar("retries", default=None)


def count_retry() -> None:
    """Record that a call is about to be retried."""
    if (count := _retries.get()) is not None:
        count.number += 1


class Policy(Protocol):
    name: str

    async def complete(self, request: Request) -> Completion: ...

    async def close(self) -> None:
        return None
