"""What is told of a run: its summary as named numbers, some of its rollouts, its config as flat keys."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from treetune.chat.images import name_images
from treetune.chat.message import Message
from treetune.core.trace import Trace
from treetune.errors import TreetuneError
from treetune.loggers import Sample
from treetune.runs.run import Run
from treetune.runs.summary import Summary

_MOST_SAMPLES = 60
_FAILURES = 10
_PLAIN = (
    *("mean_reward", "mean_reward_all", "stderr", "tasks", "rollouts", "scored", "retries", "seconds_per_rollout"),
    *("prompt_tokens", "completion_tokens", "judge_calls"),
)
_LONGEST = 4000
"""Letters of a text in a sample."""


def figures_of(summary: Summary) -> dict[str, float]:
    """Each number of a summary, by a name that every logger takes; what there is none of is left out."""
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
    """As every logger takes it: letters, digits, and `_-. /`."""
    return re.sub(r"[^\w\-./ ]", "_", name)[:200]


def samples_of(run: Run) -> Iterator[Sample]:
    """Some rollouts: failures first, then such as are spread over the whole run."""
    failed = np.flatnonzero(run.columns.codes("failure") >= 0)[:_FAILURES].tolist()
    spread = np.linspace(0, len(run) - 1, min(len(run), _MOST_SAMPLES - len(failed))).astype(int).tolist()
    for row in dict.fromkeys([*failed, *spread]):
        try:
            yield _sample(run.trace(run.columns.entry(row)))
        except (TreetuneError, OSError):  # a trace that is damaged
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


def flatten(config: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a config by its dotted path."""
    for key, value in config.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, here)
        else:
            yield here, value
