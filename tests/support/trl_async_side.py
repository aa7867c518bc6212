"""The rollout worker in the real TRL: run by tests/trainers/test_trl_async.py with the pytest of TRL's own environment.

Nothing here samples: a stand-in for vLLM says what it is told to, and takes no weights. The training itself is real
but for two things that want a GPU: the name of the device, and FlashAttention, which is done in plain torch here.
"""

from __future__ import annotations

from dataclasses import fields

import pytest
import tool_shop
import torch
import trl_speaker
import vllm_stand_in
from real_letters import letters_tokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from trl_side import Server, tiny

from treetune.core.order import derive_seed
from treetune.trainers.trl import TrlTasks

GROUP = 4


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "cpu")
    monkeypatch.setattr(packing, "_flash_attn", lambda: FlashAttention)


class FlashAttention:
    @staticmethod
    def flash_attn_varlen_func(query, key, value, starts_q, starts_k, *_, softmax_scale=None, **__):
        out = []
        bounds = [starts.tolist() for starts in (starts_q, starts_k)]
        groups = query.shape[1] // key.shape[1]
        for first, last, begin, end in zip(bounds[0], bounds[0][1:], bounds[1], bounds[1][1:], strict=False):
            keys, values = (x[begin:end].repeat_interleave(groups, 1).transpose(0, 1) for x in (key, value))
            mask = torch.ones(last - first, end - begin, dtype=torch.bool).tril((end - begin) - (last - first))
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[first:last].transpose(0, 1), keys, values, attn_mask=mask, scale=softmax_scale
            )
            out.append(attended.transpose(0, 1))
        return torch.cat(out)


class NoTransfer:
    """The stand-in has no weights to replace."""

    def init_weight_transfer(self): ...
    def pause(self): ...
    def send_weights(self, iterator): ...
    def resume(self): ...
    def destroy(self): ...


def train(tmp_path, tasks, url, num_tasks=1, first=0, *, steps=2, callbacks=(), **options):
    tokenizer = letters_tokenizer()
    place = str(tmp_path / "model")
    tiny(tokenizer).save_pretrained(place)
    tokenizer.save_pretrained(place)
    args = AsyncGRPOConfig(
        output_dir=str(tmp_path / "out"), max_steps=steps, num_generations=GROUP, max_completion_length=256,
        per_device_train_batch_size=GROUP, gradient_accumulation_steps=1, vllm_server_base_url=url, use_cpu=True,
        bf16=False, gradient_checkpointing=False, learning_rate=1e-2, report_to="none", save_strategy="no",
        max_inflight_tasks=GROUP, token_budget=-1, dataloader_pin_memory=False, disable_tqdm=True, **options,
    )  # fmt: skip
    given = tasks.async_trainer_arguments(place, args, num_tasks, first)
    worker = given["rollout_worker"]
    seen = []
    put = worker.rollout_buffer.put_nowait

    def note(sample):
        seen.append(sample)
        put(sample)

    worker.rollout_buffer.put_nowait = note
    trainer = AsyncGRPOTrainer(place, args=args, weight_transfer=NoTransfer(), callbacks=list(callbacks), **given)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    moved = [name for name, parameter in trainer.model.named_parameters() if not torch.equal(before[name], parameter)]
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())
    return seen, trainer, moved


def letters(text):
    """A text token by letter: not as the tokenizer would put it."""
    tokenizer = letters_tokenizer()
    ids = [id for letter in text for id in tokenizer(letter, add_special_tokens=False)["input_ids"]]
    return [*ids, tokenizer.eos_token_id]


def test_a_sample_of_theirs_has_the_fields_that_we_fill():
    theirs, ours = ([field.name for field in fields(cls)] for cls in (RolloutSample, trl_speaker.RolloutSample))
    assert theirs == ours


def test_tools_are_called_and_trained_on_as_they_were_sampled(tmp_path):
    target = tool_shop.write(tmp_path)
    answers = [letters(said.written()) for said in tool_shop.STORY]
    with vllm_stand_in.running(tmp_path, answers) as vllm, TrlTasks(target, call_format="hermes") as tasks:
        seen, trainer, _ = train(tmp_path, tasks, vllm.url, 1, first=1)
    seeds = [one["seed"] for one in vllm.asked]
    assert len({*seeds}) == len(seeds)
    assert {derive_seed(trainer.args.seed, f"0/{member}/0") for member in range(GROUP)} <= {*seeds}
    expected = tool_shop.expected(target)
    (whole,) = {tuple(one["prompt"] + one["ids"]) for one in vllm.asked if one["ids"] == answers[-1]}
    for sample in seen:
        mask = sample.completion_mask.astype(bool)
        assert tuple(sample.input_ids.tolist()) == whole  # what the model was given last, and said to it
        assert sample.input_ids[mask].tolist() == [id for answer in answers for id in answer]
        assert sample.metrics["reward"] == sum(turn.reward for turn in expected) == 1.0
        told = [message["content"] for message in sample.completion if message["role"] == "tool"]
        assert told == [text for turn in expected[:-1] for text in turn.shown]
    logs = trainer.state.log_history
    assert logs[0]["reward"] == 1.0
    assert logs[0]["rollout/turns_mean"] == 3


def test_several_turns_train_the_model_and_stale_samples_are_dropped(tmp_path):
    answers = [letters("a b"), letters("c"), letters("d")]

    class Told(TrlTasks):
        """Rewards that differ, so that there is something to learn."""

        count = 0

        def postprocess_reward(self, reward, num_turns, info):
            self.count += 1
            return float(self.count % 2)

    with vllm_stand_in.running(tmp_path, answers) as vllm, Told("alphabet-sort") as tasks:
        seen, trainer, moved = train(tmp_path, tasks, vllm.url, 2, steps=3, max_staleness=0)
    assert moved
    assert {sample.model_version for sample in seen} >= {1, 2}
    assert {abs(round(sample.advantage, 3)) for sample in seen} == {1.0}
    assert all(log["num_turns"] == 3 for log in trainer.state.log_history[:3])
    for sample in seen:
        assert sample.input_ids[sample.completion_mask.astype(bool)].tolist() == [id for one in answers for id in one]


def test_a_task_server_that_dies_ends_the_training_with_its_reason(tmp_path):
    server = Server("alphabet-sort")

    class Killing(TrlTasks):
        """The server dies with its first episode."""

        def postprocess_reward(self, reward, num_turns, info):
            server.kill()
            return 1.0

    try:
        with vllm_stand_in.running(tmp_path, [letters("a")]) as vllm, Killing(server.url, patience=0.2) as tasks:
            with pytest.raises(RuntimeError, match="no episode gave a reward"):
                train(tmp_path, tasks, vllm.url, 2, steps=50, heartbeat_stale_after_s=1.0)
            assert tasks.failures
    finally:
        server.kill()
