"""Random conversations of tool calls and results, played through `ChatTokens`, and what must hold of every one.

Used by the fast tests with tokenizers written for them, and, in an environment with real tokenizers, as a program:

    python call_chats.py EXAMPLES NAME...        # prints what was seen, as JSON
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from chats import encoded, sampled_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from treetune.chat.call_formats import FORMATS
from treetune.chat.tokens import ChatTokens, Tokens

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Find items.",
            "parameters": {
                "type": "object",
                "properties": {"what": {"type": "string"}, "most": {"type": "integer"}, "also": {"type": "array"}},
            },
        },
    }
    for name in ("find", "buy_it")
]


class Call(NamedTuple):
    name: str
    arguments: dict[str, Any]
    spelling: dict[str, Any]
    """How `json.dumps` spells it; a template has a way of its own."""


class Answer(NamedTuple):
    text: str
    """Beside the calls."""
    calls: list[Call]
    cuts: list[int]
    """Where the text is cut into pieces that are tokenised one by one."""
    broken: bool
    """Something is missing at the end, so that the last call cannot be read."""
    ends: bool
    """With an end token; otherwise it was cut off."""


words = st.text("ab é漢🙂\n\"'{}<>/", max_size=8)
answers = st.builds(
    Answer,
    text=st.sampled_from(["", "", "I look.", " I\n", "<think>Hm.</think>\n\n", "<think>", "caf\u00e9 "]),
    calls=st.lists(
        st.builds(
            Call,
            name=st.sampled_from(["find", "buy_it", "unknown"]),
            arguments=st.fixed_dictionaries(
                {"what": words}, optional={"most": st.integers(-9, 10**12), "also": st.lists(words, max_size=2)}
            ),
            spelling=st.sampled_from(
                [{"ensure_ascii": False}, {}, {"separators": (",", ":")}, {"indent": 2}, {"sort_keys": True}]
            ),
        ),
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    broken=st.sampled_from([False, False, False, True]),
    ends=st.sampled_from([True, True, True, False]),
)
conversations = st.tuples(
    st.none() | st.just("Be brief."),
    st.lists(st.tuples(answers, words, st.booleans()), min_size=1, max_size=5),
)


def written(answer: Answer, format: str) -> str:
    """The answer in one of the ways in which a model of that convention may write it."""
    if not answer.calls:
        return answer.text
    if format in ("qwen-xml", "deepseek"):
        text = FORMATS[format].write(
            [(call.name, json.dumps(call.arguments, **call.spelling)) for call in answer.calls]
        )
    else:
        key = "parameters" if format == "llama" else "arguments"
        spelled = [json.dumps({"name": c.name, key: c.arguments}, **c.spelling) for c in answer.calls]
        if format == "hermes":
            text = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in spelled)
        elif format == "mistral":
            text = f"[TOOL_CALLS] [{', '.join(spelled)}]"
        else:
            text = "; ".join(spelled)
            text = f"<|python_tag|>{text}" if answer.text else text
    return answer.text + (text[:-20] if answer.broken else text)


def tokens_of(tokenizer: Any, text: str, answer: Answer) -> list[int]:
    """Tokens that say it, rarely those that the text as a whole would have; control tokens stay whole."""
    special = "|".join(sorted(map(re.escape, tokenizer.all_special_tokens), key=len, reverse=True))
    ids: list[int] = []
    for piece in re.split(f"({special})", text):
        places = [0, *sorted(cut for cut in set(answer.cuts) if 0 < cut < len(piece)), len(piece)]
        whole = piece in tokenizer.all_special_tokens
        for begin, end in [(0, len(piece))] if whole else pairwise(places):
            ids += encoded(tokenizer, piece[begin:end])
    if tokenizer.decode(ids, clean_up_tokenization_spaces=False) != text:
        ids = encoded(tokenizer, text)  # it puts a space before every piece
    return [*ids, tokenizer.eos_token_id] if answer.ends else ids


def play(tokenizer: Any, conversation: Any, rewrites: str, format: str | None, seen: Counter[str]) -> None:
    system, turns = conversation
    chat = ChatTokens(tokenizer, rewrites=rewrites, call_format=format).with_tools(TOOLS)  # type: ignore[arg-type]
    assert chat._tools is not None
    form, tokens = chat._tools.format, Tokens()
    messages = [{"role": "user", "content": "Where?"}]
    if system is not None and chat._tools.role == "system":
        messages.insert(0, {"role": "system", "content": system})
    sampled: list[int] = []
    prompt = chat.prompt(messages)
    assert all(tool["function"]["name"] in tokenizer.decode(prompt.ids) for tool in TOOLS)
    for turn, (answer, result, asks) in enumerate(turns):
        if (prompt.text or "").rstrip().endswith("<think>") and answer.text != "<think>":
            answer = answer._replace(text=f"Hm.</think>{answer.text}")  # the thought that the prompt has begun
        text = written(answer, form)
        completion = tokens_of(tokenizer, text, answer)
        said = chat.read(prompt, completion, turn)
        check_read(tokenizer, said, answer, text, seen)
        tokens.add_turn(prompt, completion, message=said)
        sampled += completion
        so_far = tokens.sequences[-1].ids
        assert so_far == prompt.ids + completion

        messages = [*messages, said]
        for call in said.get("tool_calls") or []:
            name = call["function"]["name"]
            messages.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
        if asks or not said.get("tool_calls"):
            messages.append({"role": "user", "content": f"{result}?"})
        prompt = chat.next_prompt(messages, tokens)
        template = chat.prompt(messages).text  # the conversation as if nothing had been said before
        assert template is not None
        goes_on = prompt.ids[: len(so_far)] == so_far
        if not prompt.realigned:
            assert tokenizer.decode(prompt.ids) == tokenizer.decode(encoded(tokenizer, template))
        if not goes_on:  # then the model sees the template's own text, in a sequence of its own
            assert prompt.ids == encoded(tokenizer, template)
            assert not prompt.realigned
        if template.startswith(tokenizer.decode(so_far)) and not tokens.sequences[-1].realigned:
            assert goes_on
            assert not prompt.realigned
        seen["realigned" if prompt.realigned else "exact" if goes_on else "breaks"] += 1
    assert [token for sequence in tokens.sequences for token in sampled_of(sequence)] == sampled
    assert [sequence.breaks_history for sequence in tokens.sequences] == [False] + [True] * (len(tokens.sequences) - 1)
    ids = [call["id"] for message in messages for call in message.get("tool_calls") or []]
    assert len(set(ids)) == len(ids)


def check_read(tokenizer: Any, said: Any, answer: Answer, text: str, seen: Counter[str]) -> None:
    """An answer is the calls that were written, or the text that it always was."""
    calls = said.get("tool_calls") or []
    if answer.calls and not answer.broken and answer.text != "<think>":
        wanted = [(call.name, call.arguments) for call in answer.calls]
        if "<function=" in text:  # there the schema says what is not text
            wanted = [(name, as_texts(given) if name == "unknown" else given) for name, given in wanted]
        assert [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls] == wanted, text
        assert (said["content"] or "").strip() == answer.text.strip()
        seen["calls"] += len(calls)
    if not calls:
        sampled = tokens_of(tokenizer, text, answer)
        plain = tokenizer.decode(sampled, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert said["content"] == plain
        seen["texts"] += 1
    if answer.broken and answer.calls and not calls:
        seen["unreadable"] += 1


def as_texts(arguments: dict[str, Any]) -> dict[str, str]:
    return {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }


def check(tokenizer: Any, rewrites: str, format: str | None, examples: int) -> Counter[str]:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(conversations)
    def property(conversation: Any) -> None:
        play(tokenizer, conversation, rewrites, format, seen)

    run: Callable[[], None] = property
    run()
    return seen


if __name__ == "__main__":
    import real_tokenizers

    examples = int(sys.argv[1])
    report: dict[str, dict[str, Counter[str]]] = {}
    for name in sys.argv[2:]:
        tokenizer = real_tokenizers.load(name)
        report[name] = {
            f"{name} {rewrites}": check(tokenizer, rewrites, None, examples) for rewrites in ("split", "keep")
        }
    print(json.dumps(report))
