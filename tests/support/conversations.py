"""Tasks as their authors write them, one for each conversation in `stories.py`. The first task of a taskset is played.

`stories.write` copies this file to the folder of a test, where `conversations.py:NAME` is a TARGET.
"""

from __future__ import annotations

import asyncio

import msgspec

from treetune import Contract, Environment, Step, Task, Taskset, tool


class Rules(Environment):
    """Ends after `turns` answers."""

    MULTI_TURN = True
    turns = 3

    def start(self):
        self.played = 0
        return self.task.messages

    def reward(self, text: str) -> float:
        raise NotImplementedError

    def step(self, action):
        reward = self.reward(action.text)
        self.played += 1
        return Step(f"Turn {self.played} is over.", reward=reward, done=self.played == self.turns)


class Count(Rules):
    """Counts down; each right number earns half of what the one before could."""

    def reward(self, text):
        return 0.5 ** (self.played + 1) * (text.strip() == str(self.turns - 1 - self.played))


class Signs(Rules):
    """Some turns cost something, and others earn what no float is exactly."""

    turns = 5

    def reward(self, text):
        return [0.1, -0.2, 0.3, 0.0, 0.4][self.played] * (text == "go")


class AtTurn12(Rules):
    """Pays only at its last turn."""

    turns = 12

    def reward(self, text):
        return float(self.played == self.turns - 1 and text == str(self.turns))


class AtTurn30(AtTurn12):
    turns = 30


class AfterZero(Rules):
    def reward(self, text):
        return float(self.played == 2)


class Discounted(Rules):
    """Trainers train on half of its reward for each turn."""

    CONTRACT = Contract(turn_discount=0.5)
    turns = 2

    def reward(self, text):
        return 0.5


class Limited(Rules):
    """Its contract ends it before its rules do."""

    CONTRACT = Contract(max_turns=2)

    def reward(self, text):
        return 0.25


class Cut(Environment):
    """Ends the episode by a limit of its own, after a reward."""

    MULTI_TURN = True

    def start(self):
        self.played = 0

    def step(self, action):
        self.played += 1
        return Step("Go on.", reward=0.25, truncated=self.played == 2)


class Thinks(Rules):
    turns = 2

    def reward(self, text):
        return 0.5 * (text.rpartition("</think>")[2].strip() in ("left", "right"))


class Silence(Rules):
    turns = 2

    def reward(self, text):
        return 0.75 if text == "" and not self.played else 0.25 * (text == "now")


class Market(Environment):
    @tool
    async def search(self, query: str, limit: int = 5) -> list[str]:
        """Find items. query: what to look for."""
        return [f"{query} {number}" for number in range(limit)]

    @tool(final=True)
    def buy(self, item: str) -> Step:
        """Buy an item, which ends it."""
        return Step("bought", reward=float(item == "red 1"))


class Library(Environment):
    """Scores the answer at the end; on the way, its tools raise or take a while."""

    @tool
    def fetch(self, page: int) -> str:
        """Fetch a page. page: its number."""
        if page % 2:
            raise RuntimeError(f"page {page} is torn out")
        return f"Page {page}: the word is sesame."

    @tool
    async def dig(self, shelf: str) -> str:
        """Look behind a shelf, which takes a while. shelf: its name."""
        await asyncio.sleep(0.3)
        return f"Behind {shelf}: dust."

    def step(self, action):
        return Step(reward=float(action.text.strip() == "sesame"), done=True)


class Single(Taskset):
    """One task."""

    prompt, env_class = "", ""

    def load_tasks(self):
        yield Task(prompt=self.prompt, env_class=f"conversations.py:{self.env_class}")


class Counting(Single):
    prompt, env_class = "Count down from 2 to 0.", "Count"


class Steps(Single):
    prompt, env_class = "Say go.", "Signs"


class Twelve(Single):
    prompt, env_class = "Count to 12.", "AtTurn12"


class Thirty(Single):
    prompt, env_class = "Count to 30.", "AtTurn30"


class Late(Single):
    prompt, env_class = "Wait for it.", "AfterZero"


class Discounting(Single):
    prompt, env_class = "Be quick.", "Discounted"


class Limiting(Single):
    prompt, env_class = "Say two things.", "Limited"


class CutShort(Single):
    prompt, env_class = "Walk on.", "Cut"


class Thinking(Single):
    prompt, env_class = "Left or right?", "Thinks"


class Silent(Single):
    prompt, env_class = "Say nothing, and then now.", "Silence"


class Shopping(Single):
    prompt, env_class = "Buy red 1.", "Market"


class Reading(Single):
    prompt, env_class = "Which word is in the book?", "Library"


class Digging(Single):
    prompt, env_class = "Which word is behind the shelves?", "Library"


class Foreign(Taskset):
    """One answer, of letters beyond ASCII."""

    def load_tasks(self):
        yield Task(prompt="Sag: naïve — 日本語 🙂", reward_spec={"ground_truth": "naïve — 日本語 🙂 é"})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)


class Cell(msgspec.Struct, frozen=True):
    name: str
    weights: list[float | None] = []


class Board(Task, frozen=True, kw_only=True):
    cells: dict[str, list[Cell]] = {}


class Boards(Taskset[Board]):
    """Endless, with nested fields of its own."""

    INFINITE = True

    def task_at(self, index):
        cells = {"row": [Cell("a", [0.5, None]), Cell(f"b{index}")], "none": []}
        extra = {"deep": {"flags": [True, None, {"n": 2.5}], "empty": {}}}
        return Board(prompt=f"Name the cells of board {index}.", cells=cells, extra_info=extra)

    def reward(self, task, answer):
        known = task.extra_info["deep"]["flags"][2]["n"] == 2.5 and task.cells["row"][0].weights == [0.5, None]
        return 0.75 * (known and answer == " ".join(cell.name for cell in task.cells["row"]))


class Ranked(Taskset):
    """Only groups have rewards."""

    def load_tasks(self):
        yield Task(prompt="Say more than others.")

    def score_group(self, task, traces):
        return [0.5 for _ in traces]


class Grouped(Ranked):
    """An answer alone has one too."""

    def reward(self, task, answer):
        return 1.0


MIXTURE = """
taskset:
  id: mixture
  sources:
  - {id: "conversations.py:Counting", weight: 3}
  - {id: "conversations.py:Foreign", weight: 0.25}
"""
