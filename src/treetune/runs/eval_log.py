"""Writes a run as an Inspect log, which `inspect view` and `read_eval_log` open.

    write_eval_log(run, Path("x.eval"), run.traces("failed"))

A task becomes a sample, and a rollout an epoch of it. The log is a zip file with a member per sample, as Inspect's is.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.chat.message import without_surrogates
from treetune.core.trace import Trace
from treetune.runs.eval_sample import Plain, Sample, iso_time, usage_of
from treetune.runs.folder import TRACES
from treetune.runs.foreign.inspect import REWARD
from treetune.runs.run import Run
from treetune.system.digest import digest
from treetune.system.folders import read_version

_VERSION = 2
"""The version of Inspect's log format."""
_TEXT = 1000
"""The maximum number of characters of a text in a summary."""
_SUMMARISED = (
    *("id", "epoch", "target", "model_usage", "role_usage", "started_at", "completed_at", "total_time"),
    *("working_time", "uuid", "turn_count"),
)
"""The fields of a sample that the list of samples shows unchanged."""


def write_eval_log(run: Run, path: Path, traces: Iterable[Trace]) -> None:
    """Writes some rollouts of a run."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as members:
        _Log(run, members).write(traces)


class _Log:
    def __init__(self, run: Run, members: zipfile.ZipFile) -> None:
        self._run, self._members = run, members
        self._began = (run.folder / TRACES.file).stat().st_mtime
        self._epochs: dict[tuple[str, int], set[int]] = {}
        self._ids: dict[tuple[str, int], int | str] = {}
        self._taken: set[str] = set()
        """The ids that are used, as text."""
        self._summaries: list[Plain] = []
        self._models: dict[str, list[int]] = {}

    def write(self, traces: Iterable[Trace]) -> None:
        for sample in self._samples(traces):
            self._put(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
            self._summaries.append(_summary_of(sample))
        begun = {"version": _VERSION, "eval": self._spec(), "plan": {"name": "plan", "steps": [], "config": {}}}
        self._put("_journal/start.json", begun)
        self._put("summaries.json", self._summaries)
        scores = self._scores()
        self._put("reductions.json", [{"scorer": name, "samples": found} for name, found in scores.items()])
        ended = {"status": "success", "results": self._results(scores), "stats": self._stats()}
        self._put("header.json", {**begun, **ended})

    def _put(self, name: str, value: Any) -> None:
        try:
            text = msgspec.json.encode(value, enc_hook=repr)
        except UnicodeEncodeError:
            text = msgspec.json.encode(without_surrogates(msgspec.to_builtins(value, enc_hook=repr)))
        self._members.writestr(name, text)

    def _samples(self, traces: Iterable[Trace]) -> Iterator[Plain]:
        for trace in traces:
            key = trace.uid, trace.occurrence
            if key not in self._ids:
                self._ids[key] = self._name(trace)
                self._taken.add(str(self._ids[key]))
            epochs = self._epochs.setdefault(key, set())
            epoch = next(number for number in count(trace.rollout + 1) if number not in epochs)
            epochs.add(epoch)
            used = self._models.setdefault(trace.model or self._run.model or "none/none", [0, 0])
            used[0] += trace.usage.prompt_tokens
            used[1] += trace.usage.completion_tokens
            trace.model = trace.model or self._run.model
            yield Sample(trace, self._ids[key], epoch, trace.timing.began or self._began).plain()

    def _name(self, trace: Trace) -> int | str:
        """The index of the task, extended for equal tasks and for tasks that share an index."""
        index, more = trace.task.idx, f"{trace.task.idx}-{trace.occurrence}"
        names: list[int | str] = [more] if trace.occurrence else [index, more]
        free = (name for name in names if str(name) not in self._taken)
        return next(free, f"{trace.uid}-{trace.occurrence}")

    def _spec(self) -> Plain:
        run = self._run
        id = digest([str(run.path.absolute()), self._began])
        return {
            "eval_id": id[:22],
            "run_id": id[:22],
            "created": iso_time(self._began),
            "task": run.taskset or run.path.name,
            "task_id": id[:22],
            "task_version": 0,
            "dataset": {"name": run.taskset, "samples": len(self._ids), "sample_ids": list(self._ids.values())},
            "model": run.model or next(iter(self._models), "none/none"),
            "config": {"epochs": max(map(max, self._epochs.values()), default=1), "epochs_reducer": ["mean"]},
            "packages": {"treetune": read_version()},
            "metadata": {"run": str(run.path), "kind": run.kind, "config": run.config},
        }

    def _scores(self) -> dict[str, list[Plain]]:
        """The mean of each score over the epochs of each sample."""
        found: dict[str, dict[int | str, list[float]]] = {}
        for summary in self._summaries:
            for name, score in summary["scores"].items():
                found.setdefault(name, {}).setdefault(summary["id"], []).append(float(score["value"]))
        return {
            name: [{"sample_id": id, "value": sum(values) / len(values)} for id, values in samples.items()]
            for name, samples in found.items()
        }

    def _results(self, scores: dict[str, list[Plain]]) -> Plain:
        """The mean of each score over tasks, and its standard error."""
        results = []
        for name, samples in scores.items():
            means = np.array([sample["value"] for sample in samples])
            figures = {"mean": float(means.mean())}
            figures |= {"stderr": float(means.std(ddof=1) / np.sqrt(len(means)))} if len(means) > 1 else {}
            metrics = {figure: {"name": figure, "value": value, "params": {}} for figure, value in figures.items()}
            counts = {"scored_samples": len(samples), "unscored_samples": len(self._ids) - len(samples)}
            results.append({"name": name, "scorer": name, "params": {}, **counts, "metrics": metrics})
        failed = sum("error" in summary for summary in self._summaries)
        total = len(self._summaries)
        headline = {"headline": {"scorer": REWARD, "score": REWARD, "metric": "mean"}} if REWARD in scores else {}
        return {"total_samples": total, "completed_samples": total - failed, "scores": results, **headline}

    def _stats(self) -> Plain:
        times = [(each["started_at"], each["completed_at"]) for each in self._summaries]
        return {
            "started_at": min((begun for begun, _ in times), default=iso_time(self._began)),
            "completed_at": max((ended for _, ended in times), default=iso_time(self._began)),
            "model_usage": {name: usage_of(*used) for name, used in self._models.items()},
        }


def _summary_of(sample: Plain) -> Plain:
    """The line of a sample in the list of samples."""
    asked = sample["input"]
    if not isinstance(asked, str):
        asked = "\n\n".join(_words(message["content"]) for message in asked)
    thin = {name: value for name, value in sample["metadata"].items() if isinstance(value, str | int | float | bool)}
    ended = {"error": (sample.get("error") or {}).get("message"), "limit": (sample.get("limit") or {}).get("type")}
    scores = sample["scores"].items()
    return {
        **{name: sample[name] for name in _SUMMARISED},
        "input": _cut(asked),
        "metadata": {name: _cut(value) for name, value in thin.items()},
        "scores": {name: {**score, "explanation": _cut(score.get("explanation"))} for name, score in scores},
        **{name: value for name, value in ended.items() if value is not None},
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] if part["type"] == "text" else f"({part['type'].capitalize()})" for part in content)


def _cut(text: Any) -> Any:
    return text[:_TEXT] if isinstance(text, str) else text
