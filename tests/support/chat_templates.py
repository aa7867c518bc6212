"""Chat templates of every habit, and a tokenizer whose tokens are letters."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

Message = dict[str, str]


class Letters:
    """A tokenizer with a token for each letter, for some pairs of letters, and for control tokens."""

    CONTROL = ("<start>", "<end>", "<|im_end|>")
    PAIRS = ("ye", "es", " n", "no", "\n\n", "  ")

    def __init__(self, template: Callable[..., str], control: tuple[str, ...] = ()) -> None:
        """`control` are further control tokens."""
        self.template = template
        self.all_special_tokens = [*self.CONTROL, *control]
        self.all_special_ids = list(range(len(self.all_special_tokens)))
        self.eos_token_id = 1
        self._texts = [*self.all_special_tokens, *self.PAIRS]
        self._pattern = re.compile("|".join(map(re.escape, self._texts)) + "|.", re.S)

    def __len__(self) -> int:
        return len(self._texts) + 0xD800

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        first = len(self._texts)
        found = self._pattern.findall(text)
        return {"input_ids": [self._texts.index(one) if one in self._texts else first + ord(one) for one in found]}

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        shown = [id for id in ids if not (skip_special_tokens and id in self.all_special_ids)]
        return "".join(self._texts[id] if id < len(self._texts) else chr(id - len(self._texts)) for id in shown)

    def apply_chat_template(self, messages: list[Message], tokenize: bool = True, **_: Any) -> Any:
        text = self.template(messages)
        return self(text)["input_ids"] if tokenize else text


def plain(messages: list[Message]) -> str:
    return "".join(f"<start>{m['role']}\n{m['content']}<end>\n" for m in messages) + "<start>assistant\n"


def trims(messages: list[Message]) -> str:
    return plain([{**m, "content": m["content"].strip()} for m in messages])


def forgets_thoughts(messages: list[Message]) -> str:
    return plain([{**m, "content": m["content"].split("</think>")[-1]} for m in messages])


def thinks_first(messages: list[Message]) -> str:
    return forgets_thoughts(messages) + "<think>\n"


def has_no_end(messages: list[Message]) -> str:
    return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"


class CallLetters(Letters):
    """One whose template is given tools too, and need not prompt for an answer."""

    def apply_chat_template(
        self,
        messages: list[Any],
        tokenize: bool = True,
        add_generation_prompt: bool = True,
        tools: Any = None,
        **_: Any,
    ) -> Any:
        text = self.template(messages, tools or [])
        text = text if add_generation_prompt else text.removesuffix(PROMPT)
        return self(text)["input_ids"] if tokenize else text


PROMPT = "<start>assistant\n"


def _listed(tools: list[Any]) -> str:
    return "".join(f"<start>system\n{json.dumps(tools)}<end>\n" if tools else "")


def writes_hermes(messages: list[Any], tools: list[Any]) -> str:
    """As Qwen's: JSON in tags, results as the user's."""

    def content(m: Any) -> str:
        calls = [f"<tool_call>\n{json.dumps(_inner(c), ensure_ascii=False)}\n</tool_call>" for c in _calls(m, dict)]
        return "\n".join([*filter(None, [m["content"]]), *calls])

    return _listed(tools) + plain([{**m, "content": content(m)} for m in messages])


def writes_mistral(messages: list[Any], tools: list[Any]) -> str:
    """As Mistral's: a list after a mark, with ids of nine letters; what is said beside calls is not shown."""

    def content(m: Any) -> str:
        calls = [{**_inner(c), "id": c["id"]} for c in _calls(m, dict)]
        assert all(len(call["id"]) == 9 for call in calls)
        return f"[TOOL_CALLS] {json.dumps(calls, ensure_ascii=False)}" if calls else m["content"]

    return _listed(tools) + plain([{**m, "content": content(m)} for m in messages])


def writes_deepseek(messages: list[Any], tools: list[Any]) -> str:
    """As DeepSeek's: marks, arguments as text; the tools are not told of, and a thought is begun and not kept."""

    def content(m: Any) -> str:
        calls = [
            f"<call>function<sep>{c['function']['name']}\n```json\n" + c["function"]["arguments"] + "\n```</call>"
            for c in _calls(m, str)
        ]
        calls = [deepseek(call) for call in calls]
        wrapped = ["<｜tool▁calls▁begin｜>" + "\n".join(calls) + "<｜tool▁calls▁end｜>"] if calls else []
        return "".join([(m["content"] or "").split("</think>")[-1], *wrapped])

    return plain([{**m, "content": content(m)} for m in messages])


def writes_llama(messages: list[Any], tools: list[Any]) -> str:
    """As Llama 3's: bare JSON, one call at most, and nothing beside it."""

    def content(m: Any) -> str:
        calls = _calls(m, dict)
        assert len(calls) < 2, "only one call"
        inner = [_inner(call) for call in calls]
        texts = [json.dumps({"name": call["name"], "parameters": call["arguments"]}) for call in inner]
        return texts[0] if texts else m["content"]

    return _listed(tools) + plain([{**m, "content": content(m)} for m in messages])


def knows_no_tools(messages: list[Any], tools: list[Any]) -> str:
    """As SmolLM2's: it writes texts, and lets tools be."""
    return plain([{"role": m["role"], "content": m["content"] + ""} for m in messages])


def _calls(message: Any, kind: type) -> list[Any]:
    calls = message.get("tool_calls") or []
    assert all(isinstance(call["function"]["arguments"], kind) for call in calls)
    return calls


def _inner(call: Any) -> Any:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def deepseek(text: str) -> str:
    for short, mark in (
        ("<call>", "<｜tool▁call▁begin｜>"),
        ("<sep>", "<｜tool▁sep｜>"),
        ("</call>", "<｜tool▁call▁end｜>"),
    ):
        text = text.replace(short, mark)
    return text


DEEPSEEK_MARKS = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
CALL_TEMPLATES = {
    "hermes": (writes_hermes, ()),
    "mistral": (writes_mistral, ("[TOOL_CALLS]",)),
    "deepseek": (writes_deepseek, DEEPSEEK_MARKS),
    "llama": (writes_llama, ("<|python_tag|>",)),
    "none": (knows_no_tools, ()),
}
"""By how they write calls, with the marks that are control tokens of their own."""

TEMPLATES = [plain, trims, forgets_thoughts, thinks_first, has_no_end]
