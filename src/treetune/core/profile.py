"""A profile records how often each task was solved, by model: one JSON line per task, one column per model.

    {"uid": "5f0c...", "source": "gsm8k", "avg@8_my-model": 0.25}

`treetune profile` writes it. The `profile` key of a taskset reads it to decide which tasks are drawn and how often. If
tasks were made from a parameter, its value is in the line too: `"level": 3`.

A schedule (`Pools`, `Gaussian`) sets how often each pass rate is drawn, and how that changes over a stream. It draws
arms: the tasks of one pass rate, the sources of a mixture, or the values of a parameter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treetune.config.structs import FileName
from treetune.errors import ConfigError, did_you_mean
from treetune.system.digest import digest

PRIOR = 0.5
"""The pass rate of tasks without any data."""
SOLVED = 0.99
"""A task with at least this pass rate counts as solved."""

UNRATED, OUTSIDE = "no pass rate", "pass rate"
"""Reasons why a task is left out."""


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    path: FileName | None = None
    """The file written by `treetune profile`. Absent: no rates are known at first, and `online` learns them."""
    model: str | None = None
    """The model whose pass rates are used, or a column name (`avg@8_my-model`). Absent: the only one in the file."""
    min_solve_rate: Rate = 0.0
    """Leave out tasks with a lower pass rate."""
    max_solve_rate: Rate = 1.0
    """Leave out tasks with a higher pass rate."""
    drop_solved: bool = False
    """Leave out tasks that are always solved; with `online`, also tasks that become always solved."""
    unrated: Rate | Literal["drop"] | None = None
    """How to treat tasks without a pass rate: `drop`, or a rate to assume. Absent: drop; 0.5 if there is no file."""
    schedule: Schedule | None = None
    """How often each pass rate is drawn. Absent: every kept task, once an epoch."""
    shares: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """With a schedule: the fixed share of each `data_source`. Absent: the schedule ignores sources."""
    online: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """With a schedule: how far an observed reward moves the pass rate of its task: rate += online * (reward - rate)."""
    parameter: str | None = None
    """For an endless taskset: the config key with a pass rate for each value, such as `level`."""
    values: list[Any] = []
    """The values of that key to draw from."""
    rows: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With a schedule: the number of draws in a dataset task's file. Absent: the number of kept tasks."""

    def __post_init__(self) -> None:
        if self.min_solve_rate > self.max_solve_rate:
            raise ValueError(
                f"min_solve_rate ({self.min_solve_rate:g}) is above max_solve_rate ({self.max_solve_rate:g})"
            )
        if self.schedule is None:
            for key in ("online", "shares", "rows"):
                if getattr(self, key):
                    raise ValueError(f"{key} goes with a schedule, such as {{kind: pools}}")
        if bool(self.values) != (self.parameter is not None):
            raise ValueError("parameter and values go together: {parameter: level, values: [1, 2, 3]}")
        if self.path is None and self.parameter is None and self.online is None:
            raise ValueError("path is required: the file that `treetune profile` wrote")
        if self.path is None and self.model is not None:
            raise ValueError("model names a column of a file: give its path too")

    @property
    def selection(self) -> ProfileConfig | None:
        """Only the settings that decide which tasks are kept; None if all are."""
        return msgspec.structs.replace(self, schedule=None, shares={}, online=None, rows=None) if self.path else None

    def keeps(self, rate: float) -> bool:
        solved = self.drop_solved and rate >= SOLVED
        return self.min_solve_rate <= rate <= self.max_solve_rate and not solved


class Rates:
    """The pass rates that a config selects."""

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._profile = None if config.path is None else Profile.read(config.path)
        unrated = config.unrated if config.unrated is not None else PRIOR if config.path is None else "drop"
        self.unrated: float | None = None if unrated == "drop" else float(unrated)
        """The rate assumed for tasks without one; None if they are dropped."""

    @cached_property
    def by_uid(self) -> dict[str, float]:
        return {} if self._profile is None else self._profile.rates("uid", self._config.model)

    def by(self, key: str) -> dict[Any, float]:
        """The mean pass rate for each value of another column."""
        return {} if self._profile is None else self._profile.rates(key, self._config.model)

    def of(self, uid: str) -> float | None:
        """The pass rate of a task; None if it has none and is dropped."""
        return self.by_uid.get(uid, self.unrated)

    @property
    def digest(self) -> str:
        """A digest of the pass rates, for the fingerprint of a taskset."""
        return digest([self.by_uid])


