"""Wikispeedia: go from article to article by links, over a graph file of yours. Infinite, multi-turn, random access.

    treetune eval wikispeedia --taskset.graph links.tsv -m scripted:gold -n 10

Source and target of task i follow from (seed, i); how far apart they are is drawn first, so that long ways, which are
rare in graphs of this kind, come as often as short ones.

A graph file is JSON lines, `{"article": "Cat", "links": ["Dog", ...]}`, or two columns with tabs between, an article
and one that it links to, as in the Wikispeedia dump of SNAP; or a folder of that dump (`articles.tsv`, `links.tsv`).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import msgspec

from treetune.builtin.turns import max_turns_of
from treetune.config import FileName
from treetune.environment import Action, Environment, Step
from treetune.errors import ConfigError, EnvironmentFault, TasksetError, UsageError
from treetune.score import VALID, Verdict, invalid
from treetune.task import Task
from treetune.taskset import Taskset, TasksetConfig

Positive = Annotated[int, msgspec.Meta(ge=1)]
MAX_TURNS = 30
TRIES = 100
"""Sources drawn at random before all are looked at, one after the other."""
MARKS = "\"'[]()<>*`. "
"""What models like to put around a line or a name."""
SUFFIXES = (".tsv", ".jsonl")


class WikispeediaTask(Task, frozen=True, kw_only=True):
    source: str = ""
    """The article where it begins."""
    target: str = ""
    """The article to be reached."""
    distance: int = 0
    """The fewest clicks that lead there."""
    graph: str = ""
    """The graph's digest; its file is `extra_info.graph`."""


class WikispeediaConfig(TasksetConfig, frozen=True, kw_only=True):
    graph: FileName
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
        for source in _draw_sources(graph, rng):
            levels = graph.levels(source, config.max_distance)
            if len(levels) > config.min_distance:
                distance = rng.randrange(config.min_distance, len(levels))
                target = rng.choice(levels[distance])
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
        raise TasksetError(
            f"{config.graph} has no two articles that are {config.min_distance} to {config.max_distance} clicks apart",
            remedy="lower min_distance, or use a larger graph",
        )

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


class WikispeediaEnvironment(Environment):
    MULTI_TURN = True

    task: WikispeediaTask

    def __init__(self, task: WikispeediaTask) -> None:
        super().__init__(task)
        self._max_turns = max_turns_of(task, MAX_TURNS)
        self._way = [task.source]
        """From the source to the current article; `back` shortens it."""
        self._clicks = self._turns = 0

    @classmethod
    def gold(cls, task: Task) -> list[str] | None:
        if not isinstance(task, WikispeediaTask):
            return None
        path = load_graph(task).path(task.source, task.target)
        return None if path is None else [f"click {title}" for title in path[1:]]

    def start(self) -> str:
        self._graph = load_graph(self.task)
        return write_prompt(self._graph, self.task.source, self.task.target, self._max_turns)

    async def step(self, action: Action) -> Step:
        self._turns += 1
        said = self._act(action.text)
        reached = self._way[-1] == self.task.target
        last = self._turns >= self._max_turns
        if reached:
            text = f"You reached {self.task.target} with {self._clicks} clicks."
        else:
            text = "\n\n".join([*said, "The turns are over." if last else write_page(self._graph, self._way[-1])])
        return Step(
            text,
            reward=float(reached),
            done=reached or last,
            truncated=last and not reached,
            info={
                "answer": self._way[-1],
                "explanation": f"reached in {self._clicks} clicks, {self.task.distance} are enough"
                if reached
                else f"at {self._way[-1]!r}, not at {self.task.target!r}",
                "success": reached,
                "metrics": {"clicks": self._clicks, "distance": self.task.distance},
            },
        )

    def _act(self, text: str) -> list[str]:
        """Do what the last line with an action says; what there is to say about it."""
        match _read_action(text):
            case None:
                return ["Nothing was done: write one line, `click NAME` or `back`."]
            case "back", _:
                if len(self._way) == 1:
                    return ["There is no article to go back to."]
                self._way.pop()
                return []
            case _, name:
                link = _match_link(name, self._graph.links_of(self._way[-1]))
        if link is None:
            return [f"{self._way[-1]} has no link to {name[:100]!r}."]
        self._way.append(link)
        self._clicks += 1
        return []


def load_graph(task: WikispeediaTask) -> LinkGraph:
    path = task.extra_info.get("graph")
    if not isinstance(path, str):
        raise EnvironmentFault("the task names no graph", remedy="set extra_info.graph to the path of the graph file")
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


def _read_action(text: str) -> tuple[str, str] | None:
    """(`back`, nothing) or (`click`, a name), from the last line that is one of the two."""
    for line in reversed(text.splitlines()):
        line = line.strip(MARKS)
        if line.casefold() == "back":
            return "back", ""
        verb, name = line[:5], line[5:]
        if verb.casefold() == "click" and not name[:1].isalnum():
            return "click", name.lstrip(": ")
    return None


