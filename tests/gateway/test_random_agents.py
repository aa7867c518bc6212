"""Whatever an agent does, each sample that it got is trained on exactly once, as it was sampled."""

from __future__ import annotations

import pytest
import random_agents
from chat_templates import CALL_TEMPLATES, TEMPLATES

TOKENIZERS = [template.__name__ for template in TEMPLATES] + [f"calls:{name}" for name in CALL_TEMPLATES]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_delivered_sample_is_trained_exactly_once(engine, tokenizer):
    seen = random_agents.play_all(engine, tokenizer, range(2))
    assert seen["delivered"] > 20
    assert seen["streamed"] > 5
    assert seen["plain"] > 5


@pytest.mark.thorough
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_so_it_is_for_many_agents(engine, tokenizer):
    seen = random_agents.play_all(engine, tokenizer, range(2, 26))
    for change in ("edit", "answer", "compact", "sub", "branch", "retry", "abort"):
        assert seen[change] > 3, change
    assert seen["sequences"] > 60
