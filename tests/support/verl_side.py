"""Runs in verl's virtual environment, and says what the real verl makes of tasks: its dataset, its reward managers, and
its agent loop workers, with a script in the place of the engine, which needs a GPU.

    python verl_side.py scores_on_ray|loops REQUEST.json ANSWER.json
    python verl_side.py answer                # plays conversations, and says what verl makes of rows: sides.py

The request of rows and scores has `tasks` (as in `train_tasks`) or `files`, `model` (a folder) and, for scores, an
answer to each row.

That of loops has `model`, `loops` (a YAML file of agent loops) and `runs`. Each has a `worker` (`v0` and `v1` on Ray,
`here` is v0 in this process), `files` of rows, what the model `says` to a prompt, `n` rollouts and an `agent`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import sides
import torch
import transfer_queue as tq
from hydra import compose, initialize_config_module
from stories import Played, letters, pieces_of, texts_of
from transformers import AutoTokenizer
from verl import DataProto
from verl.experimental.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.workers.rollout.replica import TokenOutput

from treetune.trainers.verl.config import MANAGER
from treetune.trainers.verl.loop import EpisodeManager
from treetune_verl.tasks import get_dataset_paths

TOLD = ("turn_scores", "turn_credit", "min_global_steps", "max_global_steps")
FIELDS = ["prompts", "responses", "response_mask", "rm_scores", "rollout_log_probs", "num_turns", "extra_fields"]

OF_SAMPLE, OF_EPISODE = ("responses", "response_mask", "rm_scores"), ("turn_scores", "truncated")
IN_GROUP = 2
FEW_UNITS = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"


def trainer_config(overrides: Sequence[str]) -> Any:
    """verl's own."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def rows_config(model: str) -> Any:
    return trainer_config(
        [
            f"actor_rollout_ref.model.path={model}",
            # Our reward function, as the recipe names it.
            "reward.custom_reward_function.path=pkg://treetune.trainers.verl",
            "reward.custom_reward_function.name=compute_score",
            "reward.num_workers=1",
            # verl renders every prompt to measure it, and drops those whose rendering fails.
            "data.filter_overlong_prompts=true",
            "data.max_prompt_length=100000",
        ]
    )


class Rows:
    """The rows of files, as verl reads and scores them."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.config = rows_config(request["model"])
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
        async def scored() -> Any:
            manager = load_reward_manager(self.config, self.tokenizer)
            batch = self.batch()
            rows = await asyncio.gather(*(manager.run_single(batch[n : n + 1]) for n in range(len(batch))))
            return {"manager": type(manager).__name__, "rows": rows}

        return asyncio.run(scored())

    def scores_on_ray(self) -> list[float]:
        """By the workers that the trainer starts."""
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
        ids = ids[: sampling_params.get("max_tokens")]
        logprobs = [-(turn + 1) - place / 1000 for place in range(len(ids))]
        call = {"request": request_id, "prompt": list(prompt_ids), "sampled": ids, "logprobs": logprobs}
        call["seed"] = sampling_params.get("seed")
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


class Loops:
    """Its agent loop workers, which play files of rows."""

    def __init__(self, request: dict[str, Any], folder: Path) -> None:
        self.folder = folder
        self.config = trainer_config(
            [
                f"actor_rollout_ref.model.path={request['model']}",
                "algorithm.adv_estimator=grpo",  # as `treetune train` sets it, which also starts our trainer
                "+trainer.v1.treetune_joined=true",
                "actor_rollout_ref.rollout.name=vllm",
                f"actor_rollout_ref.rollout.agent.agent_loop_config_path={request['loops']}",
                f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class={MANAGER}",
                "actor_rollout_ref.rollout.calculate_log_probs=true",
                "actor_rollout_ref.rollout.prompt_length=2000",
                f"actor_rollout_ref.rollout.response_length={request.get('response_length', 3000)}",
                FEW_UNITS,
            ]
        )
        self.config.transfer_queue.enable = True
        self.tokenizer = AutoTokenizer.from_pretrained(request["model"])
        self.engine = Scripted(str(folder), request["model"])
        tq.init(self.config.transfer_queue)
        # Both at once: to start one takes most of the time of all runs.
        self.manager_v0 = EpisodeManager(self.config, self.engine)
        self.manager_v0.agent_loop_workers = [ray.remote(AgentLoopWorker).remote(self.config, self.engine)]
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
        batch.meta_info["global_steps"] = run["name"]  # each run is a step of its own
        return self.read_batch(self.manager_v0.generate_sequences(batch))

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
            known = tq.kv_list("train").get("train", {})  # no key is there at first
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
    keys = {key for sample in samples for key in sample["info"]}  # the v1 trainer fills gaps with None too
    values = {key: [sample["info"].get(key) for sample in samples] for key in keys}
    return process_validation_metrics([sources[uid] for uid in uids], uids, values)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


class Teller:
    """An engine that says what it is told to, turn by turn, in tokens of its own choice."""

    def __init__(self, tokenizer: Any, texts: list[str]) -> None:
        self.tokenizer, self.texts = tokenizer, texts
        self.turns: Counter[str] = Counter()
        """By request: each rollout is one."""

    async def generate(self, request_id: str, *, prompt_ids: Any, sampling_params: Any, **rest: Any) -> TokenOutput:
        ids = letters(self.tokenizer, self.texts[self.turns[request_id]])
        self.turns[request_id] += 1
        fields = {"min_global_steps": 0, "max_global_steps": 0}
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), stop_reason="completed", extra_fields=fields)


def play_story(target: str, says: list[Any], num_tasks: int | None = None, way: str = "v0") -> Played:
    """A conversation, as `treetune train verl` starts verl: the rewards and tokens that a worker of v0 or v1 gives to
    each rollout of a group, in this process."""
    from tiny_model import make_model

    model, texts = Path("model"), texts_of(says)
    if not model.exists():
        make_model(model)
        ray.init("local", num_cpus=2, include_dashboard=False)
        tq.init(trainer_config([FEW_UNITS, "transfer_queue.enable=true"]).transfer_queue)
    try:
        planned = sides.plan("verl", target, model, num_tasks=num_tasks)
    except sides.Refused as refused:
        return refused.played
    config = trainer_config(f"{key}={value}" for key, value in planned["config"].items())
    config.actor_rollout_ref.rollout.n = IN_GROUP
    config.transfer_queue.enable = way == "v1"
    tokenizer = AutoTokenizer.from_pretrained(model)
    dataset = RLHFDataset(data_files=config.data.train_files, tokenizer=tokenizer, config=config.data)
    (row,) = (dataset[position] for position in range(len(dataset)))
    engine, row = Teller(tokenizer, texts), {**row, "uid": uuid.uuid4().hex}
    samples = asyncio.run((_play_v1 if way == "v1" else _play_v0)(config, engine, row))
    turns = [*engine.turns.values()]
    assert turns == [len(texts)] * IN_GROUP, f"{turns} of {len(texts)} turns were played"
    sample = samples.pop()
    assert samples == [sample] * (IN_GROUP - 1)
    trained = pieces_of(tokenizer, sample["responses"], sample["response_mask"])
    return Played(sum(sample["rm_scores"]), sample["turn_scores"] or None, trained, sample["truncated"])


class Rewards:
    """A reward loop worker, which scores answers that verl's own agent loop sampled."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        manager = load_reward_manager(config, tokenizer)
        self.compute_score = SimpleNamespace(remote=manager.run_single)


