"""Prompts in tokens: a tokenizer with its chat template applied, ready for the model to go on.

    tokens = PromptTokens(tokenizer, {"enable_thinking": False})
    longer, faults = tokens.above(512, prompts)      # {position: tokens}, {position: what is wrong}
    tokens.ids(prompts)

Lengths are exactly those of `apply_chat_template(prompt, add_generation_prompt=True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from treetune.errors import TasksetError, UsageError, described
from treetune.rows.chat_template import ChatTemplate
from treetune.rows.token_counts import TokenCounts
from treetune.rows.tokenizer import renders_then_tokenises
from treetune.task import Message

_FIXED = frozenset(
    "add_generation_prompt continue_final_message conversation max_length padding return_assistant_tokens_mask "
    "return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs truncation".split()
)
"""What `apply_chat_template` knows beside the variables of a template: these decide what a prompt is."""


class PromptTokens:
    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        if fixed := sorted(_FIXED & self._arguments.keys()):
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(fixed)}: they are for the template")
        self._in_two_steps = renders_then_tokenises(tokenizer)
        self.has_threads = self._in_two_steps and bool(getattr(tokenizer, "is_fast", False))
        """Whether the tokenizer uses all cores by itself."""
        if self._in_two_steps:
            _need_template(tokenizer, self._arguments)
        self._template = ChatTemplate(tokenizer, self._arguments)

    def above(self, limit: int, prompts: Sequence[Any]) -> tuple[dict[int, int], dict[int, str]]:
        """The tokens of the prompts that have more than `limit`, and what is wrong with those that have none."""
        applied, faults = self._applied(prompts)
        if not self._in_two_steps:
            return {position: len(ids) for position, ids in applied.items() if len(ids) > limit}, faults
        positions = list(applied)
        longer = self._counts.above(limit, list(applied.values()))
        return {positions[number]: count for number, count in longer.items()}, faults

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        applied, faults = self._applied(prompts)
        if faults:
            position, fault = min(faults.items())
            raise TasksetError(f"prompt {position} of {len(prompts)}: {fault}")
        found = list(applied.values())
        if found and self._in_two_steps:
            found = self._tokenizer(found, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def __reduce__(self) -> Any:
        return PromptTokens, (self._tokenizer, self._arguments)

    @cached_property
    def _counts(self) -> TokenCounts:
        return TokenCounts(self._tokenizer)

    def _applied(self, prompts: Sequence[Any]) -> tuple[dict[int, Any], dict[int, str]]:
        """The template applied to each prompt: a text, or tokens where the tokenizer knows no text between."""
        good: dict[int, list[Message]] = {}
        faults: dict[int, str] = {}
        for position, prompt in enumerate(prompts):
            try:
                good[position] = messages_of(prompt)
            except ValueError as error:
                faults[position] = str(error)
        made = self._template.render(good.values()) if self._in_two_steps else map(self._in_one_step, good.values())
        applied: dict[int, Any] = {}
        for position, result in zip(good, made, strict=True):
            if isinstance(result, Exception):
                faults[position] = f"the chat template fails: {described(result)}"
            else:
                applied[position] = result
        return applied, faults

    def _in_one_step(self, prompt: list[Message]) -> list[int] | Exception:
        try:
            given = self._tokenizer.apply_chat_template(
                prompt, add_generation_prompt=True, tokenize=True, return_dict=False, **self._arguments
            )
        except Exception as error:
            return error
        ids = given["input_ids"] if isinstance(given, Mapping) else given
        return list(ids[0]) if len(ids) == 1 and isinstance(ids[0], list) else list(ids)


def messages_of(prompt: Any) -> list[Message]:
    """A prompt as chat messages: a text is one of the user's. Raises ValueError with what is wrong."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("has no prompt" if prompt is None else f"the prompt is no list of messages: {prompt!r:.80}")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: {message!r:.80}")
        # Tool calls may stand alone; anything else must say something.
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {number} ({message['role']}) has no content")
    return prompt


def _need_template(tokenizer: Any, arguments: dict[str, Any]) -> None:
    try:
        tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
    except ValueError as error:
        raise UsageError(
            f"the tokenizer has no chat template: {str(error).partition('. ')[0]}",
            remedy="take the tokenizer of an instruct model, or set tokenizer.chat_template",
        ) from None
