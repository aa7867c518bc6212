"""Samples with SGLang as slime does: tokens in, tokens out, and a `Sample` that grows by exactly these tokens."""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import Sequence
from typing import Any

from treetune.chat.sampled_tokens import check_ids, check_logprobs
from treetune.chat.tokens import Prompt, TokenSequence
from treetune.errors import PolicyError, format_error
from treetune.trainers.agents import Openings
from treetune.trainers.token_episode import Sampled


class Aborted(Exception):
    """Raised when slime has stopped its servers. The tokens sampled so far may be continued after the next weight
    update."""


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
        self.spans: list[list[tuple[int, int, int]]] = [[]]
        """The turns of each sample: (turn, first, end) in its response."""
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
        tokens, their_logprobs, output = await self._ask(ids, room)
        self._append(sample, tokens, their_logprobs, output)
        said, logprobs = said + tokens, logprobs + their_logprobs
        if _was_aborted(output):
            self._cut = said, logprobs
            raise Aborted
        self._cut = [], []
        end = sample.response_length
        self.spans[-1].append((sum(map(len, self.spans)), end - len(said), end))
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
        self._give(sample, added)
        if sample is not self.samples[-1]:
            self.samples.append(sample)
            self.spans.append([])
        return sample, room

    def _give(self, sample: Any, tokens: list[int]) -> None:
        if tokens:
            text = self._state.tokenizer.decode(tokens)
            sample.append_response_tokens(self._args, tokens=tokens, trainable=False, text=text)

    def _append(self, sample: Any, tokens: list[int], logprobs: list[float], output: dict[str, Any]) -> None:
        meta, text = output["meta_info"], output.get("text") or ""
        sample.append_response_tokens(self._args, tokens=tokens, log_probs=logprobs, meta_info=meta, text=text)

    async def _ask(self, ids: list[int], room: int | None) -> tuple[list[int], list[float], dict[str, Any]]:
        """Return the tokens of an answer, their logprobs, and everything that SGLang said."""
        output = await self._post(ids, room)
        new = output["meta_info"].get("output_token_logprobs") or []
        tokens = check_ids([entry[1] for entry in new], "sampled token")
        return tokens, check_logprobs([entry[0] for entry in new]), output

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
            raise PolicyError(f"SGLang returned no tokens: {output!r:.200}")
        return output


class AgentEngine(Engine):
    """Samples for an agent, whose calls may be of several conversations, and several at once. Its samples are written
    at the end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._openings = Openings()
        self._outputs: dict[int, dict[str, Any]] = {}
        """What SGLang said, by the hash of all tokens up to then."""
        self.aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when slime has stopped its servers."""

    async def sample(self, prompt: Prompt) -> Sampled | None:
        ids, most = prompt.ids, self._params.get("max_new_tokens")
        limits = [] if most is None else [self._openings.find(ids) + most - len(ids)]
        limits += [] if self._context is None else [self._context - len(ids)]
        room = min(limits, default=None)
        if room is not None and room < 1:
            return None
        if not self._state.aborted:
            tokens, logprobs, output = await self._ask(ids, room)
            if not _was_aborted(output):
                self._outputs[hash(tuple(ids + tokens))] = output
                return Sampled(tokens, logprobs)
        if not self.aborted.done():
            self.aborted.set_result(None)
        raise Aborted

    def write(self, sequences: Sequence[TokenSequence]) -> None:
        """Write a sample for each sequence; without any, one that trains nothing."""
        self.samples, self.spans = [], []
        end_token = self._state.tokenizer.eos_token_id
        for sequence in sequences or [TokenSequence([end_token, end_token])]:
            sample, spans, at = copy.deepcopy(self._first), list[tuple[int, int, int]](), 0
            first = sequence.spans[0].first if sequence.spans else 1
            sample.tokens, at = sequence.ids[:first], first
            for turn, first, end in sequence.spans:
                self._give(sample, sequence.ids[at:first])
                output = self._outputs[hash(tuple(sequence.ids[:end]))]
                self._append(sample, sequence.ids[first:end], sequence.logprobs[first:end], output)
                spans.append((turn, sample.response_length - (end - first), sample.response_length))
                at = end
            self._give(sample, sequence.ids[at:])
            self.samples.append(sample)
            self.spans.append(spans)


def _was_aborted(output: dict[str, Any]) -> bool:
    return (output["meta_info"].get("finish_reason") or {}).get("type") == "abort"
