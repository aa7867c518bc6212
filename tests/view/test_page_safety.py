"""The viewer does no harm and keeps nobody out: hostile texts, requests, narrow screens, screen readers, live runs, and
what is exported, in a real browser."""

from __future__ import annotations

import json
import re

import pytest
from view_page import Page, view
from viewed_run import HOSTILE, make_viewed_run, viewed_traces

from treetune.core.trace import encode_trace

pytestmark = pytest.mark.slow
VIEWS = ("/", "/run/0", "/run/0/groups", "/run/0/rollouts", "/run/0/suspicious", "/run/0/rescore", "/run/0/at/8",
         "/run/0/at/3/tokens", "/compare/0,1")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view") / "runs"
    make_viewed_run(folder / "base", tasks=60)
    make_viewed_run(folder / "later", tasks=60, seed=1, shift=0.1)
    return folder


@pytest.fixture(scope="module")
def address(folder):
    with view(folder.name, folder=folder.parent) as address:
        yield address


@pytest.fixture
def page(browser, address):
    with Page(browser, address) as page:
        yield page


def read_last(folder):
    """What each rollout said last."""
    traces = [json.loads(line) for line in (folder / "base" / "traces.jsonl").open()]
    return [((each["turns"] or [{}])[-1].get("message") or {}).get("content", "") for each in traces]


def settle(page):
    """Until nothing is awaited any more."""
    page.waits(lambda: not page.all("main .waits:not([role=row])"), "end of waiting")


def test_text_of_models_is_only_ever_text(page, folder):
    hostile = [at for at, text in enumerate(read_last(folder)) if any(each[:40] in text for each in HOSTILE)]
    assert len(hostile) >= len(HOSTILE)
    for at in hostile[: 2 * len(HOSTILE)]:
        for way in ("", "?md=1"):
            page.go(f"/run/0/at/{at}{way}", until=".facts .command")
            page.waits(lambda way=way: not way or page.all(".markdown *, .message pre"), "the text")
            page.click(".more") if page.all(".more") and not way else None
    assert page.runs("return window.hacked ?? null") is None
    assert page.runs("return document.querySelectorAll('iframe, base, object, main a[href^=javascript]').length") == 0
    assert page.runs("return [...document.images].every(image => image.src.startsWith('data:image/'))")
    assert page.complaints() == []


def test_hostile_texts_are_shown_as_they_are(page, folder):
    said = read_last(folder)

    def at_which(part):
        return next(at for at, text in enumerate(said) if part in text)

    page.go(f"/run/0/at/{at_which('window.hacked = 1')}", until=".message")
    assert "<script>window.hacked = 1</script>" in page.text(".chat")
    page.go(f"/run/0/at/{at_which('abcdefghij' * 30)}", until=".more")
    assert page.runs("return document.getElementById('main').scrollWidth <= innerWidth")
    page.go(f"/run/0/at/{at_which(chr(0x202E))}", until=".message")
    assert "⟨U+202E⟩" in page.text(".chat")  # what would turn the line around is shown, not obeyed
    page.go(f"/run/0/at/{at_which(chr(0x1B))}", until=".message")
    assert "\u241b[31mred" in page.text(".chat")


def test_scripts_of_others_do_not_run(page):
    page.runs("const script = document.createElement('script'); script.textContent = 'window.hacked = 7';"
              "document.body.append(script)")  # fmt: skip
    page.runs("const image = new Image(); image.setAttribute('onerror', 'window.hacked = 8'); image.src = 'data:,';"
              "document.body.append(image)")  # fmt: skip
    assert page.runs("return window.hacked ?? null") is None
    assert any("Content Security Policy" in line for line in page.complaints())


def test_no_request_leaves_the_machine_and_nothing_is_complained_of(page, address):
    for place in VIEWS:
        page.go(place)
        settle(page)
    page.go("/run/0/at/1?md=1", until=".markdown")
    asked = page.asked()
    assert len(asked) > 30
    assert [each for each in asked if not each.startswith(address)] == []
    assert page.complaints() == []


def test_a_token_is_taken_from_the_address_and_leaves_it(browser, folder):
    with view(folder, "--host", "0.0.0.0") as address:
        token = re.search(r"#token=([\w-]+)", address)[1]
        address = address.replace("0.0.0.0", "127.0.0.1")
        with Page(browser, address) as page:
            page.sees("main", "base")
            assert token not in page.runs("return location.href")
            page.browser.refresh()
            page.sees("main", "base")
            page.runs("sessionStorage.clear()")
            page.browser.refresh()
            page.type("input[name=token]", f"{token}\n")
            page.sees("main", "base")


# Keys, screens, readers


