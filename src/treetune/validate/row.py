"""What is wrong with one row: the one place that knows, for every kind of file.

    check = RowCheck("skyrl")
    list(check(row))   # [("ground-truth-type", "gsm8k reads text, this is a number: 42")]

A row has no nulls (see `values`). Each rule comes once at the most.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from treetune.environment import Contract, contract_of
from treetune.errors import did_you_mean
from treetune.plugins import environments
from treetune.rows.rule import RULE
from treetune.validate.rules import LESS_KNOWN_ROLES, ROLES
from treetune.validate.truths import stored_fault

Fault = tuple[str, str]
"""A rule, and what was found."""

SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)
"""The special tokens of the usual tokenizers."""


class RowCheck:
    """`known`: ids of environments beside those that are registered here. `contents`: whether messages have theirs."""

    def __init__(
        self, format: str, known: Collection[str] = (), *, contents: bool = True, special: re.Pattern[str] = SPECIAL
    ) -> None:
        self.format = format
        self._here = environments.names()
        self.known = {*self._here, *known}
        self.contents = contents
        self.special = special
        self._contracts: dict[str, Contract | None] = {}

    def __call__(self, row: Mapping[str, Any]) -> Iterator[Fault]:
        yield from self._prompt(row.get("prompt"))
        if not isinstance(row.get("extra_info", {}), dict):
            yield "extra-info-not-a-mapping", told(row["extra_info"])
        if self.format == "skyrl":
            yield from self._skyrl(row)
        else:
            yield from self._other(row)

    def contract(self, env_class: str) -> Contract | None:
        if env_class not in self._contracts:
            self._contracts[env_class] = contract_of(env_class)
        return self._contracts[env_class]

    # The prompt

    def _prompt(self, prompt: Any) -> Iterator[Fault]:
        if prompt is None:
            yield "missing-prompt", "none"
        elif not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
            yield "prompt-not-messages", told(prompt)
        elif not prompt:
            yield "empty-prompt", "an empty list"
        else:
            faults: dict[str, str] = {}
            for message in prompt:
                for rule, found in self._message(message):
                    faults.setdefault(rule, found)
            roles = [message.get("role") for message in prompt]
            if "user" not in roles and not faults.keys() & {"unknown-role", "missing-role"}:
                faults["no-user-message"] = f"only {', '.join(map(str, roles))}"
            if roles[-1] == "assistant":
                faults["ends-with-assistant"] = "a last message of the assistant"
            yield from faults.items()

    def _message(self, message: Mapping[str, Any]) -> Iterator[Fault]:
        role = message.get("role")
        if role is None:
            yield "missing-role", f"a message with only {', '.join(message) or 'nothing'}"
        elif role not in ROLES:
            yield ("rare-role" if role in LESS_KNOWN_ROLES else "unknown-role"), told(role)
        if self.contents:
            yield from self._content(message)

    def _content(self, message: Mapping[str, Any]) -> Iterator[Fault]:
        content = message.get("content")
        if isinstance(content, str):
            if not content or content.isspace():
                yield "empty-content", told(content)
            elif special := self.special.search(content):
                yield "special-tokens", special[0]
        elif content is None:
            if "tool_calls" not in message:
                yield "missing-content", f"none in a message of the {message.get('role', '?')}"
        elif not isinstance(content, list) or not all(map(_is_part, content)):
            yield "content-not-text", told(content)
        elif not content:
            yield "empty-content", "an empty list"
        elif special := self.special.search("\n".join(str(part.get("text", "")) for part in content)):
            yield "special-tokens", special[0]

    # SkyRL

    def _skyrl(self, row: Mapping[str, Any]) -> Iterator[Fault]:
        env_class = row.get("env_class")
        contract = None
        if env_class is None:
            yield "missing-env-class", "none" + did_you_mean("env_class", row.keys() - {"env_class"})
        elif not isinstance(env_class, str):
            yield "env-class-not-text", told(env_class)
        elif ":" in env_class:
            pass  # it names its own code, which is not run here
        elif env_class not in self.known:
            yield "unknown-env-class", told(env_class) + did_you_mean(env_class, self.known)
        else:
            contract = self.contract(env_class)
        yield from self._reward(row, env_class, contract)
        if contract is not None:
            yield from self._needs(row, contract)
            yield from _turns(row, contract)

    def _reward(self, row: Mapping[str, Any], env_class: Any, contract: Contract | None) -> Iterator[Fault]:
        column = contract.column if contract is not None else "reward_spec"
        spec = row.get("reward_spec", row.get(column))
        # An environment that says nothing of ground truths may need none.
        needless = contract is None and isinstance(env_class, str) and (":" in env_class or env_class in self._here)
        if needless and (spec is None or (isinstance(spec, dict) and spec.get("ground_truth") is None)):
            return
        if spec is None:
            yield "missing-reward-spec", "none" + did_you_mean("reward_spec", row.keys() - {"reward_spec"})
            return
        if not isinstance(spec, dict):
            yield "reward-spec-not-a-mapping", told(spec)
            return
        truth = spec.get("ground_truth")
        if truth is None:
            yield "missing-ground-truth", f"only {', '.join(spec)}" if spec and self.contents else "none"
        if contract is None:
            return
        read = truth
        if column != "reward_spec":
            holder = row.get(column)
            read = holder.get("ground_truth") if isinstance(holder, dict) else None
            if read is None:
                yield "missing-column", f"no {column}.ground_truth, which {env_class} reads"
                read = truth
        if read is None:
            return
        fault = stored_fault(contract, read)
        if fault is not None:
            yield fault.rule, f"{env_class} reads {fault.expected}, this is {told(read)}"
        elif truth is not None and read != truth and read != contract.encode(truth):
            yield "ground-truth-value", f"{column} says {told(read)}, reward_spec {told(truth)}"

    def _needs(self, row: Mapping[str, Any], contract: Contract) -> Iterator[Fault]:
        missing = [key for key in contract.needs if key not in row]
        if missing:
            yield "missing-column", f"no {', '.join(missing)}, which {row['env_class']} reads"
        for key in contract.needs.keys() & row.keys():
            expected = _expected(key, row[key], contract)
            if expected is not None:
                yield "wrong-value", f"{key} is {told(row[key])}, expected {expected}"
                return

    # verl and TRL

    def _other(self, row: Mapping[str, Any]) -> Iterator[Fault]:
        extra = row.get("extra_info")
        env_class = extra.get("env_class") if isinstance(extra, dict) else None
        if env_class is not None and (not isinstance(env_class, str) or env_class not in self.known):
            if not isinstance(env_class, str) or ":" not in env_class:
                yield "unknown-env-class", told(env_class) + did_you_mean(str(env_class), self.known)
            env_class = None
        contract = self.contract(env_class) if env_class is not None else None
        if self.format == "verl":
            spec = row.get("reward_model")
            if spec is None:
                yield "missing-reward-spec", "no reward_model"
                return
            if not isinstance(spec, dict):
                yield "reward-spec-not-a-mapping", told(spec)
                return
            truth = spec.get("ground_truth")
            if truth is None and (contract is not None or not _scores_itself(extra)):
                yield "missing-ground-truth", f"only {', '.join(spec) or 'an empty mapping'}"
        else:
            truth = row.get("ground_truth")
        if truth is not None and contract is not None:
            problem = contract.problem(truth)
            if problem is not None:
                yield "ground-truth-type", f"for {env_class} it {problem}"


def _scores_itself(extra: Any) -> bool:
    """Whether a row says that something else scores it than a comparison with its ground truth."""
    return isinstance(extra, dict) and isinstance(extra.get("scorer"), str) and extra["scorer"] != RULE


def told(value: Any) -> str:
    """A value as a finding shows it: its type where that is not plain to see, and its beginning."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return shown if isinstance(value, str) else f"{_NAMES.get(type(value), type(value).__name__)} {shown}"