class Profile:
    """A file of pass rates."""

    PREFIX = "avg@"

    def __init__(self, path: str, lines: list[dict[str, Any]]) -> None:
        self.path, self.lines = path, lines

    @classmethod
    def read(cls, path: str) -> Profile:
        file = Path(path).expanduser()
        try:
            data = file.read_bytes()
        except OSError as error:
            near = did_you_mean(file.name, (one.name for one in file.parent.glob("*.jsonl")))
            problem = f"cannot read {path}: {error.strerror or error}{near}"
            remedy = f"write it first: treetune profile TARGET -m MODEL -o {path}"
            raise ConfigError([("profile.path", problem)], remedy=remedy) from None
        try:
            lines = msgspec.json.Decoder(dict[str, Any]).decode_lines(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError([("profile.path", f"{path} is not a profile: {error}")]) from None
        if wrong := [number for number, line in enumerate(lines, 1) if not isinstance(line.get("uid"), str)]:
            raise ConfigError([("profile.path", f"{path} is not a profile: line {wrong[0]} has no uid")])
        return cls(path, lines)

    @property
    def columns(self) -> list[str]:
        """The columns with pass rates."""
        return list(dict.fromkeys(key for line in self.lines for key in line if key.startswith(self.PREFIX)))

    def column(self, model: str | None) -> str:
        """The column of a model. A wrong name is a `ConfigError`."""
        columns = self.columns
        models = [_model_of(column) for column in columns]
        found = [column for column, name in zip(columns, models, strict=True) if model in (None, name, column)]
        if len(found) == 1:
            return found[0]
        if found:
            raise ConfigError([("profile.model", f"{self.path} has several columns: {', '.join(found)}; name one")])
        if not columns:
            raise ConfigError([("profile.path", f"{self.path} has no column of pass rates, such as avg@8_my-model")])
        near = did_you_mean(str(model), [*models, *columns])
        raise ConfigError([("profile.model", f"{self.path} has no {model!r}{near}; it has: {', '.join(models)}")])

    def rates(self, key: str, model: str | None) -> dict[Any, float]:
        """The pass rate for each value of `key`: per uid, or the mean over all lines with that value."""
        column = self.column(model)
        found: dict[Any, list[float]] = defaultdict(list)
        for number, line in enumerate(self.lines, 1):
            rate = line.get(column)
            if rate is None or key not in line:
                continue
            if type(rate) not in (int, float) or not 0 <= rate <= 1:
                problem = f"{self.path}, line {number}: {column} is {rate!r:.40}, not a number from 0 to 1"
                raise ConfigError([("profile.path", problem)])
            found[hashable(line[key])].append(float(rate))
        return {value: math.fsum(rates) / len(rates) for value, rates in found.items()}

    def columns_of(self, model: str) -> list[str]:
        return [column for column in self.columns if _model_of(column) == model]

    def drop(self, column: str) -> None:
        kept = [{key: value for key, value in line.items() if key != column} for line in self.lines]
        self.lines = [line for line in kept if any(key.startswith(self.PREFIX) for key in line)]

    def merge(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Merge lines into the existing ones, one per task."""
        by_uid = {line["uid"]: line for line in self.lines}
        for line in lines:
            by_uid.setdefault(line["uid"], {}).update(line)
        self.lines = list(by_uid.values())

    def encode(self) -> bytes:
        return msgspec.json.Encoder().encode_lines(self.lines)


def column_of(model: str, rollouts: int) -> str:
    return f"{Profile.PREFIX}{rollouts}_{model}"


def _model_of(column: str) -> str:
    return column.partition("_")[2]


def hashable(value: Any) -> Any:
    """Make a value of a column usable as a mapping key."""
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value


Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]

BINS = 80
"""Pass rates are rounded to 1/80, which is exact for rates of 4, 5, 8, 10, 16 and 20 rollouts."""
STAGES = 100
"""The number of steps in which a Gaussian's mean moves."""


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pools", tag_field="kind"):
    hard: Weight = 0.2
    """The weight of rarely solved tasks. The share of a pool depends on its weight, not on its number of tasks."""
    normal: Weight = 1.0
    """The weight of tasks in between."""
    easy: Weight = 0.2
    """The weight of mostly solved tasks."""
    hard_to: Rate = 0.25
    """The highest pass rate of a hard task."""
    easy_above: Rate = 0.75
    """Tasks with a higher pass rate are easy."""

    def __post_init__(self) -> None:
        if not self.hard + self.normal + self.easy:
            raise ValueError("every pool has weight 0: at least one needs a higher weight")
        if self.hard_to > self.easy_above:
            raise ValueError(f"hard_to ({self.hard_to:g}) is above easy_above ({self.easy_above:g})")

    def bin_of(self, rate: float) -> int:
        return 0 if rate <= self.hard_to else 2 if rate > self.easy_above else 1

    def weight(self, bin: int, stage: int) -> float:
        return (self.hard, self.normal, self.easy)[bin]

    def starts(self) -> list[int]:
        """The index at which each stage begins. The last stage never ends."""
        return [0]


class Gaussian(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gaussian", tag_field="kind"):
    start: Rate = 0.8
    """The pass rate drawn most at the beginning."""
    end: Rate = 0.2
    """The pass rate drawn most after `over` draws."""
    width: Annotated[float, msgspec.Meta(gt=0)] = 0.15
    """The standard deviation."""
    over: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """The number of draws over which the mean moves evenly from `start` to `end`."""

    def bin_of(self, rate: float) -> int:
        return round(rate * BINS)

    def weight(self, bin: int, stage: int) -> float:
        steps = min(STAGES, self.over)
        mean = self.end if stage >= steps else self.start + (self.end - self.start) * (stage + 0.5) / steps
        return math.exp(-(((bin / BINS - mean) / self.width) ** 2) / 2)

    def starts(self) -> list[int]:
        steps = min(STAGES, self.over)
        return [self.over * stage // steps for stage in range(steps + 1)]


Schedule = Pools | Gaussian
