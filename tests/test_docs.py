"""The docs are true: every file they show is written, every command they show is run, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from command_line import run_script

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:[^\n]*`([^`\n]+)`:\n\n)?```(\w+)\n(.*?)^```", re.S | re.M)
"""A block, its kind, and the file that the line before it names, as in "`rows.jsonl`:"."""
LINK = re.compile(r"\]\((?!http)([^)#]+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_examples_run(page, treetune, tmp_path, monkeypatch):
    """What a reader copies: the whole block, as it stands, into the file that is named."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)  # as in an active environment
    for caption, kind, body in BLOCK.findall(page.read_text()):
        named = re.match(r"# file: (\S+)\n", body)
        if name := named[1] if named else caption:
            (tmp_path / name).write_text(body)
        if kind == "console":
            for line in body.splitlines():
                assert line.startswith(("$ treetune ", "$ python ")), line
                _, program, *arguments = shlex.split(line)
                if program == "python":
                    result = run_script(tmp_path, tmp_path / arguments[0], arguments[1:])
                else:
                    result = treetune(*arguments)
                assert result.code == 0, f"{line}\n{result.out}{result.err}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_json_lines_hold_nothing_but_json(page):
    for caption, kind, body in BLOCK.findall(page.read_text()):
        if kind == "jsonl":
            assert caption.endswith(".jsonl"), f"no line before it names the file: {body}"
            assert all(isinstance(json.loads(line), dict) for line in body.splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_its_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_example_taskset_is_as_small_as_the_docs_say():
    assert len((ROOT / "src/treetune/builtin/reverse_text.py").read_text().splitlines()) <= 25


def test_every_key_of_a_dataset_task_is_explained():
    from treetune.datasets.config import DatasetConfig

    text = (ROOT / "docs/dataset-tasks.md").read_text()
    for key in DatasetConfig.__struct_fields__:
        assert key == "extra" or f"`{key}" in text, key


def test_the_paths_of_architecture_visit_each_module_once():
    section = (ROOT / "docs/architecture.md").read_text().partition("## Four paths")[2].partition("\n## ")[0]
    paths = [re.findall(r"^\d+\. `([\w/]+\.py)`", part, re.M) for part in section.split("\n**")[1:]]
    assert len(paths) == 4
    for path in paths:
        assert len(path) == len(set(path)) > 5
        for name in path:
            assert (ROOT / "src/treetune" / name).exists(), name


def test_the_modules_that_architecture_names_exist():
    text = (ROOT / "docs/architecture.md").read_text()
    named = re.findall(r"`(\w+\.py|\w+/)`", text.partition("## Contracts")[0])
    assert len(named) > 15
    for name in named:
        assert (ROOT / "src/treetune" / name).exists(), name


def table_of(contracts) -> str:
    lines = [
        "| id | what | ground truth | further keys | rewards | turns | runs code |",
        "|---|---|---|---|---|---|---|",
    ]
    for id, contract in sorted(contracts.items()):
        needs = "; ".join(f"`{key}`: {meaning}" for key, meaning in contract.needs.items())
        takes = " or ".join(contract.takes)
        code = "in a sandbox" if contract.sandbox else "-"
        cells = (f"`{id}`", contract.about, takes, needs or "-", contract.rewards, contract.max_turns, code)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def test_the_table_of_environments_is_the_codes_own():
    from treetune.builtin import ENVIRONMENTS
    from treetune.environment import contract_of

    contracts = {id: contract for id in ENVIRONMENTS if (contract := contract_of(id)) is not None}
    assert len(contracts) >= 5
    assert table_of(contracts) in (ROOT / "docs/environments.md").read_text()
