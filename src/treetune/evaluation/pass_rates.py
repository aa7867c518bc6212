"""Turns the traces of a run into a profile: how often each task was solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from treetune.core.mixture import ByParameter, Mixture
from treetune.core.profile import Profile, column_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.errors import writing
from treetune.evaluation.config import Evaluation
from treetune.runs.folder import read_traces
from treetune.system.folders import write_atomically

EDGES = (0.25, 0.5, 0.75)


class PassRates(msgspec.Struct):
    """How often the tasks of a run were solved."""

    column: str
    lines: list[dict[str, Any]]
    unrated: int
    """Tasks without a scored rollout."""

    @classmethod
    def of_run(cls, run: Path, evaluation: Evaluation) -> PassRates:
        config, taskset = evaluation.config, evaluation.taskset
        column = column_of(config.model, config.num_rollouts)
        lines: dict[str, dict[str, Any]] = {}
        solved: Counter[str] = Counter()
        scored: Counter[str] = Counter()
        for trace in read_traces(run, taskset):
            lines.setdefault(trace.uid, {"uid": trace.uid, **_describe(taskset, trace.task)})
            if trace.scored:
                scored[trace.uid] += 1
                solved[trace.uid] += trace.passed(config.pass_threshold)
        rated = [{**line, column: solved[uid] / scored[uid]} for uid, line in lines.items() if scored[uid]]
        return cls(column, rated, len(lines) - len(rated))

    @property
    def rates(self) -> list[float]:
        return [line[self.column] for line in self.lines]

    def write(self, path: Path, model: str, runs: Path) -> None:
        """Adds the column to a profile file, replacing an earlier column of the same model."""
        remedy = "free some space or pass another -o; the rollouts are kept, and the same command resumes"
        with writing(path, remedy), FileLock(str(runs / ".lock")):  # another process may be profiling another model
            profile = Profile.read(str(path)) if path.exists() else Profile(str(path), [])
            for column in profile.columns_of(model):
                profile.drop(column)
            profile.merge(self.lines)
            write_atomically(path, profile.encode())

    def summary(self) -> dict[str, Any]:
        rates = self.rates
        count = len(rates)
        return {
            "column": self.column,
            "tasks": count,
            "unrated": self.unrated,
            "mean": sum(rates) / count if count else None,
            "histogram": histogram(rates),
            "all_0": sum(rate == 0 for rate in rates) / count if count else None,
            "all_1": sum(rate == 1 for rate in rates) / count if count else None,
            "mixed": sum(0 < rate < 1 for rate in rates) / count if count else None,
        }


def histogram(rates: Iterable[float]) -> dict[str, int]:
    """How many tasks have each pass rate; 0 and 1 are counted separately."""
    names = ["0", "0 to 0.25", "0.25 to 0.5", "0.5 to 0.75", "0.75 to 1", "1"]
    counts = Counter(
        names[0] if rate == 0 else names[-1] if rate == 1 else names[1 + sum(rate > edge for edge in EDGES)]
        for rate in rates
    )
    return {name: counts[name] for name in names}


def _describe(taskset: Taskset[Any, Any], task: Task) -> dict[str, Any]:
    """The other fields of a line: the task's source, and the parameter that it was made with."""
    if isinstance(taskset, ByParameter):
        return {"source": task.data_source, taskset.parameter: taskset.value_of(task)}
    if isinstance(taskset, Mixture):
        return {"source": taskset.sources[taskset.place(task.idx)[0]].name}
    return {"source": task.data_source}
