"""The questions that a judge is asked about an answer, and how verdicts become rewards.

| method | asked | worth |
|---|---|---|
| `grade` | C, P or I, by an instruction or a reference | 1, `partial`, 0 |
| `equal` | the same as the reference? both ways round | 1 where both verdicts say so, else 0 |
| `rubric` | each criterion | the weighted mean |
| `pairwise` | which of two answers is better? both ways round, within a group | wins, and half of the ties |

A rubric is a list of criteria, each with its choices from worst to best:

    criteria:
      - {name: polite, text: The answer is polite., weight: 1, choices: [rude, neutral, polite]}

A rubric is a YAML or TOML file, or part of the config. The worst choice is worth 0, the best 1, and those in between
are evenly spaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise as neighbours
from pathlib import Path
from typing import Annotated, Any

import msgspec

from treetune.chat.images import name_images
from treetune.chat.message import text_of
from treetune.config.structs import convert, load_yaml
from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, TasksetError
from treetune.scorers.judges.question import Question, fold

Verdict = Mapping[str, str]
GRADES = ("I", "P", "C")
TEXTS = ("text_1", "text_2")
"""The names of two answers that are compared."""
SPLIT = "judge_split"
"""The metric that counts contradictory verdicts."""


class Plan(msgspec.Struct, frozen=True):
    """Questions, and a function that turns their verdicts into a score."""

    questions: list[Question]
    decide: Callable[[Sequence[Verdict]], Score]


def grade(answer: str, truth: Any, task: Task | None, instruction: str | None, partial: float) -> Plan:
    reference = show_truth(truth)
    if instruction is None and reference is None:
        raise TasksetError(
            "a judge has no instruction or reference to grade by",
            remedy="give the scorer an instruction, or tasks a truth",
        )
    by = [instruction or "Does the answer say what the reference says? Wording and format make no difference."]
    if reference is not None:
        by.append("The reference is known to be right.")
    by.append(
        "Grade the answer. C: right. P: partly right. I: wrong, missing, or several different answers side by side."
    )
    worth = {"C": 1.0, "P": partial, "I": 0.0}

    def decide(verdicts: Sequence[Verdict]) -> Score:
        said = verdicts[0]["grade"]
        return Score(worth[said], explanation=f"the judge graded it {said}")

    material = _material(task, {"reference": reference, "answer": answer})
    return Plan([Question.of("grade", " ".join(by), material, {"grade": GRADES})], decide)


def equal(answer: str, truth: Any, task: Task | None, instruction: str | None) -> Plan:
    reference = show_truth(truth)
    if reference is None:
        raise TasksetError("a judge has no reference to compare with", remedy="give the tasks a ground truth")
    by = f"{instruction} " if instruction else ""
    by += (
        "Do the two texts give the same answer to the question? Wording, order and format make no difference. A text "
        "that is empty, or that names several different answers, is different."
    )
    names = "reference first", "answer first"
    pairs = [(reference, answer), (answer, reference)]
    choices = {"equal": ("different", "same")}
    questions = [
        Question.of(name, by, _material(task, {"text_1": one, "text_2": two}), choices, (mine,))
        for name, (one, two), mine in zip(names, pairs, ("text_2", "text_1"), strict=True)
    ]

    def decide(verdicts: Sequence[Verdict]) -> Score:
        said = [verdict["equal"] for verdict in verdicts]
        split = float(said[0] != said[1])
        told = f"the judge says {said[0]}" + ("" if not split else f" with the {names[0]}, {said[1]} the other way")
        # If only one order gives `same`, the texts may differ: no reward, and the split is counted.
        return Score(float(said == ["same", "same"]), explanation=told, metrics={SPLIT: split})

    return Plan(questions, decide)


def by_rubric(answer: str, truth: Any, task: Task | None, rubric: Rubric, at_once: bool) -> Plan:
    material = _material(task, {"reference": show_truth(truth), "answer": answer})
    before = f"{rubric.instruction}\n" if rubric.instruction else ""
    criteria = rubric.criteria
    if at_once:
        texts = "\n".join(f"- {one.name}: {one.text}" for one in criteria)
        asked = f"{before}Judge the answer by each of these criteria, apart from the others:\n{texts}"
        questions = [Question.of("rubric", asked, material, {one.name: one.choices for one in criteria})]
    else:
        questions = [
            Question.of(
                one.name, f"{before}Judge the answer by this alone: {one.text}", material, {one.name: one.choices}
            )
            for one in criteria
        ]

    def decide(verdicts: Sequence[Verdict]) -> Score:
        said = {what: choice for verdict in verdicts for what, choice in verdict.items()}
        told = "; ".join(f"{one.name}: {said[one.name]}" for one in criteria)
        metrics = {one.name: one.value_of(said[one.name]) for one in criteria}
        return Score(rubric.reward_of(said), explanation=told, metrics=metrics)

    return Plan(questions, decide)


class Comparison(msgspec.Struct, frozen=True):
    """Two answers of a group, by number, and a question for each order."""

    pair: tuple[int, int]
    questions: tuple[Question, Question]

    def points(self, verdicts: Sequence[Verdict]) -> tuple[float, float]:
        """1 for the answer that is better in both orders; otherwise half for each."""
        first, second = (verdict["better"] for verdict in verdicts)
        if (first, second) == ("1", "2"):
            return 1.0, 0.0
        return (0.0, 1.0) if (first, second) == ("2", "1") else (0.5, 0.5)

    def places_of(self, names: Collection[str], turn: int) -> list[int]:
        """The numbers of the answers with these names in the first question, or in the second (`turn` 1)."""
        order = self.pair if turn == 0 else self.pair[::-1]
        return [place for name, place in zip(TEXTS, order, strict=True) if name in names]

    def verdict_against(self, lost: Collection[int], turn: int) -> Verdict:
        """The verdict on the first or second question if these answers lose; a tie if both do."""
        one, two = (place in lost for place in self.pair)
        if one == two:
            return {"better": "tie"}
        return {"better": "2" if one == (turn == 0) else "1"}

    def is_split(self, verdicts: Sequence[Verdict]) -> bool:
        first, second = (verdict["better"] for verdict in verdicts)
        return first == second != "tie"


def compare(
    answers: Mapping[int, str], truth: Any, task: Task, instruction: str | None, opponents: int | None
) -> list[Comparison]:
    """Compare each answer with every other, or with at most `opponents` neighbours in a ring."""
    numbers, count = list(answers), len(answers)
    reach = count // 2 if opponents is None else min(count // 2, max(1, opponents // 2))
    pairs = {
        (min(one, other), max(one, other))
        for place, one in enumerate(numbers)
        for step in range(1, reach + 1)
        if (other := numbers[(place + step) % count]) != one
    }
    by = f"{instruction or 'Which text answers the question better?'} Length and order say nothing about quality."
    reference = show_truth(truth)
    found = []
    for one, two in sorted(pairs):
        questions = [
            Question.of(
                f"rollouts {first} and {second}",
                by,
                _material(task, {"reference": reference, "text_1": answers[first], "text_2": answers[second]}),
                {"better": ("1", "tie", "2")},
                TEXTS,
            )
            for first, second in neighbours((one, two, one))
        ]
        found.append(Comparison((one, two), (questions[0], questions[1])))
    return found


def show_truth(truth: Any) -> str | None:
    """A ground truth as shown to a judge; any item of a list is right."""
    if truth is None or truth in ("", []):
        return None
    if isinstance(truth, str):
        return truth
    if isinstance(truth, list) and all(isinstance(one, str | int | float) for one in truth):
        return "\nor: ".join(map(str, truth))
    return msgspec.json.encode(truth).decode()


def _material(task: Task | None, further: Mapping[str, str | None]) -> dict[str, str]:
    """Untrusted texts, in the order in which the judge reads them."""
    parts: dict[str, str | None] = {"question": _show_question(task) if task is not None else None, **further}
    return {what: text for what, text in parts.items() if text is not None}


def _show_question(task: Task) -> str | None:
    messages = task.messages
    if not messages:
        return None
    # An image is named by its hash, so that verdicts on different pictures are not confused.
    texts = [text_of(name_images(message.get("content"))) for message in messages]
    shown = ["(not text)" if text is None else text for text in texts]
    if len(messages) == 1:
        return shown[0]
    return "\n".join(f"{message.get('role')}: {text}" for message, text in zip(messages, shown, strict=True))


class Criterion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """The name in metrics, traces and explanations."""
    text: str
    """What the judge decides."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Its share of the reward, relative to the weights of the other criteria."""
    choices: tuple[str, ...] = ("no", "yes")
    """The choices of the judge, from worst to best."""

    def __post_init__(self) -> None:
        if not fold(self.name) or any(letter in self.name for letter in ":\n"):
            raise ValueError(f"the name {self.name!r} must be a few words without a colon")
        folded = {fold(choice) for choice in self.choices}
        if len(folded) < 2 or len(folded) < len(self.choices) or "" in folded:
            raise ValueError(f"{self.name}: give at least two different choices, from worst to best")

    @classmethod
    def read_config(cls, value: Any, path: str = "", raw: Mapping[str, str] | None = None) -> Criterion:
        return value if isinstance(value, cls) else convert(_spell_choices(value), cls, path=path, raw=raw)

    def value_of(self, choice: str) -> float:
        return self.choices.index(choice) / (len(self.choices) - 1)


