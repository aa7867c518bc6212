from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    keep: bool
    reason: str | None = None


def call_dynamic_filter(function: Any, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    return DynamicFilterOutput(True) if function is None else function(*args, **kwargs)
