"""A run as a log of Inspect, which `inspect view` and `read_eval_log` open.

    write_eval_log(Run("runs/x"), Path("x.eval"), "failed")        # gives how many samples it has

A task is a sample, a rollout an epoch of it. The log is a zip file as Inspect writes it, with a member a sample.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from treetune.chat.message import without_surrogates
from treetune.core.trace import Trace
from treetune.errors import StorageError
from treetune.runs.eval_sample import Plain, iso_time, sample_of, summary_of
from treetune.runs.folder import TRACES
from treetune.runs.foreign.inspect import REWARD
from treetune.runs.run import Run
from treetune.system.digest import digest
from treetune.system.folders import aside, read_version

ENDING = ".eval"
_VERSION = 2
"""Of Inspect's logs."""


def write_eval_log(run: Run, path: Path, query: str = "", traces: Iterable[Trace] | None = None) -> int:
    """The rollouts that a query fits, or these of its `traces`. The file is there whole, or not at all."""
    temporary = aside(path)
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as members:
            samples = _Log(run, members).write(run.traces(query) if traces is None else traces)
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror or error}", remedy="name another file") from error
    finally:
        temporary.unlink(missing_ok=True)
    return samples


class _Log:
    def __init__(self, run: Run, members: zipfile.ZipFile) -> None:
        self._run, self._members = run, members
        self._began = (run.folder / TRACES.file).stat().st_mtime
        self._epochs: dict[tuple[str, int], set[int]] = {}
        self._ids: dict[tuple[str, int], int | str] = {}
        self._taken: set[str] = set()
        """The ids, as members of the file spell them."""
        self._summaries: list[Plain] = []
        self._models: dict[str, list[int]] = {}

    def write(self, traces: Iterable[Trace]) -> int:
        for sample in self._samples(traces):
            self._put(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", sample)
            self._summaries.append(summary_of(sample))
        begun = {"version": _VERSION, "eval": self._spec(), "plan": {"name": "plan", "steps": [], "config": {}}}
        self._put("_journal/start.json", begun)
        self._put("summaries.json", self._summaries)
        scores = self._scores()
        self._put("reductions.json", [{"scorer": name, "samples": found} for name, found in scores.items()])
        self._put(
            "header.json", {**begun, "status": "success", "results": self._results(scores), "stats": self._stats()}
        )
        return len(self._summaries)

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
            yield sample_of(trace, self._ids[key], epoch, self._began)

    def _name(self, trace: Trace) -> int | str:
        """Its index; of equal tasks, and of tasks that share one, more than that."""
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
        """Of each score its means over the epochs of a sample."""
        found: dict[str, dict[int | str, list[float]]] = {}
        for summary in self._summaries:
            for name, score in summary["scores"].items():
                found.setdefault(name, {}).setdefault(summary["id"], []).append(float(score["value"]))
        return {
            name: [{"sample_id": id, "value": sum(values) / len(values)} for id, values in samples.items()]
            for name, samples in found.items()
        }

    def _results(self, scores: dict[str, list[Plain]]) -> Plain:
        """The mean over tasks, each of which counts once, and its standard error."""
        results = []
        for name, samples in scores.items():
            means = np.array([sample["value"] for sample in samples])
            figures = {"mean": float(means.mean())}
            if len(means) > 1:
                figures["stderr"] = float(means.std(ddof=1) / np.sqrt(len(means)))
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
            "model_usage": {
                name: {"input_tokens": read, "output_tokens": sampled, "total_tokens": read + sampled}
                for name, (read, sampled) in self._models.items()
            },
        }
