"""The documentation as a site: every page has its place in the navigation, every name its entry, and a reader's browser
asks nobody else for anything."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

import treetune

ROOT = Path(__file__).parents[1]


def load(name):
    """A module of docs/_site."""
    folder = str(ROOT / "docs/_site")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(folder)


class Tagless(yaml.SafeLoader):
    """The config names a function by a tag of Python's, which means nothing here."""


Tagless.add_multi_constructor("", lambda loader, suffix, node: None)


def pages_of(entry):
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [page for part in parts for page in pages_of(part)]


@pytest.fixture(scope="module")
def assembled(tmp_path_factory):
    """The pages, as the site is built from."""
    folder = tmp_path_factory.mktemp("assembled")
    load("assemble").assemble(folder / "docs")
    return folder


def test_every_page_has_its_place_in_the_navigation(assembled):
    config = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=Tagless)
    named = pages_of(config["nav"])
    pages = {path.relative_to(assembled / "docs").as_posix() for path in (assembled / "docs").rglob("*.md")}
    assert len(named) == len(set(named))
    assert set(named) == pages


def test_links_are_to_places_of_the_site(assembled):
    for path in (assembled / "docs").rglob("*.md"):
        for target in re.findall(r"\]\((?!\w+:|#)([^)#\s]+)", load("assemble").FENCE.sub("", path.read_text())):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_every_name_of_the_package_is_in_the_reference():
    told = set(re.findall(r"treetune\.(\w+)(?=[\[ ])", (ROOT / "docs/reference/api.md").read_text()))
    assert set(treetune.__all__) <= told


def test_every_verb_and_its_options_are_in_the_reference():
    from treetune.cli.app import VERBS

    text = load("reference").commands()
    for verb in VERBS:
        assert f"## treetune {verb}\n" in text
    assert "`-n, --num-tasks" in text


@pytest.mark.parametrize("page", ["configuration.md", "traces.md"])
def test_every_field_in_the_reference_is_explained(page):
    for kind, names in re.findall(r"made: (fields|members) (.*?) -->", (ROOT / "docs/reference" / page).read_text()):
        rows = getattr(load("reference"), kind)(*names.split()).splitlines()
        assert len(rows) > 2
        for row in rows:
            assert not row.startswith("|") or not row.endswith("|  |"), f"{names}: {row}"


class Addresses(HTMLParser):
    """What a browser fetches by itself to show a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        if tag == "link" and told.get("rel") not in ("canonical", "next", "prev", "alternate"):
            self.found.append(told.get("href") or "")
        elif tag in ("script", "img", "iframe", "source", "video"):
            self.found.append(told.get("src") or "")


@pytest.mark.slow
def test_it_is_built_without_a_warning_and_asks_nobody_else_for_anything(assembled):
    pytest.importorskip("zensical")
    config = (ROOT / "mkdocs.yml").read_text().replace("build/docs", "docs").replace("build/site", "site")
    (assembled / "mkdocs.yml").write_text(config.replace("paths: [src]", f"paths: [{ROOT / 'src'}]"))
    built = subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=assembled, capture_output=True)
    assert built.returncode == 0, built.stdout.decode() + built.stderr.decode()
    site = assembled / "site"
    assert len(list(site.rglob("index.html"))) > 25
    for page in site.rglob("*.html"):
        addresses = Addresses()
        addresses.feed(page.read_text())
        assert len(addresses.found) > 3
        assert not [one for one in addresses.found if re.match(r"(https?:)?//", one)], page
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*['\"]?(https?:)?//", style.read_text()), style
