r"""A Scorer computes the reward of an answer. It is a config, so that YAML and rows can name it, with one main method.

    scorer = read_scorer({"kind": "includes", "ignore_case": False})
    scorer.score("The capital of France is Paris.", "Paris").reward      # 1.0

Kinds are looked up by name on first use, and each may live in its own module. This module has `Rule`, which scores
tasks that name no scorer: does the answer agree with the ground truth?

`find_unpaid` writes a gold answer in the usual ways of models, and returns the first that a scorer does not accept:

    find_unpaid(rule(), Task(prompt="Capital of France?", ground_truth="Paris"))
    # ("The answer is Paris.", "use scorer: includes")

The ways are a sentence around it, bold, a full stop, `\boxed{}`, and for an option its letter in brackets and its
text. If the prompt specifies a form for the answer, only that form is tried.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Self, cast

import msgspec

from treetune.chat.message import text_of
from treetune.config import tables
from treetune.config.structs import convert
from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, TasksetError, did_you_mean
from treetune.scorers.reading.answer_format import AnswerFormat, asked_form
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.numerals import plain, read_amount, read_truth
from treetune.scorers.reading.statements import Extraction

KINDS: dict[str, str] = tables["SCORERS"]
"""Where each kind is defined."""


class Scorer(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", forbid_unknown_fields=True, omit_defaults=True
):
    answer: AnswerFormat | None = None
    """The place of the answer in the reply: `boxed`, `hash`, `last_line`, `{tag: answer}`, `{line: "Answer:"}`. Absent:
    wherever the reply states it."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Any:
        """The `Score` of a reply. May be async."""
        raise NotImplementedError

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        """A right reply; None if unknown."""
        truths = truths_of(truth)
        return self.say(str(truths[0])) if truths else None

    def say(self, text: str) -> str:
        """A reply with a text as its answer, in the place where this scorer looks."""
        return text if self.answer is None else self.answer.fill(text)

    def is_verbatim(self, found: Extraction, reply: str, truths: Sequence[Any]) -> bool:
        """Whether a reply without an answer is a ground truth to the letter, such as several lines or an address."""
        return self.answer is None and found.text is None and reply.strip() in [str(one).strip() for one in truths]

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        """What makes a ground truth unusable, because no answer can be right; None if it is usable."""
        return self.fault(truth, task) if truths_of(truth) else "is missing"

    def fault(self, truth: Any, task: Task | None) -> str | None:
        """What is wrong with a ground truth that is present."""
        return None

    @property
    def scores_groups(self) -> bool:
        """Whether it compares rollouts of a task (`score_group`); a single rollout then has no reward."""
        return False

    @property
    def calls_models(self) -> bool:
        """Whether it calls a model. Untrusted rows may not choose the model."""
        return False

    def check(self) -> None:
        """Raise if anything that it needs besides its config is invalid. Called before the first answer."""

    def check_reachable(self) -> None:
        """Raise if a model that it needs does not answer. Must not be called from an event loop."""

    def without_files(self) -> Self:
        """Replace files that it names by their contents, so that a row works on any machine."""
        return self

    def columns(self) -> list[str]:
        """The keys of `extra_info` that it reads. A dataset task includes these columns."""
        return []

    @classmethod
    def struct_of(cls, value: Any) -> type[Scorer] | None:
        """The kind that a config value names; None if it names none."""
        named = value.get("kind") if isinstance(value, Mapping) else value
        return kind_named(named) if isinstance(named, str) and named in KINDS else None

    @classmethod
    def read_config(cls, value: Any, path: str = "", raw: Mapping[str, str] | None = None) -> Scorer:
        """Parse a config value: `{kind: choice, ...}` or `choice`."""
        if isinstance(value, Scorer):
            return value
        key = path if isinstance(value, str) else f"{path}.kind".removeprefix(".")
        value = {"kind": value} if isinstance(value, str) else value
        if not isinstance(value, Mapping):
            raise ConfigError([(path, f"expected a kind of scorer or {{kind: ...}}, got {value!r:.60}")])
        named = value.get("kind")
        if named not in KINDS:
            near = did_you_mean(named, KINDS) if isinstance(named, str) else ""
            problem = "is required" if named is None else f"{named!r:.60} is not a kind of scorer{near}"
            raise ConfigError([(key, f"{problem}; available: {', '.join(KINDS)}")])
        keys = {key: item for key, item in value.items() if key != "kind"}
        try:
            return convert(keys, kind_named(named), path=path, raw=raw)
        except ConfigError as error:
            # Prefix faults in a kind's own values with the path.
            inside = f"{path}." if path else ""
            named_by = [(key if key.startswith(path) else f"{inside}{key}", problem) for key, problem in error.faults]
            raise ConfigError(named_by, source=error.source) from None


