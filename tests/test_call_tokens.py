"""Tools in a chat template, and tokens over turns of calls: those that are trained on are those that were sampled."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import call_chats
import pytest
import real_tokenizers
from call_chats import TOOLS
from chat_templates import CALL_TEMPLATES, CallLetters, Letters, plain, writes_hermes, writes_llama
from packing import MANY
from raising import raises_code

from treetune.chat.tokens import ChatTokens, Tokens

ASKED = [{"role": "user", "content": "Where?"}]


@pytest.mark.parametrize("rewrites", ["split", "keep"])
@pytest.mark.parametrize("format", CALL_TEMPLATES)
@pytest.mark.quick_cases(2)
def test_what_is_trained_on_is_what_was_sampled(format, rewrites):
    template, control = CALL_TEMPLATES[format]
    seen = call_chats.check(CallLetters(template, control), rewrites, None if format == "none" else format, examples=80)
    assert seen["calls"] > 50
    assert seen["unreadable"] > 10
    assert seen["realigned"] > 20  # calls are not written as the template would
    assert seen["exact"] > 5  # how many there are hangs on the constants that Hypothesis finds in loaded modules
    if format == "mistral" and rewrites == "split":
        assert seen["breaks"] > 10  # it does not show what is said beside calls


REAL = [
    "qwen2.5", "qwen3", "qwen3.5", "deepseek-v3", "deepseek-r1", "mistral-tools", "mistral-tekken",
    "mistral-sentencepiece", "llama3.2", "smollm2",
]  # fmt: skip


EXAMPLES = 200 if MANY else 70


@pytest.fixture(scope="module")
def real_chats():
    return real_tokenizers.report("call_chats.py", EXAMPLES, REAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_so_it_is_with_the_templates_and_tokenizers_of_real_models(name, real_chats):
    for key, seen in real_chats[name].items():
        counts = Counter(seen)
        assert counts["calls"] > EXAMPLES, key
        assert counts["unreadable"] > EXAMPLES / 4, key
        if key.endswith("keep"):
            assert counts["breaks"] == 0, key
        if key.startswith(("deepseek", "qwen3.5", "mistral-tools")):
            # Prompts end in a thought that is not kept, and tools stand before the last question.
            assert counts["breaks" if key.endswith("split") else "realigned"] > EXAMPLES, key
        else:
            assert counts["exact"] > EXAMPLES / 4, key


def test_a_model_whose_template_has_words_for_tools_is_shown_them_there():
    chat = ChatTokens(CallLetters(writes_hermes), call_format="hermes").with_tools(TOOLS)
    assert chat.prompt(ASKED).text == writes_hermes(ASKED, TOOLS)


def test_a_model_whose_template_has_none_is_told_of_them_in_text():
    chat = ChatTokens(Letters(plain)).with_tools(TOOLS)
    text = chat.prompt(ASKED).text
    assert "# Tools" in text
    assert text.endswith("<start>user\nWhere?<end>\n<start>assistant\n")


def test_without_tools_nothing_is_read_as_a_call():
    chat, letters = ChatTokens(Letters(plain)), Letters(plain)
    text = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    assert chat.with_tools([]) is chat
    assert chat.read(chat.prompt(ASKED), letters(text)["input_ids"]) == {"role": "assistant", "content": text}


def test_a_call_marked_by_special_tokens_keeps_its_marks_and_other_answers_have_none():
    template, control = CALL_TEMPLATES["mistral"]
    letters = CallLetters(template, control)
    chat = ChatTokens(letters, call_format="mistral").with_tools(TOOLS)
    prompt = chat.prompt(ASKED)
    said = chat.read(prompt, letters('<start>So.[TOOL_CALLS] [{"name": "find", "arguments": {}}]<end>')["input_ids"], 2)
    assert said["content"] == "So."
    assert [call["id"] for call in said["tool_calls"]] == ["c00020000"]
    assert chat.read(prompt, letters("So.[TOOL_CALLS] oops<end>")["input_ids"])["content"] == "So. oops"


def test_a_stop_string_ends_a_call_too():
    letters = CallLetters(writes_hermes)
    chat = ChatTokens(letters, call_format="hermes").with_tools(TOOLS)
    ids = letters('<tool_call>{"name": "find", "arguments": {}}\n</tool_call> and so on')["input_ids"]
    said = chat.read(chat.prompt(ASKED), ids, stop=["</tool_call>"])
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["find"]


def test_several_calls_are_shown_as_text_where_a_template_has_words_for_one():
    letters = CallLetters(writes_llama)
    chat, tokens = ChatTokens(letters, call_format="llama").with_tools(TOOLS), Tokens()
    sampled = letters('{"name": "find", "parameters": {}}; {"name": "buy_it", "parameters": {}}<end>')["input_ids"]
    prompt = chat.prompt(ASKED)
    said = chat.read(prompt, sampled)
    tokens.add_turn(prompt, sampled, message=said)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "There."} for call in said["tool_calls"]]
    following = chat.next_prompt([*ASKED, said, *results], tokens)
    assert letters.decode(following.ids).startswith(letters.decode(prompt.ids + sampled))
    assert letters.decode(following.ids).count("<start>tool\nThere.") == 2


def test_a_template_whose_calls_nobody_can_read_is_refused_unless_a_format_is_named():
    with raises_code("usage", "call_format") as refused:
        ChatTokens(CallLetters(writes_hermes)).with_tools(TOOLS)
    assert "hermes" in str(refused.value)


def test_a_format_that_does_not_exist_is_told():
    with raises_code("unknown-name", "'mistral'"):
        ChatTokens(Letters(plain), call_format="mistrl")


def test_tools_of_the_task_and_of_the_templates_arguments_are_not_mixed():
    with raises_code("usage", "`tools`"):
        ChatTokens(Letters(plain), {"tools": TOOLS}).with_tools(TOOLS[:1])


def test_a_template_is_looked_at_once_for_one_set_of_tools():
    looked = 0

    def counts(messages: list[Any]) -> str:
        nonlocal looked
        looked += 1
        return plain(messages)

    chat = ChatTokens(Letters(counts))
    assert chat.with_tools(TOOLS) is chat.with_tools(json.loads(json.dumps(TOOLS)))
    first, looked = looked, 0
    assert first > 0
    for number in range(100):
        chat.with_tools([{"type": "function", "function": {"name": f"f{number}", "parameters": {}}}])
    assert len(chat._by_tools) <= 64
