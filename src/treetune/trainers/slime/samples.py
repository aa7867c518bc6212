"""A task as a `Sample` of slime's carries it: whole, in its metadata, so that any process can play and score it.

sample = Sample(**fields_of(task, scorer))
scorer, task = task_of(sample)
"""

from __future__ import annotations

from typing import Any

import msgspec

from treetune.core.task import Task
from treetune.data.rows import row_codec
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.rule import RULE
from treetune.errors import UsageError

ROW = "treetune_row"
"""The key of the metadata with the row of the task, as JSON."""
LOST = "lost"
"""The key of the metadata that says why an episode has no reward."""
TIMES_LOST = "times_lost"
"""The key of the metadata with how often that happened."""
UNANSWERED = "unanswered"
"""Why an episode is lost that has no room or time for a first answer: no second try can save it."""
DRAW = "treetune_draw"
"""The key of the metadata with the draw that a group is of."""


def fields_of(task: Task, scorer: str | None) -> dict[str, Any]:
    """What a `Sample` of a task is made with; also a line of a file that slime reads."""
    row = FORMATS["trl"].row_of(task, scorer=scorer or "")
    metadata = {"source_name": task.data_source, ROW: msgspec.json.encode(row).decode()}
    return {"prompt": task.messages, "label": row_codec.truth_text(task.ground_truth), "metadata": metadata}


def task_of(sample: Any) -> tuple[str, Task]:
    """What scores a sample's task, and the task."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    if not isinstance(metadata.get(ROW), str):
        raise UsageError(
            f"sample {sample.index} does not carry a task of Treetune's",
            remedy="pass --prompt-data TARGET --data-source-path treetune.trainers.slime.TreetuneData",
        )
    row = msgspec.json.decode(metadata[ROW])
    return row["extra_info"].get("scorer", RULE), FORMATS["trl"].task_of(row, whole=False)


def begin_anew(sample: Any) -> None:
    """Takes out what an earlier try left in a sample."""
    sample.tokens, sample.response, sample.response_length = [], "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.reward = None
    sample.rollout_top_p_token_ids = sample.rollout_top_p_token_offsets = sample.rollout_routed_experts = None
    sample.weight_versions = []
    sample.remove_sample = False
    sample.status = type(sample.status).PENDING
    sample.metadata.pop(LOST, None)


def is_lost(sample: Any) -> bool:
    return LOST in (sample.metadata or {})


def lose(sample: Any, why: str) -> None:
    """Nothing was played that a reward could be for: the sample has none, and trains nothing."""
    begin_anew(sample)
    sample.metadata |= {LOST: why, TIMES_LOST: sample.metadata.get(TIMES_LOST, 0) + 1}
    sample.remove_sample = True
    sample.status = type(sample.status).ABORTED
