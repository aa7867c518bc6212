"""Vendors by the prefix of a model's name: `anthropic/claude-…` is that model at Anthropic's address.

    endpoint_of("gemini/gemini-2.5-flash", EndpointConfig())     # ("gemini-2.5-flash", Google's address and its key)

Each serves the chat completions that an OpenAI-compatible server has, so nothing but an address and a key is needed.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Provider(NamedTuple):
    base_url: str
    keys: tuple[str, ...] = ()
    """The environment variables that may hold the key; the first that is set is taken."""

    @property
    def key_variable(self) -> str | None:
        return next((name for name in self.keys if os.environ.get(name)), self.keys[0] if self.keys else None)


OPENAI = "https://api.openai.com/v1"
PROVIDERS = {
    "openai": Provider(OPENAI, ("OPENAI_API_KEY",)),
    "anthropic": Provider("https://api.anthropic.com/v1", ("ANTHROPIC_API_KEY",)),
    "gemini": Provider("https://generativelanguage.googleapis.com/v1beta/openai", ("GEMINI_API_KEY", "GOOGLE_API_KEY")),
    "openrouter": Provider("https://openrouter.ai/api/v1", ("OPENROUTER_API_KEY",)),
    "together": Provider("https://api.together.xyz/v1", ("TOGETHER_API_KEY",)),
    "fireworks": Provider("https://api.fireworks.ai/inference/v1", ("FIREWORKS_API_KEY",)),
    "groq": Provider("https://api.groq.com/openai/v1", ("GROQ_API_KEY",)),
    "mistral": Provider("https://api.mistral.ai/v1", ("MISTRAL_API_KEY",)),
    "deepseek": Provider("https://api.deepseek.com/v1", ("DEEPSEEK_API_KEY",)),
    "xai": Provider("https://api.x.ai/v1", ("XAI_API_KEY",)),
    "huggingface": Provider("https://router.huggingface.co/v1", ("HF_TOKEN",)),
    "ollama": Provider("http://127.0.0.1:11434/v1"),
}
"""A prefix is only read where no address is given: `openai/gpt-oss-20b` at your own server is a name of its own."""
OTHER_PROVIDERS = {
    "hf": "huggingface",
    "google": "gemini",
    "claude": "anthropic",
    "grok": "xai",
    "x-ai": "xai",
    "togetherai": "together",
    "together_ai": "together",
    "fireworks_ai": "fireworks",
    "open-router": "openrouter",
}
"""What other tools call them. Some are owners on the hub too, so errors name them, and nothing is taken for them."""


def list_headers(base_url: str, key: str | None) -> dict[str, str]:
    """What a vendor wants beside the usual when its models are listed."""
    if base_url == PROVIDERS["anthropic"].base_url and key is not None:
        return {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return {}
