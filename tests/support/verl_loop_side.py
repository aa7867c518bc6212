"""Runs in verl's virtual environment: its real agent loop workers play our rows, with a script in the engine's place.

    python verl_loop_side.py REQUEST.json ANSWER.json

The request has `model` (a folder), `loops` (a YAML file of agent loops) and `runs`. Each has a `worker` (`v0` and `v1`
on Ray, `here` is v0 in this process), `files` of rows, what the model `says` to a prompt, `n` rollouts and an `agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

TOLD = ("turn_scores", "min_global_steps", "max_global_steps")
FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "num_turns", "extra_fields"]


class Scripted:
    """Stands for the inference server, which needs a GPU: says what the file `says.json` has for the first words that a
    prompt holds, turn by turn, and writes down every call. Its tokens are such as no tokenizer would choose."""

    def __init__(self, folder: str, model: str) -> None:
        self.folder, self.model = Path(folder), model
        self.turns: dict[str, int] = defaultdict(int)
        self.scripts: dict[str, list[str]] = {}
        self.tokenizer: Any = None

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **rest: Any) -> TokenOutput:
        if self.tokenizer is None:
            self.tokenizer = AutoTokenizer.from_pretrained(self.model)
        turn = self.turns[request_id]
        self.turns[request_id] += 1
        if request_id not in self.scripts:
            says, text = json.loads((self.folder / "says.json").read_text()), self.tokenizer.decode(prompt_ids)
            place, scripts = next((key, said) for key, said in says.items() if key in text)
            # Rollouts of one prompt may each have a script of their own.
            number = len(list(self.folder.glob(f"taken-{abs(hash(place))}-*")))
            (self.folder / f"taken-{abs(hash(place))}-{number}").touch()
            self.scripts[request_id] = scripts[number % len(scripts)]
        said = self.scripts[request_id][turn]
        if said.startswith("!"):
            said = await self.fail(*said[1:].split())
        ids = [id for letter in said for id in self.tokenizer(letter).input_ids] + [self.tokenizer.eos_token_id]
        ids = ids[: sampling_params["max_tokens"]]
        logprobs = [-(turn + 1) - place / 1000 for place in range(len(ids))]
        call = {"request": request_id, "prompt": list(prompt_ids), "sampled": ids, "logprobs": logprobs}
        with (self.folder / "calls.jsonl").open("a") as file:
            file.write(json.dumps(call) + "\n")
        fields = {"min_global_steps": 10 + turn, "max_global_steps": 20 + turn}
        return TokenOutput(token_ids=ids, log_probs=logprobs, stop_reason="completed", extra_fields=fields)

    async def fail(self, what: str, *rest: str) -> str:
        """What it says all the same."""
        if what == "raise":
            raise RuntimeError("the engine is gone")
        if what == "hang":
            await asyncio.sleep(600)
        if what == "kill":  # the task server of that process id
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(rest[0]), signal.SIGKILL)
            await asyncio.sleep(0.2)
        return rest[-1] if rest else ""


class Side:
    def __init__(self, request: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        with initialize_config_module("verl.trainer.config", version_base=None):
            self.config = compose(
                "ppo_trainer",
                overrides=[
                    f"actor_rollout_ref.model.path={request['model']}",
                    "actor_rollout_ref.rollout.name=vllm",
                    f"actor_rollout_ref.rollout.agent.agent_loop_config_path={request['loops']}",
                    "actor_rollout_ref.rollout.calculate_log_probs=true",
                    "actor_rollout_ref.rollout.prompt_length=2000",
                    f"actor_rollout_ref.rollout.response_length={request.get('response_length', 3000)}",
                    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
                ],
            )
        self.config.transfer_queue.enable = True
        self.tokenizer = AutoTokenizer.from_pretrained(request["model"])
        self.engine = Scripted(str(folder), request["model"])
        tq.init(self.config.transfer_queue)
        # Both at once: to start one takes most of the time of all runs.
        self.worker_v0 = ray.remote(AgentLoopWorker).remote(self.config, self.engine)
        self.worker_v1 = AgentLoopWorkerTQ.remote(self.config, self.engine)

    def run(self, number: int, run: dict[str, Any]) -> dict[str, Any]:
        print(f"run {number}: {run['name']}", flush=True)
        for old in (*self.folder.glob("taken-*"), self.folder / "calls.jsonl"):
            old.unlink(missing_ok=True)
        (self.folder / "says.json").write_text(json.dumps(run["says"]))
        dataset = RLHFDataset(data_files=run["files"], tokenizer=self.tokenizer, config=self.config.data)
        wanted = run.get("rows") or range(len(dataset))
        rows = [dataset[position] for position in wanted]
        for place, row in enumerate(rows):
            row["uid"] = f"{number}-{place}"
            row["agent_name"] = run.get("agent", row.get("agent_name"))
        began = time.monotonic()
        try:
            samples = getattr(self, run["worker"])(rows, run)
        except Exception as error:
            samples = f"{type(error).__name__}: {error}"
        calls = self.folder / "calls.jsonl"
        written = calls.read_text().splitlines() if calls.exists() else []
        agents = [row.get("agent_name") for row in rows]
        seconds = time.monotonic() - began
        found = {"samples": samples, "calls": list(map(json.loads, written)), "agents": agents, "seconds": seconds}
        played = samples["samples"] if isinstance(samples, dict) else samples
        if isinstance(played, list) and played:
            sources = {row["uid"]: row["data_source"] for row in rows}
            found |= {"advantages": advantages(played), "validation": validation(played, sources)}
        return found

    def v0(self, rows: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
        batch = self.batch(rows, run)
        return self.read_batch(ray.get(self.worker_v0.generate_sequences.remote(batch), timeout=400))

    def here(self, rows: list[dict[str, Any]], run: dict[str, Any]) -> Any:
        """In this process, and cancelled after a while where the run says so."""
        worker = AgentLoopWorker(self.config, self.engine)

        async def play() -> Any:
            work = asyncio.ensure_future(worker.generate_sequences(self.batch(rows, run)))
            if (seconds := run.get("cancelled_after")) is None:
                return await work
            await asyncio.sleep(seconds)
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.wait(others)
            return "cancelled" if work.cancelled() else "finished"

        played = asyncio.run(play())
        return played if isinstance(played, str) else self.read_batch(played)

    def batch(self, rows: list[dict[str, Any]], run: dict[str, Any]) -> DataProto:
        items = [dict(row) for row in rows for _ in range(run.get("n", 1))]
        return DataProto.from_single_dict(collate_fn(items), meta_info={"global_steps": 3})

    def read_batch(self, batch: DataProto) -> list[dict[str, Any]]:
        tensors, others = batch.batch, batch.non_tensor_batch
        given = tensors["prompts"].shape[1]
        samples = []
        for number in range(len(batch)):
            masks = tensors["attention_mask"][number]
            length = int(masks[given:].sum())
            row = {
                name: tensors[name][number][:length].tolist() for name in ("responses", "response_mask", "rm_scores")
            }
            row["prompts"] = tensors["prompts"][number][given - int(masks[:given].sum()) :].tolist()
            row["logprobs"] = tensors["rollout_log_probs"][number][:length].tolist()
            row["num_turns"] = int(others["__num_turns__"][number])
            row["fields"] = {
                key: others[key][number] for key in ("turn_scores", "min_global_steps", "max_global_steps")
            }
            row["info"] = {key: _plain(others[key][number]) for key in batch.meta_info["reward_extra_keys"]}
            row["uid"] = others["uid"][number]
            samples.append(row)
        return samples

    def v1(self, rows: list[dict[str, Any]], run: dict[str, Any]) -> Any:
        columns = {name: [row[name] for row in rows] for name in rows[0] if name != "dummy_tensor"}
        columns["__rollout_n__"] = [run.get("n", 1)] * len(rows)
        batch = tu.get_tensordict(columns, non_tensor_dict={"global_steps": 3})
        ray.get(self.worker_v1.generate_sequences.remote(batch))
        uids = [row["uid"] for row in rows]
        for _ in range(3000):
            known = tq.kv_list("train")["train"]
            states = [known.get(uid, {}).get("status") for uid in uids]
            if all(state in ("finished", "failure") for state in states):
                break
            time.sleep(0.1)
        keys = sorted(key for key, tag in known.items() if key.split("_")[0] in uids and tag["status"] == "success")
        return {"states": states, "samples": [self.read_key(key, known[key]) for key in keys]}

    def read_key(self, key: str, tag: dict[str, Any]) -> dict[str, Any]:
        got = tq.kv_batch_get([key], "train", select_fields=FIELDS)[0]
        fields = getattr(got["extra_fields"], "data", got["extra_fields"])
        row = {name: got[name].tolist() for name in ("prompts", "responses", "response_mask", "rm_scores")}
        return {
            **row,
            "logprobs": got["rollout_log_probs"].tolist(),
            "num_turns": int(got["num_turns"]),
            "fields": {name: fields.get(name) for name in TOLD},
            "info": fields["reward_extra_info"],
            "uid": key,
            "tag": {name: tag[name] for name in ("min_global_steps", "max_global_steps")},
        }


def advantages(samples: list[dict[str, Any]]) -> list[list[float]]:
    """Of each token, by verl's own GRPO, where rewards are only compared with the mean of their group."""
    length = max(len(sample["rm_scores"]) for sample in samples)

    def pad(name: str) -> torch.Tensor:
        return torch.tensor([sample[name] + [0] * (length - len(sample[name])) for sample in samples])

    uids = np.array([sample["uid"].split("_")[0] for sample in samples])
    found, _ = compute_grpo_outcome_advantage(
        pad("rm_scores").float(), pad("response_mask"), uids, norm_adv_by_std_in_grpo=False
    )
    return [row[: len(sample["rm_scores"])] for row, sample in zip(found.tolist(), samples, strict=True)]


def validation(samples: list[dict[str, Any]], sources: dict[str, str]) -> dict[str, Any]:
    """What verl's validation would say, by data source."""
    uids = [sample["uid"].split("_")[0] for sample in samples]
    values = {key: [sample["info"][key] for sample in samples] for key in samples[0]["info"]}
    return process_validation_metrics([sources[uid] for uid in uids], uids, values)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def main() -> None:
    request, answer = map(Path, sys.argv[1:])
    asked = json.loads(request.read_text())
    folder = request.with_name("engine")
    folder.mkdir()
    environment = {name: os.environ[name] for name in os.environ if name.startswith(("TREETUNE_", "PYTHON", "HF_"))}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment})
    try:
        side = Side(asked, folder)
        answers = {run["name"]: side.run(number, run) for number, run in enumerate(asked["runs"])}
        answer.write_text(json.dumps(answers, default=_plain))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
