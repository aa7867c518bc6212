"""What is wrong with one row: the one place that knows, for every kind of file.

    check = RowCheck("skyrl")
    list(check(row))   # [("ground-truth-type", "gsm8k reads text, this is a number: 42")]

A row has no nulls (see `arrow_values`). Each rule comes once at the most.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec

from treetune.environment import Contract, Kind, Stored, contract_of, kind_of
from treetune.errors import did_you_mean
from treetune.plugins import environments
from treetune.rows.formats import format_named
from treetune.rows.rule import RULE
from treetune.validate.rules import LESS_KNOWN_ROLES, ROLES

Fault = tuple[str, str]
"""A rule, and what was found."""

SPECIAL = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|</?s>|<(?:bos|eos|pad|unk)>|<(?:start|end)_of_turn>|\[/?INST\]|<</?SYS>>"
)
"""The special tokens of the usual tokenizers."""
MAKE_NUMBERS = ("gsm8k_multi_turn",)
"""SkyRL's environments that read `extra_info.max_turns` too, and text as a number."""


class RowCheck:
    """`known`: ids of environments beside those that are registered here. `contents`: whether messages have theirs."""

    def __init__(
        self, format: str, known: Collection[str] = (), *, contents: bool = True, special: re.Pattern[str] = SPECIAL
    ) -> None:
        self.format = format_named(format)
        self._here = environments.names()
        self.known = {*self._here, *known}
        self.contents = contents
        self.special = special
        self._contracts: dict[str, Contract | None] = {}

    def __call__(self, row: Mapping[str, Any]) -> Iterator[Fault]:
        yield from self._check_prompt(row.get("prompt"))
        if not isinstance(row.get("extra_info", {}), dict):
            yield "extra-info-not-a-mapping", show(row["extra_info"])
        yield from self._check_skyrl(row) if self.format.has_environments else self._check_other(row)

    def contract(self, env_class: str) -> Contract | None:
        if env_class not in self._contracts:
            self._contracts[env_class] = contract_of(env_class)
        return self._contracts[env_class]

    def has_turns(self, env_class: str) -> bool:
        """Whether SkyRL plays an environment of this name for several turns."""
        contract = self.contract(env_class) if self.format.has_environments and env_class in self.known else None
        return contract is not None and contract.max_turns > 1

    # The prompt

    def _check_prompt(self, prompt: Any) -> Iterator[Fault]:
        if prompt is None:
            yield "missing-prompt", "none"
        elif not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
            yield "prompt-not-messages", show(prompt)
        elif not prompt:
            yield "empty-prompt", "an empty list"
        else:
            faults: dict[str, str] = {}
            for message in prompt:
                for rule, found in self._check_message(message):
                    faults.setdefault(rule, found)
            roles = [message.get("role") for message in prompt]
            if "user" not in roles and not faults.keys() & {"unknown-role", "missing-role"}:
                faults["no-user-message"] = f"only {', '.join(map(str, roles))}"
            if roles[-1] == "assistant":
                faults["ends-with-assistant"] = "a last message of the assistant"
            yield from faults.items()

    def _check_message(self, message: Mapping[str, Any]) -> Iterator[Fault]:
        role, content = message.get("role"), message.get("content")
        if role is None:
            yield "missing-role", f"a message with only {', '.join(message) or 'nothing'}"
        elif role not in ROLES:
            yield ("rare-role" if role in LESS_KNOWN_ROLES else "unknown-role"), show(role)
        if not self.contents:
            return
        if content is None:
            if "tool_calls" not in message:
                yield "missing-content", f"none in a message of the {message.get('role', '?')}"
            return
        if isinstance(content, str):
            text, blank = content, "" if content.strip() else show(content)
        elif isinstance(content, list) and all(map(_is_part, content)):
            text, blank = "\n".join(str(part.get("text", "")) for part in content), "" if content else "an empty list"
        else:
            yield "content-not-text", show(content)
            return
        if blank:
            yield "empty-content", blank
        elif special := self.special.search(text):
            yield "special-tokens", special[0]

    # SkyRL

    def _check_skyrl(self, row: Mapping[str, Any]) -> Iterator[Fault]:
        env_class = row.get("env_class")
        contract = None
        if env_class is None:
            yield "missing-env-class", "none" + did_you_mean("env_class", row.keys() - {"env_class"})
        elif not isinstance(env_class, str):
            yield "env-class-not-text", show(env_class)
        elif ":" in env_class:
            pass  # it names its own code, which is not run here
        elif env_class not in self.known:
            yield "unknown-env-class", show(env_class) + did_you_mean(env_class, self.known)
        else:
            contract = self.contract(env_class)
        yield from self._check_reward(row, env_class, contract)
        if contract is not None:
            yield from _check_needs(row, contract)
            yield from _check_turns(row, contract)

    def _check_reward(self, row: Mapping[str, Any], env_class: Any, contract: Contract | None) -> Iterator[Fault]:
        column = contract.column if contract is not None else "reward_spec"
        spec = row.get("reward_spec", row.get(column))
        truth = spec.get("ground_truth") if isinstance(spec, dict) else None
        # An environment that says nothing of ground truths may need none.
        needless = contract is None and isinstance(env_class, str) and (":" in env_class or env_class in self._here)
        if spec is None:
            if not needless:
                yield "missing-reward-spec", "none" + did_you_mean("reward_spec", row.keys() - {"reward_spec"})
            return
        if not isinstance(spec, dict):
            yield "reward-spec-not-a-mapping", show(spec)
            return
        if truth is None and not needless:
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
        if (fault := check_truth(contract, read)) is not None:
            rule, expected = fault
            yield rule, f"{env_class} reads {expected}, this is {show(read)}"
        elif truth is not None and read != truth and read != contract.encode(truth):
            yield "ground-truth-value", f"{column} says {show(read)}, reward_spec {show(truth)}"

    # verl and TRL

    def _check_other(self, row: Mapping[str, Any]) -> Iterator[Fault]:
        extra = row.get("extra_info")
        extra = extra if isinstance(extra, dict) else {}
        env_class, contract = extra.get("env_class"), None
        if isinstance(env_class, str) and env_class in self.known:
            contract = self.contract(env_class)
        elif env_class is not None and not (isinstance(env_class, str) and ":" in env_class):
            yield "unknown-env-class", show(env_class) + did_you_mean(str(env_class), self.known)
        truth = row.get("ground_truth")
        if self.format.reward is not None:
            spec = row.get(self.format.reward)
            if spec is None:
                yield "missing-reward-spec", f"no {self.format.reward}"
                return
            if not isinstance(spec, dict):
                yield "reward-spec-not-a-mapping", show(spec)
                return
            truth = spec.get("ground_truth")
            # A row may name something else that scores it than a comparison with its ground truth.
            scorer = extra.get("scorer")
            if truth is None and (contract is not None or not isinstance(scorer, str) or scorer == RULE):
                yield "missing-ground-truth", f"only {', '.join(spec) or 'an empty mapping'}"
        if truth is not None and contract is not None and (problem := contract.problem(truth)) is not None:
            yield "ground-truth-type", f"for {env_class} it {problem}"


