"""How models write tool calls: every convention is read, and what cannot be read is text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treetune.chat.call_formats import FORMATS, detect_format, parse_calls
from treetune.chat.calls import call_id
from treetune.chat.tool_template import with_tools, write_as_text, write_instructions

TEA = [("find", {"what": "tea", "most": 3})]
TWO = [*TEA, ("buy", {})]
SCHEMAS = [
    {"type": "function", "function": {"name": "find", "description": "", "parameters": {
        "type": "object",
        "properties": {"what": {"type": "string"}, "most": {"type": "integer"}, "sure": {"type": "boolean"},
                       "kinds": {"type": "array"}, "size": {"enum": ["1", "2"]}},
    }}}
]  # fmt: skip
DEEPSEEK = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
ONE_OF_DEEPSEEK = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"

READ = [
    ("hermes", '<tool_call>\n{"name": "find", "arguments": {"what": "tea", "most": 3}}\n</tool_call>', "", TEA),
    ("hermes", '<tool_call>{"arguments":{"what":"tea","most":3},"name":"find"}</tool_call>', "", TEA),
    ("hermes", 'I look.\n<tool_call>{"name": "find", "arguments": {"what": "tea", "most": 3}}</tool_call>\n'
               '<tool_call>{"name": "buy", "arguments": {}}</tool_call>', "I look.", TWO),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"what": "tea", "most": 3}}', "", TEA),  # a stop string
    ("hermes", '<tool_call>{"name": "buy", "arguments": {"x": "</tool_call>"}}</tool_call>', "",
     [("buy", {"x": "</tool_call>"})]),
    ("hermes", '<think>Not <tool_call>{}</tool_call>.</think>\n<tool_call>{"name": "buy", "arguments": {}}</tool_call>',
     "<think>Not <tool_call>{}</tool_call>.</think>", [("buy", {})]),
    ("qwen-xml", "<tool_call>\n<function=find>\n<parameter=what>\ntea\n</parameter>\n"
                 "<parameter=most>\n3\n</parameter>\n</function>\n</tool_call>", "", TEA),
    ("qwen-xml", "<tool_call><function=find><parameter=what>\n3\n</parameter><parameter=sure>True</parameter>"
                 "<parameter=kinds>[1, 2]</parameter><parameter=size>1</parameter></function></tool_call>", "",
     [("find", {"what": "3", "sure": True, "kinds": [1, 2], "size": "1"})]),
    ("qwen-xml", "So:\n\n<tool_call>\n<function=other>\n<parameter=a>\nx\ny\n</parameter>\n</function>\n</tool_call>",
     "So:", [("other", {"a": "x\ny"})]),
    ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {"what": "tea", "most": 3}}, '
                '{"name": "buy", "arguments": {}, "id": "abcdefghi"}]', "", TWO),
    ("mistral", 'I look.[TOOL_CALLS]find[ARGS]{"what": "tea", "most": 3}[TOOL_CALLS]buy[CALL_ID]abc[ARGS]{}',
     "I look.", TWO),
    ("mistral", '[TOOL_CALLS]{"name": "buy", "arguments": {}}', "", [("buy", {})]),
    ("llama", '{"name": "find", "parameters": {"what": "tea", "most": 3}}', "", TEA),
    ("llama", '<|python_tag|>{"type": "function", "name": "find", "parameters": {"what": "tea", "most": 3}}; '
              '{"name": "buy", "parameters": {}}', "", TWO),
    ("llama", 'I look.<|python_tag|>{"name": "buy", "arguments": {}}', "I look.", [("buy", {})]),
    ("deepseek", DEEPSEEK.format(ONE_OF_DEEPSEEK.format("find", '{"what": "tea", "most": 3}') + "\n"
                                 + ONE_OF_DEEPSEEK.format("buy", "{}")), "", TWO),
    ("deepseek", "Hm.</think>I look." + DEEPSEEK.format(ONE_OF_DEEPSEEK.format("buy", "{}")), "Hm.</think>I look.",
     [("buy", {})]),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>buy<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "",
     [("buy", {})]),
]  # fmt: skip
"""Format, text, the text beside the calls, the calls."""


@pytest.mark.parametrize(("format", "text", "beside", "calls"), READ)
def test_a_call_is_read_as_its_family_writes_it(format, text, beside, calls):
    content, found = parse_calls(text, format, SCHEMAS)
    assert content == beside
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in found] == calls
    assert all(call["type"] == "function" and isinstance(call["function"]["arguments"], str) for call in found)


TEXTS = [
    ("hermes", "42"),
    ("hermes", ""),
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"what": </tool_call>'),
    ("hermes", '<tool_call>{"name": "find", "arguments": "tea"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "find"}</tool_call>'),
    ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "buy", "arguments": {}} and more</tool_call>'),
    ("hermes", "<tool_call>{'name': 'buy', 'arguments': {}}</tool_call>"),
    ("hermes", '<tool_call>{"name": "buy", "arguments": {}}</tool_call><tool_call>oops</tool_call>'),
    ("hermes", '<tool_call>{"name": "buy", "arguments": {"x": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "buy", "arguments": {"x": 1e999}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "buy", "arguments": ' + '{"x": ' * 100_000),
    ("hermes", '<think>I could <tool_call>{"name": "buy", "arguments": {}}</tool_call>'),
    ("qwen-xml", "<tool_call><function=buy><parameter=x>1</function></tool_call>"),
    ("qwen-xml", '<tool_call>{"name": "buy", "arguments": {}}</tool_call>'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS] [{"name": "buy", "arguments": {}}] and more'),
    ("mistral", "[TOOL_CALLS][ARGS]{}"),
    ("llama", '{"name": "Ada", "age": 36}'),
    ("llama", 'So {"name": "buy", "parameters": {}}'),
    ("llama", "<|python_tag|>print(1)"),
    ("llama", "{}"),
    ("deepseek", DEEPSEEK.format("")),
    ("deepseek", DEEPSEEK.format(ONE_OF_DEEPSEEK.format("buy", "[]"))),
    ("deepseek", DEEPSEEK.format(ONE_OF_DEEPSEEK.format("buy", "{} {}"))),
    ("deepseek", DEEPSEEK.format(ONE_OF_DEEPSEEK.format("buy", "{}") + "and more")),
]


@pytest.mark.parametrize(("format", "text"), TEXTS, ids=[f"{format} {text[:60]}" for format, text in TEXTS])
def test_what_cannot_be_read_is_text(format, text):
    assert parse_calls(text, format, SCHEMAS) == (text, [])


values = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.lists(st.text(max_size=3), max_size=2)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "qwen-xml"])
@given(
    st.lists(
        st.tuples(st.sampled_from(["find", "buy", "grün"]), st.dictionaries(st.text(max_size=3), values, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
def test_what_is_written_is_read(format, calls):
    if any("<｜tool" in str(call) or "[TOOL_CALLS]" in str(call) for call in calls):
        return
    text = FORMATS[format].write([(name, json.dumps(arguments)) for name, arguments in calls])
    found = [
        (call["function"]["name"], json.loads(call["function"]["arguments"])) for call in parse_calls(text, format)[1]
    ]
    assert found == calls


@given(st.text(alphabet='<>{}[]"/:;,tool_callARGSfunction=pm1 \n', max_size=60), st.sampled_from(sorted(FORMATS)))
def test_no_text_breaks_a_reader(text, format):
    content, calls = parse_calls(text, format)
    assert calls or content == text


def test_ids_are_unlike_within_an_episode_and_as_mistral_wants_them():
    text = '<tool_call>{"name": "buy", "arguments": {}}</tool_call>' * 3
    ids = [call["id"] for turn in range(4) for call in parse_calls(text, "hermes", turn=turn)[1]]
    assert len(set(ids)) == len(ids) == 12
    assert all(len(id) == 9 and id.isalnum() for id in ids)
    assert call_id(1, 2) == ids[5]


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ('{{ \'<tool_call>\n{"name": "\' + name + \'", "arguments": \' }}', "hermes"),
        ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen-xml"),
        ("[TOOL_CALLS] [{% for call in calls %}", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ('<|start_header_id|>{"name": "{{ name }}", "parameters": {{ arguments }}', "llama"),
        ("<tool_call>{{ name }}<arg_key>", None),
        ("<|im_start|>{{ role }}", None),
        ("", None),
    ],
)
def test_a_chat_template_shows_its_convention(template, format):
    assert detect_format(template) == format


def test_special_tokens_show_it_where_there_is_no_template():
    assert detect_format("", ["<s>", "[TOOL_CALLS]"]) == "mistral"


# Tools in plain text

SAID = {"role": "assistant", "content": "I look.", "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"what": "tea"}'}}
]}  # fmt: skip


def test_the_system_tells_of_tools_or_the_user_where_there_is_none():
    asked = [{"role": "user", "content": "Where?"}]
    system, question = with_tools(asked, SCHEMAS)
    assert (system["role"], system["content"], question) == ("system", write_instructions(SCHEMAS), asked[0])
    (joined, _) = with_tools([{"role": "system", "content": "Be brief."}, *asked], SCHEMAS)
    assert joined["content"] == f"Be brief.\n\n{write_instructions(SCHEMAS)}"
    (user,) = with_tools(asked, SCHEMAS, role="user")
    assert user == {"role": "user", "content": f"{write_instructions(SCHEMAS)}\n\nWhere?"}


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_model_is_told_names_its_tools_and_how_they_are_called(format):
    told = write_instructions(SCHEMAS, format)
    assert json.dumps(SCHEMAS[0]) in told
    assert parse_calls(told, format)[1] == []  # it is not a call itself


def test_results_that_stand_together_are_one_message_with_what_the_user_says_then():
    results = [{"role": "tool", "tool_call_id": "1", "content": text} for text in ("a", "b")]
    said, answer = write_as_text([SAID, *results, {"role": "user", "content": "And?"}])
    assert said["content"] == 'I look.\n<tool_call>\n{"name": "find", "arguments": {"what": "tea"}}\n</tool_call>'
    assert "tool_calls" not in said
    a, b = ("<tool_response>\na\n</tool_response>", "<tool_response>\nb\n</tool_response>")
    assert answer == {"role": "user", "content": f"{a}\n{b}\nAnd?"}


def test_images_of_results_stay_what_they_are():
    picture = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    (shown, text) = write_as_text([{"role": "tool", "content": picture}, {"role": "tool", "content": "b"}])
    assert (shown, text["content"]) == ({"role": "user", "content": picture}, "<tool_response>\nb\n</tool_response>")


@pytest.mark.parametrize("arguments", ["{broken", "[1]", 3, None])
def test_calls_with_arguments_that_are_no_object_can_be_shown_all_the_same(arguments):
    said = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    (shown,) = write_as_text([said])
    (call,) = parse_calls(shown["content"], "hermes")[1]
    assert call["function"]["name"] == "f"