def test_keys_lead_everywhere(page):
    from selenium.webdriver import Keys

    page.go("/run/0", until=".figures")
    for key, place in (("g", "groups"), ("a", "rollouts"), ("s", "suspicious"), ("o", "")):
        page.press(key)
        page.waits(lambda place=place: page.hash == f"#/run/0{'/' if place else ''}{place}", f"{place} by {key}")
    page.press("?")
    page.sees("dialog[open]", "go to the query|groups")
    page.press(Keys.ESCAPE)
    page.waits(lambda: not page.all("dialog[open]"), "the keys gone")
    page.press("g")
    page.waits(lambda: page.all("#groups .cell"), "groups")
    page.press("/")
    assert page.runs("return document.activeElement.getAttribute('aria-label')") == "Query"
    page.press(Keys.ESCAPE, Keys.ESCAPE, "r")
    page.waits(lambda: page.hash == "#/", "runs")


def test_dark_and_light_follow_the_system_and_a_switch(page):
    def back():
        return page.runs("return getComputedStyle(document.body).backgroundColor")

    page.go("/run/0", until=".figures")
    light = back()
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.waits(lambda: back() != light, "dark")
    page.keep("view-run")
    page.click("button[aria-label^=Colours]")
    page.waits(lambda: back() == light, "light by the switch")
    page.runs("localStorage.clear()")


@pytest.mark.parametrize("place", VIEWS)
def test_a_narrow_screen_shows_each_view_without_scrolling_aside(page, place):
    page.resize(390, 844)
    page.go(place)
    settle(page)
    assert page.runs("return document.documentElement.scrollWidth") <= 390
    assert page.runs("return document.getElementById('main').scrollWidth") <= 390
    small = page.runs(
        "return [...document.querySelectorAll('main button, main a')].filter(each => each.checkVisibility() &&"
        " each.getBoundingClientRect().right > innerWidth + 1 && !each.closest('.scrolls, .chips, .heads')).map(each =>"
        " each.outerHTML.slice(0, 80))"
    )
    assert small == []


@pytest.mark.parametrize("place", VIEWS)
def test_a_screen_reader_finds_its_way(page, place):
    page.go(place)
    settle(page)
    tree = page.browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    nodes = [node for node in tree if not node.get("ignored")]

    def name(node):
        return (node.get("name") or {}).get("value", "").strip()

    def role(node):
        return (node.get("role") or {}).get("value")

    roles = [role(node) for node in nodes]
    assert roles.count("main") == 1
    assert roles.count("banner") == 1
    assert page.runs("return document.querySelectorAll('h1').length") >= 1
    wanted = {"button", "link", "textbox", "combobox", "checkbox", "grid", "gridcell", "searchbox", "image", "tab"}
    nameless = [role(node) for node in nodes if role(node) in wanted - {"gridcell"} and not name(node)]
    assert nameless == []


def test_what_is_found_is_announced(page):
    page.go("/run/0/groups?q=mixed", until="#groups .cell")
    page.waits(lambda: re.search(r"\d+ groups", page.text("#voice") or ""), "the number, in the live region")


# Runs that are still being written


def test_a_live_run_is_followed(browser, tmp_path):
    traces = list(viewed_traces(12, 4))
    make_viewed_run(tmp_path / "live", tasks=4, rollouts=4, finished=False)
    with view(tmp_path / "live") as address:
        page = Page(browser, address)
        page.sees(".figures", r"Rollouts\s+16 ")  # one run alone is opened at once
        page.go("/run/0/groups", until="#groups .cell")
        page.sees(".under", "^4 groups")
        page.click("#groups .task")
        with open(tmp_path / "live" / "traces.jsonl", "ab") as file:
            file.writelines(encode_trace(trace) + b"\n" for trace in traces[16:])
        page.sees(".under", "^12 groups")
        page.go("/run/0", until=".figures")
        page.sees(".figures", r"Rollouts\s+48 ")
    page.sees(".top", "does not answer")


# The file that is exported


def test_an_exported_file_opens_from_disk(browser, folder, tmp_path):
    import subprocess
    import sys

    file = tmp_path / "report.html"
    command = [sys.executable, "-m", "treetune", "view", str(folder), "--export", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    page = Page(browser, file.as_uri())
    page.go("/run/0/groups", until="#groups .cell")
    page.sees(".under", "60 groups")
    page.click(".heads button", "Task")
    page.waits(lambda: page.text('#groups [aria-rowindex="2"] .task') == "0", "sorted by task")
    page.click("#groups .cell")
    page.sees("h1#title", "Task 0 rollout 0")
    page.press("m")
    page.waits(lambda: page.all(".markdown"), "markdown")
    page.go("/run/0", until=".timeline canvas, .u-over")
    page.go("/run/0/groups?q=mixed", until=".flag.mixed")
    page.waits(lambda: set(page.texts("#groups .flag")) == {"mixed"}, "mixed groups")
    page.go("/run/0/groups?q=reward<1")
    page.sees("main", "treetune view")
    page.go("/compare/0,1", until=".verdict")
    page.waits(lambda: len(page.all(".side pre")) == 2, "answers side by side")
    assert not [each for each in page.asked() if each.startswith("http")]
    assert page.complaints() == []
