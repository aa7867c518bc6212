"""A target of every kind in the matrix, and for every kind of task the actions that earn the whole reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pictures import COLOURS, png
from scripted_judges import named

from treetune.chat.images import to_url
from treetune.chat.tool_template import write_calls
from treetune.cli.listing import TargetKind, TaskKind
from treetune.core.tool import message_of_action

CODE = '''
from treetune import Environment, Step, Task, Taskset, tool
from treetune.scorers import includes, judge


class Doubles(Taskset):
    def load_tasks(self):
        for n in range(4):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)})

    def reward(self, task, answer):
        return float(answer.strip() == task.ground_truth)

    def gold(self, task):
        return task.ground_truth


class Named(Taskset):
    scorer = includes()

    def load_tasks(self):
        for n, town in enumerate(("Paris", "Rome", "Oslo", "Bern")):
            yield Task(prompt=f"Name capital {n}.", reward_spec={"ground_truth": town})


class Judged(Taskset):
    scorer = judge(model=JUDGE, method="equal")

    def load_tasks(self):
        for n in range(4):
            yield Task(prompt=f"Name capital {n}.", reward_spec={"ground_truth": "Paris"})


class Endless(Doubles):
    INFINITE = True

    def task_at(self, index):
        return Task(prompt=f"Double {index}.", reward_spec={"ground_truth": str(2 * index)})

    load_tasks = Taskset.load_tasks


class Countdown(Environment):
    """Say 2, then 1: half of the reward for each."""

    MULTI_TURN = True

    def start(self):
        self.left = 2
        return super().start()

    def step(self, action):
        right = action.text.strip() == str(self.left)
        self.left -= 1
        return Step("Go on.", reward=0.5 * right, done=self.left == 0)

    @classmethod
    def gold(cls, task):
        return ["2", "1"]


class Doubled(Doubles):
    """The tool doubles; the answer is scored as ever."""

    @tool
    def double(self, number: int) -> int:
        """Double a number. number: which one."""
        return 2 * number

    def gold(self, task):
        number = int(task.ground_truth) // 2
        return [{"tool": "double", "arguments": {"number": number}}, task.ground_truth]


class Countdowns(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"Count down from 2, {n}.", env_class="kinds_of.py:Countdown") for n in range(2)]


class Colours(Doubles):
    def load_tasks(self):
        for colour, url in IMAGES.items():
            content = [{"type": "text", "text": "Which colour?"}, {"type": "image_url", "image_url": {"url": url}}]
            yield Task(prompt=[{"role": "user", "content": content}], reward_spec={"ground_truth": colour})
'''

TRUTHS = [
    {"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "data_source": "sums",
     "reward_model": {"style": "rule", "ground_truth": str(2 * n)}}
    for n in range(1, 5)
]  # fmt: skip
ENVIRONMENTS = [
    {"prompt": [{"role": "user", "content": f"{n} + {n}?"}], "env_class": "gsm8k",
     "reward_spec": {"method": "rule", "ground_truth": str(2 * n)}}
    for n in range(1, 5)
]  # fmt: skip

TARGETS: dict[TargetKind, tuple[str, bool]] = {
    TargetKind.ID: ("reverse-text", False),
    TargetKind.CONFIG: ("tasks.yaml", False),
    TargetKind.PYTHON: ("kinds_of.py:Doubles", False),
    TargetKind.ROWS: ("environments.jsonl", False),
    TargetKind.MIXTURE: ("mixture.yaml", True),
    TargetKind.INFINITE: ("kinds_of.py:Endless", True),
}
"""What names each, and whether it has no end."""

KINDS: dict[TaskKind, tuple[str, list[Any]]] = {
    TaskKind.RULE: ("truths.jsonl", ["2"]),
    TaskKind.SCORER: ("kinds_of.py:Named", ["It is Paris."]),
    TaskKind.JUDGE: ("kinds_of.py:Judged", ["It is Paris."]),
    TaskKind.REWARD: ("kinds_of.py:Doubles", ["0"]),
    TaskKind.ENVIRONMENT: ("environments.jsonl", ["#### 2"]),
    TaskKind.MULTI_TURN: ("kinds_of.py:Countdowns", ["2", "1"]),
    TaskKind.TOOLS: ("kinds_of.py:Doubled", [message_of_action({"tool": "double", "arguments": {"number": 0}}), "0"]),
    TaskKind.IMAGES: ("kinds_of.py:Colours", ["red"]),
}
"""What names each, and what earns the whole reward of its first task."""


def written(action: Any) -> str:
    """An action as a model writes it that is told of its tools in text."""
    return action if isinstance(action, str) else str(write_calls(action, "hermes")["content"])


def write_targets(folder: Path) -> None:
    urls = {colour: to_url(png(COLOURS[colour])) for colour in COLOURS}
    (folder / "kinds_of.py").write_text(f"IMAGES = {urls}\nJUDGE = {named('Fair')!r}\n{CODE}")
    (folder / "tasks.yaml").write_text(
        "train_tasks: [{loading_params: {args: [json], kwargs: {data_files: sums.jsonl, split: train}}, "
        "prompt_template: '{question}', ground_truth: answer, data_source: sums}]\n"
    )
    (folder / "mixture.yaml").write_text(
        "taskset: {id: mixture, sources: [{id: 'kinds_of.py:Doubles'}, {id: rows, files: [truths.jsonl], weight: 2}]}\n"
    )
    (folder / "colours.yaml").write_text(
        "train_tasks: [{loading_params: {args: [json], kwargs: {data_files: colours.jsonl, split: train}}, "
        "images: [image], prompt_template: 'Name the colour: <image>', ground_truth: colour, data_source: colours}]\n"
    )
    for colour in COLOURS:
        (folder / f"{colour}.png").write_bytes(png(COLOURS[colour]))
    colours = [{"image": f"{colour}.png", "colour": colour} for colour in COLOURS]
    sums = [{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    for name, rows in {"sums": sums, "colours": colours, "truths": TRUTHS, "environments": ENVIRONMENTS}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


CONTRACTS = '''
from treetune import Contract, Environment, Step, Task, Taskset


class Climb(Environment):
    """Pays a part for every step up, and never ends by itself."""

    CONTRACT = Contract(max_turns=12, turn_discount=0.5)

    def start(self):
        self.steps = 0
        return super().start()

    def step(self, action):
        self.steps += action.text.strip() == "up"
        return Step("Go on.", reward=float(action.text.strip() == "up"), info={"metrics": {"steps": self.steps}})


class Climbs(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"Climb {n}.", env_class="contracts_of.py:Climb") for n in range(4)]


class Together(Climbs):
    def score_group(self, task, traces):
        return [float(len(trace.turns)) for trace in traces]


class OnlyTogether(Taskset):
    def load_tasks(self):
        return [Task(prompt="Answer.")]

    def gold(self, task):
        return "yes"

    def score_group(self, task, traces):
        return [0.5 for trace in traces]
'''
