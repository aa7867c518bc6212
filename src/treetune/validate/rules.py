"""Every rule that rows must keep: how grave, what is expected, how to fix what breaks it.

`treetune validate` reports by these names, and the docs list them.
"""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from typing import NamedTuple

ROLES = ("system", "user", "assistant")
LESS_KNOWN_ROLES = ("tool", "developer", "function")
"""Roles of chat formats that not every chat template knows."""


class Severity(StrEnum):
    ERROR = "error"
    """It breaks the training, or spoils it silently."""
    WARNING = "warning"
    """It may be meant."""


class Rule(NamedTuple):
    severity: Severity
    expected: str
    fix: str
    fixable: bool = False
    """Whether `--fix` does it."""


_error, _warning = partial(Rule, Severity.ERROR), partial(Rule, Severity.WARNING)

RULES = {
    # The file
    "unreadable": _error("a whole file of the kind that its name says", "write it again"),
    "no-rows": _error("at least one row", "trainers' loaders fail on an empty file: leave it out"),
    "unknown-ending": _error(
        "a name in .parquet, .json or .jsonl: SkyRL takes others for datasets of the hub",
        "rename it (first unpack what is compressed)",
        True,
    ),
    "unsupported-type": _error("types that `datasets` knows", "write it again with plain types", True),
    "type-differs": _error(
        "the same column types in all files, or the loader refuses them together", "write the files together", True
    ),
    "mixed-types": _error(
        "one type in a column of JSON: `datasets` parses text beside other types again, so that 007 becomes 7",
        "write it with one type, or as parquet",
        True,
    ),
    "reread-dates": _error(
        "text that stays text: a JSON column of dates becomes dates", "write it as parquet", True
    ),
    "nan-becomes-null": _error(
        "numbers that JSON has: `datasets` makes null of NaN and Infinity in arrays, and beside other types",
        "write it as parquet",
        True,
    ),
    "late-types": _error(
        "the same columns and types from the start: `datasets` takes those of the first 10 MB of JSON lines",
        "write it as parquet",
        True,
    ),
    "big-integers": _error("integers of 64 bits: larger ones become floats, or break the loader", "write them as text"),
    # The prompt
    "missing-prompt": _error("a prompt: a list of messages", "add it, or leave the row out"),
    "prompt-not-messages": _error(
        'a list of messages such as {"role": "user", "content": "..."}', "text becomes one user message", True
    ),
    "empty-prompt": _error("at least one message", "add one, or leave the row out"),
    "missing-role": _error("a role in each message", "add `role`"),
    "unknown-role": _error("system, user or assistant", "rename it (human is user, gpt is assistant)", True),
    "rare-role": _warning("system, user or assistant", "see whether your chat template knows it"),
    "no-user-message": _error("at least one message of the user", "add what the model is asked"),
    "missing-content": _error("a content in each message", "add `content`: null breaks chat templates"),
    "empty-content": _error("a content that says something", "fill it in, or leave the message out"),
    "content-not-text": _error("text, or a list of parts", "write it as text", True),
    "special-tokens": _warning(
        "text without a tokenizer's special tokens: the chat template adds them", "give messages, not rendered text"
    ),
    "ends-with-assistant": _warning(
        "a last message that asks: the model continues after it", "leave the last answer out"
    ),
    "prompt-too-long": _warning("a prompt within --max-prompt-length: loaders drop others", "shorten it"),
    "template-fails": _error("messages that the tokenizer's chat template renders", "see what the template asks for"),
    # The environment
    "missing-env-class": _error("the id of an environment: without one SkyRL takes its default", "set env_class"),
    "env-class-not-text": _error("the id of an environment, as text", "set env_class"),
    "unknown-env-class": _error(
        "a registered environment", "see `treetune list`; say `--env NAME` for one that is registered elsewhere"
    ),
    "missing-column": _error("the columns that the environment reads", "add them to the row", True),
    "wrong-value": _error("a value that the environment knows", "correct it"),
    "bad-max-turns": _error("a whole number from 1", "correct it, or leave it out"),
    "null-max-turns": _error(
        "max_turns in every row of the files, or in none: a null breaks the environment", "fill it in", True
    ),
    "extra-info-not-a-mapping": _warning("a mapping", "put the value under a key"),
    # The reward
    "missing-reward-spec": _error("reward_spec with a ground_truth", "add it"),
    "reward-spec-not-a-mapping": _error("a mapping with ground_truth", "write {\"ground_truth\": ...}"),
    "missing-ground-truth": _error("a ground truth: a null one scores 0 for ever", "add it, or leave the row out"),
    "ground-truth-type": _error(
        "the type that the environment reads: any other scores 0 for ever", "write it in that type", True
    ),
    "ground-truth-value": _error("a ground truth that some answer can match", "correct it", True),
    # All rows together
    "duplicate-prompts": _warning("each prompt once", "leave the repetitions out, unless they are meant"),
    "train-val-overlap": _error("no validation prompt in the training files", "leave it out of one of them"),
    # --gold
    "environment-fails": _error("an environment that starts and scores", "see the cause"),
    "gold-not-rewarded": _error("a higher reward for the gold answer than for wrong ones", "correct the ground truth"),
    "gold-unknown": _warning("a gold answer to try", "nothing was checked: the environment knows none for the row"),
}  # fmt: skip
