from __future__ import annotations

from typing import Any


def log(args: Any, metrics: dict[str, Any], step_key: str) -> None:
    """The real one gives them to W&B and TensorBoard, at the step among them."""
    assert step_key in metrics
