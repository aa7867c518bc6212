"""The files that `treetune init` writes, by their names; `{module}`, `{cls}` and `{title}` are filled in."""

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
from treetune.formats import validate_dataset, write_tasks

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
from treetune.formats import read_tasks

SCRIPT = Path(__file__).with_name("{module}_dataset.py")


def test_the_script_writes_files_that_are_valid(tmp_path):
    command = [sys.executable, SCRIPT, "--output_dir", tmp_path, "--train_size", "20", "--val_size", "5"]
    assert subprocess.run(command).returncode == 0
    assert len(list(read_tasks(tmp_path / "train.parquet"))) == 20
    for task in read_tasks(tmp_path / "validation.parquet"):
        make(task.env_class, task)  # an environment refuses what it cannot score
''',
}
