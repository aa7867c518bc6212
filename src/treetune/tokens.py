"""Token sequences: what a trainer trains on, kept exactly as it was sampled.

    tokens = Tokens()
    tokens.add_turn(prompt, completion_ids, logprobs)

A sequence goes on as long as each prompt begins with the previous prompt plus the tokens that were sampled; a prompt
that does not begins a new sequence, marked `breaks_history`. `treetune.chat_tokens` makes prompts that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from treetune.errors import PolicyError
from treetune.task import Message


class Prompt(NamedTuple):
    """What a model is given."""

    ids: list[int]
    realigned: bool = False
    """It goes on from the sampled tokens, and its text is not quite the template's own."""
    text: str | None = None
    """The chat template's own text of it, where there is one between messages and tokens."""
    shown: int = 0
    """How many messages it holds: the answer is the next one."""
    prefix: str = ""
    """How the answer begins, where that was written before it was sampled; the prompt ends with it."""


class LastTurn(NamedTuple):
    """What the next prompt goes on from."""

    prompt: Prompt
    sampled: list[int]
    message: Message | None
    """The message that was made of them, where it is known."""


class TokenSequence(msgspec.Struct):
    ids: list[int] = []
    mask: list[int] = []
    """1 where the token was sampled by the policy, 0 where it was given to it."""
    logprobs: list[float] = []
    """The policy's log-probability of each sampled token, 0.0 elsewhere; empty where the policy gave none."""
    versions: list[int] = []
    """The version of the weights that sampled each token, -1 elsewhere; empty where the policy gave none."""
    breaks_history: bool = False
    """The prompt did not go on from the sequence before: the chat template rewrote what had been said."""
    realigned: int = 0
    """How many of its prompts differ from the template's own text, so as to go on from the tokens sampled before."""

    @property
    def sampled(self) -> list[int]:
        """The tokens that are trained on."""
        return [token for token, mine in zip(self.ids, self.mask, strict=True) if mine]


class Tokens(msgspec.Struct, dict=True):
    sequences: list[TokenSequence] = []

    def __post_init__(self) -> None:
        self.last: LastTurn | None = None  # of use only while a conversation goes on: no part of the record

    def add_turn(
        self,
        prompt: Prompt | Sequence[int],
        completion_ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        versions: Sequence[int] | None = None,
        message: Message | None = None,
    ) -> None:
        """Notes what the model was given (a `Prompt`, or its tokens alone), what it sampled, and the message that was
        made of it."""
        if not isinstance(prompt, Prompt):
            prompt = Prompt(prompt if isinstance(prompt, list) else list(prompt))
        prompt_ids = prompt.ids
        count = len(completion_ids)
        for name, values in (("logprobs", logprobs), ("versions", versions)):
            if values is not None and len(values) != count:
                raise PolicyError(f"{len(values)} {name} for {count} sampled tokens")
        sequence = self._continued_by(prompt_ids, logprobs is not None, versions is not None)
        given = prompt_ids[len(sequence.ids) :]
        sequence.ids += given
        sequence.ids += completion_ids
        sequence.mask += [0] * len(given)
        sequence.mask += [1] * count
        if logprobs is not None:
            sequence.logprobs += [0.0] * len(given)
            sequence.logprobs += logprobs
        if versions is not None:
            sequence.versions += [-1] * len(given)
            sequence.versions += versions
        sequence.realigned += prompt.realigned
        sampled = completion_ids if isinstance(completion_ids, list) else list(completion_ids)
        self.last = LastTurn(prompt, sampled, None if message is None else dict(message))

    def _continued_by(self, prompt_ids: list[int], logprobs: bool, versions: bool) -> TokenSequence:
        if not self.sequences:
            self.sequences.append(TokenSequence())
            return self.sequences[0]
        last = self.sequences[-1]
        continues = prompt_ids[: len(last.ids)] == last.ids
        if continues and (logprobs, versions) == (bool(last.logprobs), bool(last.versions)):
            return last
        self.sequences.append(TokenSequence(breaks_history=not continues))
        return self.sequences[-1]
