"""Selects the tasks that a training validates with: the target's `val_tasks`, or tasks that are held out of the
training.

    held = hold_out(taskset, 64, num_tasks=512)
    held.train, held.val              # indices of the taskset's order, with no uid in both
    held.what                         # "64 tasks that are held out of the training"

At most a fifth of the tasks is held out. `hold_out_rows` does the same with files of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from treetune.core.mixture import Selection
from treetune.core.taskset import Taskset
from treetune.errors import plural
from treetune.system.digest import digest

FAR = 2**30
"""For an endless order, validation uses the tasks from this index on, which no training reaches."""
SHARE = 5
"""At most one of this many tasks is held out; for further tasks, this many times the wanted number is looked at."""
NONE = "none: "


class HeldOut(msgspec.Struct, frozen=True):
    train: Sequence[int] | None
    """None if the training draws without end."""
    val: Sequence[int]
    what: str
    """For the plan."""
    uids: frozenset[str] = frozenset()
    """Of the tasks to validate with."""

    def select(self, taskset: Taskset[Any, Any], declared: Taskset[Any, Any] | None = None) -> Selection:
        """The tasks to validate with; chosen from the `declared` ones if the target declares some."""
        return Selection([(declared or taskset, self.val)])


def hold_out(
    taskset: Taskset[Any, Any], size: int, num_tasks: int | None = None, declared: Taskset[Any, Any] | None = None
) -> HeldOut:
    """Choose the tasks to train on, which are the first `num_tasks`, and the tasks to validate with. `declared` are the
    `val_tasks` of the target."""
    count = None if taskset.endless else taskset._size()
    wanted = min(num_tasks or count, count) if count is not None else num_tasks
    first = None if wanted is None else range(wanted)
    if declared is not None:
        found = range(size if declared.endless else declared._size() or 0)
        return HeldOut(first, found, f"{plural(len(found), 'task')} of val_tasks", _uids(declared, found))
    if not size:
        return HeldOut(first, [], f"{NONE}--val 0")
    if taskset.sequential:
        return HeldOut(first, [], f"{NONE}{taskset.name} is only a generator, whose tasks can only be read forward")
    if taskset.config.profile is not None:
        return HeldOut(first, [], f"{NONE}its tasks are drawn by their pass rates; declare val_tasks")
    if count is None or len(first or ()) + size <= count:
        return _look_further(taskset, size, first, count)
    uids = [taskset.at(index).uid for index in range(count)]
    held = choose(uids, size)
    places = {uid: index for index, uid in reversed(list(enumerate(uids))) if uid in held}
    train = [index for index, uid in enumerate(uids) if uid not in held][: num_tasks or None]
    return HeldOut(train, sorted(places.values()), describe(len(held), size, len(set(uids))), held)


def _look_further(taskset: Taskset[Any, Any], size: int, first: range | None, count: int | None) -> HeldOut:
    """Choose among the tasks after the first ones, spread over all of them."""
    known = _uids(taskset, first or ())
    begin, most = len(first or ()), SHARE * size
    if count is None:
        rest: Sequence[int] = range(FAR, FAR + most)
    else:
        rest = sorted({begin + number * (count - begin) // most for number in range(most)})
    new: dict[str, int] = {}
    for index in rest:
        if (uid := taskset.at(index).uid) not in known:
            new.setdefault(uid, index)
    held = choose(new, size, share=1 if known else SHARE)
    where = "that the training does not draw" if known or count is None else "that are held out of the training"
    if not held:
        return HeldOut(first, [], f"{NONE}{taskset.name} has no tasks besides those of the training")
    what = f"{plural(len(held), 'task')} {where}" + (f", all that were found of {size}" if len(held) < size else "")
    return HeldOut(first, [new[uid] for uid in new if uid in held], what, held)


def choose(uids: Iterable[str], size: int, share: int = SHARE) -> frozenset[str]:
    """Choose uids to hold out, independent of the order of the tasks; at most one in `share`."""
    distinct = dict.fromkeys(uids)
    return frozenset(sorted(distinct, key=digest)[: min(size, len(distinct) // share)])


def describe(held: int, size: int, distinct: int) -> str:
    if not held:
        return f"{NONE}too few tasks ({distinct:,}) to hold any out; declare val_tasks"
    fifth = f", a fifth of {distinct:,}" if held < size else ""
    return f"{plural(held, 'task')} that are held out of the training{fifth}"


def _uids(taskset: Taskset[Any, Any], indices: Iterable[int]) -> frozenset[str]:
    return frozenset(taskset.at(index).uid for index in indices)


# Files of rows


def hold_out_rows(
    files: Sequence[Path], size: int, cache_dir: Path | None
) -> tuple[dict[str, list[tuple[Path, int]]], str]:
    """Split files of rows into `train` and `val`; return the files of each with their numbers of rows. No uid is in
    both parts. Returns no files if there are too few rows."""
    from treetune.data.arrow_values import read_extra

    uids: list[str] = []
    for path in files:
        found = read_extra(path, "uid")
        uids += _row_uids(path, len(uids)) if found is None else found.to_pylist()
    held = choose(uids, size)
    what = describe(len(held), size, len(set(uids)))
    if not held:
        return {}, what
    places = {uid: number for number, uid in reversed(list(enumerate(uids))) if uid in held}
    train = [number for number, uid in enumerate(uids) if uid not in held]
    parts = {"train": train, "val": sorted(places.values())}
    return {name: [(_write_part(name, files, rows, cache_dir), len(rows))] for name, rows in parts.items()}, what


def _row_uids(path: Path, before: int) -> Iterator[str]:
    """Rows of other programs have no uid: each row counts as a separate task."""
    import pyarrow.parquet as pq

    return (f"row {before + number}" for number in range(pq.read_metadata(path).num_rows))


def _write_part(name: str, files: Sequence[Path], rows: Sequence[int], cache_dir: Path | None) -> Path:
    from treetune.data.arrow_values import schema_tree
    from treetune.data.rows.cache import Cache, Sidecar
    from treetune.data.rows.growing_parquet import write_taken
    from treetune.system.folders import default_cache_dir

    cache = Cache(default_cache_dir(cache_dir))
    key = f"{name}_{digest([[str(path) for path in files], name, list(rows)], 8)}"

    def write(path: Path) -> Sidecar:
        schema = write_taken(files, rows, path)
        config = {"part": name, "of": [str(each) for each in files]}
        return Sidecar(config=config, source=", ".join(each.name for each in files), rows=len(rows),
                       fingerprint=key, schema=schema_tree(schema))  # fmt: skip

    cache.get_or_build(key, write, force=True)  # the files may have been written again, in the same place
    return cache.path(key)
