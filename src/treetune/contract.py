"""What an environment asks of its rows: which keys, and a ground truth of which kind, stored how.

    class Gsm8k(Environment):
        CONTRACT = Contract(about="...", takes=(Kind.TEXT, Kind.NUMBER), stored=Stored.TEXT)

The writer stores ground truths by it, the validator checks them by it, the docs list it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from treetune.task import Task


class Kind(StrEnum):
    """Kinds of ground truth that a person writes."""

    TEXT = "text"
    NUMBER = "number"
    LIST = "list"
    """Several acceptable answers."""
    CASES = "cases"
    """Test cases: a list of mappings with `input` and `output`."""
    MAPPING = "mapping"


class Stored(StrEnum):
    """How trainers' own environments read it from a row."""

    TEXT = "text"
    """As text: a number there scores 0 for ever."""
    TARGET = "target"
    """As `{"target": [...]}`."""
    JSON = "json"
    """As JSON in a string."""
    AS_IS = "as is"


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    about: str
    """What the environment is, in one line."""
    takes: tuple[Kind, ...]
    """The kinds of ground truth it accepts."""
    stored: Stored = Stored.AS_IS
    column: Literal["reward_spec", "reward_model"] = "reward_spec"
    """The column that SkyRL's environment of this name reads."""
    needs: dict[str, str] = {}
    """Further keys that a row must have, and what they mean."""
    choices: dict[str, tuple[str, ...]] = {}
    """The only values that some of those keys may have."""
    pattern: str | None = None
    """What a stored text must match as a whole, for any answer to match it."""
    rewards: str = "0 or 1"
    """What rewards it gives."""
    max_turns: int = 1
    """The most turns unless a row's `extra_info.max_turns` says otherwise."""
    sandbox: bool = False
    """Its episodes run code of the policy: they need a sandbox (`treetune.sandbox.probe` says whether there is one)."""

    def problem(self, truth: Any) -> str | None:
        """What is wrong with a ground truth, or None."""
        kind = kind_of(truth)
        if kind is None:
            return "is missing" if truth is None else f"is a {type(truth).__name__}"
        if kind in self.takes or (kind is Kind.CASES and Kind.LIST in self.takes):
            return None
        return f"is {kind.value}, expected {' or '.join(self.takes)}"

    def encode(self, truth: Any, task: Task | None = None) -> Any:
        """A natural ground truth in the form that trainers' environments read; what the task says may matter too."""
        if self.stored is Stored.TEXT and kind_of(truth) is Kind.NUMBER:
            # 42.0 as "42": environments compare text, and an answer says 42.
            return str(int(truth)) if isinstance(truth, float) and truth.is_integer() else str(truth)
        if self.stored is Stored.TARGET and not (isinstance(truth, dict) and "target" in truth):
            return {"target": truth if isinstance(truth, list) else [truth]}
        if self.stored is Stored.JSON and not isinstance(truth, str):
            return msgspec.json.encode(truth).decode()
        return truth


def kind_of(truth: Any) -> Kind | None:
    if isinstance(truth, str):
        return Kind.TEXT
    if isinstance(truth, int | float) and not isinstance(truth, bool):
        return Kind.NUMBER
    if isinstance(truth, list) and truth:
        cases = all(isinstance(case, dict) and {"input", "output"} <= case.keys() for case in truth)
        return Kind.CASES if cases else Kind.LIST
    return Kind.MAPPING if isinstance(truth, dict) and truth else None


def markdown(contracts: Mapping[str, Contract]) -> str:
    """The contracts as a table, for the docs."""
    lines = [
        "| id | what | ground truth | further keys | rewards | turns | runs code |",
        "|---|---|---|---|---|---|---|",
    ]
    for id, contract in sorted(contracts.items()):
        needs = "; ".join(f"`{key}`: {meaning}" for key, meaning in contract.needs.items())
        takes = " or ".join(contract.takes)
        code = "in a sandbox" if contract.sandbox else "-"
        cells = (f"`{id}`", contract.about, takes, needs or "-", contract.rewards, contract.max_turns, code)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def contract_of(env_class: str | None) -> Contract | None:
    """The contract of an environment that is known by an id; None where there is none.

    A file or module that a row names is never loaded for it: reading and writing data must not run code the data names.
    """
    from treetune.errors import TreetuneError
    from treetune.plugins import environments

    if env_class is None or ":" in env_class:
        return None
    try:
        contract: Contract | None = getattr(environments.resolve(env_class), "CONTRACT", None)
    except TreetuneError:
        return None
    return contract
