"""Prompts that come more than once: among the training files, and in training and validation files both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from treetune.validate.finding import SHOWN
from treetune.validate.prompts import Keys
from treetune.validate.report import Report

_VALIDATION = re.compile(r"(?:^|[^a-z])(?:val|valid|validation|test|eval|dev)(?:[^a-z]|$)")
_TRAINING = re.compile(r"(?:^|[^a-z])(?:train|training)(?:[^a-z]|$)")


def is_validation(file: str) -> bool:
    """Whether a file's name, or its whole folder's, says that it is for validation; `test/train.parquet` does not."""
    path = Path(file)
    if _TRAINING.search(path.stem.lower()):
        return False
    return bool(_VALIDATION.search(path.stem.lower()) or _VALIDATION.fullmatch(path.parent.name.lower()))


class Repeats:
    """The keys of all prompts, file by file."""

    def __init__(self) -> None:
        self._keys: dict[str, list[Keys]] = {}
        self._numbers: dict[str, list[Sequence[int]]] = {}
        self._units: dict[str, str] = {}

    def take(self, file: str, unit: str, numbers: Sequence[int], keys: Keys) -> None:
        self._keys.setdefault(file, []).append(keys)
        self._numbers.setdefault(file, []).append(numbers)
        self._units[file] = unit

    def tell(self, report: Report, validation: Sequence[str]) -> None:
        files = {file: np.concatenate(keys) for file, keys in self._keys.items()}
        training = {file: keys for file, keys in files.items() if file not in validation}
        for group in (training, {file: keys for file, keys in files.items() if file in validation}):
            self._within(group, report)
        if training and len(training) < len(files):
            known = np.unique(np.concatenate(list(training.values())))
            for file in validation:
                if file in files:
                    both = np.isin(files[file], known) & (files[file] != 0)
                    self._add("train-val-overlap", file, both, "prompts that are in the training files too", report)

    def _within(self, group: dict[str, Keys], report: Report) -> None:
        if not group:
            return
        keys = np.concatenate(list(group.values()))
        order = np.argsort(keys, kind="stable")  # stable: the first of equals is the first in the files
        again = np.zeros(len(keys), np.bool_)
        again[order[1:]] = keys[order[1:]] == keys[order[:-1]]
        again &= keys != 0
        first = 0
        for file, own in group.items():
            mask = again[first : first + len(own)]
            first += len(own)
            self._add("duplicate-prompts", file, mask, "prompts that came before", report)

    def _add(self, rule: str, file: str, mask: np.ndarray[Any, Any], found: str, report: Report) -> None:
        count = int(mask.sum())
        if not count:
            return
        rows: list[int] = []
        first = 0
        for numbers in self._numbers[file]:
            places = np.flatnonzero(mask[first : first + len(numbers)])[: SHOWN - len(rows)]
            rows.extend(numbers[int(place)] for place in places)
            first += len(numbers)
            if len(rows) == SHOWN:
                break
        report.add(rule, file, found, rows, self._units[file], count=count)
