"""Runs in SkyRL's virtual environment: the advantages that its generator and its trainer give the turns of episodes.

    python skyrl_credit_side.py answer          # sides.py

The engine says what it is told to; the generator, the trainer's methods and the loss are SkyRL's own.
"""

from __future__ import annotations

import asyncio
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paid_turns
import sides
from skyrl_side import allow_typed_dicts, prompts

allow_typed_dicts()

import torch  # noqa: E402
from skyrl.backends.skyrl_train.utils.ppo_utils import ppo_policy_loss  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.generators.base import TrajectoryID  # noqa: E402
from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from tiny_model import make_model  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from treetune.data.sources.names import find  # noqa: E402
from treetune.trainers.skyrl import register  # noqa: E402
from treetune.trainers.skyrl.credit import check_credit, give_credit, keep_turn_rewards  # noqa: E402
from treetune.trainers.skyrl.gym import registry  # noqa: E402
from treetune.trainers.skyrl.tasks import read_credit  # noqa: E402


class Sessions:
    """An engine that says, in each session, the next of its answers."""

    def __init__(self, tokenizer: Any, answers: dict[str, list[str]], config: Any, ends: bool) -> None:
        self._logprobs = config.generator.sampling_params.logprobs is not None
        self._end = [tokenizer.eos_token_id] * ends
        self._tokenizer, self._answers = tokenizer, {session: iter(each) for session, each in answers.items()}

    async def generate(self, request: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        (session,) = request["session_ids"]
        text = next(self._answers[session])
        ids = [*self._tokenizer(text).input_ids, *self._end]
        if text.startswith(paid_turns.WITHOUT_TOKENS):
            text, ids = text.removeprefix(paid_turns.WITHOUT_TOKENS), []
        said = {"responses": [text], "response_ids": [ids], "stop_reasons": ["stop"]}
        return {**said, "response_logprobs": [[-1.0] * len(ids)]} if self._logprobs else said

    async def finish_session(self, session: str) -> None:
        pass


@cache
def planned(target: str) -> tuple[list[str], Any, Any, Any]:
    """What a training of two tasks is planned with: its keys, its prompts, its credit; and the tokenizer."""
    model = Path("model")
    if not model.exists():
        make_model(model)
    plan = sides.plan("skyrl", target, model, num_tasks=2)
    files = plan["data"]["train"]
    register(replace=True)
    words = [f"{key}={value}" for key, value in plan["config"].items()]
    items = prompts({"model": model, "files": files})
    return words, items, read_credit(find(files), registry()), AutoTokenizer.from_pretrained(model)


def faults(target: str, *, overrides: list[str]) -> str:
    """What is refused at the start."""
    words, _, credit, _ = planned(target)
    try:
        check_credit(SkyRLTrainConfig.from_cli_overrides([*words, *overrides]), credit)
    except Exception as error:
        return f"{getattr(error, 'code', None)}: {error}"
    return ""


def advantages(
    target: str,
    *,
    groups: list[list[list[str]]],
    overrides: list[str],
    theirs: bool = False,
    ends: bool = True,
    devices: int = 1,
) -> dict[str, Any]:
    """By group and episode, the advantage and the weight of each token that is trained on, turn by turn; and how many
    rows and optimizer steps there are. `theirs`: as SkyRL does it alone. `ends`: whether an end token is sampled."""
    words, items, credit, tokenizer = planned(target)
    config = SkyRLTrainConfig.from_cli_overrides([*words, *overrides])
    check_credit(config, credit)
    names = [(f"task{at}", number) for at, group in enumerate(groups) for number in range(len(group))]
    engine = Sessions(
        tokenizer, {f"{task}_{number}": groups[int(task[4:])][number] for task, number in names}, config, ends
    )
    generator = SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, engine, tokenizer)
    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.cfg, trainer.all_metrics, trainer.tokenizer = config, {}, tokenizer
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: devices)
    config.trainer.train_batch_size, config.generator.n_samples_per_prompt = len(groups), len(groups[0])
    config.trainer.policy_mini_batch_size = len(groups)
    if not theirs:
        generator, trainer = keep_turn_rewards(generator), give_credit(trainer, credit)
    asked = [items[int(task[4:])] for task, _ in names]
    output = asyncio.run(
        generator.generate(
            {
                "prompts": [messages for messages, _, _, _ in asked],
                "env_classes": [env_class for _, env_class, _, _ in asked],
                "env_extras": [dict(extras) for _, _, extras, _ in asked],
                "sampling_params": None,
                "trajectory_ids": [TrajectoryID(task, number) for task, number in names],
            }
        )
    )
    uids = [task for task, _ in names]
    if config.generator.step_wise_trajectories:
        uids = [each.instance_id for each in output["trajectory_ids"]]
        names = [(each.instance_id, each.repetition_id) for each in output["trajectory_ids"]]
    output, uids = trainer.postprocess_generator_output(output, uids)
    batch = trainer.convert_to_training_input(output, uids)
    rows = len(uids)
    batch["values"], batch["rewards"] = None, batch["rewards"].double()
    batch = trainer.compute_advantages_and_returns(batch)
    plain = batch["advantages"].clone()
    boundaries = batch.metadata["policy_mini_batch_boundaries"]
    batch["loss_mask"] = batch["loss_mask"].double()
    batch = trainer._normalize_advantages(batch, boundaries, batch.metadata["policy_prompt_boundaries"])
    logprobs = torch.zeros_like(batch["advantages"], dtype=torch.float64, requires_grad=True)
    loss, _ = ppo_policy_loss(
        logprobs, logprobs.detach(), batch["advantages"], config.trainer.algorithm, batch["loss_mask"]
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    found: dict[tuple[str, int], list[list[list[float]]]] = {name: [] for name in names}
    for at, name in enumerate(names):
        for first, end in runs(batch["loss_mask"][at].tolist()):
            values = [plain[at, first:end].tolist(), gradient[at, first:end].tolist()]
            found[name].append(values)
    by_task = [[found[f"task{at}", number] for number in range(len(group))] for at, group in enumerate(groups)]
    return {"turns": by_task, "rows": rows, "padded": len(plain), "steps": len(boundaries)}


def runs(mask: list[float]) -> list[tuple[int, int]]:
    edges = [
        at for at, (before, now) in enumerate(zip([0, *mask], [*mask, 0], strict=True)) if bool(before) != bool(now)
    ]
    return list(zip(edges[::2], edges[1::2], strict=True))


if __name__ == "__main__":
    sides.answer(advantages, faults)
