"""Wikispeedia: go from article to article by links, over a graph from a file. Infinite, multi-turn, random access.

    treetune eval wikispeedia --taskset.graph links.tsv -m scripted:gold -n 10

Source and target of task i follow from (seed, i). Their distance is drawn first, so that long paths, which are rare in
such graphs, come as often as short ones. docs/tasksets.md shows the formats of a graph.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from treetune.chat.message import text_of
from treetune.config.structs import FileName
from treetune.core.contract import Contract
from treetune.core.environment import Action, Step
from treetune.core.score import VALID, Verdict, invalid
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.core.trace import Trace
from treetune.errors import ConfigError, EnvironmentFault, TasksetError
from treetune.system.digest import digest
from treetune.tasksets.turns import Positive, TurnEnvironment, hash_number

TRIES = 100
"""How many sources are drawn at random before all are tried in order."""
MARKS = "\"'[]()<>*`. "
"""Characters that models put around a line or a name."""
FORMATS = "name a .tsv or .jsonl file, or a folder of the Wikispeedia dump, as docs/tasksets.md shows them"


class WikispeediaTask(Task, frozen=True, kw_only=True):
    source: str = ""
    """The article where the game begins."""
    target: str = ""
    """The article to reach."""
    distance: int = 0
    """The minimum number of clicks to reach it."""
    graph: str = ""
    """The graph's digest; its file is `extra_info.graph`."""


class WikispeediaEnvironment(TurnEnvironment):
    CONTRACT = Contract(max_turns=30)

    task: WikispeediaTask

    def __init__(self, task: WikispeediaTask) -> None:
        super().__init__(task)
        self._way = [task.source]
        """The path from the source to the current article; `back` shortens it."""
        self._clicks = 0

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        path = load_graph(task).path(task.source, task.target) if isinstance(task, WikispeediaTask) else None
        return None if path is None else [f"click {title}" for title in path[1:]]

    @classmethod
    def render(cls, trace: Trace) -> str:
        """Render the path: what was said, and where it led."""
        task, rows = trace.task, []
        if isinstance(task, WikispeediaTask):
            rows.append(f"from {task.source} to {task.target}: {task.distance} clicks are enough")
        for number, turn in enumerate(trace.turns, 1):
            said = text_of((turn.message or {}).get("content")) or ""
            place = turn.info.get("answer", "?")
            rows.append(f"{number:>4}  {_read_action(said) or 'nothing':<32}  {place}")
        return "\n".join([*rows, *filter(None, [trace.explanation])])

    def start(self) -> Any:  # not async: the graph is read in a thread
        self._graph = load_graph(self.task)
        return write_prompt(self._graph, self.task.source, self.task.target, self.max_turns)

    async def step(self, action: Action) -> Step:
        last = self.next_turn()
        said = self._act(action.text)
        place, target = self._way[-1], self.task.target
        reached = place == target
        if reached:
            said = f"You reached {target} with {self._clicks} clicks."
            explanation = f"reached in {self._clicks} clicks, {self.task.distance} are enough"
        else:
            said += "The turns are over." if last else write_page(self._graph, place)
            explanation = f"at {place!r}, not at {target!r}"
        metrics = {"clicks": self._clicks, "distance": self.task.distance}
        info = {"answer": place, "explanation": explanation, "success": reached, "metrics": metrics}
        return Step(said, float(reached), reached or last, info, truncated=last and not reached)

    def _act(self, text: str) -> str:
        """Perform the last line with an action; return what the policy is shown about it."""
        place = self._way[-1]
        line = _read_action(text)
        if line is None:
            return "Nothing was done: write one line, `click NAME` or `back`.\n\n"
        if line.casefold() == "back":
            if len(self._way) == 1:
                return "There is no article to go back to.\n\n"
            self._way.pop()
            return ""
        name, links = line[5:].lstrip(": "), self._graph.links_of(place)
        forgiving = {_simplify(link): link for link in reversed(links)}
        link = name if name in links else forgiving.get(_simplify(name))
        if link is None:
            return f"{place} has no link to {name[:100]!r}.\n\n"
        self._way.append(link)
        self._clicks += 1
        return ""


