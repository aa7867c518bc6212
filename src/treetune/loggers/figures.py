"""The figures that are logged of a run: its summary as named numbers, and some of its rollouts; and, while a server
stores traces, the rewards of each source over the steps of a training.

    curve = RewardCurve(loggers, About("traces", config, folder))
    curve.add(entries)               # of traces that were just written
    curve.close()
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec
import numpy as np

from treetune.chat.images import name_images
from treetune.chat.message import Message
from treetune.core.trace import Trace
from treetune.errors import TreetuneError
from treetune.loggers import About, Loggers, Sample
from treetune.runs.entry import Entry
from treetune.runs.run import Run
from treetune.runs.summary import Summary

_MOST_SAMPLES = 60
_FAILURES = 10
_PLAIN = (
    *("mean_reward", "mean_reward_all", "stderr", "tasks", "rollouts", "scored", "retries", "seconds_per_rollout"),
    *("prompt_tokens", "completion_tokens", "judge_calls"),
)
_LONGEST = 4000
"""The most characters of a text in a sample."""
_SECONDS = 10.0
_LAST_SECONDS = 30.0
"""How long to wait for the last figures when a server ends."""


def figures_of(summary: Summary) -> dict[str, float]:
    """The numbers of a summary, under names that every logger accepts."""
    plain = msgspec.to_builtins(summary)
    found: dict[str, float | None] = {name: plain[name] for name in _PLAIN}
    found["errors"] = summary.errors
    found |= {f"pass_at_k/{k}": chance for k, chance in summary.pass_at_k.items()}
    found |= {f"outcomes/{name}": count for name, count in summary.outcomes.items()}
    found |= {f"metrics/{name}": value for name, value in summary.metrics.items()}
    for name, source in summary.data_sources.items():
        found |= {f"reward/{name}": source.mean_reward, f"reward_all/{name}": source.mean_reward_all}
    return {clean_name(name): float(value) for name, value in found.items() if value is not None}


def clean_name(name: str) -> str:
    """A name with only the characters that every logger accepts: letters, digits, and `_-. /`."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:200]


def samples_of(run: Run) -> Iterator[Sample]:
    """Samples rollouts: failures first, then others from the whole run."""
    failed = np.flatnonzero(run.columns.codes("failure") >= 0)[:_FAILURES].tolist()
    spread = np.linspace(0, len(run) - 1, min(len(run), _MOST_SAMPLES - len(failed))).astype(int).tolist()
    for row in dict.fromkeys([*failed, *spread]):
        try:
            yield _sample(run.trace(run.columns.entry(row)))
        except (TreetuneError, OSError):  # a damaged trace
            continue


def _sample(trace: Trace) -> Sample:
    asked = trace.turns[0].observed if trace.turns else trace.task.messages
    said = [trace.turns[-1].message] if trace.turns else []
    return {
        "task": trace.task.idx,
        "rollout": trace.rollout,
        "source": trace.task.data_source,
        "reward": trace.reward,
        "outcome": trace.outcome.value,
        "prompt": _text(asked),
        "said": _text(said),
        "answer": trace.answer,
        "failure": trace.failure.message[:_LONGEST] if trace.failure is not None else None,
    }


def _text(messages: Iterable[Message | None]) -> str:
    return "\n".join(str(name_images((message or {}).get("content")) or "") for message in messages)[:_LONGEST]


_Point = list[tuple[str, float | None]]
"""The source and the reward of each rollout of a step."""


def _figures_of_point(point: _Point) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for source, reward in point:
        if reward is not None:
            rewards[f"reward/{clean_name(source)}"].append(reward)
            rewards["mean_reward"].append(reward)
    failed = sum(reward is None for _, reward in point)
    means = {name: sum(some) / len(some) for name, some in rewards.items()}
    return {**means, "rollouts": float(len(point)), "failed": float(failed)}


class RewardCurve:
    """Logs the reward of each step. A step is the trainer's own if the trainer names one: it is logged once a later
    step has begun, and again if rollouts of it arrive late. Otherwise a point is logged every few seconds, over the
    number of rollouts so far."""

    def __init__(self, loggers: Loggers, about: About) -> None:
        self._loggers, self._about = loggers, about
        self._points: dict[int, _Point] = defaultdict(list)
        self._without_step: _Point = []
        self._seen = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treetune loggers", daemon=True)
        self._thread.start()

    def add(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._seen += 1
                point = self._without_step if entry.step is None else self._points[entry.step]
                point.append((entry.source, entry.reward))

    def close(self) -> None:
        """Logs the remaining points and ends the run of each logger."""
        self._ended.set()
        self._thread.join(_LAST_SECONDS)

    def _run(self) -> None:
        self._loggers.start(self._about)
        while not self._ended.wait(_SECONDS):
            self._log()
        self._log(every=True)
        self._loggers.finish()

    def _log(self, every: bool = False) -> None:
        with self._lock:
            latest = max(self._points, default=0)
            steps = [step for step in sorted(self._points) if every or step < latest]
            points = [(step, self._points.pop(step)) for step in steps]
            if self._without_step:
                points.append((self._seen, self._without_step))
                self._without_step = []
        for step, point in points:
            self._loggers.log(_figures_of_point(point), step)
