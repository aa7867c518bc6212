"""Tasks whose turns earn what the model says, for tests of credit: `0.5 go on` earns 0.5, `1 end` earns 1 and ends the
episode, no text earns 0.25, `break` breaks the environment.

    paid_turns.write(folder)         # paid_turns_tasks.py:ByTurn, ByOutcome, Discounted
    paid_turns.says([0.0, 1.0])      # the answers of an episode that earns this, turn by turn
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path

TASKS = """
from treetune import Contract, Environment, Step, Task, Taskset


class Paid(Environment):
    SAYS = "And now?"

    def start(self):
        return "What do you earn?"

    def step(self, action):
        words = action.text.split("</think>")[-1].split()
        if words == ["break"]:
            raise RuntimeError("the environment is broken")
        done = words[-1:] == ["end"]
        return Step("" if done else self.SAYS, reward=float(words[0]) if words else 0.25, done=done)


class ByTurn(Taskset):
    CONTRACT = Contract(max_turns=9, credit="turn")

    def load_tasks(self):
        for number in range(4):
            yield Task(prompt=f"Task {number}.")

    def environment(self, task):
        return Paid(task)


class ByOutcome(ByTurn):
    CONTRACT = Contract(max_turns=9)


class Quiet(Paid):
    SAYS = ""


class QuietByTurn(ByTurn):
    def environment(self, task):
        return Quiet(task)


class Discounted(ByTurn):
    CONTRACT = Contract(max_turns=9, credit="turn", credit_discount=0.5, turn_discount=0.9)
"""
WITHOUT_TOKENS = "@"
"""Begins an answer for which an engine samples no tokens."""
GROUP = [[0.5, 0.0, 1.0], [0.0], [0.0, 0.25, 0.0, 0.5], [1.0, 0.5]]
"""What the episodes of a group earn, turn by turn."""


def write(folder: Path) -> None:
    (folder / "paid_turns_tasks.py").write_text(TASKS)


def says(rewards: Sequence[float]) -> list[str]:
    return [f"{reward:g} {'end' if turn == len(rewards) else 'go on'}" for turn, reward in enumerate(rewards, 1)]


def make_run(folder: Path, target: str, played: Iterable[tuple[int, Sequence[float] | None]]) -> None:
    """A run of a training on the first task: the step of each rollout and what it earns, or None if it fails."""
    from treetune import run_rollout
    from treetune.core.policy import Completion
    from treetune.evaluation import EvalConfig, read_config
    from treetune.models.scripted import Replay
    from treetune.runs.folder import TRACES, RunFolder
    from treetune.tasksets.target import load_taskset

    taskset = load_taskset(target)
    what = read_config({"taskset": {"id": "arithmetic"}, "model": "m"}, EvalConfig)
    with RunFolder.create(folder, TRACES, what) as run:
        for number, (step, rewards) in enumerate(played):
            policy = Replay([Completion(text=text) for text in (["break"] if rewards is None else says(rewards))])
            trace = asyncio.run(run_rollout(taskset, taskset[0], policy))
            trace.step, trace.rollout = step, number
            run.append(trace)
