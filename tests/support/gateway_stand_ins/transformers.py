"""Stands in for transformers where a gateway loads a tokenizer: any name is one of letters."""

from __future__ import annotations

from typing import Any

from chat_templates import CallLetters, writes_hermes
from scripted_engine import make_tokenizer


class Hermes(CallLetters):
    """One that shows its template, as transformers' do."""

    def get_chat_template(self, **_: Any) -> str:
        return '<tool_call>{"name": ..., "arguments": ...}</tool_call>'


class AutoTokenizer:
    @staticmethod
    def from_pretrained(name: str) -> Any:
        return make_tokenizer(name) if name == "plain" else Hermes(writes_hermes)
