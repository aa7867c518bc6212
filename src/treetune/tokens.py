"""Token sequences: what a trainer trains on, kept exactly as it was sampled.

    tokens = Tokens()
    tokens.add_turn(prompt_ids, completion_ids, logprobs)     # once per turn

A prompt that continues the sequence so far (previous prompt plus sampled tokens) only appends its new tail, masked
out. One that does not, because the chat template rewrote the history, begins a new sequence and is marked.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from treetune.errors import PolicyError


class TokenSequence(msgspec.Struct):
    ids: list[int] = []
    mask: list[int] = []
    """1 where the token was sampled by the policy, 0 where it was given to it."""
    logprobs: list[float] = []
    """The policy's log-probability of each sampled token, 0.0 elsewhere; empty where the policy gave none."""
    breaks_history: bool = False
    """The chat template rewrote what came before, so this sequence could not continue the one before it."""


class Tokens(msgspec.Struct):
    sequences: list[TokenSequence] = []

    def add_turn(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], logprobs: Sequence[float] | None
    ) -> None:
        if logprobs is not None and len(logprobs) != len(completion_ids):
            raise PolicyError(f"{len(logprobs)} logprobs for {len(completion_ids)} sampled tokens")
        sequence = self._continued_by(prompt_ids, logprobs is not None)
        given = prompt_ids[len(sequence.ids) :]
        sequence.ids += [*given, *completion_ids]
        sequence.mask += [0] * len(given) + [1] * len(completion_ids)
        if logprobs is not None:
            sequence.logprobs += [0.0] * len(given) + list(logprobs)

    def _continued_by(self, prompt_ids: Sequence[int], with_logprobs: bool) -> TokenSequence:
        last = self.sequences[-1] if self.sequences else None
        if last is not None:
            continues = list(prompt_ids[: len(last.ids)]) == last.ids
            if continues and with_logprobs == bool(last.logprobs):
                return last
            self.sequences.append(TokenSequence(breaks_history=not continues))
        else:
            self.sequences.append(TokenSequence())
        return self.sequences[-1]
