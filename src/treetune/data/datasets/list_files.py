"""The files that a trainer is given for a list of tasks: one for each task or, where tasks have a weight, one file that
their mixture draws.

    files = build_files(tasksets, "verl")
    files[0].path, files[0].shares

A drawn file has the first draws of the mixture that `eval`, `serve` and the other trainers take from the same list: as
many as the tasks have rows together, so that an epoch stays as long as without weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from treetune.config.structs import to_plain
from treetune.core.mixture import Mixture
from treetune.data.datasets.join import File, join_files
from treetune.data.datasets.taskset import BUILDER_VERSION, DatasetTaskset
from treetune.data.rows.arrow_values import schema_tree
from treetune.data.rows.cache import Cache, Sidecar, config_hash

Build = Callable[[DatasetTaskset], File]


class Share(msgspec.Struct, frozen=True):
    """What a drawn file has of one task of the list."""

    name: str
    weight: float
    draws: int
    """Rows of the file."""
    rows: int
    """Rows that the task has. With fewer draws some of them are not in the file, with more they are repeated."""


class ListFile(NamedTuple):
    name: str
    sidecar: Sidecar
    path: Path
    hit: bool
    shares: list[Share]
    """Empty where the file is that of one task."""


def draws_by_weight(weights: Sequence[Any]) -> bool:
    """Whether a list is a mixture: it has several entries, and any of them a weight. An entry without one weighs 1."""
    return len(weights) > 1 and any(weight is not None for weight in weights)


def build_files(
    tasksets: Sequence[DatasetTaskset],
    format: str = "verl",
    agents: Sequence[str] | None = None,
    *,
    num_draws: int | None = None,
    build: Build | None = None,
) -> list[ListFile]:
    """`agents`: the agent loop of each task, which its rows then name. `num_draws`: how many rows a drawn file has.
    `build` takes the place of the tasksets' own."""
    make = build or (lambda taskset: taskset.build(format))
    if not draws_by_weight([taskset.config.weight for taskset in tasksets]):
        files = join_files(tasksets, [make(taskset) for taskset in tasksets], agents)
        return [ListFile(taskset.name, *file, []) for taskset, file in zip(tasksets, files, strict=True)]
    # Pass rates that schedule a task's rows are part of the draw.
    whole = [taskset._unscheduled for taskset in tasksets]
    files = join_files(whole, [make(taskset) for taskset in whole], agents)
    return [_draw_file(tasksets, files, format, num_draws)]


def _draw_file(tasksets: Sequence[DatasetTaskset], files: Sequence[File], format: str, count: int | None) -> ListFile:
    """The file that the mixture of the tasksets draws of their files, from the cache."""
    sidecars = [sidecar for sidecar, _, _ in files]
    weights = [1.0 if taskset.config.weight is None else taskset.config.weight for taskset in tasksets]
    wanted = count or sum(sidecar.rows for sidecar in sidecars)
    orders = [(to_plain(each.config)["shuffle"], each.order_key(format)) for each in tasksets]
    asked = {"like": [sidecar.digest for sidecar in sidecars], "weights": weights, "orders": orders, "draws": wanted}
    key = f"{sidecars[0].key.partition('_')[0]}_{config_hash({**asked, 'version': BUILDER_VERSION}, {})}"
    cache = Cache(tasksets[0].cache_dir)

    def write(path: Path) -> Sidecar:
        from treetune.data.rows.growing_parquet import write_taken

        starts = [sum(sidecar.rows for sidecar in sidecars[:number]) for number in range(len(files))]
        mixture = Mixture.of(tasksets, weights)
        places = [mixture.place(mixture.position_at(index, None)) for index in range(wanted)]
        schema = write_taken([path for _, path, _ in files], [starts[source] + row for source, row in places], path)
        drawn = Counter(source for source, _ in places)
        shares = [
            Share(taskset.name, weight, drawn[number], sidecar.rows)
            for number, (taskset, weight, sidecar) in enumerate(zip(tasksets, weights, sidecars, strict=True))
        ]
        return Sidecar(
            config={"format": format, "mixture": msgspec.to_builtins(shares)},
            source=", ".join(dict.fromkeys(sidecar.source for sidecar in sidecars)),
            rows=wanted,
            dropped=dict(sum((Counter(sidecar.dropped) for sidecar in sidecars), Counter())),
            flaws=[flaw for sidecar in sidecars for flaw in sidecar.flaws],
            fingerprint=key,
            schema=schema_tree(schema),
            versions=sidecars[0].versions,
        )

    sidecar, drawn_hit = cache.get_or_build(key, write)
    shares = msgspec.convert(sidecar.config["mixture"], list[Share])
    hit = drawn_hit and all(was_hit for _, _, was_hit in files)
    return ListFile("mixture", sidecar, cache.path(key), hit, shares)
