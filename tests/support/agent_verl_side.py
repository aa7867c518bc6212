"""Runs in verl's virtual environment: a worker of its v1 or v0 trainer has an agent play, as `treetune train verl`
starts it. What samples is `agent_session.sample`, because verl's engines need a GPU."""

from __future__ import annotations

import asyncio
import logging
import uuid
from pathlib import Path
from typing import Any

import agent_session
import ray
import sides
import transfer_queue as tq
from tiny_model import make_model
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopWorker
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput
from verl_side import FEW_UNITS, FIELDS, trainer_config

from treetune.trainers.verl.loop import failures

GROUP = 2


class Engine:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **rest: Any) -> TokenOutput:
        ids, logprobs = agent_session.sample(self.tokenizer, list(prompt_ids))
        fields = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=fields)


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def play(agent: str, way: str, overrides: list[str]) -> dict[str, Any]:
    """The rows of a group of episodes, the rows that one would have alone, and what was warned of."""
    model = Path("model")
    if not ray.is_initialized():
        make_model(model, forgets=True)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = agent_session.TEMPLATE
        tokenizer.save_pretrained(model)
        ray.init("local", num_cpus=2, include_dashboard=False)
        tq.init(trainer_config([FEW_UNITS, "transfer_queue.enable=true"]).transfer_queue)
    planned = sides.plan("verl", agent_session.TARGET, model, f"agent={agent}", *overrides, num_tasks=1)
    config = trainer_config(f"{key}={value}" for key, value in planned["config"].items())
    config.actor_rollout_ref.rollout.n = GROUP
    config.actor_rollout_ref.rollout.calculate_log_probs = True
    config.transfer_queue.enable = way == "v1"
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = RLHFDataset(data_files=config.data.train_files, tokenizer=tokenizer, config=config.data)
    row = {**dataset[0], "uid": uuid.uuid4().hex}
    failures._warned.clear()  # each is said once
    heard = Heard()
    logging.getLogger("treetune.verl").addHandler(heard)
    rows = asyncio.run((play_v1 if way == "v1" else play_v0)(config, Engine(tokenizer), row))
    return {"rows": rows, "alone": agent_session.alone(tokenizer), "heard": heard.texts}


async def play_v1(config: Any, engine: Engine, row: dict[str, Any]) -> list[dict[str, Any]]:
    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, engine, reward_loop_worker_handles=[])
    columns = {name: [value] for name, value in row.items() if name != "dummy_tensor"}
    await worker.generate_sequences(tu.get_tensordict(columns, non_tensor_dict={"global_steps": 1}))
    await asyncio.gather(*worker.background_tasks)
    keys = sorted(key for key in tq.kv_list("train").get("train", {}) if key.startswith(f"{row['uid']}_"))
    rows = []
    for key, got in zip(keys, await tq.async_kv_batch_get(keys, "train", select_fields=FIELDS), strict=True):
        told = getattr(got["extra_fields"], "data", got["extra_fields"])
        given, response = got["prompts"].tolist(), got["responses"].tolist()
        rows.append({
            "rollout": int(key.split("_")[1]), "ids": given + response,
            "mask": [0] * len(given) + got["response_mask"].tolist(),
            "logprobs": [0.0] * len(given) + got["rollout_log_probs"].tolist(),
            "reward": float(got["rm_scores"].sum()), "num_turns": told["reward_extra_info"]["num_turns"],
            "failed": told["reward_extra_info"]["failed"], "credited": told["turn_credit"]["rewards"],
        })  # fmt: skip
    return rows


async def play_v0(config: Any, engine: Engine, row: dict[str, Any]) -> list[dict[str, Any]]:
    asked = DataProto.from_single_dict(collate_fn([dict(row)] * GROUP), meta_info={"global_steps": 1})
    batch = await AgentLoopWorker(config, engine, reward_loop_worker_handles=[]).generate_sequences(asked)
    tensors, rows = batch.batch, []
    for number in range(len(batch)):
        masks, given = tensors["attention_mask"][number], tensors["prompts"].shape[1]
        before, after = int(masks[:given].sum()), int(masks[given:].sum())
        prompt, response = tensors["prompts"][number][given - before :], tensors["responses"][number][:after]
        rows.append({
            "rollout": number, "ids": prompt.tolist() + response.tolist(),
            "mask": [0] * before + tensors["response_mask"][number][:after].tolist(),
            "logprobs": [0.0] * before + tensors["rollout_log_probs"][number][:after].tolist(),
            "reward": float(tensors["rm_scores"][number].sum()),
        })  # fmt: skip
    return rows


if __name__ == "__main__":
    sides.answer(play)
