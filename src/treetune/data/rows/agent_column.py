"""The column `agent_name` of verl's rows: the agent loop that plays a row whose episode does not end with one answer.

    if needs_loop(taskset, task):
        table = with_agent(table)

verl joins files and uses its default loop only if the column is missing, so either all rows of a training have the
column or none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from treetune.core.agent import AGENTS_ON_SERVERS
from treetune.core.contract import Contract
from treetune.core.environment import Environment
from treetune.core.mixture import owner_of
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.arrow_values import read_extra
from treetune.data.rows.scorer import BY_RULE, ScoredBy, environment_of, taskset_of, with_type
from treetune.errors import TreetuneError, UsageError

if TYPE_CHECKING:
    import pyarrow as pa

AGENT = "agent_name"
LOOP = "treetune"
"""Our agent loop (`treetune.trainers.verl.loop`), which plays the task in a row's `extra_info`."""


def has_several_turns(environment: Any) -> bool:
    """Whether an environment declares that its episodes have several turns."""
    if getattr(environment, "tool_methods", ()) or getattr(environment, "MULTI_TURN", False):
        return True
    return (getattr(environment, "CONTRACT", Contract()).max_turns or 1) > 1


def needs_loop(taskset: Taskset[Any, Any], task: Task) -> bool:
    """Whether one answer alone is not enough: the environment has several turns, tools may be called, or the rollouts
    of the task are scored together."""
    taskset, task = owner_of(taskset, task)
    if (of_row := getattr(taskset, "scored_by", None)) is not None:
        return row_needs_loop(task, of_row(task))
    if taskset.MULTI_TURN or taskset.offers_tools(task) or taskset.overrides("score_group"):
        return True
    if (taskset.CONTRACT.max_turns or 1) > 1:
        return True
    if task.env_class is None or taskset.overrides("environment") or task.extra_info.get("max_turns") == 1:
        return False
    try:
        return has_several_turns(taskset.environment_class(task.env_class))
    except TreetuneError:
        return False  # reported when the task is played


def takes_agents(taskset: Taskset[Any, Any], task: Task) -> bool:
    """Whether an agent with a loop of its own can play a task: one answer is enough, or its environment says how an
    agent hands in what it did."""
    owner, inner = owner_of(taskset, task)
    if owner.offers_tools(inner):
        return False
    if inner.env_class is not None and not owner.overrides("environment"):
        cls: Any = owner.environment_class(inner.env_class)
        return cls.hand_in is not Environment.hand_in or not needs_loop(taskset, task)
    return taskset.scores_group_of(task) or not needs_loop(taskset, task)


def refuse_agents(taskset: Taskset[Any, Any], task: Task, *, on_server: bool = False) -> None:
    """Raise if an agent cannot play a task, or if it could not do so on a task server."""
    if not takes_agents(taskset, task):
        problem = f"{taskset.name} has several turns or tools: agents play tasks with one answer, or on a machine"
        raise UsageError(problem, remedy="leave out the agent, or override `hand_in` in the environment")
    if on_server and needs_loop(taskset, task):
        raise UsageError(AGENTS_ON_SERVERS, remedy="train these tasks with verl, TRL or slime")


def row_needs_loop(task: Task, scored: ScoredBy | None) -> bool:
    """Like `needs_loop`, for a row: by its environment, scorer or taskset. Untrusted code is not run to find out."""
    if task.tools:
        return True
    scored = scored or (ScoredBy("environment", task.env_class) if task.env_class is not None else BY_RULE)
    if scored.by_scorer or task.extra_info.get("max_turns") == 1:
        return False
    try:
        owner = taskset_of(scored)
        if scored.kind == "environment":
            return has_several_turns(environment_of(scored))
        return needs_loop(owner, with_type(task, owner))
    except TreetuneError:
        return False


def says_nothing(path: Path | str) -> bool:
    """Whether the rows of a parquet file name no agent, and some have an environment that does not declare how long its
    episodes are. Rows with images are left to verl's own loop."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    from treetune.data.rows.image_columns import IMAGES

    if not {AGENT, IMAGES}.isdisjoint(pq.read_schema(path).names):
        return False
    scorers = read_extra(path, "scorer")
    return scorers is not None and any(
        is_silent(scored) for text in pc.unique(scorers).to_pylist() if (scored := ScoredBy.read(text)) is not None
    )


def is_silent(scored: ScoredBy) -> bool:
    """Whether a row is scored by an environment that does not declare how long its episodes are."""
    if scored.by_scorer:
        return False
    try:
        if scored.kind == "environment":
            return getattr(environment_of(scored), "CONTRACT", Contract()).max_turns is None
        owner = taskset_of(scored)
        return owner.overrides("environment") or Contract() != owner.CONTRACT  # which environments may not repeat
    except TreetuneError:
        return False


def with_agent(table: pa.Table, agent: str = LOOP) -> pa.Table:
    """Return the table with the column. A table that already has it is returned unchanged."""
    import pyarrow as pa

    if AGENT in table.column_names:
        return table
    return table.append_column(AGENT, pa.array([agent] * table.num_rows, pa.string()))
