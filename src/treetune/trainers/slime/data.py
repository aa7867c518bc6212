"""Uses a taskset as slime's data source: tasks in the usual order, without end; a resumed run continues it.

--data-source-path treetune.trainers.slime.TreetuneData --prompt-data TARGET --num-rollout 500

The datasets of `--eval-prompt-data NAME TARGET` may also be tasksets; `TARGET@[0:200]` selects some of their tasks.
"""

from __future__ import annotations

import copy
import logging
import re
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.data.rows.scorer import refuse_groups, scored_by
from treetune.errors import DrawFailed, ResumeError, UsageError
from treetune.play import streams
from treetune.play.leases import DRAW_TRIES, Draw, Pending
from treetune.system import threads
from treetune.system.digest import digest
from treetune.system.folders import default_cache_dir, write_atomically
from treetune.tasksets.target import NEEDS_TASKS, is_server, load_taskset
from treetune.trainers.slime.credit import check_credit
from treetune.trainers.slime.rollouts import settings_of
from treetune.trainers.slime.samples import DRAW, LOST, TIMES_LOST, UNANSWERED, fields_of, set_up, task_of

log = logging.getLogger("treetune.slime")

HELD_OUT = "held-out"
"""The name of a dataset for evaluation whose tasks are not trained on."""
_READ_BY_SLIME = (".jsonl", ".parquet")
_SLICE = re.compile(r"(.*?)(?:@\[(\d*):(\d*)\])?", re.S)
_MOST_LOSSES = 3
"""How often a group with lost episodes may be returned."""
_MOST_FAILURES = 8 * DRAW_TRIES
"""After this many consecutive failures to build a task, the error is raised."""


