"""`treetune init`: scaffold a taskset with a test that passes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

_TASKSET = '''"""{title}: what it asks, in one line."""

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
'''

_TEST = '''"""Run with: pytest {module}"""

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
'''

_CONFIG = """# treetune eval eval.yaml
taskset:
  id: {module}.py:{cls}  # found beside this file, from wherever it is run
  num_tasks: 20
model: scripted:gold
"""


def init_command(
    name: Annotated[str, typer.Argument(help="The name of the new taskset, such as colour-names.")],
    folder: Annotated[Path, typer.Option("-o", "--output", help="Where the new folder goes.")] = Path("."),
) -> None:
    """Scaffold a taskset: a folder with the taskset, a test that passes, and a config."""
    from treetune.errors import UsageError

    module = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    if not module or module[0].isdigit():
        raise UsageError(f"{name!r} makes no Python name", remedy="use letters, digits and dashes, a letter first")
    if _taken(module):
        module += "_taskset"
    cls = "".join(part.capitalize() for part in module.split("_"))
    place = folder / module
    if place.exists():
        raise UsageError(f"{place} exists already", remedy="choose another name, or another folder with -o")
    names = {"title": module.replace("_", " ").capitalize(), "module": module, "cls": cls}
    place.mkdir(parents=True)
    (place / f"{module}.py").write_text(_TASKSET.format(**names))
    (place / f"test_{module}.py").write_text(_TEST.format(**names))
    (place / "eval.yaml").write_text(_CONFIG.format(**names))
    typer.echo(f"{place}/{module}.py       the taskset: change load_tasks and reward")
    typer.echo(f"{place}/test_{module}.py  pytest {place}")
    typer.echo(f"{place}/eval.yaml         treetune eval {place}/{module}.py:{cls} -m scripted:gold")


def _taken(module: str) -> bool:
    """Whether a file or class of this name would hide something: a keyword, a name of ours, another module."""
    import keyword
    from importlib.util import find_spec

    import treetune

    cls = "".join(part.capitalize() for part in module.split("_"))
    if keyword.iskeyword(module) or keyword.iskeyword(cls) or module == "treetune":
        return True
    if cls in treetune.__all__ or f"{cls}Config" in treetune.__all__:
        return True
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # a mere folder, such as an earlier scaffold, hides nothing
