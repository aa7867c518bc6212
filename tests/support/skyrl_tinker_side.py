"""Real steps of SkyRL's JAX backend, on episodes that SkyRL's own generator plays: run in SkyRL's virtual environment.

    python skyrl_tinker_side.py REQUEST.json ANSWER.json
    python skyrl_tinker_side.py serve MODEL PORT FOLDER RANK SEQUENCES

The request has `model`, `files` of SkyRL's rows, the folder for `rollouts`, `steps`, `prompts` (of a step), `group`
and `rank` (of the adapter). SkyRL's trainer has no JAX backend, its Tinker API has: so the engine that the generator
asks is that API's, and its rows are what is trained on.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from skyrl_side import allow_typed_dicts, prompts
from task_servers import free_port


def serve(model: str, port: str, folder: str, rank: str, sequences: str) -> None:
    """The API wants to be started by `uv run`, and starts its engine so: here the engine gets this Python."""
    allow_typed_dicts()
    import uvicorn
    from skyrl.tinker import api, types
    from skyrl.tinker.config import EngineConfig, config_to_argv

    def engine_command(parent: Any, config: Any) -> list[str]:
        start = "import skyrl_side; skyrl_side.allow_typed_dicts(); import runpy; "
        run = "runpy.run_module('skyrl.tinker.engine', run_name='__main__', alter_sys=True)"
        return [sys.executable, "-c", start + run, *config_to_argv(config)]

    api._build_uv_run_cmd_engine = engine_command
    # The backend can train the last layer too, which the API leaves out, whatever its client asks for.
    types.LoraConfig.model_fields["train_unembed"].default = True
    types.LoraConfig.model_rebuild(force=True)
    api.app.state.engine_config = EngineConfig(
        base_model=model,
        backend="jax",
        checkpoints_base=f"{folder}/checkpoints",
        database_url=f"sqlite:///{folder}/tinker.db",
        # Batches are filled up to this number: each other number would be compiled anew.
        backend_config={
            "max_lora_adapters": 4,
            "max_lora_rank": int(rank),
            "sample_max_num_sequences": int(sequences),
        },
    )
    uvicorn.run(api.app, host="127.0.0.1", port=int(port), log_level="warning")


class Engine:
    """What SkyRL's generator asks: the policy as it is now, at the API."""

    def __init__(self, tokenizer: Any, max_tokens: int) -> None:
        self.tokenizer, self.max_tokens, self.client = tokenizer, max_tokens, None

    async def generate(self, request: dict[str, Any], model: str | None = None) -> dict[str, Any]:
        from tinker import types

        [ids] = request["prompt_token_ids"]
        sampled = await self.client.sample_async(
            prompt=types.ModelInput.from_ints(ids),
            num_samples=1,
            sampling_params=types.SamplingParams(
                max_tokens=self.max_tokens, temperature=1.0, stop=[self.tokenizer.eos_token_id]
            ),
        )
        [said] = sampled.sequences
        return {
            "responses": [self.tokenizer.decode(said.tokens, skip_special_tokens=True)],
            "response_ids": [list(said.tokens)],
            "response_logprobs": [list(said.logprobs)],
            "stop_reasons": [said.stop_reason],
        }

    async def finish_session(self, session: str) -> None:
        pass