class _State(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The state that is saved next to a checkpoint."""

    tasks: streams.State
    groups: int
    """How many groups of samples were created."""
    samples: int


class TreetuneData:
    def __init__(self, args: Any) -> None:
        target = getattr(args, "prompt_data", None)
        if not target:
            raise UsageError("no tasks are named", remedy="pass --prompt-data TARGET: an id, tasks.yaml, file.py:Name")
        if is_server(target):
            raise UsageError(
                f"{target} is a running server, and --prompt-data {NEEDS_TASKS}",
                remedy=f"name what it serves, and in the file of --custom-config-path treetune: {{urls: [{target}]}}",
            )
        self.args = args
        settings_of(args)  # raises faults before anything is loaded
        overrides = {}
        if getattr(args, "rollout_shuffle", False):
            overrides["taskset.shuffle.seed"] = str(getattr(args, "rollout_seed", 0))
        self._taskset = load_taskset(target, overrides, split="train")
        self._streams: streams.Streams = threads.run_in_background(streams.load(self._taskset))
        self._groups = self._samples = 0
        self._buffer: list[list[Any]] = []
        """Returned groups, to be handed out first."""
        self._warned = False
        set_up(args)
        self._held_out: set[str] = set()
        """The uids of tasks that are validated with, which are left out of the training."""
        for dataset in getattr(args, "eval_datasets", None) or ():
            _write_for_slime(dataset)
            if dataset.name == HELD_OUT:
                self._held_out |= uids_in(Path(dataset.path))

    # The interface that slime expects of a data source

    def get_samples(self, num_samples: int) -> list[list[Any]]:
        """Return this many groups of `--n-samples-per-prompt` samples."""
        groups = self._take_buffered(num_samples)
        missing = num_samples - len(groups)
        if missing > 0:
            drawn = threads.run_in_background(self._draw(missing))
            groups += [self._group_of(draw, task) for draw, task in drawn]
        return groups

    def add_samples(self, samples: list[list[Any]]) -> None:
        """Take back unfinished groups; they are handed out again before others."""
        most = self.args.n_samples_per_prompt
        for group in samples:
            if len(group) != most:
                raise UsageError(f"a group of {len(group)} samples, with --n-samples-per-prompt {most}")
            group = [one[0] if isinstance(one, list) else one for one in group]
            if any(map(_is_hopeless, group)):
                log.warning("group %s is left out: its episodes are lost again and again", group[0].group_index)
            else:
                self._buffer.append(group)

    def save(self, rollout_id: int) -> None:
        if (folder := getattr(self.args, "save", None)) is not None:
            path = _state_path(folder, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, msgspec.json.encode(_State(self._tasks_state(), self._groups, self._samples)))

    def load(self, rollout_id: int | None = None) -> None:
        """Continue where `save` stopped. Raises if the tasks have changed."""
        if (folder := getattr(self.args, "load", None)) is None:
            return
        path = _state_path(folder, rollout_id)
        if not path.exists():
            log.warning("%s does not exist: the tasks begin with the first", path)
            return
        try:
            state = msgspec.json.decode(path.read_bytes(), type=_State)
        except msgspec.DecodeError as error:
            raise ResumeError(f"{path} is not a state of these tasks: {error}") from None
        self._streams.restore(state.tasks)
        self._groups, self._samples, self._buffer = state.groups, state.samples, []

    def __len__(self) -> int:
        """The number of tasks in an epoch."""
        if self._streams.count is None:
            problem = f"{self._taskset.name} never ends, so it has no epochs"
            raise UsageError(problem, remedy="pass --num-rollout instead of --num-epoch")
        return self._streams.count

    def __bool__(self) -> bool:
        return True

    # Implementation

    async def _draw(self, number: int) -> list[tuple[Draw, Task]]:
        drawn: list[tuple[Draw, Task]] = []
        failures = 0
        while len(drawn) < number:
            try:
                draw, task = await self._streams.sample()
                failures = 0
                if task.uid not in self._held_out:
                    drawn.append((draw, task))
            except DrawFailed as error:  # repeated until it is skipped
                failures += 1
                if failures >= _MOST_FAILURES:
                    raise
                log.warning("a task could not be made: %s", error.message)
        return drawn

    def _group_of(self, draw: Draw, task: Task) -> list[Any]:
        from slime.utils.types import Sample

        fields = _fields_of(self._taskset, task)
        check_credit(self.args, self._taskset.contract_of(task))
        if (problem := refuse_groups(self._taskset, task)) and not self._warned:
            self._warned = True
            log.warning(problem)
        fields["metadata"][DRAW] = {"index": draw.index, "position": draw.position}
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            group.append(Sample(**copy.deepcopy(fields), group_index=self._groups, index=self._samples))
            self._samples += 1
        self._groups += 1
        return group

    def _take_buffered(self, number: int) -> list[list[Any]]:
        path = getattr(self.args, "buffer_filter_path", None)
        if path is None or not self._buffer or number < 1:
            taken, self._buffer = self._buffer[:number], self._buffer[number:]
            return taken
        from slime.utils.misc import load_function

        return list(load_function(path)(self.args, None, self._buffer, number))

    def _tasks_state(self) -> streams.State:
        """Return the state, with returned groups as unfinished draws: a resumed run does not have them."""
        state = self._streams.state()
        found = {}
        for group in self._buffer:
            if (draw := group[0].metadata.get(DRAW)) is not None:
                found[draw["index"]] = Pending(draw["index"], draw["position"])
        own = state.streams[""]
        pending = sorted([*own.pending, *found.values()], key=lambda each: each.index)
        changed = {**state.streams, "": streams.StreamState(own.index, own.curriculum, pending)}
        return streams.State(changed, state.taskset)


def _is_hopeless(sample: Any) -> bool:
    """Whether another attempt at a sample's episode is useless."""
    lost = sample.metadata.get(LOST)
    return lost == UNANSWERED or (lost is not None and sample.metadata[TIMES_LOST] >= _MOST_LOSSES)


def _state_path(folder: str, rollout_id: int | None) -> Path:
    return Path(folder) / "rollout" / f"treetune_tasks_{rollout_id}.json"


def _fields_of(taskset: Taskset[Any, Any], task: Task) -> dict[str, Any]:
    scorer = scored_by(taskset, task)
    if scorer is None:
        raise UsageError(
            f"nothing can score task {task.idx} of {taskset.name}",
            remedy="give it a ground_truth, an env_class, or a taskset with reward(task, answer)",
        )
    return fields_of(task, scorer)


def _write_for_slime(dataset: Any) -> None:
    """Write the file that slime's own reader needs, for an evaluation dataset that is a taskset."""
    target, first, last = _SLICE.fullmatch(str(dataset.path)).groups()  # type: ignore[union-attr]
    if target.endswith(_READ_BY_SLIME):
        if Path(target).parent == cache_folder():
            _read_as_ours(dataset)
        return
    taskset = load_taskset(target, split="val")
    if taskset.endless and not last:
        problem = f"--eval-prompt-data {dataset.name}: {target} never ends"
        raise UsageError(problem, remedy=f"take some of its tasks, such as {target}@[0:200]")
    dataset.path = str(write_rows(taskset, int(first or 0), int(last) if last else None))
    _read_as_ours(dataset)


def _read_as_ours(dataset: Any) -> None:
    dataset.apply_chat_template = False
    dataset.input_key, dataset.label_key, dataset.metadata_key = "prompt", "label", "metadata"


def write_rows(taskset: Taskset[Any, Any], first: int = 0, last: int | None = None) -> Path:
    """Write tasks as rows that slime reads, to the cache folder."""
    tasks = islice(taskset.draw(last), first, last)
    lines = b"".join(msgspec.json.encode(_fields_of(taskset, task)) + b"\n" for task in tasks)
    path = cache_folder() / f"{digest(lines.decode())}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lines)
    return path


def cache_folder() -> Path:
    return default_cache_dir() / "slime"


def uids_in(path: Path) -> set[str]:
    """Return the uids of the tasks in rows that `write_rows` wrote."""
    return {task_of(SimpleNamespace(**msgspec.json.decode(line)))[1].uid for line in path.open("rb")}
