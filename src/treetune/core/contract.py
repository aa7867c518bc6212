"""A Contract is what an episode promises wherever it is played: its limits, and what its reward means.

    class Guess(Environment):
        CONTRACT = Contract(max_turns=12, turn_discount=0.95)

    taskset.contract_of(task).turns         # 12, in an evaluation, on a server and in every trainer

`Limits` are the part that a run may narrow further. An episode that reaches a limit is truncated: it counts with what
it has earned so far.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec
from msgspec.structs import asdict, replace

from treetune.config.structs import without_none
from treetune.core.score import total
from treetune.errors import ConfigError, CreditError, EnvironmentFault

if TYPE_CHECKING:
    from treetune.core.task import Task

MOST_TURNS = 256
"""The turn limit of an episode if nothing declares one."""
MOST_TOOL_CALLS = 128
"""The limit of tool calls in an episode if nothing declares one."""
ONE_REWARD = "one reward for an episode: those of its turns are summed"
"""The message of trainers that accept no rewards by turn."""
SCORED_ALONE = "each episode is scored alone"
"""The message of every place that does not score the rollouts of a task together."""
Credit = Literal["outcome", "turn"]
_Turns = Annotated[int, msgspec.Meta(ge=1)]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_turns: _Turns | None = None
    """The maximum number of answers per episode. Absent: what the task or its environment declares, else 256."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """The maximum seconds of a rollout, of scoring a group, and of each call of an episode that a client steps."""
    timeout_reward: float | None = None
    """The reward of a started episode that exceeds `timeout`. Absent: it has no reward and counts as a failure."""
    max_tool_calls: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """The maximum number of tool calls per episode. Further calls are refused. If the model keeps calling, the episode
    is truncated. Absent: what the task or its environment declares, else 128."""

    def __post_init__(self) -> None:
        if self.timeout_reward is not None and not math.isfinite(self.timeout_reward):
            raise ValueError("timeout_reward must be finite")

    def until(self) -> float | None:
        """The loop's time at which these limits, counted from now, run out."""
        import asyncio  # imported here because reading and checking rows does not need it

        return None if self.timeout is None else asyncio.get_running_loop().time() + self.timeout

    def narrow(self, by: Limits) -> Self:
        """The lower of each limit. If `by` sets a timeout reward, that one counts."""
        earns = self.timeout_reward if by.timeout_reward is None else by.timeout_reward
        return replace(
            self,
            max_turns=_least(self.max_turns, by.max_turns),
            timeout=_least(self.timeout, by.timeout),
            timeout_reward=earns,
            max_tool_calls=_least(self.max_tool_calls, by.max_tool_calls),
        )


class Contract(Limits, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """None means that a field is not declared. The `timeout` of a contract is the time of the whole episode, including
    that of the model."""

    turn_discount: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    """For training, the reward is multiplied by this once per turn, including the first. Evaluations and servers report
    the reward itself. Absent: 1."""
    credit: Credit | None = None
    """What the tokens of a turn are trained with: `outcome`, the reward of the episode, or `turn`, what was earned from
    this turn on. Absent: `outcome`."""
    credit_discount: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """With `credit: turn`, the factor for what later turns earned, for each turn in between. Absent: 1."""
    group_score: bool = False
    """Whether the taskset's `score_group` scores the rollouts of a task together; set by the taskset."""

    @property
    def turns(self) -> int:
        """The turn limit, declared or not."""
        return self.max_turns or MOST_TURNS

    @property
    def tool_calls(self) -> int:
        """The limit of tool calls, declared or not."""
        return MOST_TOOL_CALLS if self.max_tool_calls is None else self.max_tool_calls

    @property
    def discount(self) -> float:
        """The factor for each turn, declared or not."""
        return 1.0 if self.turn_discount is None else self.turn_discount

    def narrow(self, by: Limits) -> Self:
        known = self if by.max_tool_calls is None else replace(self, max_tool_calls=self.tool_calls)  # never raised
        return super(Contract, known).narrow(by)

    def override(self, by: Contract) -> Contract:
        """This contract, with the fields that another contract declares."""
        return replace(self, **without_none(asdict(by)))

    def of_task(self, task: Task) -> Contract:
        """This contract with the turn limit of a task or row, `extra_info.max_turns`, if it has one."""
        given = task.extra_info.get("max_turns")
        if given is None or self.max_turns == 1:
            return self
        try:
            return replace(self, max_turns=msgspec.convert(given, _Turns, strict=False))
        except msgspec.ValidationError:
            remedy = "write a whole number from 1, or leave it out"
            raise EnvironmentFault(f"extra_info.max_turns is {given!r}", remedy=remedy) from None

    def shape(self, reward: float, turns: int) -> float:
        """The reward to train on, for an episode of this many turns."""
        return reward * self.discount**turns

    def shape_each(self, rewards: Sequence[float]) -> list[float]:
        """The rewards of the turns to train on. At every turn, the values so far sum to the shaped reward so far."""
        if self.discount == 1:
            return list(rewards)
        sums = [total(rewards[:turns]) for turns in range(len(rewards) + 1)]
        shaped = [self.shape(reward, turns) for turns, reward in enumerate(sums)]
        return [after - before for before, after in pairwise(shaped)]

    @property
    def declared(self) -> dict[str, Any]:
        """The fields that are declared."""
        return {name: value for name, value in asdict(self).items() if value is not None and value is not False}

    @property
    def resolved(self) -> Contract:
        """The contract, with the defaults of the fields that are not declared."""
        credit, by = self.turn_credit
        known = {"max_turns": self.turns, "max_tool_calls": self.tool_calls, "turn_discount": self.discount}
        return replace(self, **known, credit=credit, credit_discount=by)

    @property
    def turn_credit(self) -> tuple[Credit, float]:
        """The credit and its discount, declared or not. Raises if the discount would have no effect."""
        credit, discount = self.credit or "outcome", 1.0 if self.credit_discount is None else self.credit_discount
        if credit == "outcome" and discount != 1:
            remedy = "declare credit: turn, or leave credit_discount out"
            raise CreditError(f"credit_discount is {discount:g}, and credit by outcome has no discount", remedy=remedy)
        return credit, discount


@lru_cache(maxsize=256)  # each rollout asks, about the same few
def check_contract(contract: Contract) -> None:
    """Raise if a contract declared in Python has a value that a config could not have."""
    try:
        msgspec.convert(asdict(contract), Contract)
    except msgspec.ValidationError as error:
        reason, _, name = str(error).rstrip("`").partition(" - at `$.")
        value = getattr(contract, name, None)
        remedy = "correct the CONTRACT of the environment or the taskset"
        raise EnvironmentFault(f"{name} of a contract is {value!r}: {reason.replace('`', '')}", remedy=remedy) from None
    _ = contract.turn_credit  # raises if the two do not go together


def override_by_config(taskset: Any) -> Contract:
    """The contract of a taskset's class, with the fields that its config declares."""
    declared = taskset.config.contract
    faults = []
    if taskset.overrides("contract_of"):
        faults.append(("taskset.contract", "these tasks have contracts of their own: write it where they are declared"))
    if declared.max_turns is not None and "max_turns" in taskset.config.__struct_fields__:
        faults.append(("taskset.contract.max_turns", "these tasks have a key for it: write max_turns"))
    if declared.group_score:
        faults.append(("taskset.contract.group_score", "is not declared: a taskset with score_group() has it"))
    if faults:
        raise ConfigError(faults)
    known: Contract = taskset.CONTRACT
    return known.override(declared)


def _least(one: Any, other: Any) -> Any:
    return min((value for value in (one, other) if value is not None), default=None)
