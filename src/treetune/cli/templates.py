"""The files that `treetune init` writes, by their names; `{module}`, `{cls}`, `{title}` and `{id}` are filled in."""

TASKSET = {
    "{module}.py": '''"""{title}: what it asks, in one line."""

from treetune import Score, Task, Taskset, TasksetConfig


class {cls}Config(TasksetConfig, frozen=True, kw_only=True):
    num_tasks: int = 20
    """How many tasks there are."""


class {cls}(Taskset[Task, {cls}Config]):
    def load_tasks(self):
        for number in range(self.config.num_tasks):
            yield Task(prompt=f"Double {{number}}.", reward_spec={{"ground_truth": str(2 * number)}})

    def reward(self, task, answer):
        found = answer.strip()
        return Score(float(found == task.ground_truth), answer=found)

    def gold(self, task):
        return task.ground_truth

    def validate(self, task):
        return task.ground_truth.isdigit()
''',
    "test_{module}.py": '''"""Run with: pytest {module}"""

import asyncio
from pathlib import Path

from treetune import load_taskset, run_rollout
from treetune.policies import load_policy


def mean_reward(model):
    taskset = load_taskset(f"{{Path(__file__).with_name('{module}.py')}}:{cls}")
    policy = load_policy(model, taskset)
    rewards = [asyncio.run(run_rollout(taskset, task, policy)).reward for task in taskset.select_tasks()]
    return sum(rewards) / len(rewards)


def test_gold_answers_are_rewarded():
    assert mean_reward("scripted:gold") == 1.0


def test_repeating_the_question_is_not():
    assert mean_reward("scripted:echo") == 0.0
''',
    "eval.yaml": """# treetune eval eval.yaml
taskset:
  id: {module}.py:{cls}  # found beside this file, from wherever it is run
  num_tasks: 20
model: scripted:gold
""",
}

DATASET = {
    "{module}_dataset.py": '''"""{title}: train.parquet and validation.parquet for SkyRL.

    python {module}_dataset.py --output_dir ~/data/{module}
"""

import argparse
import sys
from pathlib import Path

from treetune import Task
from treetune.validate import validate_dataset, write_tasks

SYSTEM = "You are a helpful assistant. Think step by step, and end with: #### and the number."


def create_example(question: str, answer: str, idx: int, split: str) -> Task:
    return Task(
        data_source="{module}",
        prompt=[{{"role": "system", "content": SYSTEM}}, {{"role": "user", "content": question}}],
        env_class="gsm8k",  # `treetune list` shows the others; one of your own is registered by its id
        reward_spec={{"method": "rule", "ground_truth": answer}},
        extra_info={{"split": split, "index": idx}},
    )


def examples(split: str, size: int):
    """Your questions and answers go here. No question of one split may be in the other."""
    for idx in range(size):
        number = 2 * idx + (split == "validation")
        yield create_example(f"What is {{number}} + 10?", str(number + 10), idx, split)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="~/data/{module}")
    parser.add_argument("--train_size", type=int, default=1000)
    parser.add_argument("--val_size", type=int, default=100)
    args = parser.parse_args()

    output_dir = Path(args.output_dir).expanduser()
    files = []
    for split, size in (("train", args.train_size), ("validation", args.val_size)):
        files.append(output_dir / f"{{split}}.parquet")
        print(f"Created {{write_tasks(examples(split, size), files[-1], 'skyrl')}} {{split}} examples")
    print(f"Saved to {{output_dir}}")
    sys.exit(0 if validate_dataset(files).ok else 1)


if __name__ == "__main__":
    main()
''',
    "test_{module}_dataset.py": '''"""Run with: pytest {module}"""

import subprocess
import sys
from pathlib import Path

from treetune import make
from treetune.rows import read_tasks

SCRIPT = Path(__file__).with_name("{module}_dataset.py")


def test_the_script_writes_files_that_are_valid(tmp_path):
    command = [sys.executable, SCRIPT, "--output_dir", tmp_path, "--train_size", "20", "--val_size", "5"]
    assert subprocess.run(command).returncode == 0
    assert len(list(read_tasks(tmp_path / "train.parquet"))) == 20
    for task in read_tasks(tmp_path / "validation.parquet"):
        make(task.env_class, task)  # an environment refuses what it cannot score
''',
}

