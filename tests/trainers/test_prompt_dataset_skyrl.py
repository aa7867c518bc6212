"""PromptDataset beside the real SkyRL, and its lengths beside real tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sides
import venvs
from packing import MANY
from tokenizers_side import BOUNDED, TOKENIZERS

pytestmark = pytest.mark.slow

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(scope="module")
def lengths() -> dict[str, Any]:
    venvs.smollm2()
    prompts = 60 if MANY else 5
    side = SUPPORT / "tokenizers_side.py"
    return json.loads(venvs.run(venvs.venv(*venvs.MODELS), side, 1, prompts, *TOKENIZERS, timeout=1800))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_lengths_are_the_tokenizers_own(name, lengths):
    found = lengths[name]
    assert found["wrong"] == 0, found["first"]
    assert found["bounded"] == (list(BOUNDED[name]) if BOUNDED[name] else None)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Asks `skyrl_side.py`."""
    folder = tmp_path_factory.mktemp("program")
    venvs.run(venvs.venv(*venvs.SKYRL), SUPPORT / "tiny_model.py", folder / "model")
    with sides.open_side(venvs.SKYRL, "skyrl_side.py", folder, HF_HOME=str(folder / "library")) as program:
        yield lambda what, *files: program(what, request={"model": "model", "files": list(map(str, files))})


@pytest.fixture
def files(gsm8k, tmp_path) -> list[Path]:
    rows = []
    for number, line in enumerate((gsm8k / "train.jsonl").read_text().splitlines()[:300]):
        read = json.loads(line)
        content = f"{read['question']} Put it after ####."
        messages = [{"role": "user", "content": content}]
        if number % 3 == 0:
            messages.insert(0, {"role": "system", "content": "You are a tutor."})
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": messages,
                "env_class": "gsm8k",
                "reward_spec": {"method": "rule", "ground_truth": read["answer"].rpartition("#### ")[2]},
                "extra_info": {"index": number, "split": "train", "hint": "none" if number % 2 else None},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows[:200]), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows[200:]), tmp_path / "b.parquet")
    return [tmp_path / "a.parquet", tmp_path / "b.parquet"]


def test_it_keeps_the_rows_that_skyrl_keeps(ask, files):
    kept = ask("kept", *files)
    for ours, theirs, differ in kept.values():
        assert ours == theirs
        assert differ == 0
    assert 0 < kept["200"][0] < kept["300"][0] <= 300


def test_a_folder_is_the_split_that_skyrl_takes(ask, files, tmp_path):
    folder = tmp_path / "both"
    folder.mkdir()
    table = pa.concat_tables([pq.read_table(file) for file in files])
    of_test = [number for number in range(300) if number % 4 == 0]
    pq.write_table(table.take([number for number in range(300) if number % 4]), folder / "train.parquet")
    pq.write_table(table.take(of_test), folder / "test.parquet")
    for source, rows in ((str(folder), 225), (f"{folder}:test", 75)):
        kept = ask("kept", source)
        assert kept["1000"][0] == rows
        for ours, theirs, differ in kept.values():
            assert ours == theirs
            assert differ == 0


def test_skyrls_trainer_loads_and_resumes_it(ask, files):
    found = ask("loader", *files)
    assert found["batches"] == 18
    assert found["keys"] == ["env_class", "env_extras", "prompt", "uid"]
    assert found["uids"] == 18 * 16
    assert found["resumed"]
    assert found["as_theirs"]
    assert found["shape"] == [16, 1000]
    assert found["types"] == ["torch.int64", "torch.int64"]
    assert all(found["decoded"])
    assert found["padded_left"]


def test_a_bad_prompt_has_a_place_here(ask, tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "1 + 1?"}], "env_class": "gsm8k"} for _ in range(50)]
    rows[37]["prompt"] = [{"role": "user"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = ask("faults", tmp_path / "a.jsonl")
    assert "a.jsonl, line 38: message 0 (user) has no content" in told["ours"]
    assert "38" not in told["theirs"].replace(str(tmp_path), "")