class WikispeediaConfig(TasksetConfig, frozen=True, kw_only=True):
    graph: FileName
    """The graph: a .tsv or .jsonl file, or a folder with articles.tsv and links.tsv."""
    min_distance: Positive = 3
    """The minimum number of clicks between source and target."""
    max_distance: Positive = 8
    """The maximum number of clicks between them, on a shortest path."""
    max_turns: Positive = WikispeediaEnvironment.CONTRACT.turns
    """The number of turns in an episode, including wrong ones."""
    seed: int = 0
    """The random seed. A different seed gives different tasks; `shuffle.seed` replaces it if set."""

    def __post_init__(self) -> None:
        if self.min_distance > self.max_distance:
            raise ValueError("min_distance must not be above max_distance")
        if self.max_turns < self.max_distance:
            raise ValueError("max_turns must be at least max_distance: the target could not be reached")


class Wikispeedia(Taskset[WikispeediaTask, WikispeediaConfig]):
    INFINITE = True

    def __init__(self, config: WikispeediaConfig | None = None) -> None:
        super().__init__(config)
        # Absolute, so that tasks and runs can be resumed from another folder.
        path = str(Path(self.config.graph).expanduser().resolve())
        self.config = msgspec.structs.replace(self.config, graph=path)
        self.task_at(0)

    def task_at(self, index: int) -> WikispeediaTask:
        config, graph = self.config, LinkGraph.load(self.config.graph)
        low, high = config.min_distance, config.max_distance
        rng = random.Random(hash_number(f"wikispeedia/{self.seed}/{index}"))
        for source in _draw_sources(graph, rng):
            levels = list(islice(graph.levels(source), high + 1))
            if len(levels) > low:
                distance = rng.randrange(low, len(levels))
                target = rng.choice(sorted(levels[distance]))
                return WikispeediaTask(
                    prompt=write_prompt(graph, source, target, config.max_turns),
                    env_class="wikispeedia",
                    ability="navigation",
                    extra_info={"graph": config.graph, "max_turns": config.max_turns},
                    source=source,
                    target=target,
                    distance=distance,
                    graph=graph.digest,
                )
        why = f"{config.graph} has no two articles that are {low} to {high} clicks apart"
        raise TasksetError(why, remedy="lower min_distance, or use a larger graph")

    def validate(self, task: WikispeediaTask) -> Verdict:
        path = load_graph(task).path(task.source, task.target)
        clicks = None if path is None else len(path) - 1
        return VALID if clicks == task.distance else invalid(f"the shortest way has {clicks} clicks")

    def source(self) -> str:
        return LinkGraph.load(self.config.graph).digest


def _draw_sources(graph: LinkGraph, rng: random.Random) -> Iterator[str]:
    for _ in range(TRIES):
        yield rng.choice(graph.titles)
    first = rng.randrange(len(graph.titles))
    yield from graph.titles[first:] + graph.titles[:first]


def load_graph(task: WikispeediaTask) -> LinkGraph:
    path = task.extra_info.get("graph")
    if not isinstance(path, str):
        raise EnvironmentFault(
            "the task does not name a graph", remedy="set extra_info.graph to the path of the graph file"
        )
    graph = LinkGraph.load(path)
    if graph.digest != task.graph:
        raise EnvironmentFault(f"{path} is not the graph that this task was made from", remedy="draw the task again")
    return graph


def write_prompt(graph: LinkGraph, source: str, target: str, max_turns: int) -> str:
    return (
        f"Go from the article {source!r} to the article {target!r} by following links. In each turn write one line: "
        "`click NAME` follows a link of the article that you are at, `back` returns to the article before. "
        f"You have {max_turns} turns.\n\n{write_page(graph, source)}"
    )


def write_page(graph: LinkGraph, title: str) -> str:
    links = "\n".join(f"- {link}" for link in graph.links_of(title)) or "(none)"
    return f"You are at: {title}\n\nLinks:\n{links}"


