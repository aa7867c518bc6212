"""Tokens that are trained on are the tokens that were sampled, over turns of tool calls and their results too."""

from __future__ import annotations

import call_chats
import pytest
from chat_templates import CALL_TEMPLATES, CallLetters


@pytest.mark.parametrize("rewrites", ["split", "keep"])
@pytest.mark.parametrize("format", CALL_TEMPLATES)
def test_what_is_trained_on_is_what_was_sampled(format, rewrites):
    template, control = CALL_TEMPLATES[format]
    seen = call_chats.check(CallLetters(template, control), rewrites, None if format == "none" else format, examples=60)
    print(format, rewrites, seen)
