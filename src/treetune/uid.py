"""What identifies a task: a hash of its problem. Every uid there is comes from here.

uid_of([{"role": "user", "content": "1 + 1?"}], None, {"ground_truth": "2"})
uids_of_texts(["1 + 1?", "1 + 2?"], ["2", "3"], None, None, "rule")     # the same for many at once
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from treetune.canonical import canonical

_SIZE = 16
"""Bytes of the hash."""


def uid_of(
    messages: Sequence[Mapping[str, Any]],
    env_class: str | None,
    reward_spec: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
) -> str:
    """The uid of a task with these messages, this environment and reward, and these fields of its subclass."""
    content = _problem(messages, env_class, reward_spec)
    if own:
        content = {**own, **content}
    return hashlib.blake2b(canonical(content), digest_size=_SIZE).hexdigest()


def uids_of_texts(
    texts: Sequence[str], truths: Sequence[Any] | None, system_prompt: str | None, env_class: str | None, method: str
) -> list[str]:
    """`uid_of` of each task that asks one text, after a system prompt, and has one ground truth."""
    # Only the text and the truth differ: the JSON around them is written once.
    text_mark, truth_mark = "\x00text", "\x00truth"
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    spec = {"ground_truth": truth_mark, "method": method} if truths is not None else {}
    around = canonical(_problem([*system, {"role": "user", "content": text_mark}], env_class, spec))
    encode, blake = msgspec.json.Encoder().encode, hashlib.blake2b
    head, _, tail = around.rpartition(encode(text_mark))
    if truths is None:
        return [blake(head + encode(text) + tail, digest_size=_SIZE).hexdigest() for text in texts]
    middle, _, tail = tail.rpartition(encode(truth_mark))
    encoded = [encode(truth) if isinstance(truth, str) else canonical(truth) for truth in truths]
    return [
        blake(head + encode(text) + middle + truth + tail, digest_size=_SIZE).hexdigest()
        for text, truth in zip(texts, encoded, strict=True)
    ]


def _problem(
    messages: Sequence[Mapping[str, Any]], env_class: str | None, reward_spec: Mapping[str, Any]
) -> dict[str, Any]:
    content: dict[str, Any] = {"prompt": messages, "reward_spec": reward_spec}
    if env_class is not None:
        content["env_class"] = env_class
    return content