def read_scorer(value: Any, source: str = "the scorer") -> Scorer:
    """Make a scorer from plain values. Raises one `ConfigError` with all faults."""
    try:
        return Scorer.read_config(value, "scorer")
    except ConfigError as error:
        raise ConfigError(error.faults, source=source) from None


def make_scorer(kind: str, /, *values: Any, **keys: Any) -> Scorer:
    """Make a scorer of a kind, from values as in a config or from objects."""
    keys |= zip(kind_named(kind).__struct_fields__, values, strict=False)
    return read_scorer({"kind": kind, **msgspec.to_builtins(keys, enc_hook=str)}, f"{kind}()")


@lru_cache(maxsize=64)
def kind_named(name: str) -> type[Scorer]:
    module, _, cls = KINDS[name].partition(":")
    return cast(type[Scorer], getattr(importlib.import_module(module), cls))


def truths_of(truth: Any) -> list[Any]:
    """The acceptable ground truths, as a list."""
    if isinstance(truth, list):
        return truth
    return [] if truth is None else [truth]


def require_truths(truth: Any, task: Task | None) -> list[Any]:
    truths = truths_of(truth)
    if not truths:
        where = f"task {task.idx} of {task.data_source!r}" if task is not None else "the task"
        raise TasksetError(f"{where} has no ground truth to compare with", remedy="set ground_truth")
    return truths


def expected(truths: Sequence[Any]) -> str:
    if len(truths) == 1:
        return f"expected {truths[0]!s:.80}"
    return f"expected {' or '.join(f'{truth!s:.80}' for truth in truths)}"


def judged(found: Extraction, right: bool, truths: Sequence[Any]) -> Score:
    """The score of an answer that was looked for, and in which form it was found."""
    return Score(float(right), answer=found.text, explanation=explain(found, "" if right else expected(truths)))


def explain(found: Extraction, problem: str) -> str:
    """Whether an answer is right (it is if there is no `problem`), and in which form it was found."""
    if found.text is None:
        return (found.why or problem) if problem else "right, the ground truth to the letter"
    if not found.form:
        return problem or "right"
    return f"{problem}; read from {found.form}" if problem else f"right, from {found.form}"


