"""A `TextStream` passes on text while it is sampled. What may begin a tool call or a special token waits.

stream = TextStream(chat, prompt, stop)
stream.feed([1, 2], "Hello <to")          # [("content", "Hello ")]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from treetune.chat.message import Message
from treetune.chat.tokens import ChatTokens, Prompt

Part = tuple[Literal["content", "reasoning"], str]
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_MOST_IDS, _KEPT_IDS = 24, 6
"""After so many tokens, the text of all but the last few is final."""


class Marks:
    """Finds any of several strings in a text that grows."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = tuple(dict.fromkeys(filter(None, marks)))
        longest_first = sorted(self._marks, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        firsts = {re.escape(mark[0]) for mark in self._marks}
        self._firsts = re.compile(f"[{''.join(sorted(firsts))}]" if firsts else r"(?!)")
        self._longest = max(map(len, self._marks), default=1)

    def find(self, text: str) -> tuple[int, str]:
        found = self._any.search(text)
        return (found.start(), found[0]) if found is not None else (-1, "")

    def count_held(self, text: str) -> int:
        """The number of characters at the end that may begin a mark."""
        begin = max(0, len(text) - self._longest + 1)
        if self._firsts.search(text, begin) is None:
            return 0
        sizes = range(len(text) - begin, 0, -1)
        return next((size for size in sizes if any(mark.startswith(text[-size:]) for mark in self._marks)), 0)


_THOUGHT_ENDS = Marks([_THOUGHT_END])


@lru_cache(maxsize=256)
def _marks(closing: tuple[str, ...], special: tuple[str, ...]) -> Marks:
    return Marks([*closing, *special])


class TextStream:
    def __init__(self, chat: ChatTokens, prompt: Prompt, stop: Sequence[str] = (), plain: bool = False) -> None:
        """A `plain` completion has no reasoning and no calls."""
        format = None if plain else chat.call_format
        self._closing = (*(format.begins if format is not None else ()), *stop)
        self._marks = _marks((*self._closing, *([] if plain else [_THOUGHT])), tuple(chat.special_tokens))
        self._bare = format is not None and format.bare
        self._plain, self._thinking = plain, not plain and begins_thought(prompt)
        self._chat, self._ids, self._decoded = chat, list[int](), ""
        self._text = ""
        self._strips_newlines = self._thinking
        self._begun = self._closed = False
        self.content = ""
        """The content that was passed on."""

    def feed(self, ids: list[int], text: str | None) -> list[Part]:
        """The parts that are final. Without a text, the tokens are decoded."""
        return self.feed_text(self._decode(ids) if text is None else text)

    def feed_text(self, text: str) -> list[Part]:
        if self._closed:
            return []
        self._text += text
        parts: list[Part] = []
        while self._text:
            if not self._begun and not self._thinking and not self._plain:
                start = self._text.lstrip()
                if not start or (start != _THOUGHT and _THOUGHT.startswith(start)) or (self._bare and start[0] == "{"):
                    break  # it may begin a thought, or the whole answer may be a call
                if start.startswith(_THOUGHT):
                    self._thinking, self._strips_newlines, self._text = True, True, start[len(_THOUGHT) :]
                    continue
            if self._strips_newlines:
                self._text = self._text.lstrip("\n")
                self._strips_newlines = not self._text
                continue
            marks = _THOUGHT_ENDS if self._thinking else self._marks
            at, mark = marks.find(self._text)
            if at < 0:
                shown = len(self._text) - marks.count_held(self._text)
                self._pass_on(parts, self._text[:shown])
                self._text = self._text[shown:]
                break
            self._pass_on(parts, self._text[:at])
            self._text = self._text[at:]
            if self._thinking:
                self._thinking, self._begun, self._strips_newlines = False, True, True
                self._text = self._text[len(mark) :]
            elif mark in self._closing or mark == _THOUGHT:
                self._closed = True  # the end of the answer decides what the rest is
                break
            else:
                self._text = self._text[len(mark) :]
        return parts

    def _pass_on(self, parts: list[Part], text: str) -> None:
        if text:
            self._begun = True
            self.content += "" if self._thinking else text
            parts.append(("reasoning" if self._thinking else "content", text))

    def _decode(self, ids: list[int]) -> str:
        self._ids += ids
        text = self._chat.decode(self._ids)
        if text.endswith("\ufffd") or not text.startswith(self._decoded):
            return ""  # half a character
        added = text[len(self._decoded) :]
        self._decoded = text
        if len(self._ids) > _MOST_IDS and added:
            self._ids = self._ids[-_KEPT_IDS:]
            self._decoded = self._chat.decode(self._ids)
        return added


def begins_thought(prompt: Prompt) -> bool:
    """Whether the prompt ends with the beginning of the model's reasoning."""
    return (prompt.text or "").rstrip().endswith(_THOUGHT)


def split_reasoning(message: Message, begun: bool) -> Message:
    """The message with its reasoning in a separate field, as servers with a reasoning parser return it."""
    thought, ended, rest = (message.get("content") or "").partition(_THOUGHT_END)
    if not (begun or thought.lstrip().startswith(_THOUGHT)):
        return message
    thought = thought.lstrip().removeprefix(_THOUGHT).strip("\n")
    content = rest.lstrip("\n") if ended else ""
    said = {**message, "content": None if message.get("tool_calls") and not content else content}
    return {**said, "reasoning_content": thought} if thought else said
