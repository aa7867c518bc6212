"""Counts the tokens of prompts, with a tokenizer's chat template applied and the generation prompt added.

    tokens = PromptTokens(load_tokenizer("Qwen/Qwen3-8B"), {"enable_thinking": False})
    longer, faults = tokens.above(512, prompts)      # {position: tokens}, {position: what is wrong}

Lengths are exactly those of `apply_chat_template(prompt, add_generation_prompt=True)`. A byte-level BPE tokenizer makes
at most one token per byte, so most prompts need not be tokenised. Its special tokens cut a text into pieces, and a
piece that many prompts share is tokenised once. With any other tokenizer, every prompt is tokenised.
"""

from __future__ import annotations

import hashlib
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from treetune.chat.message import Message
from treetune.errors import MissingExtraError, TasksetError, UsageError, format_error
from treetune.system.digest import digest

PIECES = 50_000
"""The maximum number of text pieces whose token counts are cached."""

TEMPLATE_FAILS = "the chat template fails: "

_FIXED = frozenset(
    "add_generation_prompt continue_final_message conversation max_length padding return_assistant_tokens_mask "
    "return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs truncation".split()
)
"""Arguments of `apply_chat_template` that are not template variables: they determine what a prompt is."""


class PromptTokens:
    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        """`arguments` are the variables of the chat template."""
        self._tokenizer, self._arguments = tokenizer, dict(arguments or {})
        if fixed := sorted(_FIXED & self._arguments.keys()):
            raise UsageError(
                f"chat_template_kwargs cannot set {', '.join(fixed)}: it only sets variables of the template"
            )
        self._renders = _is_of_transformers(tokenizer)
        """Whether applying the template means rendering it and tokenising the text."""
        self.has_threads = self._renders and bool(tokenizer.is_fast)
        """Whether the tokenizer itself uses all cores."""
        self._growth, special = _describe(tokenizer) if self._renders else (None, [])
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        self._special = re.compile("|".join(longest_first) or r"[^\s\S]")
        self._counts: dict[str, int] = {}
        """Token counts of text pieces."""
        if self._renders:
            _require_template(tokenizer, self._arguments)

    def above(self, limit: int, prompts: Sequence[Any]) -> tuple[dict[int, int], dict[int, str]]:
        """Return the token counts of the prompts with more than `limit` tokens, and what is wrong with those that
        cannot be used."""
        applied, faults = self._apply(prompts)
        if self._renders:
            return self._texts_above(limit, applied), faults
        return {position: len(ids) for position, ids in applied.items() if len(ids) > limit}, faults

    def ids(self, prompts: Sequence[Any]) -> list[list[int]]:
        applied, faults = self._apply(prompts)
        if faults:
            position, fault = min(faults.items())
            raise TasksetError(f"prompt {position} of {len(prompts)}: {fault}")
        found = list(applied.values())
        return self._tokenise(found) if self._renders else found

    def identity(self) -> str | None:
        """Hash everything that affects the tokens of a prompt; None if that cannot be known."""
        from treetune.config.code_files import code_hash

        tokenizer, cls = self._tokenizer, type(self._tokenizer)
        try:
            own = [base for base in cls.__mro__ if not base.__module__.startswith(("transformers.", "builtins"))]
            code = [code_hash([base]) for base in own]
            if None in code or _has_replaced_methods(tokenizer):
                return None
            with tempfile.TemporaryDirectory(prefix="treetune-") as folder:
                tokenizer.save_pretrained(folder)
                files = sorted(path for path in Path(folder).rglob("*") if path.is_file())
                hashes = [[path.name, hashlib.sha256(path.read_bytes()).hexdigest()] for path in files]
            parts = [cls.__qualname__, code, hashes, self._arguments, getattr(tokenizer, "split_special_tokens", None)]
            parts += [getattr(sys.modules.get(name), "__version__", None) for name in ("transformers", "tokenizers")]
            if "strftime_now" in f"{getattr(tokenizer, 'chat_template', None)} {self._arguments}":
                parts.append(date.today().isoformat())
            return digest(parts)
        except (AttributeError, TypeError, ValueError, OSError, NotImplementedError):
            return None

    def _apply(self, prompts: Sequence[Any]) -> tuple[dict[int, Any], dict[int, str]]:
        """Apply the template to each prompt. Returns the results by position (text, or tokens if there is no text), and
        what is wrong with the other prompts."""
        good: dict[int, list[Message]] = {}
        faults: dict[int, str] = {}
        for position, prompt in enumerate(prompts):
            try:
                good[position] = messages_of(prompt)
            except ValueError as error:
                faults[position] = str(error)
        options = {"tokenize": False} if self._renders else {"tokenize": True, "return_dict": False}
        options |= {"add_generation_prompt": True, **self._arguments}
        apply = self._tokenizer.apply_chat_template
        if self._renders and good:
            try:  # all at once is faster
                return dict(zip(good, apply(list(good.values()), **options), strict=True)), faults
            except Exception:
                pass  # one by one, to find the faulty prompt
        applied = {}
        for position, messages in good.items():
            try:
                applied[position] = apply(messages, **options)
            except Exception as error:
                faults[position] = TEMPLATE_FAILS + format_error(error)
        return applied, faults

    def _texts_above(self, limit: int, texts: Mapping[int, str]) -> dict[int, int]:
        """Return the token counts of the texts with more than `limit` tokens. Only texts that may exceed it are
        tokenised."""
        long = {at: self._special.split(text) for at, text in texts.items() if self._bound(text) > limit}
        long = {at: pieces for at, pieces in long.items() if self._total(pieces) > limit}
        if len(self._counts) > PIECES:
            self._counts.clear()
        unknown = list({piece for pieces in long.values() for piece in pieces} - self._counts.keys())
        self._counts.update(zip(unknown, map(len, self._tokenise(unknown)), strict=True))
        return {at: int(count) for at, pieces in long.items() if (count := self._total(pieces)) > limit}

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return list(encoded["input_ids"])

    def _total(self, pieces: list[str]) -> float:
        """Return the tokens of a text that special tokens cut, with an upper bound for pieces that are not counted
        yet."""
        counts = self._counts
        return len(pieces) - 1 + sum(counts[piece] if piece in counts else self._bound(piece) for piece in pieces)

    def _bound(self, text: str) -> float:
        """Return an upper bound for the tokens of a text."""
        if self._growth is None:
            return float("inf")
        if text.isascii():
            return len(text)
        ascii = len(text.encode("ascii", "ignore"))
        return ascii + self._growth * (len(text.encode("utf-8", "surrogatepass")) - ascii)


