"""Random conversations played through `ChatTokens`, and what must hold of every one of them.

Used by the fast tests with tokenizers written for them, and, in an environment with real tokenizers, as a program:

    python chats.py EXAMPLES NAME...        # prints what was seen, as JSON
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from treetune.chat.tokens import ChatTokens, Tokens, TokenSequence

PIECES = [
    "yes",
    " no",
    "\n",
    "  ",
    "42",
    "<think>",
    "</think>",
    "\n\n",
    "é",
    "漢",
    "🙂",
    "{",
    "'ll",
    "a b",
    "<|im_end|>",
    "[INST]",
]


class Answer(NamedTuple):
    pieces: list[str]
    """Tokenised one by one: rarely the tokens that the text as a whole would have."""
    raw: list[int]
    """Any tokens at all, modulo the size of the vocabulary: halves of letters, control tokens."""
    ends: bool
    """With an end token; otherwise it was cut off."""


texts = st.lists(st.sampled_from(PIECES), min_size=1, max_size=6).map("".join) | st.text(min_size=1, max_size=12)
answers = st.builds(
    Answer,
    pieces=st.lists(st.sampled_from(PIECES) | st.text(min_size=1, max_size=4), max_size=8),
    raw=st.lists(st.integers(0, 2**20), max_size=2),
    ends=st.booleans(),
)
observations = st.lists(st.tuples(st.sampled_from(["user", "user", "tool"]), texts), min_size=1, max_size=2)
# What a caller does to the conversation between two turns.
changes = st.sampled_from(["", "", "", "", "history", "answer", "parts"])
conversations = st.tuples(
    st.none() | texts,  # what the system says
    texts,
    st.lists(st.tuples(answers, observations, changes), min_size=1, max_size=4),
)


def opened(tokenizer: Any, conversation: Any) -> list[dict[str, str]]:
    system, opening, _ = conversation
    first = [{"role": "user", "content": opening}]
    whole = [{"role": "system", "content": system}, *first] if system is not None else first
    return whole if taken(tokenizer, whole) else first


def shown(tokenizer: Any, messages: list[dict[str, str]], observation: list[tuple[str, str]]) -> list[dict[str, str]]:
    """The messages of an observation; where the template refuses them, one of the user's."""
    wanted = [{"role": role, "content": content} for role, content in observation]
    return wanted if taken(tokenizer, messages + wanted) else [{"role": "user", "content": observation[0][1]}]


def taken(tokenizer: Any, messages: list[dict[str, str]]) -> bool:
    """Whether a template lets a conversation stand so, and go on."""
    going_on = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    try:
        for some in (messages, messages + going_on):
            tokenizer.apply_chat_template(some, add_generation_prompt=True, tokenize=False)
    except Exception:
        return False
    return True


def play(tokenizer: Any, conversation: Any, rewrites: str, arguments: dict[str, Any], seen: Counter[str]) -> Tokens:
    """Plays a conversation and checks each turn; `seen` counts how turns went on."""
    chat, tokens = ChatTokens(tokenizer, arguments, rewrites=rewrites), Tokens()
    turns = conversation[-1]
    messages = opened(tokenizer, conversation)
    sampled: list[int] = []
    breaks = 0
    prompt = chat.prompt(messages)
    assert prompt.ids == tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **arguments
    )
    for number, (answer, observation, change) in enumerate(turns):
        completion = tokens_of(tokenizer, answer)
        text = tokenizer.decode(completion, skip_special_tokens=True)
        said = {"role": "assistant", "content": text}
        # A number of its own for each token shows that none is moved.
        logprobs = [-(len(sampled) + at + 1) / 7 for at in range(len(completion))]
        tokens.add_turn(prompt, completion, logprobs, [number] * len(completion), said)
        sampled += completion
        # The record is what the model was given and what it said, and nothing else.
        so_far = tokens.sequences[-1].ids
        assert so_far == prompt.ids + completion
        assert [sequence.breaks_history for sequence in tokens.sequences] == [False] + [True] * breaks

        at = len(messages)
        messages = [*messages, said]
        messages += shown(tokenizer, messages, observation)
        messages, changed = rewritten(messages, change, at)
        prompt = chat.next_prompt(in_parts(messages) if change == "parts" else messages, tokens)
        continues = prompt.ids[: len(so_far)] == so_far
        template = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments)
        if not prompt.realigned:
            # Twice through the tokenizer, because some have no token for a letter.
            assert tokenizer.decode(prompt.ids) == tokenizer.decode(encoded(tokenizer, template))
        if template.startswith(tokenizer.decode(so_far)) and not tokens.sequences[-1].realigned:
            assert continues
            assert not prompt.realigned
        assert continues or not prompt.realigned
        assert continues or rewrites == "split" or changed
        if changed:  # then the model sees what the caller says, and not what was said before
            given = tokens.last.prompt.text + tokenizer.decode(completion) if tokens.last else ""
            assert template.startswith(given) if continues else prompt.ids == encoded(tokenizer, template)
            seen["changed"] += 1
        breaks += not continues and number + 1 < len(turns)
        seen["realigned" if prompt.realigned else "exact" if continues else "breaks"] += 1

    assert [token for sequence in tokens.sequences for token in sampled_of(sequence)] == sampled
    for sequence in tokens.sequences:
        assert len(sequence.ids) == len(sequence.mask) == len(sequence.logprobs) == len(sequence.versions)
        for mine, logprob, version in zip(sequence.mask, sequence.logprobs, sequence.versions, strict=True):
            assert (logprob < 0) == bool(mine) == (version >= 0)
    told = [value for sequence in tokens.sequences for value in sequence.logprobs if value]
    assert told == [-(at + 1) / 7 for at in range(len(sampled))]
    return tokens


