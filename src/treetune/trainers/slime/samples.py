"""slime's samples: how a `Sample` carries a task, and what happens to groups and evaluations with lost episodes.

    sample = Sample(**fields_of(task, scorer))
    scorer, task = task_of(sample)

    --dynamic-sampling-filter-path treetune.trainers.slime.keep_played
    --custom-reward-post-process-path treetune.trainers.slime.group_rewards
    --eval-function-path treetune.trainers.slime.evaluate
    --custom-rollout-log-function-path treetune.trainers.slime.log_rollouts
    --custom-eval-rollout-log-function-path treetune.trainers.slime.log_evaluation

A sample carries its whole task in its metadata, so that any process can play and score it. `TreetuneData` adds the
functions to slime's arguments, ahead of those that are already there.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import Any

import msgspec

from treetune.core.task import Task
from treetune.core.trace import decode_trace
from treetune.data.rows import row_codec
from treetune.data.rows.formats import FORMATS
from treetune.data.rows.scorer import BY_RULE, ScoredBy
from treetune.errors import UsageError
from treetune.trainers.rollout_log import RolloutLog
from treetune.trainers.train_run import ROLLOUTS, VALIDATION

HERE = "treetune.trainers.slime"
_OTHERS = "treetune_other_functions"
"""The argument that stores which functions slime's arguments named before."""

ROW = "treetune_row"
"""The metadata key for the task's row, as JSON."""
LOST = "lost"
"""The metadata key for the reason why an episode has no reward."""
TIMES_LOST = "times_lost"
"""The metadata key for how often that happened."""
UNANSWERED = "unanswered"
"""The reason for losing an episode without room or time for a first answer: another try cannot save it."""
TRACE = "treetune_trace"
"""The metadata key for the trace of an episode, until it is written to the run folder."""
DRAW = "treetune_draw"
"""The metadata key for the draw that a group belongs to."""


def fields_of(task: Task, scored: ScoredBy | None) -> dict[str, Any]:
    """Return the arguments for a task's `Sample`; also a line of a file that slime reads."""
    row = FORMATS["trl"].row_of(task, scorer="" if scored is None else scored.text)
    metadata = {"source_name": task.data_source, ROW: msgspec.json.encode(row).decode()}
    return {"prompt": task.messages, "label": row_codec.truth_text(task.ground_truth), "metadata": metadata}


def task_of(sample: Any) -> tuple[ScoredBy, Task]:
    """Return what scores a sample's task, and the task."""
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    if not isinstance(metadata.get(ROW), str):
        raise UsageError(
            f"sample {sample.index} does not carry a task of Treetune's",
            remedy="pass --prompt-data TARGET --data-source-path treetune.trainers.slime.TreetuneData",
        )
    row = msgspec.json.decode(metadata[ROW])
    scored = ScoredBy.read(row["extra_info"].get("scorer")) or BY_RULE
    return scored, FORMATS["trl"].task_of(row, whole=False)


def begin_anew(sample: Any) -> None:
    """Remove the data that an earlier try left in a sample."""
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
    """Mark a sample as lost: no rollout could earn a reward, so it has none and trains nothing."""
    begin_anew(sample)
    sample.metadata |= {LOST: why, TIMES_LOST: sample.metadata.get(TIMES_LOST, 0) + 1}
    sample.remove_sample = True
    sample.status = type(sample.status).ABORTED


def set_up(args: Any) -> None:
    """Put this module's functions into slime's arguments. They call the functions that were there before."""
    others = dict(getattr(args, _OTHERS, None) or {})
    for key, name in (("dynamic_sampling_filter_path", "keep_played"), ("eval_function_path", "evaluate")):
        ours, named = f"{HERE}.{name}", getattr(args, key, None)
        if named != ours:
            others[key] = named
            setattr(args, key, ours)
    for key, name in (
        ("custom_reward_post_process_path", "group_rewards"),
        ("custom_rollout_log_function_path", "log_rollouts"),
        ("custom_eval_rollout_log_function_path", "log_evaluation"),
    ):
        if getattr(args, key, None) is None:
            setattr(args, key, f"{HERE}.{name}")
    setattr(args, _OTHERS, others)


