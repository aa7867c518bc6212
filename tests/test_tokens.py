"""Tokens that are trained on are the tokens that were sampled, whatever a chat template does to the conversation."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import chats
import msgspec
import numpy as np
import pytest
import real_tokenizers
import venvs
from chat_templates import TEMPLATES, Letters, forgets_thoughts, plain, thinks_first, trims
from hypothesis import given
from raising import raises_code

from treetune.chat.tokens import ChatTokens, Tokens
from treetune.errors import PolicyError


@pytest.mark.parametrize("rewrites", ["split", "keep"])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
@pytest.mark.quick_cases(2)
def test_what_is_trained_on_is_what_was_sampled(template, rewrites):
    seen = chats.check(Letters(template), rewrites, {}, examples=150)
    # What trainers do otherwise goes wrong with these conversations: they are no easy ones.
    assert seen["naive drifts"] > 10
    if template is plain:
        assert seen["exact"] > 20
    if template is trims:
        assert seen["realigned"] > 20
    if template is thinks_first:
        assert seen["breaks" if rewrites == "split" else "realigned"] > 20
    if template is forgets_thoughts and rewrites == "split":
        assert seen["breaks"] > 5


REAL = ["qwen2.5", "qwen3", "deepseek-v3", "deepseek-r1", "mistral-tekken", "mistral-sentencepiece", "smollm2"]


@pytest.fixture(scope="module")
def real_chats():
    return real_tokenizers.report("chats.py", 300, REAL)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_so_it_is_with_the_templates_and_tokenizers_of_real_models(name, real_chats):
    for key, seen in real_chats[name].items():
        counts = Counter(seen)
        assert counts["naive drifts"] > 50, key
        assert counts["changed"] > 50, key
        assert counts["calls split"] == 0, key
        if key.endswith("keep"):
            assert counts["breaks"] <= counts["changed"], key
        if key.startswith(("deepseek", "qwen3 {")):
            # Their prompts end in a thought that the history does not keep.
            assert counts["breaks" if key.endswith("split") else "realigned"] > 300, key
        elif not key.startswith("mistral-sentencepiece"):
            assert counts["exact"] > counts["realigned"] > 0, key


@pytest.mark.slow
def test_a_local_model_goes_on_from_the_tokens_it_sampled(tmp_path):
    python = venvs.venv(*venvs.MODELS)
    model = venvs.smollm2()
    venvs.run(
        python, "-m", "treetune", "eval", "alphabet-sort", "-m", f"local:{model}", "-n", 2, "--sampling.max_tokens", 20,
        "--sampling.temperature", 1.5, "--sampling.seed", 3, "-o", tmp_path / "run", "--json",
    )  # fmt: skip
    for line in (tmp_path / "run" / "traces.jsonl").read_text().splitlines():
        trace = json.loads(line)
        assert len(trace["turns"]) == 3
        (sequence,) = trace["tokens"]["sequences"]
        assert sum(sequence["mask"]) == trace["usage"]["completion_tokens"]


def played(template, *turns, rewrites="split", question="Q"):
    """A conversation of (answer, observation) pairs; its tokens, and the prompt that comes next."""
    tokenizer = Letters(template)
    chat, tokens = ChatTokens(tokenizer, rewrites=rewrites), Tokens()
    messages = [{"role": "user", "content": question}]
    prompt = chat.prompt(messages)
    for answer, observation in turns:
        completion = tokenizer(answer)["input_ids"]
        said = {"role": "assistant", "content": tokenizer.decode(completion, skip_special_tokens=True)}
        tokens.add_turn(prompt, completion, message=said)
        messages += [said, {"role": "user", "content": observation}]
        prompt = chat.next_prompt(messages, tokens)
    return tokenizer.decode(prompt.ids), prompt, tokens


def test_an_answer_that_was_cut_off_gets_the_end_token_that_the_template_gives_it():
    text, prompt, _ = played(plain, ("A", "B"))
    assert text == "<start>user\nQ<end>\n<start>assistant\nA<end>\n<start>user\nB<end>\n<start>assistant\n"
    assert not prompt.realigned


def test_an_answer_that_the_template_would_strip_keeps_its_tokens_and_the_turn_is_marked():
    text, prompt, _ = played(trims, (" A \n<end>", "B"))
    assert text == "<start>user\nQ<end>\n<start>assistant\n A \n<end>\n<start>user\nB<end>\n<start>assistant\n"
    assert prompt.realigned


def test_a_thought_that_the_template_drops_begins_a_new_sequence_or_stays_as_told():
    turns = [("<think>hm</think>A<end>", "B"), ("C<end>", "D")]
    _, _, tokens = played(forgets_thoughts, *turns)
    assert [sequence.breaks_history for sequence in tokens.sequences] == [False, True]
    assert Letters(plain).decode(tokens.sequences[1].ids).count("hm") == 0
    _, _, tokens = played(forgets_thoughts, *turns, rewrites="keep")
    (sequence,) = tokens.sequences
    assert Letters(plain).decode(sequence.ids).count("hm") == 1
    assert sequence.realigned == 1


def test_a_message_that_was_changed_after_it_was_sampled_is_not_trained_on_as_if_it_were_the_history():
    tokenizer = Letters(plain)
    chat, tokens = ChatTokens(tokenizer), Tokens()
    first = [{"role": "user", "content": "Q"}]
    tokens.add_turn(chat.prompt(first), tokenizer("long story<end>")["input_ids"])
    told = [*first, {"role": "assistant", "content": "short"}, {"role": "user", "content": "B"}]
    prompt = chat.next_prompt(told, tokens)
    assert tokenizer.decode(prompt.ids) == plain(told)
    tokens.add_turn(prompt, [5])
    assert tokens.sequences[1].breaks_history


@pytest.mark.parametrize("rewrites", ["split", "keep"])
@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.__name__)
def test_a_history_that_was_rewritten_is_what_the_model_sees(template, rewrites):
    tokenizer = Letters(template)
    chat, tokens = ChatTokens(tokenizer, rewrites=rewrites), Tokens()
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}]
    tokens.add_turn(chat.next_prompt(messages, tokens), tokenizer("A<end>")["input_ids"])
    messages += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    for changed in (
        [{"role": "system", "content": "Z"}, *messages[1:]],
        [messages[0], {"role": "user", "content": "Z"}, *messages[2:]],
        messages[1:],
        [{"role": "user", "content": "Z"}, *messages],
        [messages[0], *messages[2:]],
        messages[:1],
    ):
        prompt = chat.next_prompt(changed, tokens)
        assert tokenizer.decode(prompt.ids) == template(changed)
        assert not prompt.realigned
    messages[1]["content"] = "Z"  # in its place
    prompt = chat.next_prompt(messages, tokens)
    assert tokenizer.decode(prompt.ids) == template(messages)
    tokens.add_turn(prompt, [5])
    assert [sequence.breaks_history for sequence in tokens.sequences] == [False, True]


@pytest.mark.parametrize("rewrites", ["split", "keep"])
@pytest.mark.parametrize("told", [True, False])
def test_an_answer_that_its_caller_cut_short_goes_on_from_what_is_left(rewrites, told):
    tokenizer = Letters(trims)
    chat, tokens = ChatTokens(tokenizer, rewrites=rewrites), Tokens()
    said = {"role": "assistant", "content": "long story"}
    messages = [{"role": "user", "content": "Q"}]
    prompt = chat.next_prompt(messages, tokens)
    tokens.add_turn(prompt, tokenizer("long story<end>")["input_ids"], message=said if told else None)
    messages += [{**said, "content": "long"}, {"role": "user", "content": "B"}]
    prompt = chat.next_prompt(messages, tokens)
    assert tokenizer.decode(prompt.ids) == trims(messages)
    tokens.add_turn(prompt, [5])
    assert tokens.sequences[1].breaks_history


def test_an_answer_that_its_policy_cut_at_a_stop_string_keeps_its_tokens():
    tokenizer = Letters(plain)
    chat, tokens = ChatTokens(tokenizer), Tokens()
    said = {"role": "assistant", "content": "yes"}
    messages = [{"role": "user", "content": "Q"}]
    tokens.add_turn(chat.next_prompt(messages, tokens), tokenizer("yes; no")["input_ids"], message=said)
    messages += [said, {"role": "user", "content": "B"}]
    prompt = chat.next_prompt(messages, tokens)
    assert tokenizer.decode(prompt.ids) == plain(messages).replace("yes", "yes; no")
    assert prompt.realigned


def test_contents_in_parts_are_texts_where_the_template_knows_only_texts():
    def adds(messages):
        return "".join("<start>" + m["role"] + m["content"] + "<end>" for m in messages) + "<start>assistant\n"

    def knows_parts(messages):
        def written(content):
            return content if isinstance(content, str) else "".join("[" + part["text"] + "]" for part in content)

        return adds([{**m, "content": written(m["content"]).replace("[", "").replace("]", "")} for m in messages])

    two = [{"role": "user", "content": [{"type": "text", "text": "Q"}, {"type": "text", "text": "R"}]}]
    for template, text in ((plain, "Q\nR"), (adds, "Q\nR"), (knows_parts, "QR")):
        tokenizer = Letters(template)
        expected = template([{"role": "user", "content": text}])
        assert tokenizer.decode(ChatTokens(tokenizer).prompt(two).ids) == expected


def calls_tools(messages: list[Any]) -> str:
    def written(message: Any) -> str:
        calls = [call["function"] for call in message.get("tool_calls") or []]
        if any(isinstance(call["arguments"], str) for call in calls):
            raise TypeError("arguments are a mapping")
        shown = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in calls]
        return "\n".join([message["content"]] * bool(message["content"]) + shown)

    return plain([{**message, "content": written(message)} for message in messages])


@pytest.mark.parametrize("before", ["", "I look."])
@pytest.mark.parametrize("as_text", [True, False])
def test_tool_calls_keep_the_tokens_that_they_were_sampled_as(before, as_text):
    (sequence,) = chats.play_calls(Letters(calls_tools), before, as_text).sequences
    text = Letters(plain).decode(sequence.ids)
    assert [text.count(spelling) for spelling in chats.SPELLINGS] == [2, 1, 1, 1]
    assert sequence.realigned == (4 if before else 3)  # one is as the template writes it


def test_tool_calls_that_are_not_the_ones_that_were_sampled_begin_a_new_sequence():
    tokens = chats.play_calls(Letters(calls_tools), "", as_text=True, changed=True)
    assert len(tokens.sequences) == 5


def test_thoughts_and_calls_in_a_templates_own_words_keep_their_tokens():
    def words(messages: list[Any]) -> str:
        def written(m: Any) -> str:
            if m["role"] != "assistant":
                return m["content"]
            calls = [c["function"] for c in m.get("tool_calls") or []]
            args = [f"<arg={key}>\n{value}\n</arg>" for c in calls for key, value in c["arguments"].items()]
            shown = "".join(f"<call={c['name']}>" for c in calls) + "".join(args)
            return f"<think>\n{m.get('reasoning_content', '')}\n</think>\n\n{m['content']}{shown}"

        return plain([{**m, "content": written(m)} for m in messages]) + "<think>\n"

    class WithPrompt(Letters):
        def apply_chat_template(self, messages, tokenize=True, add_generation_prompt=True, **_):
            text = self.template(messages)
            text = text if add_generation_prompt else text.removesuffix("<start>assistant\n<think>\n")
            return self(text)["input_ids"] if tokenize else text

    tokenizer = WithPrompt(words)
    chat, tokens = ChatTokens(tokenizer), Tokens()
    call = {"type": "function", "function": {"name": "find", "arguments": '{"what": "tea"}'}}
    said = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    sampled = "hm</think><call=find><arg=what>tea</arg><end>"
    messages = [{"role": "user", "content": "Where?"}]
    for _ in range(3):
        tokens.add_turn(chat.next_prompt(messages, tokens), tokenizer(sampled)["input_ids"], message=said)
        messages = [*messages, said, {"role": "tool", "content": "There."}]
    (sequence,) = tokens.sequences
    assert tokenizer.decode(chats.sampled_of(sequence)) == sampled * 3
    assert tokenizer.decode(sequence.ids).count("<end>\n<start>tool\nThere.<end>\n<start>assistant\n<think>\n") == 2


def test_a_template_that_takes_arguments_only_as_text_gets_text():
    def text_only(messages: list[Any]) -> str:
        calls = ["".join(c["function"]["arguments"] + "" for c in m.get("tool_calls") or []) for m in messages]
        return plain([{**m, "content": m["content"] + call} for m, call in zip(messages, calls, strict=True)])

    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '{"a": 1}' in Letters(plain).decode(ChatTokens(Letters(text_only)).prompt(messages).ids)


def test_messages_of_the_assistant_that_the_environment_adds_are_no_answers():
    tokenizer = Letters(plain)
    chat, tokens = ChatTokens(tokenizer, rewrites="keep"), Tokens()
    messages = [{"role": "user", "content": "Q"}]
    tokens.add_turn(chat.prompt(messages), tokenizer("A<end>")["input_ids"])
    messages += [
        {"role": "assistant", "content": "A"},
        {"role": "assistant", "content": "said for it"},
        {"role": "user", "content": "B"},
    ]
    assert tokenizer.decode(chat.next_prompt(messages, tokens).ids) == plain(messages)


def test_a_tokenizer_without_a_text_between_messages_and_tokens_is_taken_at_its_tokens():
    class Direct(Letters):
        def apply_chat_template(self, messages, tokenize=True, **_):
            # Control tokens that no text gives, as mistral-common makes them.
            ids = [len(self) + len(m["role"]) for m in messages for _ in m["content"]]
            return ids if tokenize else self.template(messages)

    chat, tokens = ChatTokens(Direct(plain)), Tokens()
    messages = [{"role": "user", "content": "Q"}]
    tokens.add_turn(chat.prompt(messages), [5, 6])
    messages += [{"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]
    prompt = chat.next_prompt(messages, tokens)
    assert prompt.ids == Direct(plain).apply_chat_template(messages)
    tokens.add_turn(prompt, [7])
    assert [chats.sampled_of(sequence) for sequence in tokens.sequences] == [[5, 6], [7]]


def test_a_template_that_refuses_a_conversation_says_why():
    def refuses(messages):
        raise ValueError("roles must alternate")

    with raises_code("usage", "roles must alternate"):
        ChatTokens(Letters(refuses)).prompt([{"role": "user", "content": "Q"}])


def test_a_number_of_logprobs_or_versions_that_is_not_that_of_the_tokens_is_refused():
    with raises_code("policy", "1 logprobs", "2 sampled"):
        Tokens().add_turn([1], [2, 3], [-1.0])
    with raises_code("policy", "3 versions", "2 sampled"):
        Tokens().add_turn([1], [2, 3], [-1.0, -2.0], [0, 0, 0])


NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("ids", "logprobs", "told"),
    [
        ([7, -2], None, "sampled token 1 of 2 is -2, and must be a token id from 0 to 2147483647"),
        ([2**31], None, "sampled token 0 of 1 is 2147483648"),
        ([7, 1.5], None, "sampled token 1 of 2 is 1.5, and must be an integer"),
        ([7, "8"], None, "sampled token 1 of 2 is '8', and must be an integer"),
        ([7, None], None, "sampled token 1 of 2 is None, and must be an integer"),
        ([True], None, "sampled token 0 of 1 is True, and must be an integer"),
        ("78", None, "expected a list, got '78'"),
        (7, None, "expected a list, got 7"),
        ([7, 8], [-1.0, NAN], "the logprob of sampled token 1 of 2 is nan, and must be finite"),
        ([7, 8], [-INFINITE, -1.0], "the logprob of sampled token 0 of 2 is -inf, and must be finite"),
        ([7, 8], [-1.0, INFINITE], "the logprob of sampled token 1 of 2 is inf, and must be finite"),
        ([7, 8], [0.7, -1.0], "the logprob of sampled token 0 of 2 is 0.7, and must be at most 0"),
        ([7, 8], [-1.0, "-1"], "the logprob of sampled token 1 of 2 is '-1', and must be a number"),
        ([7, 8], [-1.0, None], "the logprob of sampled token 1 of 2 is None, and must be a number"),
    ],
)
def test_what_is_no_sample_is_refused_with_the_value_and_its_place(ids, logprobs, told):
    tokens = Tokens()
    tokens.add_turn([1], [2], [-1.0])
    before = json.dumps(msgspec.to_builtins(tokens))
    with pytest.raises(PolicyError) as error:
        tokens.add_turn([1, 2, 3], ids, logprobs)
    assert told in error.value.message
    assert json.dumps(msgspec.to_builtins(tokens)) == before


def test_a_prompt_that_is_none_is_refused_too():
    tokens = Tokens()
    with raises_code("policy", "1 of 3 is -5"):
        tokens.add_turn([1, -5, 3], [4])
    assert not tokens.sequences


def test_what_rounding_and_greedy_sampling_give_is_kept():
    tokens = Tokens()
    tokens.add_turn([1], [2, 3, 4], [0.0, 1e-7, -1])
    (sequence,) = tokens.sequences
    assert sequence.logprobs == [0.0, 0.0, 0.0, -1.0]


def test_numbers_of_numpy_become_plain_ones():
    tokens = Tokens()
    tokens.add_turn(np.array([1, 2]), np.array([3, 4]), np.array([-0.5, -1.5], dtype=np.float32))
    (sequence,) = tokens.sequences
    assert (sequence.ids, sequence.logprobs) == ([1, 2, 3, 4], [0.0, 0.0, -0.5, -1.5])
    assert {type(value) for value in [*sequence.ids, *sequence.logprobs]} == {int, float}


def test_turns_without_logprobs_do_not_join_a_sequence_that_has_them():
    tokens = Tokens()
    tokens.add_turn([1], [2], [-1.0])
    tokens.add_turn([1, 2, 3], [4])
    assert [(s.ids, s.logprobs, s.breaks_history) for s in tokens.sequences] == [
        ([1, 2], [0.0, -1.0], False),
        ([1, 2, 3, 4], [], False),
    ]


@given(chats.conversations)
def test_a_record_survives_its_file(conversation):
    import msgspec

    tokens = chats.play(Letters(plain), conversation, "split", {}, Counter())
    assert msgspec.json.decode(msgspec.json.encode(tokens), type=Tokens) == tokens