_NAMES: dict[type, str] = {
    bool: "boolean", int: "number", float: "number", list: "list", dict: "mapping", bytes: "bytes",
}  # fmt: skip


def _is_part(part: Any) -> bool:
    """Whether it is what chat templates take in a list of contents, such as `{"type": "text", "text": "..."}`."""
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _expected(key: str, value: Any, contract: Contract) -> str | None:
    """What a column that an environment reads should be, where it is something else."""
    if key in contract.choices:
        return None if value in contract.choices[key] else ", ".join(contract.choices[key])
    if key == "db_id":
        return None if isinstance(value, str) and value.strip() else "the name of a database"
    if key == "extra_info" and not isinstance(value, dict):
        # SkyRL looks for `max_turns` in it, which text and lists stand.
        return None if isinstance(value, str | list) and "max_turns" not in value else "a mapping"
    return None


def _turns(row: Mapping[str, Any], contract: Contract) -> Iterator[Fault]:
    extra = row.get("extra_info")
    for place, holder in (("max_turns", row), ("extra_info.max_turns", extra)):
        given = holder.get("max_turns") if isinstance(holder, dict) else None
        if contract.max_turns > 1 and given is not None and not is_turns(given, row["env_class"]):
            yield "bad-max-turns", f"{place} is {told(given)}"
            return


def is_turns(given: Any, env_class: str) -> bool:
    """Whether it is a whole number from 1; as text only where the environment makes a number of it."""
    if isinstance(given, bool) or (isinstance(given, str) and env_class not in MAKE_NUMBERS):
        return False
    try:
        return int(given) == float(given) >= 1
    except (TypeError, ValueError, OverflowError):
        return False


MAKE_NUMBERS = ("gsm8k_multi_turn",)
"""SkyRL's environments that read `extra_info.max_turns` too, and text as a number."""
