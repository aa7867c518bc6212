"""Tasks of every kind of scorer and column, with their rewards in eval."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from treetune import Task
from treetune.core.from_config import build_taskset
from treetune.core.policy import Completion
from treetune.core.taskset import Taskset
from treetune.data.datasets.build import build_rows
from treetune.data.datasets.taskset import DatasetTaskset
from treetune.models.scripted import Replay
from treetune.play.rollout import run_rollout

# A reward that tells 1 from 1.0, True and "1", and sees every field.
SEEN = """
import datetime
import hashlib
import json

import treetune
from treetune import Environment, Step
from treetune_verl.tasks import Task


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def seen(task):
    extra = {key: value for key, value in task.extra_info.items() if key != "max_turns"}
    fields = [task.prompt, task.data_source, task.ability, task.reward_spec, extra]
    seen = json.dumps(without_nulls(fields), sort_keys=True)
    return hashlib.sha256(seen.encode()).hexdigest()


class Plain(Task):
    def gold(self, task):
        return seen(task)

    def reward(self, task, answer):
        return float(answer == seen(task))


class Wide(Plain):
    def _make_map_fn(self):
        make_row = super()._make_map_fn()

        def wider(row, index):
            made = make_row(row, index)
            reward = {"style": "model", "ground_truth": row["truth"], "rubric": [index, "x"], "weight": 0.5}
            columns = {"level": index, "tests": [{"in": str(index), "out": None}], "mix": [1, "1", [1.0]][index % 3]}
            return {**made, "ability": ["math", "code"][index % 2], "reward_model": reward, **columns}

        return wider


class Marked(treetune.Task, frozen=True, kw_only=True):
    day: datetime.date
    shades: tuple[float, ...] = ()


class Many(treetune.Taskset[Marked]):
    def load_tasks(self):
        for number in range(3):
            day = datetime.date(2024, 5, 1)
            columns = {"mixed": [1, "hard", [1.0]][number], "when": day, "wide": {"a": [{}, None]}}
            yield Marked(
                prompt=["é𝒳", [{"role": "user", "content": "?"}], "3"][number],
                ability="math",
                reward_spec={"ground_truth": [1, "two", [3.0]][number], "rubric": {"n": number}},
                extra_info=columns,
                day=datetime.date(2024, 5, 1 + number),
                shades=(0.5, number),
            )

    def gold(self, task):
        return f"{seen(task)} {task.day!r} {task.shades!r}"

    def reward(self, task, answer):
        return float(answer == self.gold(task))


class Look(Environment):
    @classmethod
    def gold(cls, task):
        return seen(task)

    def step(self, action):
        return Step(reward=float(action.text == seen(self.task)), done=True)
"""


COMPARES = """
import re

class Compares:
    def complete(self, request):
        prompt = request.messages[0]["content"]
        code = re.search("VERDICT ([0-9a-f]+)", prompt)[1]
        answer, reference = (
            re.search(f"<{what} {code}>\\n(.*?)\\n</", prompt, re.S)[1] for what in ("answer", "reference")
        )
        return f"VERDICT {code}: {'C' if answer == reference else 'I'}"
