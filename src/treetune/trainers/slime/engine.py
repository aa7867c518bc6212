"""Calls SGLang as slime does: tokens in, tokens out, and a `Sample` that grows by exactly these tokens.

engine = Engine(args, sample, sampling_params, ...)
await TokenEpisode(chat, hooks, episode, engine.sample).play()
engine.samples              # one, or more if history was rewritten
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from typing import Any

from treetune.chat.sampled_tokens import check_ids, check_logprobs
from treetune.chat.tokens import Prompt
from treetune.errors import PolicyError, format_error
from treetune.trainers.token_episode import Sampled


class Aborted(Exception):
    """Raised when slime has stopped its servers. What was sampled so far may continue after the next weight update."""


class Engine:
    def __init__(
        self,
        args: Any,
        sample: Any,
        sampling_params: dict[str, Any],
        state: Any,
        context: int | None,
        timeout: float,
    ) -> None:
        """`sample` has no tokens yet, `state` is slime's `GenerateState`, and `context` is the token limit for a prompt
        with its answer."""
        self._args, self._params, self._state = args, sampling_params, state
        self._context, self._timeout = context, timeout
        self._first = copy.deepcopy(sample)
        self.samples = [sample]
        self.seconds = 0.0
        """The time spent on sampling."""
        self._cut: tuple[list[int], list[float]] = [], []
        """The part of an answer that was sampled before an abort."""
        if sample.session_id is None:  # one id for all turns, so that they reach the same server and its cache
            sample.session_id = str(uuid.uuid4())
        by_session = getattr(args, "router_policy", None) == "consistent_hashing"
        self._headers = {"X-SMG-Routing-Key": sample.session_id} if by_session else None

    def go_on(self, sampling_params: dict[str, Any]) -> None:
        """Continue after an abort, in another call by slime."""
        self._params = sampling_params

    def mask_all(self) -> None:
        """Exclude the tokens sampled so far from training: the weights have changed."""
        for sample in self.samples:
            sample.loss_mask = [0] * sample.response_length

    async def sample(self, prompt: Prompt) -> Sampled | None:
        """Sample an answer; None if there is no room for one."""
        if self._state.aborted:
            raise Aborted
        said, logprobs = self._cut
        ids = prompt.ids + said
        if (opened := self._open(ids)) is None:
            return None
        sample, room = opened
        output = await self._post(ids, room)
        meta = output["meta_info"]
        new = meta.get("output_token_logprobs") or []
        tokens = check_ids([entry[1] for entry in new], "sampled token")
        their_logprobs = check_logprobs([entry[0] for entry in new])
        sample.append_response_tokens(
            self._args, tokens=tokens, log_probs=their_logprobs, meta_info=meta, text=output.get("text") or ""
        )
        said, logprobs = said + tokens, logprobs + their_logprobs
        if (meta.get("finish_reason") or {}).get("type") == "abort":
            self._cut = said, logprobs
            raise Aborted
        self._cut = [], []
        return Sampled(said, logprobs)

    def _open(self, ids: list[int]) -> tuple[Any, int | None] | None:
        """Return the sample that a prompt continues, with the added tokens, and the token limit for the answer. If
        history was rewritten, it is a new sample. None if there is no room for an answer."""
        sample = self.samples[-1]
        if sample.tokens and ids[: len(sample.tokens)] != sample.tokens:
            sample = copy.deepcopy(self._first)
        added = ids[len(sample.tokens) :] if sample.tokens else []
        # A response holds all turns of an episode, and everything between them.
        most = self._params.get("max_new_tokens")
        limits = [] if most is None else [most - sample.response_length - len(added)]
        if self._context is not None:
            limits.append(self._context - len(ids))
        room = min(limits, default=None)
        if room is not None and room < 1:
            return None
        if not sample.tokens:
            sample.tokens = list(ids)
        if added:
            text = self._state.tokenizer.decode(added)
            sample.append_response_tokens(self._args, tokens=added, trainable=False, text=text)
        if sample is not self.samples[-1]:
            self.samples.append(sample)
        return sample, room

    async def _post(self, ids: list[int], room: int | None) -> dict[str, Any]:
        from slime.utils.http_utils import post

        args = self._args
        asked: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": self._params if room is None else {**self._params, "max_new_tokens": room},
            "return_logprob": True,
        }
        if getattr(args, "use_rollout_routing_replay", False):
            asked["return_routed_experts"] = True
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                output = await post(
                    f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", asked, headers=self._headers
                )
        except TimeoutError:
            raise PolicyError(
                f"SGLang did not answer within {self._timeout:g} seconds", remedy="allow more: treetune.model_timeout"
            ) from None
        except Exception as error:
            raise PolicyError(f"SGLang does not answer: {format_error(error)}") from error
        finally:
            self.seconds += time.perf_counter() - began
        if not isinstance(output, dict) or "meta_info" not in output:
            raise PolicyError(f"SGLang gave no tokens: {output!r:.200}")
        return output
