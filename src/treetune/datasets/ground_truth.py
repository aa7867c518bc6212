"""The right answer of a row: a column, or what a regular expression finds in one."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from treetune.datasets.column_faults import no_column
from treetune.datasets.config import GroundTruthConfig
from treetune.errors import ConfigError

_TIMES = (datetime.date, datetime.time, datetime.timedelta)


class GroundTruth:
    """Compiled from the config; checks its column and its expression at once."""

    def __init__(self, config: str | GroundTruthConfig, columns: Sequence[str]) -> None:
        given = GroundTruthConfig(column=config) if isinstance(config, str) else config
        if given.column not in columns:
            raise ConfigError([("ground_truth", no_column(given.column, columns))])
        self.column = given.column
        self._pattern: re.Pattern[str] | None = None
        if given.pattern is not None:
            try:
                self._pattern = re.compile(given.pattern)
            except re.error as error:
                raise ConfigError([("ground_truth.pattern", f"no regular expression: {error}")]) from None
            if self._pattern.groups > 1:
                raise ConfigError([("ground_truth.pattern", "has several groups; use (?:...) for all but the answer")])

    def of(self, row: Mapping[str, Any]) -> Any:
        """The ground truth as it is stored, or None where there is none."""
        value = row[self.column]
        if self._pattern is None:
            return stored(value)
        matches = self._pattern.findall(value) if isinstance(value, str) else None
        return (matches[-1].strip() or None) if matches else None

    def of_column(self, values: list[Any]) -> list[Any]:
        """The ground truths of a column's values."""
        if self._pattern is None:
            return [stored(value) for value in values]
        # The last match counts: a solution may quote the marker before it ends.
        find = self._pattern.findall
        return [
            (matches[-1].strip() or None) if isinstance(value, str) and (matches := find(value)) else None
            for value in values
        ]


def stored(value: Any) -> Any:
    """Scalars as text, since that is what scorers compare and what lets any two files be joined; structures as
    they are."""
    if value is None or value in ("", [], {}):
        return None
    if isinstance(value, str | list | dict):
        return value
    if isinstance(value, bytes):
        return value.decode() or None  # bytes that are no text are a fault of their row
    return msgspec.to_builtins(value) if isinstance(value, _TIMES) else str(value)