class Rubric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    criteria: list[Criterion]
    instruction: str | None = None
    """Context for the judge that applies to all criteria."""

    def __post_init__(self) -> None:
        names = [fold(criterion.name) for criterion in self.criteria]
        if not names:
            raise ValueError("a rubric needs at least one criterion")
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"several criteria are called {', '.join(sorted(doubled))}")

    def reward_of(self, verdict: Mapping[str, str]) -> float:
        total = sum(criterion.weight for criterion in self.criteria)
        earned = sum(one.weight * one.value_of(verdict[one.name]) for one in self.criteria)
        return earned / total


def read_rubric(path: str | Path) -> Rubric:
    """Read a rubric from a .toml or .yaml file; a single error lists all its faults."""
    file = Path(path).expanduser()
    data = _load_toml(file) if file.suffix == ".toml" else load_yaml(file, interpolates=False)
    return convert(data, Rubric, source=str(path))


def _load_toml(file: Path) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError([("", f"cannot read {file}: {error.strerror or error}")], source=str(file)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([("", f"not valid TOML: {error}")], source=str(file)) from None


def _spell_choices(item: Any) -> Any:
    """YAML parses `yes` and `no` as booleans, and 1 as a number."""
    if not isinstance(item, Mapping) or not isinstance(item.get("choices"), list):
        return item
    words = {True: "yes", False: "no"}
    spelt = [words[one] if isinstance(one, bool) else str(one) for one in item["choices"]]
    return {**item, "choices": spelt}
