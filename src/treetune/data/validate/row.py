"""Checks one row, and applies the fixes that are safe.

    list(check_row(row, RowContext("skyrl")))   # [("ground-truth-type", "gsm8k reads text, this is a number: 42")]

A fix is safe if it changes how a row says something, not what it says: a ground truth in the type that its environment
reads, a prompt that was plain text, a role under another name, columns where the environment looks for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from treetune.config.plugins import environments as known_environments
from treetune.core.environment import Stored, requirements_of, turns_of
from treetune.core.task import Task
from treetune.data.arrow_values import drop_nulls
from treetune.data.rows.formats import Format
from treetune.data.sources.names import Row
from treetune.data.validate.prompt_rules import check_images, check_prompt
from treetune.data.validate.reward_rules import check_reward
from treetune.data.validate.rules import Fault, RowContext
from treetune.errors import TreetuneError


def check_row(row: Row, check: RowContext) -> Iterator[Fault]:
    """Find what is wrong with one row: the single place for this, for every kind of file."""
    row = check.format.to_plain(row)
    yield from check_prompt(row, check)
    yield from check_images(row, check)
    yield from check_reward(row, check)


def helps(rule: str, row: Row, check: RowContext) -> bool:
    """Whether fixing a row that breaks a rule makes it follow the rule."""
    try:
        _, written = fix_task(row, check.format, check.format)
    except TreetuneError:
        return False
    return all(found != rule for found, _ in check_row(drop_nulls(written), check))


def fix_task(row: Row, read: Format, write: Format, turns: bool = False) -> tuple[Task, Row]:
    """Return the task of a row, fixed, and the row to write for it; raises if no fix makes a task of it."""
    spec, model = row.get("reward_spec"), row.get("reward_model")
    if isinstance(spec, dict) and isinstance(model, dict):  # SkyRL's aime has both
        one, two = spec.get("ground_truth"), model.get("ground_truth")
        if one is not None and two is not None and str(one) != str(two):
            raise TreetuneError("two ground truths")
    task = read.task_of_pruned(fix(row, turns=turns))
    if not isinstance(task.env_class, str | None):
        raise TreetuneError("an env_class that is not text")
    if not task.messages:
        raise TreetuneError("no prompt")
    if isinstance(task.ground_truth, float) and not math.isfinite(task.ground_truth):
        raise TreetuneError("a ground truth that is not a number")
    try:
        return task, write.row_of(task)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a faulty row may hold any values
        raise TreetuneError(f"values that are not a task's: {error}") from None


def fix(row: Row, *, turns: bool = False) -> Row:
    """Fix a row where that is safe. The writer does the rest (types of ground truths, columns) anyway.

    `turns`: write the turns of a row that has none into a column, because other rows have it.
    """
    row = dict(row)
    if "prompt" in row:
        row["prompt"] = _fix_prompt(row["prompt"])
    env_class, spec, extra = row.get("env_class"), row.get("reward_spec"), row.get("extra_info", {})
    registered = isinstance(env_class, str) and env_class in known_environments.names()
    needed = requirements_of(env_class) if registered else None
    if needed is None:
        return row
    truth = spec.get("ground_truth") if isinstance(spec, dict) else None
    if isinstance(spec, dict) and isinstance(truth, str) and needed.stored is Stored.TEXT and needed.pattern:
        # A number as answers write it: without spaces and thousands separators.
        plain = truth.strip().replace(",", "")
        if re.fullmatch(needed.pattern, plain):
            row["reward_spec"] = {**spec, "ground_truth": plain}
    if (most := turns_of(env_class)) > 1 and "max_turns" not in row:
        if isinstance(extra, dict):
            row["extra_info"] = {"max_turns": most, **extra}
        if turns:
            row["max_turns"] = most
    return row


def _fix_prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if isinstance(prompt, dict) and "role" in prompt:
        prompt = [prompt]
    if not isinstance(prompt, list):
        return prompt
    return [_fix_message(message) if isinstance(message, dict) else message for message in prompt]


ROLES = dict.fromkeys(("human", "prompter"), "user") | dict.fromkeys(("gpt", "bot", "model", "ai"), "assistant")
"""Other chat formats' names for our roles."""


def _fix_message(message: dict[str, Any]) -> dict[str, Any]:
    if "from" in message and "value" in message and "role" not in message:  # ShareGPT's names
        message = {"role": message["from"], "content": message["value"]}
    role, content = message.get("role"), message.get("content")
    if isinstance(role, str):
        plain = role.strip().lower()
        message = {**message, "role": ROLES.get(plain, plain)}
    return {**message, "content": str(content)} if isinstance(content, bool | int | float) else message
