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

from treetune.trainers.trl import run as running


class WeightsInFolder:
    """Writes the weights where vLLM has loaded them from, and asks it to load them again."""

    def __init__(self, url, folder):
        self.url, self.folder, self.sent = url, Path(folder), 0

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
        self.sent += 1

    def destroy(self): ...


def stand_in_for_a_gpu(url, folder):
    from trl_async_side import FlashAttention

    torch.cuda.get_device_name = lambda *_: "cpu"
    async_grpo.packing._flash_attn = lambda: FlashAttention
    async_grpo.AsyncGRPOTrainer = partial(async_grpo.AsyncGRPOTrainer, weight_transfer=WeightsInFolder(url, folder))


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


def largest_difference(model, samples):
    """Between the logprobs that vLLM gave with the first weights, and those that the trainer's model has with them. The
    first samples are from those: the first step is taken on them. Later ones may be from weights that are newer than
    their version, which TRL raises after the server has them."""
    differences = []
    for sample in samples[:16]:
        ids = torch.tensor([list(sample.input_ids)])
        logprobs = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
        ours = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        mine = torch.tensor([*sample.completion_mask])[1:].bool()
        theirs = torch.tensor([*sample.old_log_probs])[1:]
        differences.append((ours[mine] - theirs[mine]).abs().max().item())
    return max(differences)


@torch.no_grad()
def main(answer, *arguments):
    _, _, given = running.read_arguments(arguments)
    before = AutoModelForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    seen = []
    if given.get("trainer") == "async":
        stand_in_for_a_gpu(given["vllm_server_base_url"], given["model"])
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
        found["difference"] = largest_difference(before, seen)
        found["rewards"] = [sample.metrics["reward"] for sample in seen]
        found["versions"] = sorted({sample.model_version for sample in seen})
        found["sent"] = trainer.weight_transfer.sent if hasattr(trainer, "weight_transfer") else None
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