def train(request: dict[str, Any], url: str) -> list[dict[str, Any]]:
    allow_typed_dicts()
    import tinker
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.generators.base import BatchMetadata
    from skyrl.train.generators.skyrl_gym_generator import SkyRLGymGenerator
    from tinker import types
    from transformers import AutoTokenizer

    from treetune.trainers.skyrl import register
    from treetune.trainers.skyrl.tasks import writing_rollouts

    register(replace=True)
    for spec in request.get("register", []):
        register(spec)
    tokenizer = AutoTokenizer.from_pretrained(request["model"])
    config = SkyRLTrainConfig.from_cli_overrides(
        ["generator.max_turns=4", "generator.batched=false", "generator.sampling_params.logprobs=1"]
    )
    engine = Engine(tokenizer, request["max_tokens"])
    generator = SkyRLGymGenerator(config.generator, config.environment.skyrl_gym, engine, tokenizer)
    play = writing_rollouts(generator.generate, tokenizer, Path(request["rollouts"]))
    service = tinker.ServiceClient(base_url=url, api_key="tml-none")
    policy = service.create_lora_training_client(base_model=request["model"], rank=request["rank"], seed=0)
    rows, group, steps = prompts(request), request["group"], []
    for step in range(request["steps"]):
        engine.client = policy.save_weights_and_get_sampling_client(name=f"step-{step}")
        first = step * request["prompts"]
        chosen = [row for row in rows[first : first + request["prompts"]] for _ in range(group)]
        output = asyncio.run(
            play(
                {
                    "prompts": [messages for messages, _, _, _ in chosen],
                    "env_classes": [env_class for _, env_class, _, _ in chosen],
                    "env_extras": [extras for _, _, extras, _ in chosen],
                    "sampling_params": None,
                    "trajectory_ids": None,
                    "batch_metadata": BatchMetadata(global_step=step + 1, training_phase="train"),
                }
            )
        )
        rewards = [sum(one) if isinstance(one, list) else one for one in output["rewards"]]
        data = [
            datum(types, output, at, rewards[at] - mean(rewards[at // group * group :][:group]))
            for at in range(len(rewards))
        ]
        done = policy.forward_backward(data, loss_fn="importance_sampling").result()
        masks = [
            [0] * (len(ids) - 1) + mask
            for ids, mask in zip(output["prompt_token_ids"], output["loss_masks"], strict=True)
        ]
        sampled = [value for one in data for value in one.loss_fn_inputs["logprobs"].data]
        trained = [value for one in done.loss_fn_outputs for value in one["logprobs"].data]
        mine = [value for mask in masks for value in mask]
        differences = [abs(a - b) for a, b, own in zip(sampled, trained, mine, strict=True) if own]
        policy.optim_step(types.AdamParams(learning_rate=request["learning_rate"])).result()
        steps.append(
            {
                "reward": mean(rewards),
                "rewards": rewards,
                "logprob_difference": max(differences),
                "trained_tokens": len(differences),
                "texts": [tokenizer.decode(ids) for ids in output["response_ids"]][:2],
                "trained": [
                    tokenizer.decode([token for token, own in zip(ids, mask, strict=True) if own])
                    for ids, mask in zip(output["response_ids"], output["loss_masks"], strict=True)
                ][:2],
            }
        )
        print(json.dumps(steps[-1]), flush=True)
    return steps


def datum(types: Any, output: dict[str, Any], at: int, advantage: float) -> Any:
    """A row for the API, which foretells each token from those before: masked tokens have no advantage."""
    given, said = output["prompt_token_ids"][at], output["response_ids"][at]
    mask, logprobs = output["loss_masks"][at], output["rollout_logprobs"][at]
    ids, before = [*given, *said], len(given) - 1

    def numbers(values: list[Any], dtype: str) -> Any:
        return types.TensorData(data=values, dtype=dtype, shape=[len(values)])

    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={
            "target_tokens": numbers(ids[1:], "int64"),
            "logprobs": numbers([0.0] * before + list(logprobs), "float32"),
            "advantages": numbers([0.0] * before + [advantage * own for own in mask], "float32"),
        },
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def main(request: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        sizes = (request["rank"], request["prompts"] * request["group"])
        command = [sys.executable, __file__, "serve", request["model"], str(port), folder, *map(str, sizes)]
        server = subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{url}/api/v1/healthz", timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None, f"the API ended with {server.returncode}"
                    time.sleep(0.5)
            return train(request, url)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        Path(sys.argv[2]).write_text(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
