"""AReaL: a workflow that trains on any task server, and a command that trains on any tasks.

    trainer.train(
        workflow="treetune.trainers.areal.TaskServerWorkflow",
        workflow_kwargs={"gconfig": config.gconfig, "tokenizer": config.tokenizer_path, "url": "http://127.0.0.1:5000"},
    )

AReaL is imported only when the workflow is used: a training can be planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.trainers.areal.workflow import TaskServerWorkflow, open_servers, tensors

__all__ = ["TaskServerWorkflow", "open_servers", "tensors"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from treetune.trainers.areal import workflow

    return getattr(workflow, name)
