"""Files and variables that the code of a dataset task reads by itself: the cache does not know them, and says so."""

from __future__ import annotations

import json
import warnings

import pytest

from treetune.data.datasets.task_lists import load_task

READS = """
import json, os
from pathlib import Path
from treetune.config.structs import FileName
from treetune.data.datasets.config import DatasetConfig
from treetune_verl.tasks import Task as Base

class Config(DatasetConfig, frozen=True, kw_only=True):
    table: FileName = "table.json"
    word: str = ""

class Task(Base):
    config_type = Config

    def _make_map_fn(self):
        make = super()._make_map_fn()
        word = WORD
        def fn(row, index):
            made = make(row, index)
            made["extra_info"]["word"] = word
            return made
        return fn
"""


@pytest.fixture
def build_twice(tmp_path, monkeypatch):
    """What the rows say, then after a change of the file and the variable, and the warnings of that second time."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)

    def build(reading, **keys):
        (tmp_path / "rows.jsonl").write_text('{"q": "a"}\n')
        (tmp_path / "reads.py").write_text(READS.replace("WORD", reading))
        node = {
            "custom_cls": {"path": "reads.py"},
            "loading_params": {"args": ["json"], "kwargs": {"data_files": "rows.jsonl", "split": "train"}},
            "prompt_template": "{q}",
        }
        words = []
        for word in ("old", "new"):
            (tmp_path / ("table.json" if keys else "other.json")).write_text(json.dumps(word))
            monkeypatch.setenv("THE_WORD", word)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                given = {name: value.format(word=word) for name, value in keys.items()}
                words.append(load_task({**node, **given})[0].extra_info["word"])
        return words, [str(warning.message) for warning in caught if warning.category is UserWarning]

    return build


@pytest.mark.parametrize(
    ("reading", "named"),
    [
        ('json.load(open("other.json"))', "the file 'other.json'"),
        ('json.loads(Path("other.json").read_text())', "the file 'other.json'"),
        ('os.environ["THE_WORD"]', "the variable 'THE_WORD'"),
        ('os.environ.get("THE_WORD")', "the variable 'THE_WORD'"),
        ('os.getenv("THE_WORD", "")', "the variable 'THE_WORD'"),
    ],
)
def test_a_hit_whose_code_reads_by_itself_is_warned_of(build_twice, reading, named):
    words, warned = build_twice(reading)
    assert words == ["old", "old"]
    (message,) = warned
    assert f"reads.py, line 17, reads {named}" in message
    assert "treetune.config.structs.FileName" in message


@pytest.mark.parametrize(
    ("reading", "keys"),
    [
        ("json.load(open(self.config.table))", {"table": "table.json"}),
        ("open('log.txt', 'w').close() or self.config.word", {"word": "{word}"}),
    ],
)
def test_what_the_config_names_is_noticed_without_a_warning(build_twice, reading, keys):
    assert build_twice(reading, **keys) == (["old", "new"], [])
