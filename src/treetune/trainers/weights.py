"""Shows that an episode counts the same in a trainer, whether it is one training row or several.

    for result in verify_weights("verl"):
        print(result.loss, result.errors, result.passed)

Each trainer has a function that yields a `Case` for each of its losses. It plays the episodes of `tiny_episodes.py`
through the trainer's own functions, in the trainer's own environment.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from treetune.core.contract import Credit
from treetune.errors import CreditError, MissingExtraError, UnknownNameError

CASES = {
    "areal": "treetune.trainers.areal.weights:cases",
    "skyrl": "treetune.trainers.skyrl.weights:cases",
    "slime": "treetune.trainers.slime.weights:cases",
    "verl": "treetune.trainers.verl.weights:cases",
    "trl": "treetune.trainers.trl.weights:cases",
}
"""The function of each trainer that yields its cases."""
CUTS: dict[str, Sequence[int]] = {
    "1": (1, 1, 1, 1, 1, 1, 1, 1),
    "2": (2, 1, 1, 1, 1, 1, 1, 1),
    "5": (5, 1, 1, 1, 1, 1, 1, 1),
    "unequal": (5, 3, 1, 2, 1, 2, 3, 1),
}
"""Into how many rows each of the eight episodes is cut: the first one only, or all of them differently."""
MOST_ERROR = 1e-6
"""The largest relative error of a gradient, and the largest error of an advantage. Trainers have advantages in single
precision."""


class Outcome(NamedTuple):
    """What a trainer makes of the episodes."""

    advantages: Mapping[tuple[int, int], float]
    """The advantage of each turn, by episode and turn; empty if they have the weights of rows."""
    gradient: Any
    """The gradient of the loss, as one tensor."""
    steps: int = 1
    """The number of optimizer steps."""


class Case(NamedTuple):
    loss: str
    """The loss, in the words of the trainer."""
    credit: Credit
    play: Callable[[Sequence[int]], Outcome]
    """Plays the episodes, cut into that many rows each. Raises `CreditError` if the trainer refuses several rows."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    loss: str
    credit: Credit
    errors: dict[str, float] = {}
    """The relative error of the gradient, for each of the `CUTS`."""
    advantage_error: float | None = None
    """The largest difference of an advantage from that with one row for each episode."""
    steps: dict[str, int] = {}
    """The number of optimizer steps, for each of the `CUTS`."""
    refused: str | None = None
    """Why the trainer refuses several rows, if it does."""

    @property
    def passed(self) -> bool:
        if self.refused is not None:
            return True
        errors = [self.advantage_error or 0, *self.errors.values()]
        return max(errors) <= MOST_ERROR and len(set(self.steps.values())) == 1


def verify_weights(trainer: str) -> Iterator[Result]:
    """Verify each loss of a trainer. Must run in an environment that has the trainer."""
    if trainer not in CASES:
        raise UnknownNameError.of("trainer", trainer, CASES)
    module, _, function = CASES[trainer].partition(":")
    try:
        cases = getattr(importlib.import_module(module), function)
    except ImportError as error:
        remedy = f"run it with the Python that has {trainer}"
        raise MissingExtraError(f"{trainer} cannot be imported: {error}", remedy=remedy) from error
    yield from map(_verify, cases())


def _verify(case: Case) -> Result:
    found: dict[str, Outcome] = {}
    try:
        for name, cut in CUTS.items():
            found[name] = case.play(cut)
    except CreditError as error:
        return Result(loss=case.loss, credit=case.credit, refused=error.message)
    whole = found["1"]
    return Result(
        loss=case.loss,
        credit=case.credit,
        errors={
            name: float((each.gradient - whole.gradient).norm() / whole.gradient.norm()) for name, each in found.items()
        },
        advantage_error=max(
            (abs(each.advantages[turn] - value) for turn, value in whole.advantages.items() for each in found.values()),
            default=None,
        ),
        steps={name: each.steps for name, each in found.items()},
    )