"""
COLUMNS: dict[str, list[Any]] = {
    "whole": [1, -(2**40), 0],
    "fraction": [1.0, 0.1, -2.5e300],
    "flag": [True, False, True],
    "nothing": [None, None, None],
    "sometimes": [None, "x", None],
    "text": ["1", "", '"quoted"'],
    "list": [[1, 2], [], [3]],
    "mapping": [{"a": 1}, {"b": [None, "c"]}, {"a": 2, "b": None}],
    "mixed": [1, "hard", [1, 2]],
    "mixed_text": ["1", 1, '"1"'],
    "date": ["2024-05-01", "1999-12-31", "2024-02-29"],
    "unicode": ["é𝒳\u2028", "名前", "\U0001f600"],
    "truth": ["1", "two", "3.0"],
    "num_turns": [2, 3, None],
}


def with_files(folder: Path) -> Path:
    """A folder with the classes and the rows of all kinds."""
    (folder / "seen.py").write_text(SEEN)
    (folder / "compares.py").write_text(COMPARES)
    rows = [{name: values[number] for name, values in COLUMNS.items()} for number in range(3)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def path_of(taskset: Taskset[Any, Any], format: str) -> str:
    return str(
        taskset.get_parquet_path(format) if isinstance(taskset, DatasetTaskset) else build_rows(taskset, format)[1]
    )


def runs_of(folder: Path, format: str) -> tuple[list[dict[str, Any]], list[list[float]]]:
    """The rows of each kind with right and with wrong answers, and their rewards in eval."""
    runs, rewards = [], []
    for kind in KINDS.values():
        taskset = build_taskset(kind(with_files(folder)))
        golds = golds_of(taskset)
        for answers in (golds, [f"not {gold}, 17" for gold in golds]):
            runs.append({"files": [path_of(taskset, format)], "answers": answers})
            rewards.append(rewards_in_eval(taskset, answers))
    return runs, rewards


def dataset(folder: Path, **keys: Any) -> dict[str, Any]:
    source = {"args": ["json"], "kwargs": {"data_files": str(folder / "rows.jsonl"), "split": "train"}}
    return {
        "loading_params": source,
        "prompt_template": "{text} {unicode}",
        "system_prompt": "Look.",
        "data_source": "looks",
        "extra_fields": list(COLUMNS),
        **keys,
    }


KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "rule": lambda folder: dataset(folder, id="dataset", ground_truth="truth", ability="math"),
    "judge": lambda folder: dataset(
        folder,
        id="dataset",
        ground_truth="truth",
        scorer={"kind": "judge", "model": f"scripted:{folder}/compares.py:Compares"},
    ),
    "custom_cls": lambda folder: dataset(
        folder, custom_cls={"path": str(folder / "seen.py"), "name": "Plain"}, ground_truth="truth", ability="math"
    ),
    "custom_cls with columns of its own": lambda folder: dataset(
        folder, custom_cls={"path": str(folder / "seen.py"), "name": "Wide"}
    ),
    "environment": lambda folder: dataset(
        folder, id="dataset", ground_truth="truth", ability="math", env_class=f"{folder}/seen.py:Look"
    ),
    "python taskset": lambda folder: {"id": f"{folder}/seen.py:Many"},
    "mixture": lambda folder: {
        "id": "union",
        "sources": [{"id": f"{folder}/seen.py:Many"}, KINDS["environment"](folder)],
    },
}


def rewards_in_eval(taskset: Taskset[Any, Any], answers: list[str]) -> list[float]:
    async def play() -> list[float]:
        tasks = taskset.select_tasks()
        assert len(tasks) == len(answers)
        traces = [
            await run_rollout(taskset, task, Replay([Completion(text=answer)]))
            for task, answer in zip(tasks, answers, strict=True)
        ]
        assert all(trace.outcome.scored for trace in traces)
        return [trace.reward for trace in traces]

    return asyncio.run(play())


def golds_of(taskset: Taskset[Any, Any]) -> list[str]:
    tasks: list[Task] = taskset.select_tasks()
    return [taskset.gold(task) for task in tasks]


leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4)
    | st.sampled_from(["1", "null", '"x"', "[1]", "2024-05-01", 1, 1.0, True])
)  # fmt: skip


keys = st.sampled_from(["a", "b", "a.b", "uid", "index", "num_turns", "style", "prompt", "env_class", "treetune", "é"])


values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


tasks = st.builds(
    Task,
    prompt=st.text(min_size=1, max_size=5) | st.just([{"role": "user", "content": "?"}]),
    data_source=st.sampled_from(["here", "é"]),
    reward_spec=st.fixed_dictionaries({"ground_truth": values, "method": st.just("rule")}, optional={"rubric": values}),
    ability=st.none() | st.just("math"),
    extra_info=st.dictionaries(keys, values, max_size=4),
)
