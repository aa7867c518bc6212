"""What TRL makes of the rows of an episode: the losses of its GRPOTrainer, and of its asynchronous trainer from the
samples that it is given to its micro-batches."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache, partial
from itertools import pairwise, starmap
from types import SimpleNamespace
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig
from trl.experimental.async_grpo.async_grpo_trainer import (
    AsyncGRPOTrainer,
    DataCollatorForRollout,
    TokenBudgetBatcher,
)

from datasets import Dataset
from treetune.chat.tokens import Span, Tokens, TokenSequence
from treetune.core.contract import Contract, Credit
from treetune.trainers.credit import Row, check_loss, row_advantages
from treetune.trainers.tiny_episodes import GROUP, LONGEST, VOCABULARY, TinyModel, TinyRow, cut_rows, pad
from treetune.trainers.trl.async_samples import EpisodeGroup
from treetune.trainers.trl.episode_trainer import EpisodeTrainer
from treetune.trainers.trl.rollouts import check_rows, check_settings
from treetune.trainers.weights import Case, Outcome

CREDITS: tuple[Credit, ...] = ("outcome", "turn")
LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo")


def cases() -> Iterator[Case]:
    for loss in LOSSES:
        for credit in CREDITS:
            yield Case(f"GRPOTrainer, {loss}", credit, partial(play_loss, loss=loss, credit=credit))
    for loss in ("luspo", "vespo"):
        yield Case(f"GRPOTrainer, {loss}", "turn", partial(play_loss, loss=loss, credit="turn"))
    yield Case("GRPOTrainer's rollouts", "outcome", play_rollouts)
    for credit in CREDITS:
        yield Case("AsyncGRPO", credit, partial(play_asynchronously, credit=credit))
    yield Case("AsyncGRPO, token_budget=-1", "turn", partial(play_asynchronously, credit="turn", token_budget=-1))


def play_rollouts(cuts: Sequence[int]) -> Outcome:
    """Hand the episodes to GRPOTrainer, which takes one row of each."""
    for count in cuts:
        check_rows(count)
    return play_loss(cuts, loss="dapo", credit="outcome")


def play_loss(cuts: Sequence[int], *, loss: str, credit: Credit) -> Outcome:
    check_loss(loss)
    trainer, rows = _trainer(loss), cut_rows(cuts)
    batch = [Row(row.group, row.episode, row.rewards, row.spans, len(row.ids), credit) for row in rows]
    ids, mask = pad(row.ids for row in rows), pad(row.mask for row in rows)
    there = pad([1] * len(row.ids) for row in rows)
    # The first token is the prompt: all rows have the same places.
    now, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, there, ids.shape[1] - 1)
    given = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": there[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": there[:, 1:],
        "tool_mask": mask[:, 1:],
        "advantages": pad(row_advantages(batch, loss, epsilon=1e-4)).double()[:, 1:],
        "old_per_token_logps": now.detach() - pad(row.old_log_probs for row in rows).double()[:, 1:],
        "num_items_in_batch": mask.sum().double(),
    }
    trainer.model.zero_grad()
    trainer._compute_loss(trainer.model, given).backward()
    gradient = torch.cat([part.grad.flatten() for part in trainer.model.parameters()])
    plain = row_advantages(batch, "dapo", epsilon=1e-4)
    advantages = {
        (row.episode, turn): own[first] for row, own in zip(rows, plain, strict=True) for turn, first, _ in row.spans
    }
    return Outcome(advantages, gradient)


@cache
def _trainer(loss: str) -> Any:
    tokenizer = Tokenizer(models.WordLevel({f"w{word}": word for word in range(VOCABULARY)}, unk_token="w0"))
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LONGEST, pad_token_id=0, **shape)
    with tempfile.TemporaryDirectory() as folder:
        settings = GRPOConfig(
            output_dir=folder,
            loss_type=loss,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            per_device_train_batch_size=GROUP,
            num_generations=GROUP,
        )
        trainer = EpisodeTrainer(
            LlamaForCausalLM(model).double(),
            args=settings,
            processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1"),
            train_dataset=Dataset.from_list([{"prompt": "w2"}] * GROUP),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def play_asynchronously(cuts: Sequence[int], *, credit: Credit, token_budget: int = 4096) -> Outcome:
    """Take the losses of the micro-batches that the samples of all groups become."""
    if credit == "turn":
        check_settings({"token_budget": token_budget})
    model, rows, samples = TinyModel(), cut_rows(cuts), []
    advantages: dict[tuple[int, int], float] = {}
    for number in range(len(cuts) // GROUP):
        group = EpisodeGroup(number, GROUP)
        for episode in range(number * GROUP, (number + 1) * GROUP):
            group.add(_episode([row for row in rows if row.episode == episode], credit))
        for sample in group.samples():
            ids = torch.tensor(sample.input_ids)
            old = model.log_probs(ids[None])[0].detach() - torch.tensor(sample.old_log_probs)
            mask = torch.tensor(sample.completion_mask)
            kept = {name: getattr(sample, name) for name in ("advantage", "group_id", "metrics")}
            samples.append({**kept, "input_ids": ids, "completion_mask": mask, "old_log_probs": old})
            for row in (row for row in rows if row.ids == sample.input_ids.tolist()):
                trained = (turn for turn, first, _ in row.spans if mask[first])
                advantages.update(((row.episode, turn), sample.advantage) for turn in trained)
    # A micro-batch ends with the first sample that has no room in it.
    whole = torch.zeros(token_budget, dtype=torch.long)
    samples.append({"input_ids": whole, "completion_mask": whole, "group_id": None})
    batches = TokenBudgetBatcher(samples, 1, token_budget, defaultdict(list))
    losses = [_asynchronous_loss(model, batch) for batch in batches]
    return Outcome(advantages, model.gradient(cast(torch.Tensor, sum(losses))), len(losses))


def _episode(rows: list[TinyRow], credit: Credit) -> Any:
    """Return an episode as it is after it was played."""
    sequences = [
        TokenSequence(row.ids, row.mask, row.old_log_probs, [0] * len(row.ids), spans=list(starmap(Span, row.spans)))
        for row in rows
    ]
    rewards = rows[0].rewards
    return SimpleNamespace(
        reward=sum(rewards),
        rewards=rewards,
        turns=len(rewards),
        shape_each=lambda turns: rewards,
        contract=Contract(credit=credit),
        tokens=Tokens(sequences),
        messages=[{"role": "assistant"}] * len(rewards),
        metrics={},
    )


def _asynchronous_loss(model: TinyModel, rows: list[Any]) -> torch.Tensor:
    """Return the loss of a micro-batch, in a trainer with one process that accumulates nothing."""
    batch = DataCollatorForRollout(pad_token_id=0).torch_call([rows])
    trainer = _Trainer(
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda value, **_: value, gather=lambda value: value),
        current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss: torch.Tensor = AsyncGRPOTrainer.compute_loss(trainer, _Forest(model), batch)
    return loss


class _Trainer(SimpleNamespace):
    def __getattr__(self, name: str) -> float:
        if name.startswith("_step_"):  # what it counts
            return 0.0
        raise AttributeError(name)


class _Forest:
    """Attention of plain torch: a token sees its path through TRL's tree of prefixes."""

    def __init__(self, model: TinyModel) -> None:
        self._model = model

    def __call__(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, shift_labels: torch.Tensor, **tree: Any
    ) -> Any:
        count = input_ids.shape[1]
        seen = torch.zeros(count, count, dtype=torch.bool)
        queries, keys = tree["tree_cu_seqlens_q"].tolist(), tree["tree_cu_seqlens_k"].tolist()
        for at, (first, end) in enumerate(pairwise(queries)):
            path = tree["tree_kv_index"][keys[at] : keys[at + 1]]
            for place in range(first, end):
                seen[place, path[path <= place]] = True
        said = self._model(input_ids, position_ids, seen).log_softmax(-1)
        log_probs = said.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0]
        return SimpleNamespace(log_probs=log_probs, entropy=-(said.exp() * said).sum(-1))
