"""Runs a causal language model in this process: sampled tokens with their own logprobs, no server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from treetune.chat.tokens import ChatTokens, Tokens
from treetune.core.policy import Completion, Policy, Request, Sampling, Usage
from treetune.errors import ContextFullError, MissingExtraError, UsageError
from treetune.system.hub import fetch_model, is_hub_name
from treetune.system.threads import call

DEFAULT_MAX_TOKENS = 256
_SCORED_AT_ONCE = 256
"""The number of tokens of a pass in `score`; each needs a row of logits."""


def find_model(path: str) -> Path | None:
    """Return the folder or file of a model; None if the name can only be one on the hub."""
    where = Path(path).expanduser()
    if where.exists():
        return where
    if not is_hub_name(path):
        remedy = "local: takes a Hugging Face folder, a .gguf file, or a name on the hub (ORG/NAME)"
        raise UsageError(f"no model at {path}", remedy=remedy)
    return None


class LocalPolicy(Policy):
    """A Hugging Face model folder, a .gguf file, or a hub model, in float32. It makes one completion at a time."""

    def __init__(self, path: str, call_format: str | None = None) -> None:
        """`call_format`: how the model writes tool calls, if its chat template does not show it."""
        where = find_model(path)
        try:
            import torch
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError:
            raise MissingExtraError.of("torch or transformers", "local") from None
        where = where or fetch_model(path)
        options: dict[str, Any] = {"local_files_only": True}
        if where.is_file():
            options["gguf_file"] = where.name
            where = where.parent
        self.name = f"local:{path}"
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(where), **options)
        self._chat = ChatTokens(self.tokenizer, call_format=call_format)
        self.model: Any = AutoModelForCausalLM.from_pretrained(str(where), dtype=torch.float32, **options).eval()
        self.context: int | None = getattr(self.model.config, "max_position_embeddings", None)
        ends = self.model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self._end_ids = {end for end in [*ends, self.tokenizer.eos_token_id] if end is not None}
        self._busy = asyncio.Lock()

    async def complete(self, request: Request) -> Completion:
        await self._busy.acquire()
        generating = asyncio.ensure_future(call(self.generate, request))
        generating.add_done_callback(lambda _: self._busy.release())
        # Shielded: a cancelled request keeps the model busy until its thread has finished.
        completion: Completion = await asyncio.shield(generating)
        return completion

    def generate(self, request: Request) -> Completion:
        sampling = request.sampling
        chat = self._chat.with_tools(request.tools)
        prompt = chat.next_prompt(request.messages, request.tokens or Tokens(), continues=request.continues)
        # A separate generator, so that torch's global one is not touched.
        rng = random.Random(None if sampling.seed is None else f"{sampling.seed}/{request.key}/{request.turn}")
        ids, logprobs, finish = self.sample(prompt.ids, sampling, rng)
        message = chat.read(prompt, ids, request.turn, sampling.stop)
        calls = bool(message.get("tool_calls"))
        return Completion(
            text=message["content"] or "",
            message=message if calls else None,
            finish_reason="tool_calls" if calls and finish == "stop" else finish,
            usage=Usage(len(prompt.ids), len(ids)),
            prompt_ids=prompt.ids,
            completion_ids=ids,
            logprobs=logprobs,
            prompt=prompt,
        )

    def sample(
        self,
        prompt_ids: list[int],
        sampling: Sampling,
        rng: random.Random,
        hear: Callable[[int, float], None] | None = None,
    ) -> tuple[list[int], list[float], str]:
        """Return the sampled tokens, their logprobs, and why the answer ended. `hear` receives each of them;
        if it raises, sampling stops."""
        import torch

        temperature = 1.0 if sampling.temperature is None else sampling.temperature
        top_p = 1.0 if sampling.top_p is None else sampling.top_p
        most = sampling.max_tokens or DEFAULT_MAX_TOKENS
        if self.context is not None:
            most = min(most, self.context - len(prompt_ids))
        if most < 1:
            raise ContextFullError(f"the prompt of {len(prompt_ids)} tokens fills the context of {self.context}")
        ids: list[int] = []
        logprobs: list[float] = []
        finish = "length"
        cache: Any = None
        feed = torch.tensor([prompt_ids])
        with torch.inference_mode():
            while len(ids) < most and finish == "length":
                output = self.model(input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache = output.past_key_values
                logits = output.logits[0, -1].double()
                token = _sample(logits, temperature, top_p, rng)
                ids.append(token)
                logprobs.append(float(logits[token] - logits.logsumexp(0)))
                feed = torch.tensor([[token]])
                if hear is not None:
                    hear(token, logprobs[-1])
                text = self.tokenizer.decode(ids, skip_special_tokens=True) if sampling.stop else ""
                if token in self._end_ids or any(stop in text for stop in sampling.stop):
                    finish = "stop"
        return ids, logprobs, finish

    def score(self, ids: list[int]) -> list[float]:
        """Return the logprob of each token after those before it, in a fresh pass; 0.0 for the first."""
        import torch

        logprobs, cache = [0.0], None
        with torch.inference_mode():
            for start in range(0, len(ids) - 1, _SCORED_AT_ONCE):
                part, following = ids[start : start + _SCORED_AT_ONCE], ids[start + 1 : start + 1 + _SCORED_AT_ONCE]
                output = self.model(input_ids=torch.tensor([part]), past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits = output.logits[0, : len(following)].double()
                chosen = logits.gather(1, torch.tensor(following)[:, None])[:, 0]
                logprobs += (chosen - logits.logsumexp(1)).tolist()
        return logprobs


def _sample(logits: Any, temperature: float, top_p: float, rng: random.Random) -> int:
    if temperature == 0:
        return int(logits.argmax())
    probabilities = (logits / temperature).softmax(0)
    if top_p < 1:
        ranked, order = probabilities.sort(descending=True)
        probabilities[order[ranked.cumsum(0) - ranked >= top_p]] = 0  # keep the token that crosses top_p
    total = probabilities.cumsum(0)
    drawn = int((total <= rng.random() * float(total[-1])).sum())
    return min(drawn, len(total) - 1)