async def _play_v0(config: Any, engine: Teller, row: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [dict(row) for _ in range(IN_GROUP)]
    asked = DataProto.from_single_dict(collate_fn(rows), meta_info={"global_steps": 1})
    rewards = [Rewards(config, engine.tokenizer)]
    batch = await AgentLoopWorker(config, engine, reward_loop_worker_handles=rewards).generate_sequences(asked)
    tensors, others = batch.batch, batch.non_tensor_batch
    samples = []
    for number in range(IN_GROUP):
        length = int(tensors["attention_mask"][number][tensors["prompts"].shape[1] :].sum())
        sample = {name: tensors[name][number][:length].tolist() for name in OF_SAMPLE}
        samples.append(sample | {key: others[key][number] if key in others else None for key in OF_EPISODE})
    return samples


async def _play_v1(config: Any, engine: Teller, row: dict[str, Any]) -> list[dict[str, Any]]:
    rewards = [Rewards(config, engine.tokenizer)]
    worker = AgentLoopWorkerTQ.__ray_metadata__.modified_class(config, engine, reward_loop_worker_handles=rewards)
    columns = {name: [value] for name, value in row.items() if name != "dummy_tensor"}
    await worker.generate_sequences(tu.get_tensordict(columns, non_tensor_dict={"global_steps": 1}))
    await asyncio.gather(*worker.background_tasks)
    keys = [f"{row['uid']}_{number}_0" for number in range(IN_GROUP)]
    samples = []
    for got in await tq.async_kv_batch_get(keys, "train", select_fields=[*OF_SAMPLE, "extra_fields"]):
        fields = getattr(got["extra_fields"], "data", got["extra_fields"])
        told = fields | fields["reward_extra_info"]
        samples.append({name: got[name].tolist() for name in OF_SAMPLE} | {key: told.get(key) for key in OF_EPISODE})
    return samples


def play_loops(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    folder.mkdir()
    environment = {name: os.environ[name] for name in os.environ if name.startswith(("TREETUNE_", "PYTHON", "HF_"))}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": environment})
    try:
        side = Loops(asked, folder)
        return {run["name"]: side.run(number, run) for number, run in enumerate(asked["runs"])}
    finally:
        ray.shutdown()


def rows(request: dict[str, Any]) -> list[dict[str, Any]]:
    return json.loads(json.dumps(Rows(request).rows(), default=_plain))


def scores(request: dict[str, Any]) -> dict[str, Any]:
    return Rows(request).scores()


def main(what: str, *files: str) -> None:
    if what == "answer":
        sides.answer(play_story, rows, scores)
        return
    request, answer = map(Path, files)
    asked = json.loads(request.read_text())
    loops = what == "loops"
    answers = play_loops(asked, request.with_name("engine")) if loops else Rows(asked).scores_on_ray()
    answer.write_text(json.dumps(answers, default=_plain))


if __name__ == "__main__":
    main(*sys.argv[1:])
