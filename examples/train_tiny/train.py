"""Train a tiny model with GRPO on a CPU, every answer scored by a task server over HTTP.

    python train.py                          # starts a task server of its own and trains: a minute
    python train.py --seed 1
    python train.py --control                # rewards are shuffled: nothing can be learned from them
    python train.py --server http://127.0.0.1:5000

Each run adds its figures (seed-0.json) to the folder --output, and curve.svg there shows all runs of the folder.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from curve import draw
from tiny import make_model, make_tokenizer, warm_up
from transformers import PrinterCallback, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer

from treetune.trainers.trl import TrlTasks

HERE = Path(__file__).parent
TASKS, HELD_OUT = 26**3, 512
"""How many tasks there are, and how many of them, the last ones, are only evaluated on."""
GROUP, BATCH = 16, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="the address of a task server that serves reverse.py; started here if absent")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--control", action="store_true", help="shuffle the rewards")
    parser.add_argument("--output", type=Path, default=Path("train-tiny"))
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the server ends too
    with task_server(args.seed) if args.server is None else contextlib.nullcontext(args.server) as url:
        result = train(url, args.seed, args.steps, args.control, args.output)
    name = f"seed-{args.seed}" + ("-control" if args.control else "")
    (args.output / f"{name}.json").write_text(json.dumps(result) + "\n")
    (args.output / "curve.svg").write_text(draw(args.output.glob("seed-*.json")))
    print(f"exact match {result['before']:.3f} -> {result['after']:.3f} in {result['seconds']} s")
    print(f"the curve: {args.output / 'curve.svg'}")


def train(url: str, seed: int, steps: int, control: bool, output: Path) -> dict:
    """Exact match before and after, and the curve between."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # the model is too small for more
    set_seed(seed)
    tasks = TrlTasks(url, max_turns=1)
    rows, held_out = tasks.dataset(steps * BATCH // GROUP), tasks.dataset(HELD_OUT, first=TASKS - HELD_OUT)

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    warm_up(model, tokenizer, [prompt[0]["content"] for prompt in rows["prompt"]], until=0.4)

    curve: list[tuple[int, float]] = []

    def measure(step: int) -> None:
        share = exact_match(model, tokenizer, tasks, held_out)
        if share is not None:
            curve.append((step, share))
        print(f"step {step:>3}: " + ("no task server" if share is None else f"exact match {share:.3f}"), flush=True)

    class Measure(TrainerCallback):
        def on_step_end(self, arguments, state, control, **others):
            if state.global_step % 20 == 0 or state.global_step == steps:
                measure(state.global_step)

    shuffler = random.Random(seed)

    def reward(**columns) -> list:
        rewards = tasks.reward(**columns)
        return shuffler.sample(rewards, len(rewards)) if control else rewards

    trainer = GRPOTrainer(
        model,
        args=GRPOConfig(
            output_dir=str(output),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            learning_rate=1e-3,
            lr_scheduler_type="cosine",
            per_device_train_batch_size=BATCH,
            num_generations=GROUP,
            max_completion_length=4,
            max_steps=steps,
            beta=0.0,
            seed=seed,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
        ),
        processing_class=tokenizer,
        train_dataset=rows,
        reward_funcs=reward,
        rollout_func=tasks.rollout,
        callbacks=[Measure()],
    )
    trainer.remove_callback(PrinterCallback)
    measure(0)
    trainer.train()
    tasks.close()
    return {
        "seed": seed,
        "control": control,
        "before": curve[0][1],
        "after": curve[-1][1],
        "curve": curve,
        "failures": tasks.failures,
        "seconds": round(time.perf_counter() - began, 1),
    }


@torch.no_grad()
def exact_match(model, tokenizer, tasks: TrlTasks, rows) -> float | None:
    """The share of held-out tasks that the server says are solved, with answers sampled as in training."""
    model.eval()
    texts = [tokenizer.apply_chat_template(prompt, tokenize=False) for prompt in rows["prompt"]]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
    answers = model.generate(**inputs, max_new_tokens=4, do_sample=True, top_k=0)[:, inputs["input_ids"].shape[1] :]
    model.train()
    rewards = tasks.reward(rows["prompt"], tokenizer.batch_decode(answers, skip_special_tokens=True))
    known = [reward for reward in rewards if reward is not None]  # the others were lost to the server
    return sum(known) / len(known) if known else None


@contextlib.contextmanager
def task_server(seed: int):
    """`treetune serve` in a process of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    task = f"{HERE / 'reverse.py'}:Reverse"
    command = f"serve --http 127.0.0.1:{port} --taskset.shuffle.seed {seed}".split()
    server = subprocess.Popen([sys.executable, "-m", "treetune", *command, task], stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/api/health", timeout=5).close()
                break
            if server.poll() is not None:
                sys.exit(f"the task server ended with {server.returncode}: treetune {' '.join(command)} {task}")
            time.sleep(0.1)
        yield url
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
