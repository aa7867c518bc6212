"""A profile says how often each task was solved, by model: a line of JSON for each task, a column for each model.

    {"uid": "5f0c...", "source": "gsm8k", "avg@8_my-model": 0.25}

`treetune profile` writes it; the key `profile` of a taskset reads it, for which tasks are drawn and how often. Where
tasks were made by a parameter, its value stands in the line too: `"level": 3`.

A schedule says how often each pass rate is drawn, and how that changes as a stream goes on: `Pools`, `Gaussian`. It
draws arms: the tasks of one pass rate, the sources of a mixture, the values of a parameter. `Staged` gives the arm at
an index, as a pure function; `Credits` does the same one draw at a time, for shares that change.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

import msgspec

from treetune.config.structs import FileName
from treetune.core.order import Interleave
from treetune.errors import ConfigError, did_you_mean
from treetune.system.digest import digest

PRIOR = 0.5
"""The pass rate of tasks of which nothing is known yet."""
SOLVED = 0.99
"""The pass rate from which a task counts as solved."""

UNRATED, OUTSIDE = "no pass rate", "pass rate"
"""Why a task is left out."""


class ProfileConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    path: FileName | None = None
    """The file that `treetune profile` wrote; absent: nothing is known at the start, and `online` learns it."""
    model: str | None = None
    """Whose pass rates: a model, or the name of a column (`avg@8_my-model`); absent: the only one."""
    min_solve_rate: Rate = 0.0
    """Leave out tasks that are solved less often."""
    max_solve_rate: Rate = 1.0
    """Leave out tasks that are solved more often."""
    drop_solved: bool = False
    """Leave out tasks that are always solved; `online`, also those that come to be."""
    unrated: Rate | Literal["drop"] | None = None
    """Tasks without a pass rate: `drop`, or the rate that they count with. Absent: drop; without a file 0.5."""
    schedule: Schedule | None = None
    """How often each pass rate is drawn; absent: every task that is kept, once an epoch."""
    shares: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    """With a schedule: the fixed share of each `data_source`; absent: the schedule knows no sources."""
    online: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """With a schedule: how far an observed reward moves the pass rate of its task: rate += online * (reward - rate)."""
    parameter: str | None = None
    """Of a taskset that never ends: the key of its config that has a pass rate for each value, such as `level`."""
    values: list[Any] = []
    """The values of that key which are drawn."""
    rows: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """With a schedule: how many draws the file of a dataset task has; absent: as many as tasks are kept."""

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
        """Only what decides which tasks there are; None where all are kept."""
        return msgspec.structs.replace(self, schedule=None, shares={}, online=None, rows=None) if self.path else None

    def keeps(self, rate: float) -> bool:
        solved = self.drop_solved and rate >= SOLVED
        return self.min_solve_rate <= rate <= self.max_solve_rate and not solved


class Rates:
    """The pass rates that a config asks for."""

    def __init__(self, config: ProfileConfig) -> None:
        self._config = config
        self._profile = None if config.path is None else Profile.read(config.path)
        unrated = config.unrated if config.unrated is not None else PRIOR if config.path is None else "drop"
        self.unrated: float | None = None if unrated == "drop" else float(unrated)
        """What tasks without a rate count with; None: they are dropped."""

    @cached_property
    def by_uid(self) -> dict[str, float]:
        return {} if self._profile is None else self._profile.rates("uid", self._config.model)

    def by(self, key: str) -> dict[Any, float]:
        """The mean pass rate for each value of another column."""
        return {} if self._profile is None else self._profile.rates(key, self._config.model)

    def of(self, uid: str) -> float | None:
        """Of a task; None: it has none, and is dropped."""
        return self.by_uid.get(uid, self.unrated)

    @property
    def digest(self) -> str:
        """Identifies the numbers, for the fingerprint of a taskset."""
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
            raise ConfigError([("profile.path", f"{path} is no profile: {error}")]) from None
        if wrong := [number for number, line in enumerate(lines, 1) if not isinstance(line.get("uid"), str)]:
            raise ConfigError([("profile.path", f"{path} is no profile: line {wrong[0]} has no uid")])
        return cls(path, lines)

    @property
    def columns(self) -> list[str]:
        """Those with pass rates."""
        return list(dict.fromkeys(key for line in self.lines for key in line if key.startswith(self.PREFIX)))

    def column(self, model: str | None) -> str:
        """The column of a model; what is wrong with its name is a fault of the config."""
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
        """The pass rate of each value of `key`: of each uid, or the mean over all lines with that value."""
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
        return {value: fmean(rates) for value, rates in found.items()}

    def columns_of(self, model: str) -> list[str]:
        return [column for column in self.columns if _model_of(column) == model]

    def drop(self, column: str) -> None:
        kept = [{key: value for key, value in line.items() if key != column} for line in self.lines]
        self.lines = [line for line in kept if any(key.startswith(self.PREFIX) for key in line)]

    def merge(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Puts lines beside those that are there: of one task there is one."""
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
    """A value of a column as a key of a mapping."""
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value


Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Weight = Annotated[float, msgspec.Meta(ge=0)]

