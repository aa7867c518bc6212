"""Real steps of TRL on a CPU, as `treetune train trl` takes them: run in TRL's virtual environment.

    python trl_cpu_side.py ANSWER.json ARGUMENTS...      # those of `python -m treetune.trainers.trl`

For AsyncGRPO three things stand in for what wants a GPU: the name of the device, FlashAttention in plain torch, and new
weights, which reach vLLM by the model's folder and not by NCCL. vLLM itself, the episodes and the steps are real.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import requests
import torch
import vllm_server
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from trl import GRPOTrainer
from trl.experimental import async_grpo

from treetune.trainers.trl import __main__ as running

LOOKED_AT = 3
"""Versions of the weights that are kept."""


class WeightsInFolder:
    """Writes the weights where vLLM has loaded them from, and asks it to load them again."""

    def __init__(self, url, folder):
        self.url, self.folder = url, Path(folder)
        self.sent = []
        """The first weights, by which the first samples are looked at."""

    def init_weight_transfer(self):
        requests.get(f"{self.url}/health", timeout=60).raise_for_status()

    def pause(self):
        requests.post(f"{self.url}/pause", params={"mode": "keep"}, timeout=60).raise_for_status()

    def resume(self):
        requests.post(f"{self.url}/resume", timeout=60).raise_for_status()

    def send_weights(self, iterator):
        weights = {name: tensor.detach().contiguous().clone() for name, tensor in iterator}
        save_file(weights, self.folder / "model.safetensors", metadata={"format": "pt"})
        vllm_server.load_again(self.url)
        if len(self.sent) < LOOKED_AT:
            self.sent.append(weights)

    def destroy(self): ...


def stand_in_for_a_gpu(transfer):
    from trl_async_side import FlashAttention

    torch.cuda.get_device_name = lambda *_: "cpu"
    async_grpo.packing._flash_attn = lambda: FlashAttention
    async_grpo.AsyncGRPOTrainer = partial(async_grpo.AsyncGRPOTrainer, weight_transfer=transfer)


def note_samples(seen):
    """Keeps what the worker gives the trainer."""
    from treetune.trainers.trl.worker import RolloutWorker

    start = RolloutWorker.start

    def start_noting(worker):
        put = worker.rollout_buffer.put_nowait

        def note(sample):
            seen.append(sample)
            put(sample)

        worker.rollout_buffer.put_nowait = note
        start(worker)

    RolloutWorker.start = start_noting


def compare(model, sent, samples, batch):
    """By which weights the samples of the first two batches were sampled: the versions of each batch, and the largest
    difference between a logprob that vLLM gave and the one that the nearest of those weights give."""
    differences = []
    for weights in sent:
        model.load_state_dict(weights)
        differences.append([_difference(model, sample) for sample in samples[: 2 * batch]])
    nearest = [torch.stack(one).min(0) for one in zip(*differences, strict=True)]
    versions = [
        sorted({version + 1 for one in nearest[first : first + batch] for version in one.indices.tolist()})
        for first in range(0, len(nearest), batch)
    ]
    return versions, max(one.values.max().item() for one in nearest)


def _difference(model, sample):
    ids = torch.tensor([list(sample.input_ids)])
    logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    ours = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    mine = torch.tensor([*sample.completion_mask])[1:].bool()
    return (ours - torch.tensor([*sample.old_log_probs])[1:])[mine].abs()


@torch.no_grad()
def main(answer, *arguments):
    _, _, given = running.read_arguments(arguments)
    before = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    seen = []
    if given.get("trainer") == "async":
        transfer = WeightsInFolder(given["vllm_server_base_url"], given["model"])
        stand_in_for_a_gpu(transfer)
        note_samples(seen)
    with torch.enable_grad():
        trainer = running.run(arguments)
    assert isinstance(trainer, GRPOTrainer) or seen
    old = dict(before.named_parameters())
    found = {
        "logs": [log for log in trainer.state.log_history if "loss" in log],
        "moved": sum(not torch.equal(old[name], new.detach()) for name, new in trainer.model.named_parameters()),
        "finite": all(bool(torch.isfinite(new).all()) for new in trainer.model.parameters()),
    }
    if seen:
        batch = int(given["per_device_train_batch_size"])
        found["sampled_by"], found["difference"] = compare(before, transfer.sent, seen, batch)
        found["versions"] = sorted({sample.model_version for sample in seen})
        found["rewards"] = [sample.metrics["reward"] for sample in seen]
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
