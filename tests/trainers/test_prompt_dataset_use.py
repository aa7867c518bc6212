"""PromptDataset as somebody new to it uses it: files that move, replaced methods, arguments that are wrong."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from raising import raises_code
from word_tokenizer import WordTokenizer

from treetune.data.rows import read_rows
from treetune.data.rows.prompt_lengths import PromptTokens
from treetune.errors import TreetuneError, UsageError
from treetune.trainers.skyrl import PromptDataset

ROWS = [
    {
        "prompt": [{"role": "user", "content": "a " * (number % 7 + 1)}],
        "env_class": "gsm8k",
        "reward_spec": {"ground_truth": str(number)},
    }
    for number in range(20)
]


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def made(source: Any, tokenizer: Any = None, limit: Any = 8, **options: Any) -> PromptDataset:
    return PromptDataset(source, tokenizer or WordTokenizer(), limit, **{"quiet": True, **options})


def test_the_report_of_a_moved_file_names_where_it_is_now(source, tmp_path):
    before = made([source, source]).report
    moved = shutil.copy(source, tmp_path / "moved.jsonl")
    after = made([source, moved]).report
    assert after.cached
    assert [one.place for one in before.first[:8]] == [one.place for one in after.first[:8]]
    assert [one.place for one in after.first[8:]] == [f"{moved}, line 5", f"{moved}, line 6"]
    assert [file.source for file in after.files] == [str(source), str(moved)]


def test_what_is_no_file_of_rows_is_none_though_the_same_bytes_were_under_another_ending(tmp_path, source):
    array = tmp_path / "array.json"
    array.write_text(json.dumps(ROWS))
    assert len(list(read_rows(array))) == made(array, limit=100).report.rows == 20
    with pytest.raises(TreetuneError, match=r"array.jsonl, line 1"):
        made(shutil.copy(array, tmp_path / "array.jsonl"), limit=100)


def test_a_method_that_was_replaced_in_a_tokenizer_is_noticed(source):
    """As trainers do to fix arguments of the template: no file of the tokenizer tells of it."""
    assert len(made(source)) == 12
    tokenizer = WordTokenizer()
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, shout=True)
    loud = made(source, tokenizer)
    assert len(loud) == 9
    assert not loud.report.cached
    assert PromptTokens(tokenizer).identity() is None


class Verbose(WordTokenizer):
    """Its template is its base's."""


def test_the_code_of_a_tokenizers_bases_counts(monkeypatch):
    before = PromptTokens(Verbose()).identity()
    assert before == PromptTokens(Verbose()).identity()
    read = Path.read_bytes
    monkeypatch.setattr(
        Path, "read_bytes", lambda self: read(self) + b"#" * (self.name == "word_tokenizer.py"), raising=True
    )
    assert before is not None
    assert PromptTokens(Verbose()).identity() != before


@pytest.mark.parametrize("wrong", [None, 5, "", [""], [None]])
def test_what_names_no_file_is_told(wrong, source):
    with pytest.raises(UsageError, match="does not name a file"):
        made(wrong)


def test_wrong_arguments_are_told_at_once(source):
    with raises_code("usage", "max_prompt_length"):
        made(source, limit=True)
    with raises_code("usage", "num_workers"):
        made(source, num_workers=None)
    with pytest.raises(UsageError, match="a dict is not a tokenizer"):
        made(source, {"vocab": []})
    with pytest.raises(TreetuneError, match=r"has no prompt under 'messages'; its columns: prompt, env_class"):
        made(source, prompt_key="messages")
