"""Chat templates of every habit, and a tokenizer whose tokens are letters."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Message = dict[str, str]


class Letters:
    """A tokenizer with a token for each letter, for some pairs of letters, and for control tokens."""

    CONTROL = ("<start>", "<end>", "<|im_end|>")
    PAIRS = ("ye", "es", " n", "no", "\n\n", "  ")

    def __init__(self, template: Callable[[list[Message]], str]) -> None:
        self.template = template
        self.all_special_tokens = list(self.CONTROL)
        self.all_special_ids = [0, 1, 2]
        self.eos_token_id = 1
        self._texts = [*self.CONTROL, *self.PAIRS]
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) + "|.", re.S)

    def __len__(self) -> int:
        return len(self._texts) + 0xD800

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        first = len(self._texts)
        found = self._pattern.findall(text)
        return {"input_ids": [self._texts.index(one) if one in self._texts else first + ord(one) for one in found]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        shown = [id for id in ids if not (skip_special_tokens and id in self.all_special_ids)]
        return "".join(self._texts[id] if id < len(self._texts) else chr(id - len(self._texts)) for id in shown)

    def apply_chat_template(self, messages: list[Message], tokenize: bool = True, **_: Any) -> Any:
        text = self.template(messages)
        return self(text)["input_ids"] if tokenize else text


def plain(messages: list[Message]) -> str:
    return "".join(f"<start>{m['role']}\n{m['content']}<end>\n" for m in messages) + "<start>assistant\n"


def trims(messages: list[Message]) -> str:
    return plain([{**m, "content": m["content"].strip()} for m in messages])


def forgets_thoughts(messages: list[Message]) -> str:
    return plain([{**m, "content": m["content"].split("</think>")[-1]} for m in messages])


def thinks_first(messages: list[Message]) -> str:
    return forgets_thoughts(messages) + "<think>\n"


def has_no_end(messages: list[Message]) -> str:
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


TEMPLATES = [plain, trims, forgets_thoughts, thinks_first, has_no_end]
