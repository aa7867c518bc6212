"""A Policy is what answers: a model behind an endpoint, a local model, a script.

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
    """Absent: what the model or its server defaults to."""
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """Nucleus sampling: keep the likeliest tokens up to this probability."""
    max_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The most tokens of one completion."""
    stop: list[str] = []
    """Strings at which a completion ends."""
    seed: int | None = None
    """Makes sampling reproducible where the model supports it; each rollout derives its own from it."""
    logprobs: bool = False
    """Ask an endpoint for the log-probability of each sampled token."""
    extra: dict[str, Any] = {}
    """Further fields of an endpoint's request body, passed as they are (`top_k`, `chat_template_kwargs`)."""

    def __post_init__(self) -> None:
        for field in self.extra:
            if " " in str(field):
                raise ValueError(f"extra has a field {field!r}, which has a space in it: write {{NAME: VALUE}}")

    def over(self, usual: Sampling) -> Sampling:
        """These settings, and those of `usual` where a value here is not set."""
        unsaid = Sampling()
        if usual == unsaid:
            return self
        values = ((name, getattr(self, name)) for name in self.__struct_fields__)
        said = {name: value for name, value in values if value != getattr(unsaid, name)}
        return msgspec.structs.replace(usual, **{**said, "extra": {**usual.extra, **self.extra}})


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    """The tokens that were given to the model, over all turns."""
    completion_tokens: int = 0
    """The tokens that it sampled."""


class Request(msgspec.Struct):
    """One call of a policy, within one rollout."""

    messages: list[Message]
    sampling: Sampling
    task: Task
    turn: int
    key: str
    """Names the rollout (task, occurrence, number). A policy derives its random seed from it."""
    tokens: Tokens | None = None
    """The tokens of the rollout so far, where the policy gave any: it continues them in the prompts that it makes."""
    continues: bool = False
    """The last message is the beginning of the answer. A policy continues it and gives the whole message; one that
    cannot raises `cannot_continue`."""
    tools: list[dict[str, Any]] = []
    """What it may call, in OpenAI's form; calls are in the `tool_calls` of the message that it answers."""
    partial: Completion | None = None
    """The answer so far of a call that was aborted (`finish_reason: abort`). A policy that works on tokens
    continues it, and gives the whole with `resumed`; any other answers anew."""

    @property
    def prefix(self) -> str:
        """How the answer begins; nothing where all of it is the policy's."""
        return (text_of(self.messages[-1].get("content")) or "") if self.continues else ""


class Completion(msgspec.Struct):
    """What a policy answers to one `Request`.

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
    """The whole assistant message where there is more than text (tool calls, reasoning)."""
    finish_reason: Literal["stop", "length", "tool_calls"] | str = "stop"
    usage: Usage | None = None
    prompt_ids: list[int] | None = None
    """The exact tokens the model was given."""
    completion_ids: list[int] | None = None
    """The exact tokens it sampled, end token included."""
    logprobs: list[float] | None = None
    """The model's own log-probability of each sampled token, before temperature and top-p."""
    prompt: Prompt | None = None
    """The same with its text, where a chat template was applied here: the prompt of the next turn continues it."""
    version: int | None = None
    """The version of the weights that answered, where their server reports it."""
    versions: list[int] | None = None
    """The same of each sampled token, where that is known."""
    resumed: int = 0
    """How many of its first tokens are those of `Request.partial`."""

    def as_message(self) -> Message:
        return self.message if self.message is not None else {"role": "assistant", "content": self.text}


def check_continues(request: Request, completion: Completion, name: str) -> None:
    """Refuses an answer that stands beside its beginning instead of going on with it. One that has become calls holds
    only the text beside them."""
    message = completion.as_message()
    if message.get("tool_calls"):
        return
    if request.continues and not (text_of(message.get("content")) or "").startswith(request.prefix):
        raise cannot_continue(f"{name} answered it, and did not go on with it")


def cannot_continue(problem: str, remedy: str = "use a model that can: local:PATH, or one behind vLLM") -> PolicyError:
    return PolicyError(
        f"the prompt ends with the beginning of an answer, a message of the assistant's: {problem}",
        remedy=f"{remedy}; or leave that message out",
    )


class RetryCount:
    """How often calls of a model were repeated (429, 5xx, a cut connection, no answer in time) within it, whichever
    code made them:

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
    """A call is about to be repeated."""
    if (count := _retries.get()) is not None:
        count.number += 1


class Policy(Protocol):
    name: str

    async def complete(self, request: Request) -> Completion: ...

    async def close(self) -> None:
        return None
