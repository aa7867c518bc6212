"""A `Call` is what an agent asks, whatever its dialect; a `Reply` is what it gets; a `Sampler` is what answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from treetune.chat.message import Message
from treetune.chat.tokens import Prompt
from treetune.core.policy import Completion, Sampling
from treetune.errors import PolicyError
from treetune.system.http_error import HttpError


class Refused(HttpError):
    """The gateway refuses a call; the agent gets the reason in its dialect."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error") -> None:
        super().__init__(status, kind, message)


class Call(msgspec.Struct, kw_only=True):
    messages: list[Message] = []
    """In OpenAI's form."""
    text: str | list[int] | None = None
    """The prompt of a completion, as text or token ids, which no chat template renders."""
    tools: list[dict[str, Any]] = []
    sampling: Sampling = Sampling()
    stream: bool = False
    model: str = ""
    continues: bool = False
    """Whether the last message is the beginning of the answer."""
    ignored: list[str] = []
    """What was asked for and left out. The notes of the session count it."""
    stream_usage: bool = False
    """Whether a stream ends with the numbers of tokens."""


class Reply(NamedTuple):
    message: Message
    """The answer in OpenAI's form, with its reasoning in `reasoning_content`."""
    finish: str
    prompt_tokens: int
    completion_tokens: int
    number: int
    """The number of the call in its session."""


class Sampled(NamedTuple):
    """What a model sampled after a prompt, or a part of it."""

    ids: list[int] | None
    """The sampled tokens; None if the upstream returned only text."""
    logprobs: list[float] | None = None
    finish: str = "stop"
    """Why it ended. After `abort`, the call continues from its tokens."""
    versions: list[int] | None = None
    """The version of the weights for each token, -1 if unknown."""
    text: str = ""
    """The answer as text, needed only without ids."""


def join(parts: Sequence[Sampled]) -> Sampled:
    """The whole of these parts. It has no ids if a part has none."""
    text, finish = "".join([part.text for part in parts]), parts[-1].finish
    ids: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for part in parts:
        if part.ids is None:
            return Sampled(None, finish=finish, text=text)
        ids += part.ids
        logprobs += part.logprobs or []
        versions += [-1] * len(part.ids) if part.versions is None else part.versions
    if logprobs and len(logprobs) != len(ids):
        raise PolicyError(f"the engine sent {len(logprobs)} logprobs for {len(ids)} tokens")
    has_versions = any(version >= 0 for version in versions)
    return Sampled(ids, logprobs if logprobs or not ids else None, finish, versions if has_versions else None, text)


Hear = Callable[[Sampled], None]
"""Receives tokens while they are sampled, with their text if the upstream sends it."""


class Answerer(Protocol):
    """Answers messages, for models that neither take nor return token ids."""

    async def __call__(self, call: Call, sampling: Sampling, number: int) -> Completion: ...


class Sampler(Protocol):
    """Samples tokens after tokens: an engine over HTTP, a model in this process, a trainer's own generation."""

    @property
    def context(self) -> int | None:
        """The maximum number of tokens of a prompt and its answer, if known."""
        ...

    async def __call__(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        """Sample one answer. Cancelling the call stops the sampling."""
        ...
