"""A run as a training leaves it, of any size, without a model: several turns, tools, tokens, failures, retries.

make_run(Path("runs/large"), tasks=12_500)      # 100,000 rollouts, 2 GB

About 20 kB a rollout, of which a quarter is text.
"""

from __future__ import annotations

import random
from itertools import accumulate
from pathlib import Path

from treetune.chat.calls import ToolCall
from treetune.chat.tokens import Tokens, TokenSequence
from treetune.core.policy import Usage
from treetune.core.task import Task
from treetune.core.trace import Failure, Outcome, Timing, Trace, Turn
from treetune.evaluation import EvalConfig, read_config
from treetune.runs.folder import TRACES, RunFolder

ROLLOUTS = 8
SOURCES = ("gsm8k", "math", "aime", "code", "shell")
WORD, RARE = "Therefore", "zeppelin"
"""A word of every tenth rollout or so, as a sentence begins with it, and one of one in a thousand."""
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs a program, and gives what it prints.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]


class Writer:
    """Text of made-up words, and tokens, cut from a stock."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        syllables = [c + v + e for c in "bdfgklmnprst" for v in "aeiou" for e in ("", "n", "r", "st")]
        words = ["".join(self.random.choices(syllables, k=self.random.randint(1, 4))) for _ in range(8000)]
        weights = list(accumulate(1 / (place + 3) for place in range(len(words))))
        stock = self.random.choices(words, cum_weights=weights, k=400_000)
        for at in range(0, len(stock), 9):
            stock[at] = stock[at].capitalize()
            stock[at - 1] += self.random.choice([".", ".", ",", "\n", "\\(x^2\\)", ' "so"', " = 17"])
        self._stock = " ".join(stock)
        self._ids = [min(151_000, int(self.random.paretovariate(0.35))) for _ in range(100_000)]
        self._logprobs = [-self.random.expovariate(2.0) * self.random.random() ** 3 for _ in range(100_000)]

    def text(self, length: int) -> str:
        at = self.random.randrange(len(self._stock) - length)
        return self._stock[at : at + length]

    def said(self, length: int) -> str:
        text, chance = self.text(length), self.random.random()
        word = RARE if chance < 0.0005 else WORD if chance < 0.04 else ""
        return f"{text}. {word} {self.text(40)}" if word else text

    def tokens(self, number: int) -> tuple[list[int], list[float]]:
        at = self.random.randrange(len(self._ids) - number)
        return self._ids[at : at + number], self._logprobs[at : at + number]


def make_trace(writer: Writer, task: Task, uid: str, rollout: int, chance: float, began: float) -> Trace:
    """One rollout of a task that is solved with that chance."""
    rng, sequence, turns = writer.random, TokenSequence(), list[Turn]()
    number = rng.choice((1, 2, 3, 3, 4, 5))
    for turn in range(number):
        said = writer.said(max(60, int(rng.gammavariate(2, 1000 / number))))
        message = {"role": "assistant", "content": said}
        observed = task.messages
        if turn:
            observed = [{"role": "tool", "tool_call_id": f"call_{turn - 1}", "content": writer.text(250)}]
        calls = []
        if turn < number - 1:
            arguments = '{"code": "print(17 * 3)"}'
            function = {"name": "python", "arguments": arguments}
            message["tool_calls"] = [{"id": f"call_{turn}", "type": "function", "function": function}]
            calls = [ToolCall(f"call_{turn}", "python", {"code": "print(17 * 3)"})]
        given, sampled = (180 if turn == 0 else 80), len(said) // 4
        ids, logprobs = writer.tokens(given + sampled)
        sequence.ids += ids
        sequence.mask += [0] * given + [1] * sampled
        sequence.logprobs += [0.0] * given + logprobs[given:]
        turns.append(
            Turn(observed, message, 0.0, {}, "stop", calls, policy_seconds=rng.random() * 9, environment_seconds=0.02)
        )
    reward = turns[-1].reward = float(rng.random() < chance)
    policy = sum(turn.policy_seconds for turn in turns)
    trace = Trace(
        task=task,
        uid=uid,
        rollout=rollout,
        model="made",
        reward=reward,
        turns=turns,
        tools=_TOOLS,
        answer=str(rng.randrange(10_000)),
        explanation="the last number in the text",
        metrics={"format": round(rng.random(), 3), "length": float(len(sequence.ids))},
        usage=Usage(len(sequence.ids), sum(sequence.mask)),
        retries=int(rng.random() < 0.01),
        timing=Timing(policy=policy, environment=0.02 * number, total=policy + 0.02 * number, began=began),
        tokens=Tokens([sequence]),
    )
    fate = rng.random()
    if fate < 0.02:
        failure = Failure("ValueError", "no such tool", "environment", writer.text(900), f"tasks.py:{rng.randrange(9)}")
        trace.fail(Outcome.ENVIRONMENT_ERROR, failure)
    elif fate < 0.06:
        trace.outcome = Outcome.TRUNCATED
    return trace


def make_run(folder: Path, tasks: int, seed: int = 0) -> int:
    """Writes it as an evaluation does; gives how many rollouts it has."""
    writer = Writer(seed)
    config = {"taskset": {"id": "arithmetic"}, "model": "made", "num_tasks": tasks, "num_rollouts": ROLLOUTS}
    with RunFolder.create(folder, TRACES, read_config(config, EvalConfig)) as run:
        for first in range(0, tasks, 64):  # so many are under way at once
            traces = []
            for idx in range(first, min(tasks, first + 64)):
                source = SOURCES[idx % len(SOURCES)]
                prompt = [{"role": "system", "content": "Solve it."}, {"role": "user", "content": writer.text(400)}]
                task = Task(idx=idx, prompt=prompt, data_source=source, ground_truth="17")
                uid, chance = task.uid, writer.random.choice((0, 0, 0.1, 0.3, 0.5, 0.7, 0.9, 1, 1))
                began = 1.7e9 + idx
                traces += [make_trace(writer, task, uid, number, chance, began) for number in range(ROLLOUTS)]
            writer.random.shuffle(traces)
            for trace in traces:
                run.append(trace)
    return tasks * ROLLOUTS
