"""reasoning-gym: any of its generators by name, endless, with its own scorer (extra `reasoning-gym`).

reasoning-gym adds its seed to the index, so that seed 7 at index i + 1 equals seed 8 at index i. Here all tasks lie on
one line of 2**32 such sums, cut into stretches; a seed only chooses where on the line a run begins.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import msgspec

from treetune.builtin.turns import hash_number
from treetune.errors import ConfigError, MissingExtraError, UnknownNameError
from treetune.score import Score
from treetune.task import Task
from treetune.taskset import Taskset, TasksetConfig

_STRETCH = 1024
"""Tasks of one reasoning-gym dataset: some of its generators allocate their whole size at once."""
_STRETCHES = (1 << 32) // _STRETCH
"""Some of its generators take seeds of 32 bits only."""


class ReasoningGymConfig(TasksetConfig, frozen=True, kw_only=True):
    dataset: str = "chain_sum"
    """The generator's name."""
    params: dict[str, Any] = {}
    """Its own settings, such as `{min_terms: 2}`."""
    seed: int = 0
    """Another seed gives other tasks; `shuffle.seed` takes its place where it is set."""


class ReasoningGym(Taskset[Task, ReasoningGymConfig]):
    INFINITE = True
    EXTRA = "reasoning-gym"

    def __init__(self, config: ReasoningGymConfig | None = None) -> None:
        super().__init__(config)
        try:
            known = importlib.import_module("reasoning_gym.factory").DATASETS
        except ImportError:
            raise MissingExtraError.of("reasoning-gym", "reasoning-gym") from None
        if self.config.dataset not in known:
            raise UnknownNameError.of("reasoning-gym generator", self.config.dataset, known)
        self._start = hash_number(f"{self.seed}") % _STRETCHES
        try:
            self._load_stretch(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError([("taskset.params", f"{self.config.dataset} refuses them: {error}")]) from None

    def task_at(self, index: int) -> Task:
        from reasoning_gym.utils import SYSTEM_PROMPTS

        entry = self._load_entry(index)
        answer = entry["answer"]
        system, question = SYSTEM_PROMPTS["default"], entry["question"]
        return Task(
            prompt=[{"role": "system", "content": system}, {"role": "user", "content": question}],
            data_source=f"reasoning-gym/{self.config.dataset}",
            reward_spec={} if answer is None else {"ground_truth": str(answer)},
            ability="reasoning",
        )

    def reward(self, task: Task, answer: str) -> Score:
        from reasoning_gym.utils import extract_answer

        extracted = extract_answer(answer)
        # The scorer wants the entry with its own types, so it is made again rather than carried as JSON.
        reward = self._load_stretch(task.idx // _STRETCH).score_answer(extracted, self._load_entry(task.idx))
        return Score(float(reward), answer=extracted, explanation=None if extracted else "no <answer> in the text")

    def gold(self, task: Task) -> str | None:
        return None if task.ground_truth is None else f"<answer>{task.ground_truth}</answer>"

    def _load_entry(self, index: int) -> Any:
        return self._load_stretch(index // _STRETCH)[index % _STRETCH]

    def _load_stretch(self, number: int) -> Any:
        seed = (self._start + number) % _STRETCHES * _STRETCH
        return _make_generator(self.config.dataset, seed, msgspec.json.encode(self.config.params))


@lru_cache(maxsize=32)
def _make_generator(dataset: str, seed: int, params: bytes) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(dataset, seed=seed, size=_STRETCH, **msgspec.json.decode(params))
