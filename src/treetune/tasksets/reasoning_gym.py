"""reasoning-gym: any of its generators by name, endless, with its own scorer (extra `reasoning-gym`).

reasoning-gym adds its seed to the index: seed 7 at index i + 1 equals seed 8 at index i. Here all tasks are on one line
of 2**32 such sums, cut into sections. A seed only chooses where on the line a run begins.

Some of its scorers evaluate the answer as Python. These only get sums of numbers and names, and lists of them.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import deque
from functools import lru_cache
from typing import Any

import msgspec

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import ConfigError, MissingExtraError, UnknownNameError
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import plain
from treetune.scorers.reading.statements import Extraction, Statement, tagged
from treetune.scorers.scorer import explain
from treetune.tasksets.turns import hash_number

_STRETCH = 1024
"""Tasks per reasoning-gym dataset: some of its generators allocate their whole size at once."""
_STRETCHES = (1 << 32) // _STRETCH
"""Some generators accept only 32-bit seeds."""


class ReasoningGymConfig(TasksetConfig, frozen=True, kw_only=True):
    dataset: str = "chain_sum"
    """The generator's name."""
    params: dict[str, Any] = {}
    """The generator's own settings, such as `{min_terms: 2}`."""
    strict: bool = True
    """Accept only one `<answer>`, and give no reward if it contains the right answer among others, for which many
    generators give a part of the reward. `false` scores as reasoning-gym itself does."""
    seed: int = 0
    """The random seed. A different seed gives different tasks; `shuffle.seed` replaces it if set."""


class ReasoningGym(Taskset[Task, ReasoningGymConfig]):
    INFINITE = True
    EXTRA = "reasoning-gym"
    ANSWER = AnswerFormat(tag="answer")

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
            ground_truth=None if answer is None else str(answer),
            ability="reasoning",
        )

    def reward(self, task: Task, answer: str) -> Score:
        missing = "no <answer> in the text"
        if self.config.strict:
            found = extract(answer, self.ANSWER, _read_tag)
        else:  # like its own `extract_answer`, which is quadratic in open tags
            last = deque(tagged(answer, "answer"), maxlen=1)
            found = Extraction(last[0] if last else None, missing)
        said = found.text
        if said is None:
            return Score(self._score(task, None), explanation=found.why)
        forms = dict.fromkeys([said, plain(said)] if self.config.strict else [said])
        refusals = [self._refuse(task, form) for form in forms]
        if all(refusals):
            return Score(self._score(task, None), answer=said, explanation=refusals[0])
        reward = max(self._score(task, form) for form, why in zip(forms, refusals, strict=True) if why is None)
        if self.config.strict and reward < 1.0 and str(task.ground_truth) in said:
            reward = 0.0
        return Score(reward, answer=said, explanation=explain(found, "" if reward == 1 else f"earns {reward:g}"))

    def _score(self, task: Task, answer: str | None) -> float:
        # The scorer needs the entry with its original types, so it is generated again, not carried as JSON.
        return float(self._load_stretch(task.idx // _STRETCH).score_answer(answer, self._load_entry(task.idx)))

    def _refuse(self, task: Task, answer: str) -> str | None:
        """Return why the scorer must not get an answer; None if it may."""
        truth = str(self._load_entry(task.idx)["answer"])
        if len(answer) > _LONGEST + 4 * len(truth):
            return "the answer is too long"
        evaluated = _evaluates(type(self._load_stretch(task.idx // _STRETCH)).score_answer)
        if evaluated and answer != truth and not is_plain_expression(answer):
            return "the answer is not a plain expression"
        return None

    def _load_entry(self, index: int) -> Any:
        return self._load_stretch(index // _STRETCH)[index % _STRETCH]

    def _load_stretch(self, number: int) -> Any:
        seed = (self._start + number) % _STRETCHES * _STRETCH
        return _make_generator(self.config.dataset, seed, msgspec.json.encode(self.config.params))


def _read_tag(statement: Statement) -> Extraction | None:
    return Extraction(statement.text, value=statement.text) if statement.form == "<answer>" else None


@lru_cache(maxsize=256)
def _evaluates(scorer: Any) -> bool:
    return re.search(r"\b(eval|exec|parse_expr|sympify)\(", inspect.getsource(scorer)) is not None


def is_plain_expression(text: str) -> bool:
    """Whether it is safe and quick to evaluate as Python: only numbers, strings, lists, names of variables and
    mathematical functions, small powers."""
    if re.search(r"[eE][-+]?\d{3}|\d{50}", text):  # numbers on which sympy hangs
        return False
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    texts = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in nodes)
    sums = any(isinstance(node, ast.BinOp) for node in nodes)
    return len(nodes) <= _MOST_NODES and all(map(_is_plain, nodes)) and not (texts and sums)  # no 'a' * 10**9


def _is_plain(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _FUNCTIONS or re.fullmatch(r"[A-Za-z]", node.id) is not None
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        # If it had only numbers, it would be computed: exp(exp(99)) would not end.
        return known and any(isinstance(part, ast.Name) and len(part.id) == 1 for part in ast.walk(node))
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | float | int)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        # No nested powers.
        base = not any(isinstance(part, ast.Pow) for part in ast.walk(node.left))
        numbers = [part.value for part in ast.walk(node.right) if isinstance(part, ast.Constant)]
        return (
            base
            and all(isinstance(value, int | float) and abs(value) <= _MOST_POWER for value in numbers)
            and not any(isinstance(part, ast.Pow | ast.Mult) for part in ast.walk(node.right))
        )
    return isinstance(node, _PLAIN)


_LONGEST, _MOST_NODES, _MOST_POWER = 10_000, 2000, 100
_FUNCTIONS = frozenset("sin cos tan sec csc cot asin acos atan sinh cosh tanh exp log ln sqrt abs Abs pi".split())
_PLAIN = (
    *(ast.Expression, ast.BinOp, ast.UnaryOp, ast.List, ast.Tuple, ast.Load, ast.UAdd, ast.USub),
    *(ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow),
)


@lru_cache(maxsize=32)
def _make_generator(dataset: str, seed: int, params: bytes) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(dataset, seed=seed, size=_STRETCH, **msgspec.json.decode(params))
