"""Runs in TRL's virtual environment: the advantages that EpisodeTrainer gives the turns of episodes, and the gradient
that TRL's loss makes of them.

    python trl_credit_side.py answer                        # sides.py
    torchrun --nproc-per-node 2 trl_credit_side.py FOLDER   # a group in two processes; RANK.json has what each gave

The sampler says what it is told to; the trainer and its loss are TRL's own.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import chain, cycle
from pathlib import Path
from typing import Any
from unittest import mock

import paid_turns
import sides
import torch
from real_letters import letters_tokenizer
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl_async_side import FlashAttention, NoTransfer
from trl_side import tiny

from datasets import Dataset
from treetune.trainers.trl import TrlTasks
from treetune.trainers.trl.episode_trainer import EpisodeTrainer
from treetune.trainers.trl.worker import PolicyServer


class Script:
    """A sampler: each episode says the next of its answers, until they are at an end."""

    def __init__(self, answers: list[list[str]], tokenizer: Any) -> None:
        self._answers, self._tokenizer, self._turn = answers, tokenizer, 0

    def __call__(self, prompts: list[list[int]], trainer: Any) -> tuple[list[list[int]], None]:
        said = [each[self._turn] for each in self._answers if len(each) > self._turn]
        said += said[:1] * (len(prompts) - len(said))  # another process has more episodes
        self._turn += 1
        return [ids_of(text, self._tokenizer) for text in said], None


def ids_of(text: str, tokenizer: Any) -> list[int]:
    if text.startswith(paid_turns.WITHOUT_TOKENS):
        return []
    return [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]


def train(target: str, answers: list[list[str]], size: int, settings: dict[str, Any], theirs: bool) -> Any:
    """Take a step on episodes that are in groups of this size; return the trainer with its first batch."""
    tokenizer = letters_tokenizer()
    tokenizer.padding_side = "left"
    tasks = TrlTasks(target, generate=Script(answers, tokenizer))
    rows = Dataset.from_list([*tasks.dataset(1)] * len(answers))
    chosen = {
        "output_dir": tempfile.mkdtemp(), "use_cpu": True, "bf16": False, "gradient_checkpointing": False,
        "per_device_train_batch_size": len(answers), "num_generations": size, "max_completion_length": 6,
        "max_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True, **settings,
    }  # fmt: skip
    args = GRPOConfig(**chosen)
    trainer_class = GRPOTrainer if theirs else EpisodeTrainer
    trainer = trainer_class(
        tiny(tokenizer).double(), args=args, processing_class=tokenizer, train_dataset=rows, reward_funcs=tasks.reward,
        rollout_func=tasks.rollout,
    )  # fmt: skip
    score = trainer._generate_and_score_completions

    def scoring(inputs: Any) -> Any:
        trainer.first_batch = score(inputs)
        return dict(trainer.first_batch)

    trainer._generate_and_score_completions = scoring
    trainer.train()
    return trainer


def advantages(
    target: str, *, groups: list[list[list[str]]], settings: dict[str, Any] | None = None, theirs: bool = False
) -> dict[str, Any]:
    """By group and episode, the advantage and the gradient of each trained token, a list for each run of them; and how
    many steps there were. `theirs`: with TRL's own GRPOTrainer."""
    answers = [episode for group in groups for episode in group]
    trainer = train(target, answers, len(groups[0]), settings or {}, theirs)
    batch = trainer.first_batch
    mask = batch["completion_mask"] * batch["tool_mask"]
    given = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"][:, None] * mask
    logprobs = torch.zeros(mask.shape, dtype=torch.float64, requires_grad=True)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None)
    trainer.model.train()
    (gradient,) = torch.autograd.grad(trainer._compute_loss(trainer.model, batch), logprobs)
    runs = [
        [[given[at, first:end].tolist(), gradient[at, first:end].tolist()] for first, end in _runs(mask[at].tolist())]
        for at in range(len(mask))
    ]
    size = len(groups[0])
    turns = [runs[first : first + size] for first in range(0, len(runs), size)]
    return {"turns": turns, "steps": trainer.state.global_step}


def async_advantages(target: str, *, groups: list[list[list[str]]]) -> dict[str, Any]:
    """By group and episode, the advantage of each run of tokens that a sample of AsyncGRPO trains; and how many steps
    TRL's own trainer took on them."""
    tokenizer, place = letters_tokenizer(), tempfile.mkdtemp()
    tiny(tokenizer).save_pretrained(place)
    tokenizer.save_pretrained(place)
    args = AsyncGRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=1, num_generations=len(groups[0]), max_completion_length=64,
        gradient_accumulation_steps=1, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", max_inflight_tasks=1, token_budget=4096, dataloader_pin_memory=False, disable_tqdm=True,
    )  # fmt: skip
    answers = cycle(chain.from_iterable(episode for group in groups for episode in group))  # one after the other

    async def sample(server: Any, prompt: list[int], version: int, seed: int) -> tuple[list[int], list[float]]:
        ids = ids_of(next(answers), tokenizer)
        return ids, [-1.0] * len(ids)

    async def learn(server: Any, version: int) -> None: ...

    with (
        mock.patch.multiple(PolicyServer, sample=sample, learn=learn),
        mock.patch.object(packing, "_flash_attn", return_value=FlashAttention),
        mock.patch("torch.cuda.get_device_name", return_value="cpu"),
        TrlTasks(target) as tasks,
    ):
        given = tasks.async_trainer_arguments(place, args, len(groups))
        buffer, samples = given["rollout_worker"].rollout_buffer, []
        put = buffer.put_nowait
        buffer.put_nowait = lambda one: (put(one), samples.append(one))
        trainer = AsyncGRPOTrainer(place, args=args, weight_transfer=NoTransfer(), **given)
        trainer.train()
    turns: list[list[list[Any]]] = [[] for _ in groups]
    for one in samples:
        if one.group_id >= len(groups):
            break
        if one.metrics:  # the first sample of an episode
            turns[one.group_id].append([])
        runs = _runs(one.completion_mask.tolist())
        turns[one.group_id][-1] += [[first, [one.advantage] * (end - first)] for first, end in runs]
    found = [[[[run] for _, run in sorted(episode)] for episode in group] for group in turns]
    return {"turns": found, "steps": trainer.state.global_step}


def fault(target: str, *, settings: dict[str, Any] | None = None, theirs: bool = False, says: Any = None) -> str:
    """What is refused in a training that would play two episodes."""
    answers = [says or paid_turns.says([0.5, 1.0])] * 2
    try:
        train(target, answers, 2, settings or {}, theirs)
    except Exception as error:
        return f"{getattr(error, 'code', None)}: {error}"
    return ""


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    edges = [at for at, (one, other) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


if __name__ == "__main__" and sys.argv[1] == "answer":
    sides.answer(advantages, async_advantages, fault)
elif __name__ == "__main__":
    import os

    rank, folder = int(os.environ["RANK"]), Path(sys.argv[1])
    answers = [paid_turns.says(rewards) for rewards in paid_turns.GROUP][2 * rank : 2 * rank + 2]
    chosen = {"per_device_train_batch_size": 2, "num_generations": 4}
    trained = train(str(folder / "paid_turns_tasks.py:ByTurn"), answers, 4, chosen, theirs=False)
    batch = trained.first_batch
    mine = [
        row[kept.bool()].tolist()
        for row, kept in zip(batch["advantages"], batch["completion_mask"] * batch["tool_mask"], strict=True)
    ]
    (folder / f"{rank}.json").write_text(json.dumps(mine))
