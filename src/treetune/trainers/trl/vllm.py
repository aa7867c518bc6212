"""Client for the vLLM server to which an AsyncGRPOTrainer publishes its weights: tokens in, tokens out.

server = PolicyServer.of(args)                 # of an AsyncGRPOConfig
await server.learn(version)                  # which models it has, and how long a prompt may be
ids, logprobs = await server.sample(prompt_ids, version)
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from typing import Any

from treetune.errors import EndpointRefusal, PolicyError, UsageError
from treetune.models import EndpointConfig
from treetune.models.endpoint import Endpoint

ADAPTER = "trl-policy"
"""TRL's name for the adapter that it publishes, followed by `-v` and the version of the weights."""
_PAUSE = 1.0
_REMEDY = (
    "is vLLM running there? AsyncGRPOConfig says where (vllm_server_base_url) and how long to wait (request_timeout)"
)


class PolicyServer:
    def __init__(self, endpoint: Endpoint, sampling: dict[str, Any], wait: float) -> None:
        """`wait` is how many seconds the server may take to come up."""
        self._endpoint, self._sampling, self._wait = endpoint, sampling, wait
        self._model = ""
        self._has_adapters = False
        self.context: int | None = None
        """The token limit for a prompt and its answer."""

    @classmethod
    def of(cls, args: Any, patience: float) -> PolicyServer:
        """Return the server that an `AsyncGRPOConfig` names, with its sampling settings; requests are retried for
        `patience` seconds."""
        config = EndpointConfig(
            base_url=f"{args.vllm_server_base_url.rstrip('/')}/v1",
            timeout=float(args.request_timeout),
            max_retries=int(math.log2(2 * patience + 1)),  # the pauses double, starting at half a second
            max_connections=max(1, args.max_inflight_tasks),
        )
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        sampling = {name: value for name in names if (value := getattr(args, name)) is not None}
        sampling["max_tokens"] = args.max_completion_length
        return cls(Endpoint(config), sampling, float(args.vllm_server_timeout))

    async def close(self) -> None:
        await self._endpoint.close()

    async def learn(self, version: int) -> None:
        """Ask which models the server has; wait until it is up."""
        until = time.monotonic() + self._wait
        while True:
            try:
                models = (await self._endpoint.get("/models"))["data"]
                break
            except EndpointRefusal:
                raise
            except PolicyError as error:
                if time.monotonic() > until:
                    error.remedy = _REMEDY
                    raise
                await asyncio.sleep(_PAUSE)
        base = [model for model in models if not model.get("parent")]
        if not base:
            raise UsageError(f"{self._endpoint.url} serves no model", remedy="start it with `vllm serve MODEL`")
        self._model, self.context = base[0]["id"], base[0].get("max_model_len")
        self._has_adapters = any(model["id"] == f"{ADAPTER}-v{version}" for model in models)

    async def sample(self, prompt: list[int], version: int) -> tuple[list[int], list[float]]:
        """Sample one answer to a prompt. If the server has adapters, with the weights of `version`, else with its
        latest."""
        model = f"{ADAPTER}-v{version}" if self._has_adapters else self._model
        # Without an individual seed, the same prompt may get the same answer from several engines.
        asked = {"model": model, "prompt": prompt, "n": 1, "seed": random.getrandbits(63)}
        wanted = {"return_token_ids": True, "logprobs": 0}
        try:
            answer = await self._endpoint.post("/completions", {**self._sampling, **asked, **wanted})
        except PolicyError as error:
            error.remedy = _REMEDY
            raise
        try:
            (choice,) = answer["choices"]
            ids, logprobs = list(choice["token_ids"]), list(choice["logprobs"]["token_logprobs"])
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(
                f"{self._endpoint.url} sent no tokens: {answer!r:.300}",
                remedy="serve the model with a recent vLLM",
            ) from error
        if choice.get("finish_reason") == "abort":
            raise PolicyError(f"{self._endpoint.url} broke an answer off")
        return ids, logprobs