def _read_action(text: str) -> str | None:
    """Return the last line that says `back` or `click NAME`."""
    for line in reversed(text.splitlines()):
        line = line.strip(MARKS)
        if line.casefold() == "back" or (line[:5].casefold() == "click" and not line[5:6].isalnum()):
            return line
    return None


def _simplify(name: str) -> str:
    """Remove surrounding marks, underscores and capitals."""
    return " ".join(name.replace("_", " ").split()).strip(MARKS).casefold()


class LinkGraph:
    def __init__(self, links: dict[str, set[str]]) -> None:
        self.titles = sorted(links.keys() | {target for targets in links.values() for target in targets})
        self._links = {title: links.get(title, set()) - {title} for title in self.titles}
        number = {title: number for number, title in enumerate(self.titles)}
        numbers = [sorted(number[target] for target in self._links[title]) for title in self.titles]
        self.digest = digest([self.titles, numbers])
        """Hash of articles and links, whatever the file format."""

    @classmethod
    def load(cls, path: str | Path) -> LinkGraph:
        """Return the graph in a file, which is read again only if it changes."""
        path = Path(path).expanduser()
        files = [path / "articles.tsv", path / "links.tsv"] if path.is_dir() else [path]
        if not files[-1].is_file() or files[-1].suffix not in (".tsv", ".jsonl"):
            raise ConfigError([("taskset.graph", f"{files[-1].absolute()} is not a graph file")], remedy=FORMATS)
        there = [(file, file.stat()) for file in files if file.is_file()]
        return _read_graph(tuple((file, info.st_size, info.st_mtime_ns) for file, info in there))

    def links_of(self, title: str) -> list[str]:
        return sorted(self._links[title])

    def levels(self, source: str) -> Iterator[set[str]]:
        """Yield the articles that are 0, 1, 2, ... clicks away."""
        level = {source}
        seen = set(level)
        while level:
            yield level
            level = set().union(*(self._links[title] for title in level)) - seen
            seen |= level

    def path(self, source: str, target: str) -> list[str] | None:
        """Return the first of the shortest paths by title, seen from its end; None if there is no path."""
        levels = []
        for level in self.levels(source):
            if target in level:
                break
            levels.append(level)
        else:
            return None
        path = [target]
        for level in reversed(levels):
            path.append(min(title for title in level if path[-1] in self._links[title]))
        return path[::-1]


@lru_cache(maxsize=8)
def _read_graph(files: tuple[tuple[Path, int, int], ...]) -> LinkGraph:
    links: dict[str, set[str]] = {}
    for file, _, _ in files:
        parse = _parse_json if file.suffix == ".jsonl" else _parse_columns
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError([("taskset.graph", f"{file} cannot be read: {error}")], remedy=FORMATS) from None
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.startswith("#"):
                try:
                    article, *targets = map(_clean_title, parse(line))
                except ValueError as error:
                    raise ConfigError([("taskset.graph", f"{file}, line {number}: {error}")], remedy=FORMATS) from None
                links.setdefault(article, set()).update(targets)
    if not any(links.values()):
        raise ConfigError([("taskset.graph", f"{files[0][0]} has no links")], remedy=FORMATS)
    return LinkGraph(links)


class _Article(msgspec.Struct):
    article: str
    links: list[str] = []


def _parse_json(text: str) -> list[str]:
    """Return an article and its links."""
    entry = msgspec.json.decode(text, type=_Article)
    return [entry.article, *entry.links]


def _parse_columns(text: str) -> list[str]:
    """Return an article and a link; an article alone in `articles.tsv`."""
    columns = text.split("\t")
    if len(columns) > 2:
        raise ValueError(f"expected an article and a link with a tab between, got {len(columns)} columns")
    return [unquote(column) for column in columns]


@lru_cache(maxsize=1 << 16)
def _clean_title(text: str) -> str:
    """Return a title as a person writes it: `Ancient_Egypt` is `Ancient Egypt`."""
    title = " ".join(text.replace("_", " ").split())
    if not title:
        raise ValueError("an article without a title")
    return title
