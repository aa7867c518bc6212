"""What is released: the version of a tag, the files of the wheel, and what stands around the code."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def hatch(folder: Path, *arguments: object) -> str:
    command = [sys.executable, "-m", "hatchling", *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path) -> Path:
    """As much of this repository as its version depends on, with a history of its own."""
    folder = tmp_path / "clone"
    (folder / "src/treetune").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not there")
def test_the_version_is_the_tag(clone):
    assert hatch(clone, "version") == "0.1.0.dev0"  # a copy without history
    who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a"}

    def git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=clone, check=True, capture_output=True, env={**os.environ, **who})

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    assert re.fullmatch(r"0\.1(\.0)?\.dev\d+", hatch(clone, "version"))  # no tag yet
    git("tag", "v1.2.3")
    assert hatch(clone, "version") == "1.2.3"
    (clone / "README.md").write_text("changed")
    git("commit", "-am", "second")
    assert re.fullmatch(r"1\.2\.4\.dev1", hatch(clone, "version"))


def test_the_wheel_has_its_types_and_what_it_writes_and_serves(tmp_path):
    hatch(ROOT, "build", "-t", "wheel", "-d", tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {"treetune/py.typed", "treetune_verl/py.typed", "treetune/serve/http/page.html"} <= names
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {path.relative_to(ROOT / "src").as_posix() for path in files} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "benchmarks/"))]


def test_the_pythons_of_the_classifiers_are_those_that_a_release_is_tried_on():
    named = [line.rpartition(" ")[2] for line in PROJECT["classifiers"] if ":: Python :: 3." in line]
    workflow = yaml.safe_load((ROOT / ".github/workflows/publish.yml").read_text())
    assert workflow["jobs"]["try"]["strategy"]["matrix"]["python"] == named
    assert f"for release in {' '.join(named)};" in (ROOT / ".ci/run").read_text()


def test_a_release_is_published_without_a_secret():
    text = (ROOT / ".github/workflows/publish.yml").read_text()
    jobs = yaml.safe_load(text)["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "try"
    assert "secrets." not in text
    assert "password" not in text


def test_what_stands_around_the_code_can_be_read_and_names_nobody():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    forms = [*(ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"), ROOT / "CITATION.cff", ROOT / "SECURITY.md"]
    for form in forms:
        text = form.read_text()
        assert not re.search(r"https?://|\w@\w", text), form  # no address that nobody has
    for form in ("bug.yml", "idea.yml"):
        body = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE" / form).read_text())["body"]
        assert {field["type"] for field in body} <= {"textarea", "input", "markdown", "dropdown", "checkboxes"}


def test_the_changelog_keeps_its_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = set(re.findall(r"^### (.*)$", text, re.M))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    headings = re.findall(r"^## (.*)$", text, re.M)
    assert headings[0] == "[Unreleased]"
    for heading in headings[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading)