def sampled_of(sequence: TokenSequence) -> list[int]:
    """The tokens that are trained on."""
    return [token for token, mine in zip(sequence.ids, sequence.mask, strict=True) if mine]


def rewritten(messages: list[dict[str, str]], change: str, answer: int) -> tuple[list[dict[str, str]], bool]:
    """The conversation as a caller tells it, and whether that is another one."""
    if change == "history":
        return [{**messages[0], "content": messages[0]["content"] + "?"}, *messages[1:]], True
    text = messages[answer]["content"]
    if change == "answer" and text[: len(text) // 2].strip() != text.strip():
        cut = {**messages[answer], "content": text[: len(text) // 2]}
        return [*messages[:answer], cut, *messages[answer + 1 :]], True
    return messages, False


def in_parts(messages: list[dict[str, str]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def encoded(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def tokens_of(tokenizer: Any, answer: Answer) -> list[int]:
    ids: list[int] = []
    for piece in answer.pieces:
        ids += encoded(tokenizer, piece)
    ids += [number % len(tokenizer) for number in answer.raw]
    return [*ids, tokenizer.eos_token_id] if answer.ends else ids


def naive_drifts(tokenizer: Any, conversation: Any, arguments: dict[str, Any]) -> bool:
    """Whether rendering anew and cutting by length, as is usual, would train on tokens that were not sampled."""
    turns = conversation[-1]
    messages = opened(tokenizer, conversation)
    so_far: list[int] = []
    for answer, observation, *_ in turns:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **arguments)
        if prompt[: len(so_far)] != so_far:
            return True
        completion = tokens_of(tokenizer, answer)
        so_far = prompt + completion
        text = tokenizer.decode(completion, skip_special_tokens=True)
        messages = [*messages, {"role": "assistant", "content": text}]
        messages += shown(tokenizer, messages, observation)
    return False


def check(tokenizer: Any, rewrites: str, arguments: dict[str, Any], examples: int) -> Counter[str]:
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
        play(tokenizer, conversation, rewrites, arguments, seen)
        seen["naive drifts"] += naive_drifts(tokenizer, conversation, arguments)

    run: Callable[[], None] = property
    run()
    return seen


SPELLINGS = [
    '{"name": "find", "arguments": {"what": "caf\u00e9", "most": 3}}',
    '{"name":"find","arguments":{"what":"caf\\u00e9","most":3}}',
    '{"arguments": {"most": 3,  "what": "caf\u00e9"}, "name": "find"}',
    '{\n  "name": "find",\n  "arguments": {\n    "what": "caf\u00e9",\n    "most": 3\n  }\n}',
]
"""Ways to write one tool call; a template writes it in a way of its own."""


def play_calls(tokenizer: Any, before: str, as_text: bool, changed: bool = False) -> Tokens:
    """A conversation of tool calls, each as a model spells it; a parser has made messages of them."""
    chat, tokens = ChatTokens(tokenizer), Tokens()
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Where?"}]
    for spelling in [*SPELLINGS, SPELLINGS[0]]:
        prompt = chat.next_prompt(messages, tokens)
        completion = [*encoded(tokenizer, f"{before}<tool_call>\n{spelling}\n</tool_call>"), tokenizer.eos_token_id]
        arguments: Any = {"what": "tea" if changed else "café", "most": 3}
        function = {"name": "find", "arguments": json.dumps(arguments) if as_text else arguments}
        said = {"role": "assistant", "content": before, "tool_calls": [{"type": "function", "function": function}]}
        tokens.add_turn(prompt, completion, message=None if changed else said)
        messages += [said, {"role": "tool", "content": "There."}]
    return tokens


if __name__ == "__main__":
    import real_tokenizers

    examples = int(sys.argv[1])
    report: dict[str, dict[str, Counter[str]]] = {}
    for name in sys.argv[2:]:
        tokenizer, report[name] = real_tokenizers.load(name), {}
        variants = [{}, {"enable_thinking": False}] if name == "qwen3" else [{}]
        for arguments in variants:
            for rewrites in ("split", "keep"):
                key = f"{name}{' ' + json.dumps(arguments) if arguments else ''} {rewrites}"
                report[name][key] = check(tokenizer, rewrites, arguments, examples)
                if name.startswith("qwen") and not arguments:
                    played = [
                        play_calls(tokenizer, before, as_text)
                        for before in ("", "I look.") for as_text in (True, False)
                    ]  # fmt: skip
                    report[name][key]["calls split"] = sum(len(tokens.sequences) - 1 for tokens in played)
    print(json.dumps(report))
