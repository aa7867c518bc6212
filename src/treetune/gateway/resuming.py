"""A `ResumingSampler` continues calls that the engine, or a pause of the weights, has aborted.

    sampler = ResumingSampler(HttpSampler(...), weights)

A call waits while the weights are paused. An aborted one continues from its tokens, so that a stream repeats no text,
and each token has the version of the weights that sampled it.
"""

from __future__ import annotations

import asyncio

import msgspec

from treetune.chat.tokens import Prompt
from treetune.core.policy import Sampling
from treetune.errors import PolicyError
from treetune.gateway.call import Hear, Sampled, Sampler, join
from treetune.play.weights import MOST_ABORTS, Weights, wait_after_abort


class ResumingSampler:
    def __init__(self, sampler: Sampler, weights: Weights) -> None:
        self._sampler, self._weights = sampler, weights

    @property
    def context(self) -> int | None:
        return self._sampler.context

    async def __call__(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        weights, parts = self._weights, list[Sampled]()
        for number in range(MOST_ABORTS):
            part = await self._sample(prompt, sampling, hear)
            parts.append(part)
            if part.finish != "abort":
                return part if len(parts) == 1 else join(parts)
            if part.ids is None and hear is not None and part.text:
                raise PolicyError("the engine aborted a stream without token ids, which cannot be continued")
            if part.ids is None:
                parts.pop()
            elif part.ids:
                prompt = prompt._replace(ids=prompt.ids + part.ids)
                if sampling.max_tokens is not None:
                    left = sampling.max_tokens - len(part.ids)
                    if left < 1:
                        return join([*parts, Sampled([], finish="length")])
                    sampling = msgspec.structs.replace(sampling, max_tokens=left)
            if not weights.paused:
                await asyncio.sleep(wait_after_abort(number))
        raise PolicyError(f"the engine aborted a call {MOST_ABORTS} times in a row")

    async def _sample(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        """Sample once. What a stream had passed on when a pause aborted it is kept."""
        weights, heard = self._weights, list[Sampled]()
        if weights.paused:
            await weights.wait()

        def listen(part: Sampled) -> None:
            heard.append(part)
            if hear is not None:
                hear(part)

        version, call = weights.version, weights.begin_call()
        try:
            sampled = await self._sampler(prompt, sampling, None if hear is None else listen)
        except asyncio.CancelledError:
            if not weights.was_aborted(call):
                raise
            sampled = join([*heard, Sampled([], finish="abort")])
        else:
            weights.counts["aborted_calls"] += sampled.finish == "abort"
        finally:
            weights.end_call(call)
        if sampled.versions is not None:
            weights.reach(max(sampled.versions, default=-1))
        elif version is not None:
            return sampled._replace(versions=[version] * len(sampled.ids or ()))
        return sampled