BINS = 80
"""Pass rates are distinguished to 1/80: rates of 4, 5, 8, 10, 16 and 20 rollouts are kept as they are."""
STAGES = 100
"""In so many steps a Gaussian falls."""
LEAST_SHARE = 1e-6
"""An arm with a smaller share is not drawn."""


class Pools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="pools", tag_field="kind"):
    hard: Weight = 0.2
    """The weight of tasks that are seldom solved; the share of a pool is its weight, however many tasks it has."""
    normal: Weight = 1.0
    """The weight of those between."""
    easy: Weight = 0.2
    """The weight of tasks that are mostly solved."""
    hard_to: Rate = 0.25
    """The highest pass rate of a hard task."""
    easy_above: Rate = 0.75
    """Tasks with a higher pass rate are easy."""

    def __post_init__(self) -> None:
        if not self.hard + self.normal + self.easy:
            raise ValueError("every pool has the weight 0: one at least needs more")
        if self.hard_to > self.easy_above:
            raise ValueError(f"hard_to ({self.hard_to:g}) is above easy_above ({self.easy_above:g})")

    def bin_of(self, rate: float) -> int:
        return 0 if rate <= self.hard_to else 2 if rate > self.easy_above else 1

    def weight(self, bin: int, stage: int) -> float:
        return (self.hard, self.normal, self.easy)[bin]

    def starts(self) -> list[int]:
        """The index at which each stage begins; the last never ends."""
        return [0]


class Gaussian(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="gaussian", tag_field="kind"):
    start: Rate = 0.8
    """The pass rate that is drawn most at the beginning."""
    end: Rate = 0.2
    """The one that is drawn most from the draw `over` on."""
    width: Annotated[float, msgspec.Meta(gt=0)] = 0.15
    """The standard deviation."""
    over: Annotated[int, msgspec.Meta(ge=1)] = 10_000
    """The number of draws over which the mean goes from `start` to `end`, evenly."""

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


def normalise(weights: Sequence[float]) -> list[float]:
    """Shares that sum to 1, where tiny ones are 0. Where all weights vanish, the arms have equal shares."""
    total = math.fsum(weights)
    if not total:
        return [1 / len(weights)] * len(weights)
    return [weight / total if weight / total >= LEAST_SHARE else 0.0 for weight in weights]


class Staged:
    """Arms whose shares change from stage to stage: any index is reached without the ones before it."""

    def __init__(
        self, starts: Sequence[int], shares: Callable[[int], Sequence[float]], seed: int | None = None
    ) -> None:
        """`shares` gives those of all arms in a stage."""
        self._starts = starts
        self._seed = seed
        self._shares = shares
        self._stages: list[_Stage] = []
        self._lock = threading.Lock()
        """Tasks are made in several threads, and stages are worked out as they are reached."""

    def at(self, index: int) -> tuple[int, int]:
        """The arm that draw `index` takes from, and which of that arm's own draws it is."""
        stage = self._stage(bisect_right(self._starts, index) - 1)
        number, within = stage.interleave.at(index)
        return stage.arms[number], stage.offsets[number] + within

    def _stage(self, number: int) -> _Stage:
        if len(self._stages) <= number:
            with self._lock:
                while len(self._stages) <= number:
                    self._stages.append(self._next_stage())
        return self._stages[number]

    def _next_stage(self) -> _Stage:
        number = len(self._stages)
        shares = self._shares(number)
        arms = [arm for arm, share in enumerate(shares) if share]
        drawn = [0] * len(shares)
        start = self._starts[number]
        if number:
            before = self._stages[-1]
            drawn = list(before.drawn)
            counts = before.interleave.counts_before(start)
            for arm, offset, count in zip(before.arms, before.offsets, counts, strict=True):
                drawn[arm] = offset + count
        interleave = Interleave([shares[arm] for arm in arms], self._seed)
        # Its points continue those of the stage before, so only what it gives from here on counts.
        counts = interleave.counts_before(start)
        offsets = [drawn[arm] - count for arm, count in zip(arms, counts, strict=True)]
        return _Stage(arms, interleave, offsets, drawn)


class _Stage(msgspec.Struct):
    arms: list[int]
    """Those that are drawn in it."""
    interleave: Interleave
    offsets: list[int]
    """What to add to an arm's number in the interleave for its number among all its draws."""
    drawn: list[int]
    """How often each arm of all was drawn before it."""


class Credits:
    """Draws arms by shares that may be others at every draw: each arm earns its share, and the one with most pays 1.
    So every arm is within a few draws of what its shares sum to."""

    def __init__(self, arms: int) -> None:
        self.values = [0.0] * arms

    def draw(self, shares: Sequence[float]) -> int:
        values = self.values
        best = -1
        for arm, share in enumerate(shares):
            if share:
                values[arm] += share
                if best < 0 or values[arm] > values[best]:
                    best = arm
        values[best] -= 1
        return best
