"""Where a model is served: the part of the configuration that holds addresses and keys."""

from __future__ import annotations

import os
from typing import Annotated

import msgspec

from treetune.errors import UsageError

OPENAI = "https://api.openai.com/v1"


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_url: Annotated[str, msgspec.Meta(pattern="^https?://")] = OPENAI
    """An OpenAI-compatible server, up to and including `/v1`."""
    api_key_env: str | None = None
    """The environment variable that holds the key. Absent: OPENAI_API_KEY, and only for OpenAI's own address, so that
    your key never goes to another server by accident."""
    timeout: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """The most seconds of one request."""
    max_retries: Annotated[int, msgspec.Meta(ge=0)] = 6
    """How often a request is repeated after a connection fault, 408, 409, 429 or 5xx."""
    max_connections: Annotated[int, msgspec.Meta(ge=1)] = 256
    """The most requests under way at once."""

    continue_final_message: bool = False
    """Whether the server goes on with a last message of the assistant's instead of answering it, as vLLM and SGLang do.
    Without it, a prompt that ends with the beginning of an answer is refused."""

    def api_key(self) -> str | None:
        name = self.api_key_env or ("OPENAI_API_KEY" if self.base_url.rstrip("/") == OPENAI else None)
        if name is None:
            return None
        key = os.environ.get(name)
        if not key:
            raise UsageError(
                f"the environment variable {name} is not set",
                remedy=f"export {name}=..., or name another with --endpoint.api_key_env, "
                "or point --endpoint.base_url at a server that needs no key",
            )
        return key
