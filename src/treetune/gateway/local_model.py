"""`LocalSampler` samples with a model in this process, one call at a time."""

from __future__ import annotations

import asyncio
import random

from treetune.chat.tokens import Prompt
from treetune.core.policy import Sampling
from treetune.gateway.call import Hear, Sampled
from treetune.models.local import LocalPolicy
from treetune.system.threads import call


class _Stopped(Exception):
    """Ends the sampling of a call that was cancelled."""


class LocalSampler:
    def __init__(self, policy: LocalPolicy) -> None:
        self.context = policy.context
        self._policy, self._busy = policy, asyncio.Lock()

    async def __call__(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        loop, is_cancelled = asyncio.get_running_loop(), False

        def hear_token(token: int, logprob: float) -> None:
            if is_cancelled:
                raise _Stopped
            if hear is not None:
                loop.call_soon_threadsafe(hear, Sampled([token], [logprob]))

        async with self._busy:
            rng = random.Random(sampling.seed)
            sampling_task = asyncio.ensure_future(call(self._policy.sample, prompt.ids, sampling, rng, hear_token))
            try:
                ids, logprobs, finish = await asyncio.shield(sampling_task)
            except asyncio.CancelledError:
                is_cancelled = True
                await asyncio.wait([sampling_task])  # the model is free when its thread has stopped
                sampling_task.exception()
                raise
        return Sampled(ids, logprobs, finish)
