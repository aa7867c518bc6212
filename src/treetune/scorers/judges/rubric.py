"""A rubric is a list of criteria, each with its choices from worst to best.

    criteria:
      - {name: polite, text: The answer is polite., weight: 1, choices: [rude, neutral, polite]}

It is a YAML or TOML file, or stands in the config itself. An answer earns the weighted mean of its criteria; the worst
choice is worth 0, the best 1, those between are spread evenly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from treetune.config.structs import convert, load_yaml
from treetune.errors import ConfigError
from treetune.scorers.judges.question import fold


class Criterion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    """Names it in metrics, traces and explanations."""
    text: str
    """What the judge is to decide."""
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Its share of the reward, beside the weights of the others."""
    choices: tuple[str, ...] = ("no", "yes")
    """What the judge may say, from worst to best."""

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
    """What the judge should know for all criteria."""

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
    """A rubric from a .toml or .yaml file; one error names every fault of it."""
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
    """YAML takes `yes` and `no` for true and false, and 1 for a number."""
    if not isinstance(item, Mapping) or not isinstance(item.get("choices"), list):
        return item
    words = {True: "yes", False: "no"}
    spelt = [words[one] if isinstance(one, bool) else str(one) for one in item["choices"]]
    return {**item, "choices": spelt}