def keep_played(args: Any, group: list[Any], **kwargs: Any) -> Any:
    """Filter for dynamic sampling: drops and counts a group if one of its episodes was lost."""
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput, call_dynamic_filter

    for sample in _flat(group):
        if is_lost(sample):
            return DynamicFilterOutput(keep=False, reason=f"lost_{sample.metadata[LOST]}")
    firsts = [one[0] if isinstance(one, list) else one for one in group]
    return call_dynamic_filter(_other(args, "dynamic_sampling_filter_path"), args, firsts, **kwargs)


def episode_of(sample: Any) -> Any:
    return sample.index if sample.rollout_id is None else sample.rollout_id


def evaluate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = True) -> Any:
    """Run slime's evaluation; lost episodes are counted but not averaged."""
    from slime.rollout.base_types import call_rollout_fn

    other = _other(args, "eval_function_path") or _load("slime.rollout.sglang_rollout.generate_rollout")
    output = call_rollout_fn(other, args, rollout_id, data_source, evaluation=evaluation)
    for name, found in output.data.items() if evaluation else ():
        samples = found.get("samples") or []
        kept = [at for at, sample in enumerate(samples) if not is_lost(sample)]
        if len(kept) == len(samples):
            continue
        if not kept:
            raise RuntimeError(f"every episode of the evaluation {name!r} was lost")
        for key, values in found.items():
            if isinstance(values, list) and len(values) == len(samples):
                found[key] = [values[at] for at in kept]
        output.metrics = {**(output.metrics or {}), f"eval/{name}/lost": len(samples) - len(kept)}
    return output


def log_rollouts(rollout_id: int, args: Any, samples: list[Any], *others: Any) -> bool:
    """Log the metrics of a step and write its rollouts to the run folder; slime's own logging continues."""
    _written["trained"] = True
    played = list(_flat(samples))
    _log_metrics(rollout_id, args, "rollout/step", {"rollout": played})
    _write(ROLLOUTS, rollout_id + 1, played)
    return False


def log_evaluation(rollout_id: int, args: Any, data: dict[str, Any], *others: Any) -> bool:
    """Do the same with an evaluation. slime numbers the evaluation before the first step like the one after it."""
    step = rollout_id + 1 if rollout_id or _written["trained"] else 0
    played = {f"eval/{name}": found.get("samples") or [] for name, found in data.items()}
    _log_metrics(rollout_id, args, "eval/step", played)
    _write(VALIDATION, step, chain.from_iterable(played.values()))
    return False


def _log_metrics(rollout_id: int, args: Any, step_key: str, played: dict[str, list[Any]]) -> None:
    """Log the mean of each metric next to what slime logs. Each episode counts once, however many samples it gave."""
    from slime.observability import logging_utils
    from slime.observability.metric_utils import compute_rollout_step

    values: dict[str, list[float]] = defaultdict(list)
    for prefix, samples in played.items():
        episodes = {episode_of(sample): (sample.metadata or {}).get("metrics") or {} for sample in samples}
        for metrics in episodes.values():
            for name, value in metrics.items():
                values[f"{prefix}/metrics/{name}"].append(value)
    if values:
        means = {name: statistics.fmean(each) for name, each in values.items()}
        logging_utils.log(args, {**means, step_key: compute_rollout_step(args, rollout_id)}, step_key=step_key)


def _write(name: str, step: int, samples: Iterable[Any]) -> None:
    encoded = [text for sample in samples if (text := (sample.metadata or {}).pop(TRACE, None)) is not None]
    if (log := _log(name)) is not None:
        log.add(step, map(decode_trace, encoded))


_written = {"trained": False}
_log = cache(RolloutLog.named)


def _other(args: Any, key: str) -> Any:
    path = (getattr(args, _OTHERS, None) or {}).get(key)
    return None if path is None else _load(path)


def _load(path: str) -> Any:
    from slime.utils.misc import load_function

    return load_function(path)


def _flat(group: list[Any]) -> Iterator[Any]:
    for one in group:
        yield from one if isinstance(one, list) else [one]