def messages_of(prompt: Any) -> list[Message]:
    """Convert a prompt to chat messages; a text becomes a user message. Raises ValueError with what is wrong."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise ValueError("has no prompt" if prompt is None else f"the prompt is not a list of messages: {prompt!r:.80}")
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} has no role: {message!r:.80}")
        # Tool calls may stand alone; any other message needs content.
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"message {number} ({message['role']}) has no content")
    return prompt


def _describe(tokenizer: Any) -> tuple[int | None, list[str]]:
    """Describe a byte-level BPE tokenizer: the maximum number of bytes that its normalisation makes of one non-ASCII
    byte, and the special tokens that cut a text. None and no tokens for any other tokenizer."""
    if not tokenizer.is_fast:
        return None, []
    parts = msgspec.json.decode(tokenizer.backend_tokenizer.to_str())
    model, normalizers = parts["model"], _stages(parts["normalizer"], "normalizers")
    *cuts, last = _stages(parts["pre_tokenizer"], "pretokenizers")
    adds = ("byte_fallback", "dropout", "continuing_subword_prefix", "end_of_word_suffix")
    growth = {None: 1, "NFC": 3, "NFKC": 11}.get(normalizers[0]["type"])
    if (
        (growth is None or len(normalizers) > 1)
        or (model["type"] != "BPE" or any(map(model.get, adds)))
        or any(stage["type"] not in ("Split", "Digits") for stage in cuts)
        or (last["type"] != "ByteLevel" or last["add_prefix_space"])
    ):
        return None, []
    special = [token for token in parts["added_tokens"] if token["content"] and not token["normalized"]]
    reach_further = any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in special)
    if reach_further or tokenizer.split_special_tokens:
        return growth, []
    return growth, [token["content"] for token in special]


def _stages(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    part = part or {"type": None}
    return part[inner] or [{"type": None}] if part["type"] == "Sequence" else [part]


def load_tokenizer(tokenizer: Any) -> Any:
    """Load a transformers tokenizer by name or folder. Any other object must itself be a tokenizer."""
    remedy = "pass a transformers tokenizer, its folder, or its name on the hub"
    if not isinstance(tokenizer, str | Path):
        if not callable(getattr(tokenizer, "apply_chat_template", None)):
            raise UsageError(
                f"a {type(tokenizer).__name__} is not a tokenizer: it applies no chat template", remedy=remedy
            )
        return tokenizer
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError.of("transformers", "local") from None
    place = Path(tokenizer).expanduser()
    try:
        return AutoTokenizer.from_pretrained(str(place if place.exists() else tokenizer))
    except (OSError, ValueError) as error:
        raise UsageError(f"{tokenizer} is not a tokenizer: {str(error).partition(chr(10))[0]}", remedy=remedy) from None


def _is_of_transformers(tokenizer: Any) -> bool:
    """Whether applying the chat template means rendering it and tokenising the text, as in transformers."""
    transformers, cls = sys.modules.get("transformers"), type(tokenizer)
    if transformers is None or not cls.__module__.startswith("transformers.") or _has_replaced_methods(tokenizer):
        return False
    theirs = transformers.PreTrainedTokenizerBase
    return issubclass(cls, theirs) and cls.apply_chat_template is theirs.apply_chat_template


def _has_replaced_methods(tokenizer: Any) -> bool:
    """Whether the object overrides a method of its class."""
    return any(callable(getattr(type(tokenizer), name, None)) for name in getattr(tokenizer, "__dict__", ()))


def _require_template(tokenizer: Any, arguments: Mapping[str, Any]) -> None:
    try:
        tokenizer.get_chat_template(arguments.get("chat_template"), arguments.get("tools"))
    except ValueError as error:
        raise UsageError(
            f"the tokenizer has no chat template: {str(error).partition('. ')[0]}",
            remedy="use the tokenizer of an instruct model, or set tokenizer.chat_template",
        ) from None
