from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(function: Any, *args: Any, evaluation: bool) -> Any:
    return function(*args, evaluation=evaluation)
