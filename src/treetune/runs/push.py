"""A run as a dataset of the hub: a row for each rollout, together with the run's own files.

    Run("runs/x").push_to_hub("me/my-run")       # calls push_run
    load_dataset("me/my-run")["rollouts"]           # uid, reward, outcome, messages, ...

The files are those of the run folder, so a download of the repository is a run: `Run(snapshot_download(...))`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from treetune.chat.images import name_images
from treetune.chat.message import Message
from treetune.config.trust import CONFIG, FINGERPRINT, SUMMARY, TRACE_LINES
from treetune.core.trace import Trace
from treetune.runs.index import INDEX
from treetune.runs.plain_files import IMAGES, find_fault
from treetune.runs.summary import Summary
from treetune.system.hub import Card, check_repo, upload

ROLLOUTS = "data/rollouts-00000-of-00001.parquet"
_AT_ONCE = 500


class AboutRun(msgspec.Struct):
    """The facts about a run that the card shows."""

    kind: str
    """The program that wrote it."""
    taskset: str
    model: str
    pass_threshold: float
    summary: Summary


def push_run(
    repo: str, about: AboutRun, folder: Path, traces: Iterator[Trace], metrics: Sequence[str], private: bool = False
) -> str:
    """Pushes the rollouts, and the run folder if Treetune wrote it. Returns the address of the dataset."""
    check_repo(repo)
    with tempfile.TemporaryDirectory(prefix="treetune-push-") as temporary:
        table = Path(temporary) / "rollouts.parquet"
        write_rollouts(traces, metrics, table)
        files: dict[str, Path | bytes] = {"README.md": _card(about, repo).page(), ROLLOUTS: table}
        if about.kind == "treetune":
            own = [folder / name for name in (CONFIG, FINGERPRINT, SUMMARY, TRACE_LINES, INDEX)]
            own += sorted((folder / IMAGES).glob("*"))
            files |= {str(file.relative_to(folder)): file for file in own if not find_fault(file, folder)}
        rollouts = f"{about.summary.rollouts:,} rollouts"
        return upload(repo, files, private=private, message=f"{rollouts} of {about.taskset} by {about.model}")


_COLUMNS: dict[str, tuple[str, Callable[[Trace], Any]]] = {
    "uid": ("string", attrgetter("uid")),
    "task": ("int64", attrgetter("task.idx")),
    "occurrence": ("int64", attrgetter("occurrence")),
    "rollout": ("int64", attrgetter("rollout")),
    "step": ("int64", attrgetter("step")),
    "source": ("string", attrgetter("task.data_source")),
    "model": ("string", attrgetter("model")),
    "outcome": ("string", attrgetter("outcome.value")),
    "reward": ("double", attrgetter("reward")),
    "success": ("bool", attrgetter("success")),
    "turns": ("int64", lambda trace: len(trace.turns)),
    "agent_calls": ("int64", lambda trace: trace.agent and len(trace.agent.calls)),
    "prompt_tokens": ("int64", attrgetter("usage.prompt_tokens")),
    "completion_tokens": ("int64", attrgetter("usage.completion_tokens")),
    "began": ("double", attrgetter("timing.began")),
    "seconds": ("double", attrgetter("timing.total")),
    "policy": ("double", attrgetter("timing.policy")),
    "environment": ("double", attrgetter("timing.environment")),
    "retries": ("int64", attrgetter("all_retries")),
    "answer": ("string", attrgetter("answer")),
    "ground_truth": ("string", lambda trace: _text(trace.task.ground_truth)),
    "explanation": ("string", attrgetter("explanation")),
    "failure": ("string", lambda trace: trace.failure and f"{trace.failure.type}: {trace.failure.message}"),
}
"""The columns of a row, each with its Arrow type; the messages and the metrics follow."""


def write_rollouts(traces: Iterator[Trace], metrics: Sequence[str], path: Path) -> None:
    """Writes a parquet row for each rollout, holding only some of them in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    fields = {name: pa.type_for_alias(kind) for name, (kind, _) in _COLUMNS.items()}
    fields["messages"] = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    schema = pa.schema({**fields, **{f"metric_{name}": pa.float64() for name in metrics}})
    with pq.ParquetWriter(path, schema) as writer:
        while some := list(islice(traces, _AT_ONCE)):
            writer.write_table(pa.Table.from_pylist([_row(trace) for trace in some], schema))


def _row(trace: Trace) -> dict[str, Any]:
    messages = (trace.agent.messages if trace.agent is not None else []) or trace.messages
    return {
        **{name: value(trace) for name, (_, value) in _COLUMNS.items()},
        "messages": [{"role": str(message.get("role")), "content": _said(message)} for message in messages],
        **{f"metric_{name}": value for name, value in trace.metrics.items()},
    }


def _said(message: Message) -> str:
    """The text of a message, followed by its tool calls as JSON."""
    content = name_images(message.get("content"))
    return "\n".join(filter(None, [_text(content), _text(message.get("tool_calls") or None)]))


def _text(value: Any) -> str | None:
    """Text unchanged, anything else as JSON."""
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=repr).decode("utf-8", "replace")


def _card(run: AboutRun, repo: str) -> Card:
    from treetune.system.folders import read_version

    of_ours = run.kind == "treetune"
    origin = (
        f"Evaluated by Treetune {read_version()}" if of_ours else f"Of {run.kind}, read by Treetune {read_version()}"
    )
    lines = [
        f"{origin}: {run.summary.tasks:,} tasks, {run.summary.rollouts:,} rollouts, a row each. A rollout that failed "
        "has no reward (null); it is never a 0.",
        "",
        *_figures(run.summary),
        *("", "```python", "from datasets import load_dataset", ""),
        *(f'rollouts = load_dataset("{repo}", split="rollouts")', "```"),
    ]
    if of_ours:
        lines += [
            "",
            f"The tasks are those of `{run.taskset}`, which scores them: `config.yaml` contains it with all of its "
            "keys. A "
            f"reward of {run.pass_threshold:g} counts as solved. The run itself is here too:",
            *("", "```shell", f"hf download {repo} --repo-type dataset --local-dir run"),
            *("treetune show run", "treetune eval run/config.yaml -m MODEL", "```"),
        ]
    title = f"{run.taskset or 'Rollouts'} by {run.model or 'a trainer'}"
    return Card(title, {"rollouts": [ROLLOUTS]}, "\n".join(lines))


def _figures(summary: Summary) -> Iterator[str]:
    yield from ("| figure | value |", "|---|---|")
    error = "" if summary.stderr is None else f" ± {summary.stderr:.4f} (standard error)"
    if summary.mean_reward is not None:
        yield f"| mean reward, of {summary.scored:,} scored rollouts | {summary.mean_reward:.4f}{error} |"
    if summary.mean_reward_all is not None:
        yield f"| over all, with failed rollouts counted as 0 | {summary.mean_reward_all:.4f} |"
    for k, chance in summary.pass_at_k.items():
        yield f"| pass@{k} | {chance:.4f} |"
    for name, count in summary.outcomes.items():
        yield f"| {name} | {count:,} |"
