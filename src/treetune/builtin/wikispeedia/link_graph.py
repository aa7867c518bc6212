"""Articles and the links between them, read from a file.

    graph = LinkGraph.load("links.tsv")
    graph.links_of("Cat")             # sorted
    graph.path("Cat", "Philosophy")   # a shortest one

A file is JSON lines, `{"article": "Cat", "links": ["Dog", ...]}`, or two columns with tabs between, an article and one
that it links to, as in the Wikispeedia dump of SNAP; a folder of that dump (`articles.tsv`, `links.tsv`) is one too.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

import msgspec

from treetune.errors import UsageError

SUFFIXES = (".tsv", ".jsonl")


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
        files = _files_of(Path(path).expanduser())
        return _loaded(tuple((str(file), (info := os.stat(file)).st_size, info.st_mtime_ns) for file in files))

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
def _loaded(files: tuple[tuple[str, int, int], ...]) -> LinkGraph:
    links: dict[str, set[str]] = {}
    for name, _, _ in files:
        file = Path(name)
        for line, text in _lines(file):
            try:
                article, targets = _from_json(text) if file.suffix == ".jsonl" else _from_columns(text)
            except ValueError as error:
                raise GraphError(
                    f"{file}, line {line}: {error}", remedy="see docs/tasksets.md for the formats"
                ) from None
            links.setdefault(article, set()).update(targets)
    if not any(links.values()):
        raise GraphError(f"{files[0][0]} has no links", remedy="see docs/tasksets.md for the formats")
    return LinkGraph(links)


def _files_of(path: Path) -> list[Path]:
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


def _lines(file: Path) -> Iterator[tuple[int, str]]:
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


def _from_json(text: str) -> tuple[str, list[str]]:
    entry = _decoder.decode(text)
    return _title(entry.article), [_title(link) for link in entry.links]


def _from_columns(text: str) -> tuple[str, list[str]]:
    """An article and a link; an article alone in `articles.tsv`."""
    columns = text.split("\t")
    if len(columns) > 2:
        raise ValueError(f"expected an article and a link with a tab between, got {len(columns)} columns")
    article, *targets = (_title(unquote(column)) for column in columns)
    return article, targets


@lru_cache(maxsize=1 << 16)
def _title(text: str) -> str:
    """As a person writes it: `Ancient_Egypt` is `Ancient Egypt`."""
    title = " ".join(text.replace("_", " ").split())
    if not title:
        raise ValueError("an article without a title")
    return title
