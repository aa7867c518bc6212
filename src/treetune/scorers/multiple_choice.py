"""The scorer for multiple choice: `choice`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from string import ascii_uppercase
from typing import Any, Literal

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import ConfigError, TasksetError
from treetune.scorers.reading.extraction import extract
from treetune.scorers.reading.options import Options, option_reader
from treetune.scorers.scorer import Scorer, judged, require_truths

_ANY_OF = "choice: a ground truth is a list of options, of which any is right; all: true if all must be chosen"
LETTERS = tuple(ascii_uppercase[:10])
"""The labels if the options are unknown."""


class Choice(Scorer, frozen=True, tag="choice"):
    choices: str | list[str] | dict[str, str] | None = None
    """The options: a list of texts, labelled A, B, ...; texts by label (`{"1": yes, "2": no}`); or the column (the key
    of `extra_info`) that holds them for each task. Absent: `extra_info.choices` if the task has it, else the letters
    only."""
    truth: Literal["label", "index", "text"] | None = None
    """What the ground truth is: a label, the index of the right option from 0, or its text. Absent: an integer is an
    index, and a text is a label or else an option's text."""

    all: bool = False
    """Whether the truth is a list of options that must all be chosen, and no others. If not, any of a list is right."""

    def __post_init__(self) -> None:
        if isinstance(self.choices, list | dict) and len(self.choices) < 2:
            raise ConfigError([("choices", "there must be two options at least")])

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the reply chooses the right option, by its label or its text."""
        options = self._options(task)
        right = self._labels_of(truth, options, task)
        reader = option_reader(options)
        if self.all:
            found = extract(answer, self.answer, reader.read_all)
            return judged(found, found.value == frozenset(right), [", ".join(sorted(right))])
        if len(right) > 1:
            warnings.warn(_ANY_OF, stacklevel=1)  # Python shows it once
        found = extract(answer, self.answer, reader.read, verdicts=reader.verdicts)
        return judged(found, found.value in right, sorted(right))

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        right = self._labels_of(truth, self._options(task), task)
        return self.say(", ".join(sorted(right)) if self.all else right[0])

    def fault(self, truth: Any, task: Task | None) -> str | None:
        try:
            options = self._options(task)
            for one in require_truths(truth, task):
                self._labels_of(one, options, task)
        except TasksetError as error:
            return error.message
        return None

    def columns(self) -> list[str]:
        return [self.choices] if isinstance(self.choices, str) else []

    def _options(self, task: Task | None) -> Options:
        given: Any = self.choices
        if given is None or isinstance(given, str):
            given = None if task is None else task.extra_info.get(given or "choices")
            if given is None and self.choices is not None:
                raise TasksetError(f"there is no extra_info.{self.choices} with the options")
        if given is None:
            return _LETTERS_ALONE
        if not isinstance(given, list) and isinstance(given, Mapping):  # the Mapping check is slow
            if "label" in given and "text" in given:  # as in ARC
                return _make_options(tuple(map(str, given["label"])), tuple(map(str, given["text"])))
            return _make_options(tuple(map(str, given)), tuple(map(str, given.values())))
        if not isinstance(given, list | tuple) or not 0 < len(given) <= len(ascii_uppercase):
            raise TasksetError(f"the options are no list of 1 to 26: {given!r:.80}")
        texts = tuple(given)
        return _make_options(None, texts if isinstance(texts[0], str) else tuple(map(str, texts)))

    def _labels_of(self, truth: Any, options: Options, task: Task | None) -> Sequence[str]:
        if isinstance(truth, str):
            if (label := _find_label(truth, False, self.truth, options)) is not None:
                return (label,)
            if self.all:  # "A, C" or "AC"
                truth = [one.strip() for one in truth.split(",")] if "," in truth else list(truth.strip())
        return [self._label_of(one, options, task) for one in require_truths(truth, task)]

    def _label_of(self, truth: Any, options: Options, task: Task | None) -> str:
        """The label of the right option."""
        label = _find_label(str(truth), isinstance(truth, int), self.truth, options)
        if label is None:
            where = f"task {task.idx}: " if task is not None else ""
            known = ", ".join(options.texts or options.labels)
            problem = f"{where}the ground truth {truth!r:.60} is none of the options: {known:.200}"
            raise TasksetError(
                problem,
                remedy="name the column of the options (choices), and what the truth is: truth: index counts from 0",
            )
        return label


@lru_cache(maxsize=4096)
def _make_options(labels: tuple[str, ...] | None, texts: tuple[str, ...]) -> Options:
    return Options(labels or tuple(ascii_uppercase[: len(texts)]), texts)


_LETTERS_ALONE = Options(LETTERS)


@lru_cache(maxsize=4096)
def _find_label(truth: str, is_whole: bool, kind: str | None, options: Options) -> str | None:
    labels, texts = options
    if kind == "index" or (kind is None and is_whole and truth not in labels):
        return labels[int(truth)] if truth.isdecimal() and int(truth) < len(texts or labels) else None
    if kind != "text":
        label = option_reader(Options(labels)).label_of(truth)
        if label is not None or kind == "label":
            return label
    folded = [text.strip().casefold() for text in texts]
    wanted = truth.strip().casefold()
    return labels[folded.index(wanted)] if wanted in folded else None
