"""Find a way from one article to another by following links."""

from __future__ import annotations

from treetune.builtin.conversation import max_turns_of
from treetune.builtin.wikispeedia.link_graph import LinkGraph
from treetune.environment import Action, Environment, Step
from treetune.errors import EnvironmentFault
from treetune.task import Task

MAX_TURNS = 30
MARKS = "\"'[]()<>*`. "
"""What models like to put around a line or a name."""


class WikispeediaTask(Task, frozen=True, kw_only=True):
    source: str = ""
    """The article where it begins."""
    target: str = ""
    """The article to be reached."""
    distance: int = 0
    """The fewest clicks that lead there."""
    graph: str = ""
    """The graph's digest; its file is `extra_info.graph`."""


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
        path = graph_of(task).path(task.source, task.target)
        return None if path is None else [f"click {title}" for title in path[1:]]

    def start(self) -> str:
        self._graph = graph_of(self.task)
        return opening(self._graph, self.task.source, self.task.target, self._max_turns)

    async def step(self, action: Action) -> Step:
        self._turns += 1
        said = self._act(action.text)
        reached = self._way[-1] == self.task.target
        last = self._turns >= self._max_turns
        if reached:
            text = f"You reached {self.task.target} with {self._clicks} clicks."
        else:
            text = "\n\n".join([*said, "The turns are over." if last else page(self._graph, self._way[-1])])
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
        match _action(text):
            case None:
                return ["Nothing was done: write one line, `click NAME` or `back`."]
            case "back", _:
                if len(self._way) == 1:
                    return ["There is no article to go back to."]
                self._way.pop()
                return []
            case _, name:
                link = _meant(name, self._graph.links_of(self._way[-1]))
        if link is None:
            return [f"{self._way[-1]} has no link to {name[:100]!r}."]
        self._way.append(link)
        self._clicks += 1
        return []


def graph_of(task: WikispeediaTask) -> LinkGraph:
    path = task.extra_info.get("graph")
    if not isinstance(path, str):
        raise EnvironmentFault("the task names no graph", remedy="set extra_info.graph to the path of the graph file")
    graph = LinkGraph.load(path)
    if graph.digest != task.graph:
        raise EnvironmentFault(f"{path} is not the graph that this task was made from", remedy="draw the task again")
    return graph


def opening(graph: LinkGraph, source: str, target: str, max_turns: int) -> str:
    return (
        f"Go from the article {source!r} to the article {target!r} by following links. In each turn write one line: "
        "`click NAME` follows a link of the article that you are at, `back` returns to the article before. "
        f"You have {max_turns} turns.\n\n{page(graph, source)}"
    )


def page(graph: LinkGraph, title: str) -> str:
    links = "\n".join(f"- {link}" for link in graph.links_of(title)) or "(none)"
    return f"You are at: {title}\n\nLinks:\n{links}"


def _action(text: str) -> tuple[str, str] | None:
    """(`back`, nothing) or (`click`, a name), from the last line that is one of the two."""
    for line in reversed(text.splitlines()):
        line = line.strip(MARKS)
        if line.casefold() == "back":
            return "back", ""
        verb, name = line[:5], line[5:]
        if verb.casefold() == "click" and not name[:1].isalnum():
            return "click", name.lstrip(": ")
    return None


def _meant(name: str, links: list[str]) -> str | None:
    """The link that a name stands for: marks around it, underscores and capitals are forgiven."""
    if name in links:
        return name
    plain = {_plain(link): link for link in reversed(links)}
    return plain.get(_plain(name))


def _plain(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).strip(MARKS).casefold()
