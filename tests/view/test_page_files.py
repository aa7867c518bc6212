"""The files of the viewer's page: small, and in the form that an export can join into one file."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

PAGE = Path(str(resources.files("treetune.view"))) / "page"
MODULES = sorted(PAGE.glob("*.js"))


def test_all_assets_together_are_small():
    sizes = {file.name: file.stat().st_size for file in PAGE.rglob("*") if file.is_file()}
    assert sum(sizes.values()) < 450_000


def test_every_library_has_its_notice():
    notices = (PAGE / "vendor" / "NOTICES.txt").read_text()
    libraries = [file.name for file in (PAGE / "vendor").iterdir() if ".js" in file.suffixes]
    assert len(libraries) == 6
    assert [name for name in libraries if name not in notices] == []


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.name)
def test_a_module_can_be_joined_with_the_others(module):
    text = module.read_text()
    for line in re.findall(r"^import.*$", text, re.MULTILINE):
        name = re.fullmatch(r'import \{ [\w, ]+ \} from "\./([\w./-]+\.js)";', line)
        assert name, line
        assert (PAGE / name[1]).is_file()
    assert not re.search(r"\bexport default\b|\bexport \{|\bimport\(|^await ", text, re.MULTILINE)
    assert text.startswith("// ")
    assert len(text.splitlines()) <= 250


def test_no_markup_is_ever_made_of_text():
    made = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(|new Function|dangerously"
    assert [module.name for module in MODULES if re.search(made, module.read_text())] == []


def test_the_page_itself_has_no_script_or_style_of_its_own():
    text = (PAGE / "index.html").read_text()
    assert not re.search(r"<script>|<style|style=| on\w+=", text)
