"""`Prompts` writes the calls of agents as tokens.

chat, seed = prompts.chat_of(call.tools)
prompts.begin(chat, call)                   # the prompt of a new conversation
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from treetune.chat.calls import function_of
from treetune.chat.tokens import ChatTokens, Prompt
from treetune.chat.tool_template import write_as_text
from treetune.errors import UsageError
from treetune.gateway.call import Call, Sampler
from treetune.gateway.pieces import digest_of

_MOST_PROMPTS = 512
_MOST_TOOLSETS = 256


class TokenModel(NamedTuple):
    """A model that works on tokens."""

    prompts: Prompts
    sampler: Sampler


class Prompts:
    def __init__(self, chat: ChatTokens) -> None:
        self._chat = chat
        self._chats: dict[bytes, ChatTokens] = {}
        self._prompts: OrderedDict[bytes, Prompt] = OrderedDict()

    def chat_of(self, tools: list[dict[str, Any]]) -> tuple[ChatTokens, bytes]:
        """The chat with these tools, and the digest with which its conversations begin."""
        if not tools:
            return self._chat, b""
        key = digest_of(tools)
        if key not in self._chats:
            if len(self._chats) >= _MOST_TOOLSETS:
                self._chats.clear()
            self._chats[key] = self._chat.with_tools(tools)
        return self._chats[key], key

    def with_history(self, chat: ChatTokens, call: Call) -> Call:
        """The call in a form that the template can show. Without tools, many templates leave calls in the history out;
        they become text."""
        if call.tools or not any(message.get("tool_calls") or message["role"] == "tool" for message in call.messages):
            return call
        messages = [{**message, "content": message.get("content") or ""} for message in call.messages]
        text = chat.render(messages)
        functions = [function_of(made) for message in messages for made in message.get("tool_calls") or []]
        if text is None or not all(str(function.get("name")) in text for function in functions):
            messages = write_as_text(messages)
        return msgspec.structs.replace(call, messages=messages)

    def begin(self, chat: ChatTokens, call: Call) -> Prompt:
        """The prompt of a new conversation. Rollouts of a group begin alike, so it is rendered once for all of them."""
        if not call.messages:
            raise UsageError("there are no messages")
        key = digest_of([call.messages, call.tools, call.continues])
        if (prompt := self._prompts.get(key)) is None:
            prompt = self._prompts[key] = chat.prompt(call.messages, continues=call.continues)
            if len(self._prompts) > _MOST_PROMPTS:
                self._prompts.popitem(last=False)
        return prompt

    def count_tokens(self, call: Call) -> int:
        """The number of tokens of the prompt of a call."""
        return len(self.begin(self.chat_of(call.tools)[0], call).ids)
