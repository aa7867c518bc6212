"""Runs in TRL's virtual environment: examples/turn_credit by AsyncGRPOTrainer, until 90 % of the answers are right.

    python trl_luck_side.py luck [--seeds 10] [--first 0]      # a JSON line for each training
    python trl_luck_side.py final --in-turns                   # trainings that can be repeated to the last digit

The trainer is TRL's own, on a CPU: its attention is done in plain torch. `Server` stands for vLLM: it samples over HTTP
in this process, from a copy of the model that gets the weights of the trainer after each step. With `--in-turns`, it
samples only while the trainer waits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from aiohttp import web
from transformers import PrinterCallback, set_seed
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, packing
from trl_async_side import FlashAttention

from treetune.system import threads
from treetune.trainers.trl import TrlTasks

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "turn_credit"))

import train as example
from luck import TURNS
from tiny import make_model, make_tokenizer

TOGETHER = 0.01
"""For how many seconds requests wait for others, to be sampled together."""


class Server:
    """The routes of vLLM that are asked here, and TRL's WeightTransferProtocol."""

    def __init__(self, model: Any) -> None:
        self.model, self.paused = model, threading.Lock()
        self.waiting: list[tuple[list[int], int, asyncio.Future[tuple[int, float]]]] = []
        """Prompts with their seeds."""
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self) -> str:
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.model.config.max_position_embeddings}]})

    async def completions(self, request: web.Request) -> web.Response:
        """Sample one token."""
        asked = await request.json()
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append((asked["prompt"], asked["seed"], answer))
        self.begin()
        token, logprob = await answer
        choice = {"token_ids": [token], "finish_reason": "length", "logprobs": {"token_logprobs": [logprob]}}
        return web.json_response({"choices": [choice]})

    def begin(self) -> None:
        if len(self.waiting) == 1:
            asyncio.get_running_loop().call_later(TOGETHER, self.sample)

    def sample(self) -> None:
        asked, self.waiting = sorted(self.waiting, key=lambda each: each[:2]), []
        for length in {len(prompt) for prompt, _, _ in asked}:
            prompts, seeds, answers = zip(*(each for each in asked if len(each[0]) == length), strict=True)
            with self.paused, torch.no_grad():
                logprobs = self.model(input_ids=torch.tensor(prompts)).logits[:, -1].log_softmax(-1)
            for own, seed, answer in zip(logprobs, seeds, answers, strict=True):
                token = int(torch.multinomial(own.exp(), 1, generator=torch.Generator().manual_seed(seed)))
                if not answer.done():  # the training may have ended
                    answer.set_result((token, float(own[token])))

    # Called by the trainer

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        self.paused.acquire()

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.model.load_state_dict(dict(iterator))

    def resume(self) -> None:
        self.paused.release()

    def destroy(self) -> None: ...


class ServerInTurns(Server):
    """Samples for all episodes of a batch together, when the trainer waits for them: so nothing depends on the time."""

    async def start(self) -> str:
        self.loop, self.wanted = asyncio.get_running_loop(), asyncio.Event()
        return await super().start()

    def begin(self) -> None:
        if len(self.waiting) == example.BATCH:
            self.sampling = asyncio.create_task(self.sample_in_turn())

    async def sample_in_turn(self) -> None:
        if len(self.waiting[0][0]) == 1:  # they begin
            await self.wanted.wait()
        self.sample()

    def watch(self, buffer: Any) -> None:
        """Sample when the buffer of the trainer is empty, and pass samples on in an order of their own."""
        get, put, held = buffer.get, buffer.put_nowait, []

        def want(**options: Any) -> Any:
            if buffer.empty():
                self.loop.call_soon_threadsafe(self.wanted.set)
            return get(**options)

        def hold(sample: Any) -> None:
            held.append(sample)
            if len(held) == example.BATCH:
                self.loop.call_soon_threadsafe(self.wanted.clear)
                for each in sorted(held, key=lambda each: (each.group_id, each.input_ids.tolist())):
                    put(each)
                held.clear()

        buffer.get, buffer.put_nowait = want, hold


def train(task: str, credit: str, seed: int, most: int, in_turns: bool) -> dict[str, Any]:
    began = time.process_time()
    set_seed(seed)
    tokenizer, enough = make_tokenizer(), example.UntilEnough()
    server = (ServerInTurns if in_turns else Server)(make_model(tokenizer))
    name = task.capitalize() + "ByTurn" * (credit == "turn")
    with tempfile.TemporaryDirectory() as place, TrlTasks(f"{example.TASKS}:{name}") as tasks:
        server.model.save_pretrained(place)
        args = AsyncGRPOConfig(
            output_dir="turn-credit", use_cpu=True, bf16=False, gradient_checkpointing=False,
            learning_rate=example.RATE, num_generations=example.GROUP, max_completion_length=1, max_steps=most,
            seed=seed, save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
            vllm_server_base_url=threads.run_in_background(server.start()), max_inflight_tasks=example.BATCH,
            token_budget=example.BATCH * TURNS,  # a step: the episodes of a batch with a token for each turn
        )  # fmt: skip
        given = tasks.async_trainer_arguments(place, args, processing_class=tokenizer)
        if in_turns:
            server.watch(given["rollout_worker"].rollout_buffer)
        trainer = AsyncGRPOTrainer(place, args=args, weight_transfer=server, callbacks=[enough], **given)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    threads.run_in_background(server.runner.cleanup())
    logs = [log for log in trainer.state.log_history if "right" in log]
    return {
        "trainer": "AsyncGRPO",
        "task": task,
        "credit": credit,
        "seed": seed,
        "steps": len(enough.right) if enough.reached else None,  # None: not within so many
        "seconds": round(time.process_time() - began, 1),
        "stale": round(fmean(log["sample/staleness_mean"] for log in logs), 2),
        "episodes": round(fmean(log["batch/trained_tokens_per_step"] for log in logs) / TURNS, 1),
        "right": enough.right,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=["luck", "final", "quiz"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--most", type=int, default=example.MOST)
    parser.add_argument("--in-turns", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for more
    torch.cuda.get_device_name = lambda *_: "cpu"
    packing._flash_attn = lambda: FlashAttention
    for seed in range(args.first, args.first + args.seeds):
        for credit in ("turn", "outcome"):
            print(json.dumps(train(args.task, credit, seed, args.most, args.in_turns)), flush=True)


if __name__ == "__main__":
    main()
