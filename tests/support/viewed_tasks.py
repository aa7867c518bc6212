"""The tasks of the runs that the viewer's tests look at: five sources, one of each kind that a page has to show."""

from __future__ import annotations

import re
from base64 import b64encode
from random import Random

from pictures import COLOURS, png

from treetune import Environment, Step, Task, Taskset
from treetune.core.environment import Rendered
from treetune.core.taskset import TasksetConfig

SOURCES = ("sums", "tools", "pictures", "walk", "essays")
MARK = "Answer:"
SIDE = 4
MOVES = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}


class ViewedConfig(TasksetConfig, frozen=True, kw_only=True):
    num_tasks: int = 200
    lenient: bool = False
    """Pays for a sum that is wrong by one: what `rescore` then finds is known."""


def given(text: str) -> str:
    found = re.findall(rf"{MARK}\s*(.+)", text)
    return found[-1].strip().strip("*$") if found else ""


class Viewed(Taskset[Task, ViewedConfig]):
    def load_tasks(self):
        return (make_task(number) for number in range(self.config.num_tasks))

    def reward(self, task, answer):
        said = given(answer)
        if task.data_source == "essays":
            return min(1.0, len(answer.split()) / 200)
        if self.config.lenient and said.isdigit():
            return float(abs(int(said) - int(task.ground_truth)) <= 1)
        return float(said == task.ground_truth)

    def environment(self, task):
        return Walk(task) if task.data_source == "walk" else super().environment(task)

    @classmethod
    def render(cls, trace):
        """The boards of a walk, one after the other."""
        if trace.task.data_source != "walk":
            return None
        shown = [turn.observed[-1]["content"] for turn in trace.turns if turn.observed]
        shown += [message["content"] for message in trace.final]
        return Rendered(kind="shell", text="\n\n".join(f"turn {turn}\n{text}" for turn, text in enumerate(shown)))

    def gold(self, task):
        if task.data_source == "walk":
            return route(task)
        return "word " * 200 if task.data_source == "essays" else f"{MARK} {task.ground_truth}"


class Walk(Environment):
    """A way through a field, told by a board in a fixed-width font."""

    MULTI_TURN = True

    def __init__(self, task):
        super().__init__(task)
        self.at, self.goal = (0, 0), tuple(task.extra_info["goal"])

    def start(self):
        return [*self.task.messages, {"role": "user", "content": board(self.at, self.goal)}]

    def step(self, action):
        move = MOVES.get(given(action.text) or action.text.strip().lower(), (0, 0))
        self.at = tuple(min(SIDE - 1, max(0, place + by)) for place, by in zip(self.at, move, strict=True))
        there = self.at == self.goal
        info = {"at": list(self.at), "success": there, "explanation": "reached the goal" if there else "not yet there"}
        return Step(board(self.at, self.goal), 1.0 if there else 0.0, there, info)


def board(at, goal):
    def cell(x, y):
        return "@" if (x, y) == tuple(at) else "x" if (x, y) == tuple(goal) else "."

    return "\n".join(" ".join(cell(x, y) for x in range(SIDE)) for y in range(SIDE))


def route(task):
    x, y = task.extra_info["goal"]
    return ["east"] * x + ["south"] * y


def make_task(number: int) -> Task:
    random = Random(f"task {number}")
    source = SOURCES[number % len(SOURCES)]
    a, b = random.randint(10, 99), random.randint(10, 99)
    system = {"role": "system", "content": f"Think, then end with a line `{MARK} ...`."}
    more = {"tools": ["calculator"]} if source == "tools" else {}
    prompt = f"What is ${a} \\times {b} + {number}$?" if source == "tools" else f"What is ${a} + {b} + {number}$?"
    truth = str(a * b + number) if source == "tools" else str(a + b + number)
    if source == "pictures":
        truth = random.choice(list(COLOURS))
        url = "data:image/png;base64," + b64encode(png(COLOURS[truth], 48 + number, 48)).decode()
        prompt = [
            {"type": "text", "text": "Which colour has this picture? One word."},
            {"type": "image_url", "image_url": {"url": url}},
        ]
    elif source == "walk":
        goal = random.randint(1, SIDE - 1), random.randint(1, SIDE - 1)
        more = {"extra_info": {"goal": list(goal)}}
        prompt, truth = f"Walk from the @ to the x: say north, south, west or east. Field {number}.", str(goal)
    elif source == "essays":
        prompt, truth = f"Explain why $e^{{i\\pi}} + 1 = 0$ to reader number {number}, in 200 words.", None
    spec = {"ground_truth": truth} if truth is not None else {}
    messages = [system, {"role": "user", "content": prompt}]
    return Task(idx=number, prompt=messages, data_source=source, reward_spec=spec, ability="math", **more)
