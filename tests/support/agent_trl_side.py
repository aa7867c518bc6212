"""Runs in TRL's virtual environment: its trainers train on what an agent played. What samples is
`agent_session.sample`, in place of a model that would say nothing of use; the batches and the training are TRL's."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import agent_session
import sides
import torch
import trl_async_side
import vllm_stand_in
from real_letters import letters_tokenizer
from trl.experimental.async_grpo import packing
from trl_side import BATCH, GROUP, rows_of, train

from datasets import Dataset
from treetune.trainers.trl import TrlTasks


def make_tokenizer() -> Any:
    tokenizer = letters_tokenizer()
    tokenizer.padding_side, tokenizer.chat_template = "left", agent_session.TEMPLATE
    return tokenizer


def play(agent: str, error: str | None = None) -> dict[str, Any]:
    """The rows of a batch of GRPOTrainer, those of an episode alone, and how many prompts were sampled together."""
    folder, tokenizer, batches, columns = Path(tempfile.mkdtemp()), make_tokenizer(), [], []

    def generate(prompts: list[list[int]], trainer: Any) -> Any:
        batches.append(len(prompts))
        if error is not None:
            raise ValueError(error)
        said = [agent_session.sample(tokenizer, prompt) for prompt in prompts]
        return [ids for ids, _ in said], [logprobs for _, logprobs in said]

    with TrlTasks(agent_session.TARGET, agent=agent, generate=generate) as tasks:
        given = tasks.trainer_arguments(1)
        rows = Dataset.from_list([*given["train_dataset"]] * (BATCH // GROUP))
        play_all = tasks.rollout

        def rollout(prompts: Any, trainer: Any) -> Any:
            columns.append(play_all(prompts, trainer))
            return columns[-1]

        tasks.rollout = rollout
        try:
            seen, _ = train(folder, tokenizer, tasks, rows, steps=1)
        except Exception as raised:
            return {"raised": f"{type(raised).__name__}: {raised}", "batches": batches}
        warned = sorted(tasks._log._warned)
    ((batch, _),) = seen.batches
    (said,) = columns
    found = []
    for at, (ids, mask) in enumerate(rows_of(batch)):
        logprobs = [0.0] * len(said["prompt_ids"][at]) + said["logprobs"][at]
        reward = seen.rewards[0][at]
        found.append({"rollout": at, "ids": ids, "mask": mask, "logprobs": logprobs, "reward": reward})
    return {"rows": found, "alone": agent_session.alone(tokenizer), "batches": batches, "warned": warned}


def play_async(agent: str) -> dict[str, Any]:
    """The samples that AsyncGRPOTrainer trained on."""
    folder, tokenizer = Path(tempfile.mkdtemp()), make_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    with (
        mock.patch.object(trl_async_side, "letters_tokenizer", make_tokenizer),
        mock.patch.object(torch.cuda, "get_device_name", return_value="cpu"),
        mock.patch.object(packing, "_flash_attn", return_value=trl_async_side.FlashAttention),
        vllm_stand_in.running(folder, str(folder / "tokenizer")) as vllm,
        TrlTasks(agent_session.TARGET, agent=agent) as tasks,
    ):
        seen, _, _ = trl_async_side.train(folder, tasks, vllm.url, 1, steps=1)
    rows = [
        {
            "ids": one.input_ids.tolist(), "mask": one.completion_mask.tolist(), "logprobs": one.old_log_probs.tolist(),
            "reward": one.metrics.get("reward"), "group": one.group_id,
        }
        for one in seen
    ]  # fmt: skip
    return {"rows": rows, "alone": agent_session.alone(tokenizer)}


if __name__ == "__main__":
    sides.answer(play, play_async)
