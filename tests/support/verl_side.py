"""Runs in verl's virtual environment, and says what the real verl makes of tasks.

    python verl_side.py rows|scores|scores_on_ray|runs REQUEST.json ANSWER.json

The request has `tasks` (as in `train_tasks`) or `files`, `model` (a folder) and, for scores, an answer to each row.
`runs` are several such requests for scores.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl import DataProto
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

from treetune_verl.tasks import get_dataset_paths


def trainer_config(model: str) -> Any:
    """verl's own, with our reward function as the recipe names it."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                "reward.custom_reward_function.path=pkg://treetune.trainers.verl",
                "reward.custom_reward_function.name=compute_score",
                "reward.num_workers=1",
                # verl renders every prompt to measure it, and drops those whose rendering fails.
                "data.filter_overlong_prompts=true",
                "data.max_prompt_length=100000",
            ],
        )


class Side:
    def __init__(self, request: dict[str, Any]) -> None:
        self.config = trainer_config(request["model"])
        self.tokenizer = AutoTokenizer.from_pretrained(request["model"])
        self.dataset = RLHFDataset(
            data_files=request.get("files") or get_dataset_paths(request["tasks"]),
            tokenizer=self.tokenizer,
            config=self.config.data,
        )
        self.items = [self.dataset[position] for position in range(len(self.dataset))]
        self.answers = request.get("answers", [])

    def rows(self) -> list[dict[str, Any]]:
        columns = collate_fn(self.items)
        del columns["dummy_tensor"]
        return [
            {
                **{name: values[number] for name, values in columns.items()},
                "rendered": self.tokenizer.apply_chat_template(
                    item["raw_prompt"], add_generation_prompt=True, tokenize=False
                ),
            }
            for number, item in enumerate(self.items)
        ]

    def scores(self) -> dict[str, Any]:
        from verl.trainer.ppo.reward import load_reward_manager

        async def scored() -> Any:
            manager = load_reward_manager(self.config, self.tokenizer)
            batch = self.batch()
            rows = await asyncio.gather(*(manager.run_single(batch[n : n + 1]) for n in range(len(batch))))
            return {"manager": type(manager).__name__, "rows": rows}

        return asyncio.run(scored())

    def scores_on_ray(self) -> list[float]:
        """By the workers that the trainer starts."""
        import ray
        from verl.experimental.reward_loop import RewardLoopManager

        ray.init(num_cpus=2, include_dashboard=False)
        try:
            scored = RewardLoopManager(self.config).compute_rm_score(self.batch())
            return scored.batch["rm_scores"].sum(-1).tolist()
        finally:
            ray.shutdown()

    def batch(self) -> DataProto:
        """The rows after a rollout: prompts of no interest, and the answers with their end, padded."""
        assert len(self.answers) == len(self.items)
        end, padding = self.tokenizer.eos_token_id, self.tokenizer.pad_token_id
        ids = [torch.tensor([*self.tokenizer(answer).input_ids, end]) for answer in self.answers]
        responses = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=padding)
        prompts = torch.full((len(ids), 4), end)
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": torch.cat([torch.ones_like(prompts), (responses != padding).long()], 1),
        }
        return DataProto.from_single_dict({**collate_fn(self.items), **tensors})


if __name__ == "__main__":
    what, request, answer = sys.argv[1:]
    asked = json.loads(Path(request).read_text())
    if what == "runs":
        answers = [Side({**asked, **run}).scores()["rows"] for run in asked["runs"]]
    else:
        answers = getattr(Side(asked), what)()
    Path(answer).write_text(json.dumps(answers))