def show(value: Any) -> str:
    """A value as a finding shows it: its type where that is not plain to see, and its beginning."""
    text = repr(value)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return text if isinstance(value, str) else f"{_NAMES.get(type(value), type(value).__name__)} {text}"


_NAMES: dict[type, str] = {bool: "boolean", int: "number", float: "number", dict: "mapping"}


def _is_part(part: Any) -> bool:
    """Whether it is what chat templates take in a list of contents, such as `{"type": "text", "text": "..."}`."""
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _check_needs(row: Mapping[str, Any], contract: Contract) -> Iterator[Fault]:
    """The columns that an environment reads, and what they should be."""
    if missing := [key for key in contract.needs if key not in row]:
        yield "missing-column", f"no {', '.join(missing)}, which {row['env_class']} reads"
    for key in contract.needs.keys() & row.keys():
        value, expected = row[key], None
        if key in contract.choices:
            expected = None if value in contract.choices[key] else ", ".join(contract.choices[key])
        elif key == "db_id":
            expected = None if isinstance(value, str) and value.strip() else "the name of a database"
        elif key == "extra_info" and not isinstance(value, dict):
            # SkyRL looks for `max_turns` in it, which text and lists stand.
            expected = None if isinstance(value, str | list) and "max_turns" not in value else "a mapping"
        if expected is not None:
            yield "wrong-value", f"{key} is {show(value)}, expected {expected}"
            return