def _match_link(name: str, links: list[str]) -> str | None:
    """The link that a name stands for: marks around it, underscores and capitals are forgiven."""
    if name in links:
        return name
    plain = {_simplify(link): link for link in reversed(links)}
    return plain.get(_simplify(name))


def _simplify(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).strip(MARKS).casefold()


class GraphError(UsageError):
    """A graph file that cannot be read."""


class LinkGraph:
    """Made by `load`. Articles are numbered in the order of their titles, so sorted numbers are sorted titles."""

    def __init__(self, links: dict[str, set[str]]) -> None:
        self.titles = sorted(links.keys() | {target for targets in links.values() for target in targets})
        self._number = {title: number for number, title in enumerate(self.titles)}
        self._links = [
            sorted(self._number[target] for target in links.get(title, ()) if target != title) for title in self.titles
        ]
        content = msgspec.json.encode([self.titles, self._links])
        self.digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        """Of articles and links, whichever way they were written down."""

    @classmethod
    def load(cls, path: str | Path) -> LinkGraph:
        """The graph of a file, read once as long as the file does not change."""
        files = _find_files(Path(path).expanduser())
        return _read_graph(tuple((str(file), (info := os.stat(file)).st_size, info.st_mtime_ns) for file in files))

    def __contains__(self, title: str) -> bool:
        return title in self._number

    def links_of(self, title: str) -> list[str]:
        return [self.titles[number] for number in self._links[self._number[title]]]

    def levels(self, source: str, depth: int) -> list[list[str]]:
        """The articles that are 0, 1, 2, ... clicks away, up to `depth` clicks; each list is sorted."""
        level = {self._number[source]}
        seen = set(level)
        found: list[list[str]] = []
        while level and len(found) <= depth:
            found.append([self.titles[number] for number in sorted(level)])
            level = set().union(*(self._links[number] for number in level)) - seen
            seen |= level
        return found

    def path(self, source: str, target: str) -> list[str] | None:
        """The first of the shortest paths by title, both ends included; None where there is no way."""
        goal = self._number[target]
        came_from = {self._number[source]: -1}
        level = list(came_from)
        while level and goal not in came_from:
            reached = []
            for number in level:
                for link in self._links[number]:
                    if link not in came_from:
                        came_from[link] = number
                        reached.append(link)
            level = reached
        if goal not in came_from:
            return None
        steps = [goal]
        while (before := came_from[steps[-1]]) >= 0:
            steps.append(before)
        return [self.titles[number] for number in reversed(steps)]


@lru_cache(maxsize=8)
def _read_graph(files: tuple[tuple[str, int, int], ...]) -> LinkGraph:
    links: dict[str, set[str]] = {}
    for name, _, _ in files:
        file = Path(name)
        for line, text in _read_lines(file):
            try:
                article, targets = _parse_json(text) if file.suffix == ".jsonl" else _parse_columns(text)
            except ValueError as error:
                raise GraphError(
                    f"{file}, line {line}: {error}", remedy="see docs/tasksets.md for the formats"
                ) from None
            links.setdefault(article, set()).update(targets)
    if not any(links.values()):
        raise GraphError(f"{files[0][0]} has no links", remedy="see docs/tasksets.md for the formats")
    return LinkGraph(links)


def _find_files(path: Path) -> list[Path]:
    if path.is_dir():
        files = [path / "articles.tsv", path / "links.tsv"]
        if not files[1].is_file():
            raise GraphError(f"{path} has no links.tsv", remedy="name a folder of the Wikispeedia dump, or a file")
        return [file for file in files if file.is_file()]
    if not path.is_file():
        raise GraphError(f"no such file: {path}", remedy=f"paths are taken from {Path.cwd()}")
    if path.suffix not in SUFFIXES:
        raise GraphError(f"{path} is no graph file", remedy=f"its name must end in {' or '.join(SUFFIXES)}")
    return [path]


def _read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Numbered, without empty ones and comments."""
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip() and not line.startswith("#"):
                    yield number, line.rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise GraphError(f"{file} cannot be read: {error}", remedy="it must be a text file in UTF-8") from None


class _Article(msgspec.Struct):
    article: str
    links: list[str] = []


_decoder = msgspec.json.Decoder(_Article)


def _parse_json(text: str) -> tuple[str, list[str]]:
    entry = _decoder.decode(text)
    return _clean_title(entry.article), [_clean_title(link) for link in entry.links]


def _parse_columns(text: str) -> tuple[str, list[str]]:
    """An article and a link; an article alone in `articles.tsv`."""
    columns = text.split("\t")
    if len(columns) > 2:
        raise ValueError(f"expected an article and a link with a tab between, got {len(columns)} columns")
    article, *targets = (_clean_title(unquote(column)) for column in columns)
    return article, targets


@lru_cache(maxsize=1 << 16)
def _clean_title(text: str) -> str:
    """As a person writes it: `Ancient_Egypt` is `Ancient Egypt`."""
    title = " ".join(text.replace("_", " ").split())
    if not title:
        raise ValueError("an article without a title")
    return title
