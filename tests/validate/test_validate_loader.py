"""`treetune validate` beside SkyRL's own loader and environments, and beside a script as people write it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import faults
import mutations
import pytest
import venvs
from packing import MANY

from treetune import Task
from treetune.data.validate import write_tasks

pytestmark = pytest.mark.slow

VALIDATE = """
import json, sys
from treetune.data.validate import validate
for paths in json.load(open(sys.argv[1])):
    report = validate(paths)
    print(json.dumps([paths, report.ok, [finding.rule for finding in report.findings]]), flush=True)
"""

LENGTHS = """
import json, sys, tempfile
import datasets
from loguru import logger
from skyrl.train.dataset import PromptDataset
from tiny_model import make_tokenizer
from treetune.data.validate import validate
from treetune.data.validate.prompt_rules import LengthCheck

logger.remove()
datasets.disable_progress_bars()
datasets.config.HF_DATASETS_CACHE = tempfile.mkdtemp()
tokenizer, path = make_tokenizer(), sys.argv[1]
report = validate(path, lengths=LengthCheck(tokenizer, 100))
counts = {finding.rule: finding.count for finding in report.findings}
loaded = PromptDataset(path, tokenizer, max_prompt_length=100, num_workers=1)
loader = report.rows - len(loaded)
print(json.dumps({"dropped": counts["prompt-too-long"], "loader": loader, "special": counts["special-tokens"]}))
"""

SCRIPT = """
import sys, tempfile
import datasets
from datasets import load_dataset

datasets.disable_progress_bars()

def validate_dataset(path):
    kind = "parquet" if path.endswith(".parquet") else "json"
    ds = load_dataset(kind, data_files=path, cache_dir=tempfile.mkdtemp())["train"]
    errors = []
    for i, item in enumerate(ds):
        for field in ("prompt", "env_class", "reward_spec"):
            if field not in item:
                errors.append(f"Row {i}: Missing {field!r}")
        if "prompt" in item:
            if not isinstance(item["prompt"], list):
                errors.append(f"Row {i}: 'prompt' must be a list")
            elif not any(m.get("role") == "user" for m in item["prompt"]):
                errors.append(f"Row {i}: No 'user' message in prompt")
        if "reward_spec" in item and "ground_truth" not in item["reward_spec"]:
            errors.append(f"Row {i}: Missing 'ground_truth' in reward_spec")
    return errors

for path in sys.argv[1:]:
    try:
        errors = validate_dataset(path)
        print("found" if errors else "says valid")
    except Exception as error:
        print("crashes")
"""
"""The checks of a validation script that SkyRL users copy, on JSON files too."""


def skyrl() -> Path:
    # As in test_skyrl: one environment serves both.
    return venvs.venv(*venvs.SKYRL)


FILES = 1000 if MANY else 400
Group = tuple[str, ...]
"""Files that are loaded together."""


def groups(paths: Sequence[Path | Sequence[Path]]) -> list[Group]:
    return [tuple(map(str, [path] if isinstance(path, Path) else path)) for path in paths]


def validated(asked: list[Group], folder: Path) -> dict[Group, bool]:
    """Whether each is valid; in a process of its own, which must neither crash nor hang."""
    request = folder / "asked.json"
    request.write_text(json.dumps(asked))
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, request], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"after {done.stdout[-200:]}: {done.stderr[-2000:]}"
    return {tuple(paths): ok for paths, ok, _ in map(json.loads, done.stdout.splitlines())}


def broken(asked: list[Group], folder: Path) -> dict[Group, str]:
    """What breaks in SkyRL's loader or environment."""
    request, answer = folder / "asked.json", folder / "answered.json"
    request.write_text(json.dumps(asked))
    side = Path(__file__).parents[1] / "support" / "loader_side.py"
    venvs.run(skyrl(), side, request, answer, PYTHONPATH=str(side.parent), timeout=1500)
    answers = dict(zip(asked, json.loads(answer.read_text()), strict=True))
    return {paths: why for paths, why in answers.items() if why is not None}


def test_a_file_that_breaks_the_loader_is_never_called_valid(tmp_path: Path) -> None:
    results = validated(groups(mutations.harmful(tmp_path, FILES)), tmp_path)
    assert len(results) == FILES
    called_valid = [paths for paths, ok in results.items() if ok]
    assert 0.1 < len(called_valid) / FILES < 0.3, "some changes do no harm, most do"
    assert broken(called_valid, tmp_path) == {}


def test_changes_that_matter_to_nobody_are_no_alarm(tmp_path: Path) -> None:
    asked = groups(mutations.neutral(tmp_path, FILES))
    assert [paths for paths, ok in validated(asked, tmp_path).items() if not ok] == []
    assert broken(asked[: FILES // 5], tmp_path) == {}, "the loader and the environment take them"


def test_files_go_together_where_the_loader_puts_them_together(tmp_path: Path) -> None:
    results = validated(groups(mutations.together(tmp_path, 300)), tmp_path)
    apart = [paths for paths, ok in results.items() if not ok]
    assert 50 < len(apart) < 250
    assert sorted(broken(list(results), tmp_path)) == sorted(apart)


def test_environments_with_ground_truths_of_two_types_are_mixed_in_one_file(tmp_path: Path) -> None:
    numbers = [Task(prompt=f"{n} + 0?", env_class="gsm8k", reward_spec={"ground_truth": n}) for n in range(3)]
    names = [Task(prompt=f"{n}?", env_class="search", reward_spec={"ground_truth": ["007", "é"]}) for n in range(3)]
    apart = []
    for name, tasks in (("gsm8k", numbers), ("search", names)):
        apart.append(tmp_path / f"{name}.parquet")
        write_tasks(tasks, apart[-1], "skyrl")
    write_tasks([*numbers, *names], tmp_path / "mixed.parquet", "skyrl")
    asked = groups([apart, tmp_path / "mixed.parquet"])
    assert list(validated(asked, tmp_path).values()) == [False, True]
    assert list(broken(asked, tmp_path)) == asked[:1]


def test_prompts_are_as_long_as_the_loader_says(tmp_path: Path) -> None:
    rows = [
        faults.row(number, prompt=faults.user("é<|im_end|>" * number + "x" * (number % 7))) for number in range(1, 60)
    ]
    path = str(faults.parquet(tmp_path / "a", rows))
    counted = json.loads(venvs.run(skyrl(), "-c", LENGTHS, path, PYTHONPATH=str(Path(__file__).parents[1] / "support")))
    assert counted["dropped"] == counted["loader"]
    assert 10 < counted["dropped"] < 50
    assert counted["special"] == len(rows)


def test_the_table_in_the_docs_is_what_a_script_finds(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "data-format.md").read_text()
    listed = dict(re.findall(r"^\| `([a-z-]+)` \|.*\| ([a-z ]+) \|$", text, re.MULTILINE))
    files = {rule: faults.files(rule, tmp_path) for rule in faults.FAULTS}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *(file for made in files.values() for file in made)],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
    )
    said = iter(done.stdout.split("\n"))
    found = {rule: " and ".join(dict.fromkeys(next(said) for _ in made)) for rule, made in files.items()}
    assert {rule: listed.get(rule) for rule in found} == found