def _check_turns(row: Mapping[str, Any], contract: Contract) -> Iterator[Fault]:
    for place, holder in (("max_turns", row), ("extra_info.max_turns", row.get("extra_info"))):
        turns = holder.get("max_turns") if isinstance(holder, dict) else None
        if contract.max_turns > 1 and turns is not None and not _is_turns(turns, row["env_class"]):
            yield "bad-max-turns", f"{place} is {show(turns)}"
            return


def _is_turns(turns: Any, env_class: str) -> bool:
    """Whether it is a whole number from 1; as text only where the environment makes a number of it."""
    if isinstance(turns, bool) or (isinstance(turns, str) and env_class not in MAKE_NUMBERS):
        return False
    try:
        return int(turns) == float(turns) >= 1
    except (TypeError, ValueError, OverflowError):
        return False


def check_truth(contract: Contract, truth: Any) -> Fault | None:
    """Whether a ground truth stands in a row as its environment reads it: the rule that it breaks, and what is
    expected. Nothing else tells: it scores 0."""
    texts: Any = [truth]
    if contract.stored is Stored.JSON:
        return _check_json(contract, truth)
    if contract.stored is Stored.TARGET:
        target = truth.get("target") if isinstance(truth, dict) else None
        texts = [target] if isinstance(target, str) else target
        fits = isinstance(texts, list) and bool(texts) and all(isinstance(text, str) for text in texts)
        expected = '{"target": [texts]}'
    elif contract.stored is Stored.TEXT:
        fits, expected = isinstance(truth, str), "text"
    else:
        fits, expected = contract.problem(truth) is None, " or ".join(contract.takes)
    if not fits:
        return "ground-truth-type", expected
    if all(isinstance(text, str) and not text.strip() for text in texts):
        return "ground-truth-value", "a text that says something"
    if contract.stored is Stored.TEXT and contract.pattern and not re.fullmatch(contract.pattern, truth):
        return "ground-truth-value", f"text such as {contract.pattern}"
    return None


def _check_json(contract: Contract, truth: Any) -> Fault | None:
    expected = f"{' or '.join(kind for kind in contract.takes if kind is not Kind.TEXT)} as JSON in a text"
    if not isinstance(truth, str):
        return "ground-truth-type", expected
    try:
        value = msgspec.json.decode(truth)
    except (msgspec.DecodeError, UnicodeError):
        return "ground-truth-value", expected
    kind = kind_of(value)
    if kind is Kind.TEXT or kind not in contract.takes:
        return "ground-truth-value", expected
    if kind is Kind.CASES and all(map(_is_plain, value)):
        return None
    if (problem := contract.problem(truth)) is not None:
        return "ground-truth-value", f"{expected}, but it {problem}"
    if kind is Kind.CASES:
        pairs = zip(value, msgspec.json.decode(contract.encode(truth)), strict=True)
        if any((one["input"], one["output"]) != (two["input"], two["output"]) for one, two in pairs):
            return "ground-truth-value", "inputs and outputs that are text"
    return None


def _is_plain(case: dict[str, Any]) -> bool:
    """Whether there is nothing to ask the contract: most cases are text in, text out."""
    texts = isinstance(case["input"], str) and isinstance(case["output"], str)
    return texts and case.get("testtype") in (None, "stdin") and not case.get("metadata")