class Rule(Scorer, frozen=True, tag="rule"):
    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the answer equals the ground truth: as a number if the truth is a number, else as a text."""
        truths = truth if isinstance(truth, list) else [truth]
        numbers = [read_truth(one) for one in truths]
        if None not in numbers:
            found = extract(answer, self.answer, read_amount)
            return judged(found, found.text is not None and found.value in numbers, truths)
        from treetune.scorers.reading import wording  # here, because declaring a task does not need it

        found = extract(answer, self.answer, wording.read_text)
        right = found.text is not None and any(wording.same(found.text, one) for one in truths)
        return judged(found, right or self.is_verbatim(found, answer, truths), truths)


TRIED = ("rule", "exact", "includes", "number", "choice", "math")
"""Kinds that should accept any usual form. Other kinds define the form themselves."""
LONGEST = 100
"""The maximum length of an answer that a model would put into a sentence."""
_LETTER = re.compile(r"[A-J]")
_TOLD = re.compile(r"\b(?:only|just|exactly|nothing else|one word|single word|no other)\b", re.I)


def find_unpaid(scorer: Scorer, task: Task) -> tuple[str, str] | None:
    """The first usual way to write the gold answer that earns nothing, and the remedy; None if all are accepted."""
    kind = str(scorer.__struct_config__.tag)
    if kind not in TRIED or scorer.problem(task.ground_truth, task) is not None:
        return None
    gold = scorer.gold(task.ground_truth, task)
    if gold is None or not _pays(scorer, gold, task):
        return None  # reported by another rule
    asked = asked_form(text_of_prompt(task)) if scorer.answer is None else None
    for reply in _ways(scorer, task):
        if not _pays(scorer, reply, task):
            remedy = "tell the form of the answer in the prompt" if asked is None else f"answer: {asked.spelled}"
            return reply, f"use scorer: {_better(task)}, or {remedy}"
    return None


def find_form_faults(form: AnswerFormat | None, scorer: Scorer | None, task: Task) -> Iterator[tuple[str, str]]:
    """Why a model may put its answer where it is not read, or is rewarded for a guess: rules, and what was found.

    `form` is the form that the task declares. `scorer` is the kind of its scorer; None if an environment or code scores
    it.
    """
    if scorer is not None and (parts := getattr(scorer, "named", None)) is not None:
        for _, part in parts():
            yield from find_form_faults(part.answer, part, task)
        return
    prompt = text_of_prompt(task)
    if form is not None and prompt.strip() and not form.fits(prompt):
        asked = asked_form(prompt)
        if asked is None:
            yield "answer-form-unsaid", f"the answer is read from {form}, but the prompt does not ask for it"
        else:
            yield "answer-form-differs", f"the prompt asks for {asked}, but the answer is read from {form}"
    kind = None if scorer is None else scorer.__struct_config__.tag
    if kind == "includes" and form is None and not task.extra_info.get("choices"):
        yield (
            "answer-guessed",
            "includes looks for the ground truth in a whole statement: a list of guesses may be right",
        )


def text_of_prompt(task: Task) -> str:
    return "\n".join(text_of(message.get("content")) or "" for message in task.messages)


def _ways(scorer: Scorer, task: Task) -> Iterator[str]:
    prompt = text_of_prompt(task)
    bare = scorer if scorer.answer is None else None
    text = plain(str(truths_of(task.ground_truth)[0]))
    label = None
    if scorer.__struct_config__.tag == "choice":
        text = label = plain((scorer.gold(task.ground_truth, task) or "") if bare else text)
    if _TOLD.search(prompt) or not text or "\n" in text or len(text) > LONGEST:
        return
    place = scorer.answer or asked_form(prompt)
    fill = (lambda said: said) if place is None else place.fill
    if place is None or not place.boxed:  # LaTeX has no Markdown in it
        yield fill(f"**{text}**")
    yield fill(f"{text}.")
    if place is not None:
        return
    yield f"\\boxed{{{text}}}"
    if label is not None:
        yield f"({label})"
        if option := _option(task, label):
            yield option
    yield f"The answer is {text}."


def _option(task: Task, label: str) -> str | None:
    choices = task.extra_info.get("choices")
    number = ord(label) - ord("A")
    return str(choices[number]) if isinstance(choices, list) and 0 <= number < len(choices) else None


def _better(task: Task) -> str:
    truth = truths_of(task.ground_truth)[0]
    if read_truth(truth) is not None:
        return "number"
    return "choice" if isinstance(truth, str) and _LETTER.fullmatch(truth.strip()) else "includes"


def _pays(scorer: Scorer, reply: str, task: Task) -> bool:
    score = scorer.score(reply, task.ground_truth, task)
    if inspect.iscoroutine(score):
        score.close()
        return True
    return Score.of(score).reward > 0