SERVER = {
    "{module}.py": '''"""{title}: what it asks, in one line."""

from treetune import Environment, Step, Task, Taskset


class {cls}Environment(Environment):
    def start(self):
        self.turns = 0
        return self.task.prompt

    def step(self, action):
        self.turns += 1
        said, number = action.text.strip(), self.task.ground_truth
        if said == number:
            return Step("Right.", reward=1.0, done=True)
        guess = int(said) if said.isdecimal() and len(said) < 5 else None
        hint = "That is no number." if guess is None else "Higher." if guess < int(number) else "Lower."
        return Step(hint, done=self.turns == 7)


class {cls}(Taskset):
    def load_tasks(self):
        question = "I think of a number from 1 to 100. Guess it: you have 7 turns, and I say higher or lower."
        for number in range(1, 101):
            yield Task(prompt=question, reward_spec={{"ground_truth": str(number)}})

    def environment(self, task):
        return {cls}Environment(task)

    def gold(self, task):
        return [task.ground_truth]
''',
    "test_{module}.py": '''"""Run with: pytest"""

import asyncio
from importlib.metadata import entry_points

from treetune import run_rollout
from treetune.policies import load_policy

from {module} import {cls}


def mean_reward(model):
    taskset = {cls}()
    policy = load_policy(model, taskset)
    rewards = [asyncio.run(run_rollout(taskset, task, policy)).reward for task in taskset.select_tasks()]
    return sum(rewards) / len(rewards)


def test_gold_answers_are_rewarded():
    assert mean_reward("scripted:gold") == 1.0


def test_repeating_the_question_is_not():
    assert mean_reward("scripted:echo") == 0.0


def test_treetune_finds_it_by_its_name():
    (found,) = entry_points(group="treetune.tasksets", name="{id}")
    assert found.load() is {cls}
''',
    "pyproject.toml": """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{id}"
version = "0.1.0"
description = "{title}: a task for RL training of language models."
requires-python = ">=3.11"
dependencies = ["treetune"]

[project.entry-points."treetune.tasksets"]
{id} = "{module}:{cls}"

[tool.hatch.build.targets.wheel]
include = ["{module}.py"]
""",
    "README.md": """# {title}

    pip install -e . pytest && pytest             # install it, and run its tests
    treetune serve {id} --http :5000              # serve it; http://127.0.0.1:5000 is a page to play it by hand
    treetune probe http://127.0.0.1:5000          # is it good for training?

The task is in `{module}.py`: change the environment and the tasks, keep the name of the taskset.

## In a container

    docker build -t {id} .
    docker run -p 5000:5000 -e TREETUNE_TOKEN=a-long-secret {id}

Without a token it does not start: others may reach the port of a container. Clients send the same token. Where
Treetune is not on your package index, put its wheel beside the Dockerfile first:
`pip wheel --no-deps -w wheels PATH_TO_TREETUNE`.

To be found by `treetune list --servers`, give it a register, and the address that others see:

    docker run -p 5000:5000 -e TREETUNE_TOKEN=a-long-secret -v /shared/servers:/servers \\
        -e TREETUNE_SERVERS=/servers -e TREETUNE_ADVERTISE=http://$(hostname):5000 {id}
""",
    "Dockerfile": """FROM python:3.12-slim
WORKDIR /task
COPY . .
RUN pip install --no-cache-dir --find-links wheels .
RUN useradd --create-home player
USER player
EXPOSE 5000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:5000/api/health', timeout=3)"]
# TREETUNE_TOKEN comes from outside. Docker ends a container 10 seconds after it asked it to stop.
CMD ["treetune", "serve", "{id}", "--http", "0.0.0.0:5000", "--drain", "8"]
""",
    ".dockerignore": """.git
.venv
**/__pycache__
**/.pytest_cache
*.egg-info
dist
""",
}
