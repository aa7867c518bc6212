"""RewardCurve: rewards of each source over the steps of a training, as a server hears of them.

    curve = RewardCurve(loggers, About("traces", config, folder))
    curve.add(entries)               # of traces that were just written
    curve.close()

A step is the trainer's own where it tells one; it is logged once a later one has begun, and again where rollouts of it
come late. Elsewhere a point is logged every few seconds, over the number of rollouts so far.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from treetune.loggers import About, Loggers
from treetune.loggers.figures import clean_name
from treetune.runs.entry import Entry

_SECONDS = 10.0
_LAST_SECONDS = 30.0
"""For what is still to be sent when a server ends."""


class _Point:
    """The rollouts of one step."""

    def __init__(self) -> None:
        self.rollouts = self.failed = 0
        self.rewards: dict[str, list[float]] = defaultdict(list)

    def add(self, entry: Entry) -> None:
        self.rollouts += 1
        if entry.reward is None:
            self.failed += 1
        else:
            self.rewards[entry.source].append(entry.reward)

    def figures(self) -> dict[str, float]:
        every = [reward for rewards in self.rewards.values() for reward in rewards]
        found = {f"reward/{clean_name(name)}": sum(some) / len(some) for name, some in self.rewards.items()}
        found |= {"mean_reward": sum(every) / len(every)} if every else {}
        return {**found, "rollouts": float(self.rollouts), "failed": float(self.failed)}


class RewardCurve:
    def __init__(self, loggers: Loggers, about: About) -> None:
        self._loggers, self._about = loggers, about
        self._points: dict[int, _Point] = {}
        self._untold = _Point()
        self._seen = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="treetune loggers", daemon=True)
        self._thread.start()

    def add(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._seen += 1
                point = self._untold if entry.step is None else self._points.setdefault(entry.step, _Point())
                point.add(entry)

    def close(self) -> None:
        """Logs what there is, and ends the run of each logger."""
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
            if self._untold.rollouts:
                points.append((self._seen, self._untold))
                self._untold = _Point()
        for step, point in points:
            self._loggers.log(point.figures(), step)
