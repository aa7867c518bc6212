"""Wikispeedia: go from article to article by links, over a graph file of yours. Infinite, multi-turn, random access.

    treetune eval wikispeedia --taskset.graph links.tsv -m scripted:gold -n 10

Source and target of task i follow from (seed, i); how far apart they are is drawn first, so that long ways, which are
rare in graphs of this kind, come as often as short ones.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from treetune.builtin.wikispeedia.environment import (
    MAX_TURNS,
    WikispeediaEnvironment,
    WikispeediaTask,
    graph_of,
    opening,
)
from treetune.builtin.wikispeedia.link_graph import GraphError, LinkGraph
from treetune.errors import ConfigError, TasksetError
from treetune.score import VALID, Verdict, invalid
from treetune.taskset import Taskset, TasksetConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]
TRIES = 100
"""Sources drawn at random before all are looked at, one after the other."""


class WikispeediaConfig(TasksetConfig, frozen=True, kw_only=True):
    graph: str
    """The graph: a .tsv or .jsonl file, or a folder with articles.tsv and links.tsv."""
    min_distance: Positive = 3
    """The fewest clicks between source and target."""
    max_distance: Positive = 8
    """The most clicks between them, on a shortest way."""
    max_turns: Positive = MAX_TURNS
    """Turns of an episode, wrong ones included."""
    seed: int = 0
    """Another seed gives other tasks; `shuffle.seed` takes its place where it is set."""

    def __post_init__(self) -> None:
        if self.min_distance > self.max_distance:
            raise ValueError("min_distance must not be above max_distance")
        if self.max_turns < self.max_distance:
            raise ValueError("max_turns must be at least max_distance: the target could not be reached")


class Wikispeedia(Taskset[WikispeediaTask, WikispeediaConfig]):
    INFINITE = True

    def __init__(self, config: WikispeediaConfig | None = None) -> None:
        super().__init__(config)
        # Absolute, so that tasks and runs can be taken up from another folder.
        path = str(Path(self.config.graph).expanduser().resolve())
        self.config = msgspec.structs.replace(self.config, graph=path)
        try:
            LinkGraph.load(path)
        except GraphError as error:
            raise ConfigError([("taskset.graph", str(error))]) from None
        self.task_at(0)

    def task_at(self, index: int) -> WikispeediaTask:
        config, graph = self.config, LinkGraph.load(self.config.graph)
        # Hashed, not added: seed 7 at index i + 1 must not be seed 8 at index i.
        key = hashlib.blake2b(f"wikispeedia/{self.seed}/{index}".encode(), digest_size=8).digest()
        rng = random.Random(int.from_bytes(key, "little"))
        for source in _sources(graph, rng):
            levels = graph.levels(source, config.max_distance)
            if len(levels) > config.min_distance:
                distance = rng.randrange(config.min_distance, len(levels))
                target = rng.choice(levels[distance])
                return WikispeediaTask(
                    prompt=opening(graph, source, target, config.max_turns),
                    env_class="wikispeedia",
                    ability="navigation",
                    extra_info={"graph": config.graph, "max_turns": config.max_turns},
                    source=source,
                    target=target,
                    distance=distance,
                    graph=graph.digest,
                )
        raise TasksetError(
            f"{config.graph} has no two articles that are {config.min_distance} to {config.max_distance} clicks apart",
            remedy="lower min_distance, or use a larger graph",
        )

    def gold(self, task: WikispeediaTask) -> list[str] | None:
        return WikispeediaEnvironment.gold(task)

    def validate(self, task: WikispeediaTask) -> Verdict:
        path = graph_of(task).path(task.source, task.target)
        clicks = None if path is None else len(path) - 1
        return VALID if clicks == task.distance else invalid(f"the shortest way has {clicks} clicks")

    def source(self) -> str:
        return LinkGraph.load(self.config.graph).digest


def _sources(graph: LinkGraph, rng: random.Random) -> Iterator[str]:
    for _ in range(TRIES):
        yield rng.choice(graph.titles)
    first = rng.randrange(len(graph.titles))
    yield from graph.titles[first:] + graph.titles[:first]
