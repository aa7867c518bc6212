"""Runs with rewards that a test chose, without a model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from treetune import Task
from treetune.core.trace import Failure, Outcome, Trace, Turn
from treetune.evaluation import EvalConfig, read_config
from treetune.runs.columns import Columns
from treetune.runs.entry import Entry
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run


def make_trace(task: int, rollout: int, reward: float | None, *, source: str = "made", said: str = "", **more) -> Trace:
    problem = Task(idx=task, prompt=f"Problem {task}.", data_source=source)
    trace = Trace(task=problem, uid=problem.uid, rollout=rollout, reward=reward, **more)
    message = {"role": "assistant", "content": said or f"answer {rollout}"}
    trace.turns = [Turn(observed=problem.messages, message=message, reward=reward or 0.0)]
    if reward is None:
        error = ZeroDivisionError("division by zero")
        trace.fail(Outcome.ENVIRONMENT_ERROR, Failure.of(error, "environment"))
    return trace


def run_in_memory(rewards: Sequence[Sequence[float | None]]) -> Run:
    """The same as `make_run`, of which nothing is on disk but in `columns`: for simulations."""
    run = Run.__new__(Run)
    run.path, run.columns, run.config = Path("made"), Columns(), {}
    entries = []
    for task, group in enumerate(rewards):
        for number, reward in enumerate(group):
            outcome = "completed" if reward is not None else "environment_error"
            known = (0, 0, 0, task, f"{task:032}", 0, number, 0, None, "made", outcome, reward)
            entries.append(Entry(*known, None, 1, 0, 0, None, 0.0, 0.0, 0.0, 0, None, None, {}, False))
    run.columns.extend(entries)
    return run


def make_run(folder: Path, rewards: Sequence[Sequence[float | None]], model: str = "made", source: str = "made") -> Run:
    """A run whose task number i had these rewards; None is a rollout that failed."""
    what = read_config({"taskset": {"id": "arithmetic"}, "model": model}, EvalConfig)
    with RunFolder.create(folder, TRACES, what) as run:
        for task, group in enumerate(rewards):
            for rollout, reward in enumerate(group):
                run.append(make_trace(task, rollout, reward, source=source))
    return Run(folder)
