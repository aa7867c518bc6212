"""`treetune validate` beside SkyRL's own loader and environments, and beside a script as people write it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import faults
import mutations
import venvs

pytestmark = pytest.mark.slow

VALIDATE = """
import json, sys
from treetune.formats.validation import validate
for path in json.load(open(sys.argv[1])):
    report = validate(path)
    print(json.dumps([path, report.ok, [finding.rule for finding in report.findings]]), flush=True)
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
    return venvs.venv(
        "skyrl",
        ["torch==2.13.0"],
        ["skyrl==0.3.0", "--no-deps"],
        ["skyrl-gym==0.4.0", "--no-deps"],
        ["datasets", "transformers", "loguru", "omegaconf", "ray[default]>=2.40"],
    )


def validated(paths: list[Path], folder: Path) -> dict[str, bool]:
    """Whether each file is valid; in a process of its own, which must neither crash nor hang."""
    asked = folder / "asked.json"
    asked.write_text(json.dumps([str(path) for path in paths]))
    done = subprocess.run(
        [sys.executable, "-c", VALIDATE, asked], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"after {done.stdout[-200:]}: {done.stderr[-2000:]}"
    return {path: ok for path, ok, _ in map(json.loads, done.stdout.splitlines())}


def loaded(paths: list[str], folder: Path) -> dict[str, str | None]:
    """What breaks each file in SkyRL's loader or environment, or None."""
    asked, answered = folder / "asked.json", folder / "answered.json"
    asked.write_text(json.dumps(paths))
    side = Path(__file__).with_name("loader_side.py")
    venvs.run(skyrl(), side, asked, answered, PYTHONPATH=str(side.parent), timeout=900)
    return dict(json.loads(answered.read_text()))


def test_a_file_that_breaks_the_loader_is_never_called_valid(tmp_path: Path) -> None:
    results = validated(mutations.harmful(tmp_path, 1000), tmp_path)
    assert len(results) == 1000
    called_valid = [path for path, ok in results.items() if ok]
    assert 100 < len(called_valid) < 300, "some changes do no harm, most do"
    broken = {path: why for path, why in loaded(called_valid, tmp_path).items() if why is not None}
    assert not broken


def test_changes_that_matter_to_nobody_are_no_alarm(tmp_path: Path) -> None:
    paths = mutations.neutral(tmp_path, 1000)
    results = validated(paths, tmp_path)
    assert [path for path, ok in results.items() if not ok] == []
    some = [str(path) for path in paths[:150]]
    assert {why for why in loaded(some, tmp_path).values()} == {None}, "the loader and the environment take them"


def test_the_table_in_the_docs_is_what_a_script_finds(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "data-format.md").read_text()
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
