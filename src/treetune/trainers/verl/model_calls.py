"""The calls of the model in one episode: verl's engine is given tokens and gives tokens.

calls = ModelCalls(server_manager.generate, sampling_params, prompt_length=1024, response_length=1024)
calls.begin()                              # for each attempt at the episode
said = await calls.sample(prompt)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

from treetune.chat.tokens import Prompt, TokenSequence
from treetune.serve import ServeError
from treetune.trainers.token_episode import Sampled

log = logging.getLogger("treetune.verl")


class ModelCalls:
    def __init__(
        self,
        generate: Callable[..., Awaitable[Any]],
        sampling_params: Mapping[str, Any],
        *,
        prompt_length: int,
        response_length: int,
        timeout: float | None = None,
        request_id: str | None = None,
        priority: int | None = None,
    ) -> None:
        """`request_id` names the episode where a run is to be repeatable; else each attempt has one of its own.
        `timeout` is for one call, in seconds."""
        self._generate, self._params = generate, sampling_params
        self._prompt_length, self._response_length = prompt_length, response_length
        self._timeout, self._given_id = timeout, request_id
        self._further = {} if priority is None else {"priority": priority}
        self.begin()

    def begin(self) -> None:
        """An episode begins, or begins again."""
        self._request_id = self._given_id or uuid4().hex
        self._longest: int | None = None
        self.fields: dict[str, Any] = {}
        """What the engine told: the versions of the weights that sampled the first token and the last."""
        self.seconds = 0.0
        self.preempted: int | None = None
        self._experts: list[Any] = []

    def longest_prompt(self) -> int | None:
        """What was given and sampled after the first prompt must fit into verl's response, with room for an answer."""
        return None if self._longest is None else self._longest - 1

    async def sample(self, prompt: Prompt) -> Sampled:
        ids = prompt.ids
        if self._longest is None:
            if len(ids) > self._prompt_length:  # as verl's own loops do
                log.warning("a prompt of %d tokens is cut to its last %d", len(ids), self._prompt_length)
                ids = ids[-self._prompt_length :]
            self._longest = len(ids) + self._response_length
        room = self._longest - len(ids)
        limits = {"max_tokens": min(room, self._params.get("max_tokens") or room)}
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                said = await self._generate(
                    request_id=self._request_id,
                    prompt_ids=ids,
                    sampling_params={**self._params, **limits},
                    **self._further,
                )
        except TimeoutError:
            remedy = "allow more: model_timeout"
            raise ServeError(f"the model gave no answer in {self._timeout} seconds", remedy=remedy) from None
        finally:
            self.seconds += time.perf_counter() - began
        self._note(said)
        wanted = self._params.get("logprobs") or said.log_probs
        return Sampled(list(said.token_ids), list(said.log_probs or ()) if wanted else None, prompt_ids=ids)

    def _note(self, said: Any) -> None:
        told = said.extra_fields or {}
        if not self.fields:
            self.fields = dict(told)
        elif told.get("max_global_steps") is not None:
            self.fields["max_global_steps"] = told["max_global_steps"]
        if said.num_preempted is not None:
            self.preempted = (self.preempted or 0) + said.num_preempted
        self._experts.append(said.routed_experts)

    def experts_of(self, sequences: Sequence[TokenSequence]) -> list[Any]:
        """The experts that the engine routed each sequence to, where it tells: its last turn has them all."""
        if not any(routed is not None for routed in self._experts):
            return [None] * len(sequences)
        found, turn = [], -1
        for sequence in sequences:
            starts = zip([0, *sequence.mask], sequence.mask, strict=False)
            turn += sum(1 for before, now in starts if now > before)
            found.append(self._experts[turn] if 0 <= turn < len(self._experts) else None)
        return found
