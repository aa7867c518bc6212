"""Which texts have more tokens than a limit, exactly, with as little tokenising as can be proven to do.

    TokenCounts(tokenizer).above(512, texts)      # {position: tokens} of the longer ones

What is proven, for tokenizers of the byte-level BPE kind (GPT-2's, Llama 3's, Qwen's, DeepSeek's and many more):

- A text has no more tokens than bytes, for each token stands for a byte or more. Unicode normalisation makes at most
  three bytes (NFC) or eleven (NFKC) of one that is not ASCII.
- Where the pre-tokenizer takes a space only before a word, it cuts at every single space. Then a text has as many
  tokens as its words have together, each with the space before it, and a word need be tokenised only once.

Every other tokenizer is asked about every text.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from typing import Any

import msgspec

from treetune.rows.tokenizer import by_library

WORDS = 500_000
"""Words that are remembered, at most."""

LONGEST = 64
"""Characters of a word that is worth remembering."""

_CUT = re.compile(r" (?<=[!-~] )(?=[!-~])")
"""A single space between two visible ASCII characters."""


class TokenCounts:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        structure = structure_of(tokenizer)
        self._growth = structure.growth if structure is not None else None
        self._words = _Words(tokenizer, " ") if structure is not None and structure.cuts else None
        self._starts = _Words(tokenizer, "")

    def above(self, limit: int, texts: Sequence[str]) -> dict[int, int]:
        """The tokens of each text that has more than `limit`, by its position."""
        some = [position for position, text in enumerate(texts) if self._may_exceed(limit, text)]
        if not some:
            return {}
        chosen = [texts[position] for position in some]
        counts = self._tokenised(chosen) if self._words is None else self._by_words(chosen, self._words)
        return {position: count for position, count in zip(some, counts, strict=True) if count > limit}

    def _may_exceed(self, limit: int, text: str) -> bool:
        if self._growth is None:
            return True
        if text.isascii():
            return len(text) > limit
        size = len(text.encode("utf-8", "surrogatepass"))
        beyond_ascii = size - sum(map(str.isascii, text))
        return size + (self._growth - 1) * beyond_ascii > limit

    def _by_words(self, texts: list[str], words: _Words) -> list[int]:
        self._tokenised([""])  # takes off a truncation that was left on
        counts = []
        for text in texts:
            parts = iter(_CUT.split(text))
            counts.append(self._starts[next(parts)] + sum(map(words.__getitem__, parts)))
        return counts

    def _tokenised(self, texts: list[str]) -> list[int]:
        encoded = self._tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [len(ids) for ids in encoded["input_ids"]]


class _Words(dict[str, int]):
    """The tokens of words, each with a space before it or not."""

    def __init__(self, tokenizer: Any, space: str) -> None:
        self._tokenizer, self._space = tokenizer, space

    def __missing__(self, word: str) -> int:
        count = len(self._tokenizer.backend_tokenizer.encode(self._space + word, add_special_tokens=False))
        if len(self) > WORDS:
            self.clear()
        if len(word) <= LONGEST:
            self[word] = count
        return count


# What is known of a tokenizer


class Structure(msgspec.Struct, frozen=True):
    """Of a byte-level BPE tokenizer."""

    growth: int
    """Bytes that normalisation makes of one beyond ASCII, at most."""
    cuts: bool
    """Whether every single space begins a new word."""


class _Model(msgspec.Struct):
    type: str
    byte_fallback: bool = False
    dropout: float | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool
    rstrip: bool
    single_word: bool


class _Tokenizer(msgspec.Struct):
    """The parts of a `tokenizer.json` that matter here; the vocabulary is skipped."""

    model: _Model
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


def structure_of(tokenizer: Any) -> Structure | None:
    """None where nothing is proven."""
    if not by_library(tokenizer, "__call__", "_encode_plus", "_batch_encode_plus"):
        return None
    try:
        parts = msgspec.json.decode(tokenizer.backend_tokenizer.to_str(), type=_Tokenizer)
    except (AttributeError, msgspec.MsgspecError):
        return None
    growth = _growth(parts.normalizer)
    stages = _stages(parts.pre_tokenizer, "pretokenizers")
    model = parts.model
    plain = model.type == "BPE" and not (
        model.byte_fallback or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix
    )
    if growth is None or not plain or not _gives_bytes(stages):
        return None
    return Structure(growth, _cuts(stages) and all(map(_stays_within, parts.added_tokens)))


def _growth(normalizer: dict[str, Any] | None) -> int | None:
    stages = _stages(normalizer, "normalizers")
    if len(stages) > 1:
        return None
    return {"NFC": 3, "NFKC": 11}.get(stages[0]["type"]) if stages else 1


def _stages(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return part[inner] if part["type"] == "Sequence" else [part]


def _gives_bytes(stages: list[dict[str, Any]]) -> bool:
    """Whether a pre-tokenizer only cuts, and then makes a character of each byte."""
    *cuts, last = stages or [{"type": ""}]
    ends_in_bytes = last["type"] == "ByteLevel" and not last["add_prefix_space"]
    return ends_in_bytes and all(stage["type"] in ("Split", "Digits") for stage in cuts)


def _cuts(stages: list[dict[str, Any]]) -> bool:
    """Whether one of the stages has a known pattern, and no other joins what a space separates."""
    *splits, last = stages
    patterns = [_pattern(stage) for stage in splits if stage["type"] == "Split"]
    known = all(pattern in _CUTTING or pattern in _HARMLESS for pattern in patterns)
    return known and (last.get("use_regex", True) or any(pattern in _CUTTING for pattern in patterns))


def _pattern(stage: dict[str, Any]) -> str:
    if stage["behavior"] != "Isolated" or stage["invert"]:
        return ""
    pattern = stage["pattern"].get("Regex", "")
    return str(pattern).replace("\r", r"\r").replace("\n", r"\n")


def _stays_within(token: _AddedToken) -> bool:
    """Whether a token never reaches over a cut."""
    contents = token.content, unicodedata.normalize("NFKC", token.content)  # a no-break space may become a space
    spaced = any(re.search("[!-~] ", content) for content in contents)
    return not (token.lstrip or token.rstrip or token.single_word or spaced)


_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SMALL = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_LARGE = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"

_CUTTING = frozenset(
    (
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3, GPT-4
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
        # Qwen 2 and 3
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES,
        # Qwen 3.5
        _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
        # GPT-4o, GPT-OSS
        f"{_SMALL}{_ENDINGS}?|{_LARGE}{_ENDINGS}?" + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
        # Mistral's Tekken
        f"{_SMALL}|{_LARGE}" + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
        # DeepSeek 3
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES,
    )
)
"""Patterns of which each match has a space only at its beginning, or nothing but white space."""

_HARMLESS = frozenset((r"\p{N}{1,3}", r"\p{N}", "[一-龥\u3040-ゟ゠-ヿ]+"))
"""Patterns that match no space."""
