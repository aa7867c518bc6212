"""The model behind verifiers' interception endpoint, as a policy: verifiers records there what is said."""

from __future__ import annotations

from typing import Any

from treetune.chat.message import Message
from treetune.core.policy import Completion, Request
from treetune.errors import ContextFullError, PolicyError
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy


class InterceptedModel(OpenAIPolicy):
    def __init__(self, model: str, endpoint: str, secret: str, trace: Any, system: str | None, config: Any) -> None:
        """`trace` is verifiers' own, which says whether a limit of verifiers' has ended it; `system` takes the place of
        the task's system prompt."""
        place = EndpointConfig(base_url=endpoint, timeout=config.model_timeout, max_retries=config.model_retries)
        super().__init__(model, place)
        self._server.headers["Authorization"] = f"Bearer {secret}"
        self._trace, self._system = trace, system

    async def complete(self, request: Request) -> Completion:
        if self._system is not None:
            request.messages = _with_system(request.messages, self._system)
        try:
            return await super().complete(request)
        except PolicyError as error:
            if self._trace.stop_condition is None:
                raise
            # Not a failure: it counts with what it has earned so far, as under a limit of our own.
            raise ContextFullError(f"verifiers ended it: {self._trace.stop_condition}") from error

    def _call_headers(self, request: Request) -> dict[str, str]:
        # A call that is repeated because its reply was lost is not sampled and recorded twice.
        return {"Idempotency-Key": f"turn-{request.turn}"}


def _with_system(messages: list[Message], system: str) -> list[Message]:
    rest = messages[1:] if messages and messages[0].get("role") == "system" else messages
    return [{"role": "system", "content": system}, *rest]
