"""AReaL: a workflow that trains on any task server.

    trainer.train(
        workflow="treetune.trainers.areal.TaskServerWorkflow",
        workflow_kwargs={"gconfig": config.gconfig, "tokenizer": config.tokenizer_path, "url": "http://127.0.0.1:5000"},
    )

Each call of `arun_episode` plays one episode. A trajectory holds exactly the tokens that were sampled.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from treetune.chat.tokens import ChatTokens, Prompt, Rewrites, TokenSequence
from treetune.core.contract import Contract
from treetune.errors import MissingExtraError, PolicyError
from treetune.serve import ServeError, TaskServerClient
from treetune.trainers.episodes import connect
from treetune.trainers.token_episode import FailureLog, Hooks, Sample, Sampled, play_episode

try:
    import numpy as np
    import torch
    from areal import workflow_context
    from areal.api import ModelRequest, RolloutWorkflow
    from areal.utils import logging, stats_tracker
except ImportError as error:
    raise MissingExtraError(
        f"AReaL cannot be imported: {error}", remedy="install areal as its guide describes"
    ) from error

log = logging.getLogger("TaskServerWorkflow")


class TaskServerWorkflow(Hooks, RolloutWorkflow):  # type: ignore[misc]
    FOREIGN = Contract(turn_discount=0.95)

    def __init__(
        self,
        gconfig: Any,
        tokenizer: Any,
        url: str | Sequence[str],
        *,
        max_turns: int | None = None,
        turn_discount: float | None = None,
        rewrites: Rewrites = "keep",
        chat_template_kwargs: dict[str, Any] | None = None,
        call_format: str | None = None,
        token_env: str = "TREETUNE_TOKEN",
        timeout: float = 600.0,
        patience: float = 60.0,
    ) -> None:
        """`url` is one or more task servers. `max_turns` and `turn_discount` replace what they declare; the reward of a
        server that declares nothing is multiplied by 0.95 for each turn. `call_format` is how the model writes tool
        calls, if its chat template does not show it. `token_env` names the variable with the servers' token. `timeout`
        applies to one step, `patience` to a server that does not answer."""
        super().__init__(max_turns, turn_discount)
        if isinstance(tokenizer, str):
            from areal.utils.hf_utils import load_hf_tokenizer

            tokenizer = load_hf_tokenizer(tokenizer)
        self.tokenizer = tokenizer
        self.gconfig = gconfig.new_with_stop_and_pad_token_ids(tokenizer).new(n_samples=1)
        self._in_groups = gconfig.n_samples > 1
        self._chat = ChatTokens(tokenizer, chat_template_kwargs, rewrites=rewrites, call_format=call_format)
        urls = (url,) if isinstance(url, str) else tuple(url)
        self._access = urls, token_env, timeout, patience

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, torch.Tensor] | None:
        """Return a trajectory, or None if there is nothing to train on."""
        client, failures = open_servers(asyncio.get_running_loop(), *self._access)
        stats = stats_tracker.get(workflow_context.stat_scope())
        try:
            index = data.get("task_index", data.get("index"))
            if index is None and self._in_groups:
                failures.warn_once("rows without a task_index: the episodes of one group are of different tasks")
            played = await play_episode(
                lambda: client.start(None if index is None else int(index), step=engine.get_version()),
                self._chat,
                self,
                self._sampler(engine),
                longest_prompt=self.gconfig.max_tokens - 1,
                attempts=1,
            )
            if played.failure is not None:
                raise played.failure
        except (ServeError, PolicyError) as error:
            failures.add(error)
            stats.scalar(task_server_failure=1.0)
            return None
        stats.scalar(task_server_failure=0.0)
        if (reward := played.reward) is None:
            return None
        sequences = played.tokens.sequences
        if len(sequences) > 1:
            group = ", and a group of a fixed size (reward_norm, adv_norm) no longer fits; rewrites='keep' avoids it"
            split = "the chat template rewrites history: such episodes become several rows"
            failures.warn_once(split + group * self._in_groups)
        stats.scalar(
            reward=reward,
            num_turns=played.turns,
            realigned_turns=sum(sequence.realigned for sequence in sequences),
            split_sequences=len(sequences) - 1,
        )
        stats.scalar(**played.metrics)
        return tensors(sequences, reward)

    def _sampler(self, engine: Any) -> Sample:
        request = uuid.uuid4().hex  # one for all turns, so that they find the same inference server and its cache

        async def sample(prompt: Prompt) -> Sampled:
            asked = {"rid": request, "input_ids": list(prompt.ids), "gconfig": self.gconfig.new()}
            said = await engine.agenerate(ModelRequest(**asked, tokenizer=self.tokenizer))
            versions, given = list(said.output_versions), list(said.input_tokens)
            return Sampled(list(said.output_tokens), list(said.output_logprobs), versions, given)

        return sample


def tensors(sequences: Sequence[TokenSequence], reward: float) -> dict[str, torch.Tensor]:
    """Return the data that AReaL trains on: one row per sequence, padded on the right, all with the episode's
    reward."""
    shape = len(sequences), max(len(sequence.ids) for sequence in sequences)

    def rows(name: str, dtype: Any, padding: float) -> torch.Tensor:
        filled = np.full(shape, padding, dtype=dtype)  # numpy reads lists three times as fast as torch
        for row, sequence in zip(filled, sequences, strict=True):
            values = getattr(sequence, name)
            row[: len(values)] = values
        return torch.from_numpy(filled)

    lengths = torch.tensor([len(sequence.ids) for sequence in sequences])
    return {
        "input_ids": rows("ids", np.int32, 0),
        "loss_mask": rows("mask", np.int32, 0),
        "logprobs": rows("logprobs", np.float32, 0.0),
        "versions": rows("versions", np.int32, -1),
        "attention_mask": torch.arange(shape[1])[None, :] < lengths[:, None],
        "rewards": torch.full(shape[:1], reward, dtype=torch.float32),
    }


@lru_cache(maxsize=16)
def open_servers(
    loop: asyncio.AbstractEventLoop, urls: tuple[str, ...], token_env: str, timeout: float, patience: float
) -> tuple[TaskServerClient, FailureLog]:
    """Return the client of a run's task servers and the log of their failures. AReaL creates a workflow for every
    episode, so both are kept here, per event loop."""
    from areal.infra.utils.concurrent import register_loop_cleanup

    client = connect(urls, token_env, timeout, patience)
    register_loop_cleanup(client.close)
    return client, FailureLog(log)
