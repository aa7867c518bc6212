"""The page at `/`: a person plays an episode by hand, in a real browser (Debian: `chromium`, `chromium-driver`)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import urllib.request
from contextlib import contextmanager
from importlib import resources

import pytest
from serve_process import serve

from treetune.serve.host import Scored
from treetune.serve.metrics import Metrics

TROUBLE = """
from treetune import Environment, Observation, Step, Task, Taskset

EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
PIXEL = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7"


class Talks(Environment):
    def start(self):
        return [{"role": "system", "content": EVIL}, {"role": EVIL, "content": [{"type": "text", "text": EVIL}]}]

    def step(self, action):
        if action.text == "break":
            raise ValueError(EVIL)
        if action.text == "picture":
            return Step(Observation("image", PIXEL), reward=0.25)
        if action.text == "odd":
            return Step(Observation("messages", [None, "oddity"]), reward=0.1)
        if action.text == "ls":
            return Step("total 2\\nname      size\\na.txt       12\\nlong.txt  3456 " + "x" * 300)
        if action.text == "prose":
            return Step("First one line.\\nThen another one.")
        if action.text == "json":
            return Step(Observation("json", {"key": [1, None, EVIL]}))
        return Step(f"{action.type}: {action.text}", info={"note": EVIL}, done=action.text == "stop")


class Trouble(Taskset):
    def load_tasks(self):
        yield from [Task(prompt="x", data_source=EVIL)] * 3

    def environment(self, task):
        return Talks(task)
"""


class Page:
    """What a person does and sees."""

    def __init__(self, browser, url):
        self.browser, self.url = browser, url
        browser.set_window_size(900, 900)
        browser.get(url)
        browser.get_log("browser")  # what was said before is not ours
        self.sees("health", r"episodes? live|no answer")

    def at(self, id):
        return self.browser.find_element("id", id)

    def sees(self, id, pattern):
        """Waits until the text of an element has the pattern."""
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.browser, 30, poll_frequency=0.05).until(
            lambda _: re.search(pattern, self.at(id).text, re.S), f"{pattern!r} in {self.at(id).text!r}"
        )
        return self.at(id).text

    def start(self, index=""):
        self.at("index").clear()
        self.at("index").send_keys(str(index))
        self.at("begin").click()

    def send(self, text):
        self.at("action").send_keys(text, "\n")

    def runs(self, script):
        return self.browser.execute_script(script)

    def complaints(self):
        return [line["message"] for line in self.browser.get_log("browser")]


@contextmanager
def opened(browser, folder, *arguments):
    with serve(folder, *arguments, "--port", "0", "--drain", "0") as server:
        page = Page(browser, server.report["http"])
        page.server = server
        yield page
        browser.get("about:blank")  # a page still asks a server that has ended, and complains


def post(url, what, body):
    request = urllib.request.Request(
        f"{url}/api/episode/{what}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def answer(question):
    a, b = re.search(r"What is (\d+) \+ (\d+)\?", question).groups()
    return int(a) + int(b)


@pytest.mark.slow
def test_a_right_answer_and_a_wrong_one(browser, tmp_path):
    with opened(browser, tmp_path, "arithmetic") as page:
        assert page.sees("name", "arithmetic")
        page.sees("about", "endless · the next index is 0")
        assert not page.at("step").is_displayed()
        assert not page.at("token-form").is_displayed()
        page.start()
        question = page.sees("log", r"task 0.*What is")
        page.sees("health", "^1 episode live")
        page.send(str(answer(question)))
        shown = page.sees("log", "done after 1 turn, total 1")
        assert "reward 1" in shown
        assert "\nsuccess" in shown
        assert not page.at("step").is_displayed()
        page.sees("health", "^0 episodes live")
        page.sees("about", "the next index is 1")

        page.start(7)
        question = page.sees("log", r"task 7.*What is")
        page.send(str(answer(question) + 1))
        shown = page.sees("log", "done after 1 turn, total 0")
        assert "reward 0" in shown
        assert "no success" in shown
        page.sees("about", "the next index is 1")  # an index moves no cursor
        page.at("index").clear()
        page.browser.find_element("css selector", "#log button").click()  # start another
        page.sees("log", r"task 1\b.*What is")
        assert page.complaints() == []


@pytest.mark.slow
def test_a_token_is_asked_for_where_one_is_needed(browser, tmp_path):
    with opened(browser, tmp_path, "arithmetic", "--token", "abc") as page:
        page.sees("about", "401: the token is missing or wrong")
        page.at("token").send_keys("wrong\n")
        page.start(0)
        page.sees("log", "401: the token is missing or wrong")
        assert page.at("token-form").is_displayed()
        page.at("token").clear()
        page.at("token").send_keys("abc\n")
        page.sees("name", "arithmetic")
        assert not page.at("token-form").is_displayed()
        page.start(0)
        page.send(str(answer(page.sees("log", "What is"))))
        page.sees("log", "\nsuccess")
        assert "abc" not in page.browser.page_source


@pytest.mark.slow
def test_what_comes_from_a_task_is_shown_and_never_run(browser, tmp_path):
    (tmp_path / "trouble.py").write_text(TROUBLE)
    with opened(browser, tmp_path, "trouble.py:Trouble") as page:
        page.start(0)
        shown = page.sees("log", "task 0")
        assert shown.count("<script>window.hacked = 1</script>") == 3  # the source, a role and its content
        page.browser.find_element("css selector", "#log summary").click()  # the system prompt, which is folded
        assert page.sees("log", "system prompt").count("<script>window.hacked = 1</script>") == 4
        page.send("json")
        page.sees("log", r'"key": \[\s+1,\s+null,\s+"<script>')
        page.send("hello")
        page.sees("log", "text: hello")
        page.browser.find_elements("tag name", "summary")[-1].click()
        page.sees("log", r'"note": "<script>')
        page.send("break")
        page.sees("log", r"500: ValueError: <script>|ValueError.*<script>")
        assert not page.at("step").is_displayed()
        assert page.runs("return window.hacked") is None
        assert page.runs("return document.querySelectorAll('#log img, #log script').length") == 0


@pytest.mark.slow
def test_pictures_json_and_several_turns(browser, tmp_path):
    (tmp_path / "trouble.py").write_text(TROUBLE)
    with opened(browser, tmp_path, "trouble.py:Trouble") as page:
        page.start(1)
        page.sees("log", "task 1")
        page.send("picture")
        page.sees("log", "reward 0.25")
        assert (
            page.runs("const i = document.querySelector('#log img'); return i.decode().then(() => i.naturalWidth)") == 1
        )
        page.at("kind").send_keys("json")
        page.send('{"tool"')
        page.sees("log", "JSON")
        page.at("action").clear()
        page.send('{"tool": "x"}')
        page.sees("log", r"json: .*tool")
        page.at("kind").send_keys("text")
        page.send("stop")
        page.sees("log", "done after 3 turns, total 0.25")


@pytest.mark.slow
def test_what_is_not_as_it_should_be_is_shown_as_it_is_and_sums_are_round(browser, tmp_path):
    (tmp_path / "trouble.py").write_text(TROUBLE)
    with opened(browser, tmp_path, "trouble.py:Trouble") as page:
        page.start(1)
        page.sees("log", "task 1")
        for turn in range(3):
            page.send("odd")
            page.sees("log", rf"turn {turn}\n.*null,\s+\"oddity\"")
        page.send("stop")
        page.sees("log", "done after 4 turns, total 0.3\n")


@pytest.mark.slow
def test_what_the_server_has_played_is_shown_live(browser, tmp_path):
    with opened(browser, tmp_path, "arithmetic") as page:
        page.sees("counts", r"^0 of [\d,]+ under way · 0 ended$")
        for right in (0, 1):
            page.start()
            page.send(str(answer(page.sees("log", rf"task {right}\b.*What is")) + 1 - right))
            page.sees("log", "done after 1 turn")
        page.sees("counts", "2 ended · mean reward 0.5$")
        assert page.at("recent").get_attribute("aria-label") == "the last rewards: 0, 1"
        heights = page.runs("return [...document.querySelectorAll('#recent span')].map(bar => bar.clientHeight)")
        assert heights[0] < heights[1]
        begun = post(page.url, "start", {})  # a trainer plays meanwhile
        post(page.url, "step", {"episode_id": begun["episode_id"], "action": "0"})
        page.sees("counts", "3 ended")
        assert page.complaints() == []


@pytest.mark.slow
def test_what_a_shell_prints_keeps_its_columns(browser, tmp_path):
    (tmp_path / "trouble.py").write_text(TROUBLE)
    fonts = "return [...document.querySelectorAll('#log pre')].at(-1).matches('.laid-out, .fixed pre')"
    width = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    with opened(browser, tmp_path, "trouble.py:Trouble") as page:
        page.start(0)
        page.sees("log", "task 0")
        page.send("ls")
        page.sees("log", r"long\.txt  3456")
        assert page.runs(fonts)
        assert page.runs(width)  # a long line scrolls in its own box
        page.send("prose")
        page.sees("log", "Then another one")
        assert not page.runs(fonts)
        page.at("fixed").click()
        assert page.runs(fonts)


@pytest.mark.slow
def test_cancelling_another_start_and_wrong_indices(browser, tmp_path):
    (tmp_path / "trouble.py").write_text(TROUBLE)
    with opened(browser, tmp_path, "trouble.py:Trouble") as page:
        page.start(0)
        page.sees("health", "^1 episode live")
        page.start(2)
        page.sees("log", "task 2")
        page.sees("health", "^1 episode live")  # the first was ended: nobody could go on with it
        page.at("cancel").click()
        page.sees("log", "cancelled")
        page.sees("health", "^0 episodes live")
        assert not page.at("step").is_displayed()
        page.start(10**20)
        page.sees("log", "422: ")
        page.start(1)
        with urllib.request.urlopen(page.url + "/metrics", timeout=30) as figures:
            assert b"treetune" in figures.read()
        page.sees("log", "task 1")
        assert "422" not in page.at("log").text


@pytest.mark.slow
def test_the_death_of_the_server_is_shown(browser, tmp_path):
    with opened(browser, tmp_path, "arithmetic") as page:
        page.start(0)
        page.sees("log", "What is")
        page.server.process.kill()
        page.server.process.wait()
        page.send("1")
        page.sees("log", "The server does not answer")
        page.sees("health", "no answer")
        assert page.at("action").get_attribute("value") == "1"  # it may come back
        assert page.at("send").is_enabled()
        page.start()
        page.sees("log", "(does not answer.*){2}")


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 1200])
def test_it_fits_any_screen(browser, tmp_path, width):
    (tmp_path / "trouble.py").write_text(TROUBLE)
    with opened(browser, tmp_path, "trouble.py:Trouble") as page:
        page.browser.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500},
        )
        try:
            page.start(0)
            page.sees("log", "task 0")
            page.send("w" * 500)
            page.sees("log", "reward 0")
            assert page.runs("return document.documentElement.scrollWidth") <= width
            folder = os.environ.get("TREETUNE_SCREENSHOTS")
            if folder:
                page.browser.save_screenshot(f"{folder}/{width}.png")
        finally:
            page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_may_run_its_own_script_and_no_other():
    """Its policy names the script by hash: whoever changes the script changes the hash."""
    page = resources.files("treetune.serve.http").joinpath("page.html").read_text()
    (script,) = re.findall("<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "innerHTML" not in page
    assert not re.search(r"<[^>]+\son\w+=", page)


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    with serve(tmp_path, "arithmetic", "--port", "0") as server:
        with urllib.request.urlopen(server.report["http"], timeout=30) as reply:
            page = reply.read().decode()
        with urllib.request.urlopen(server.report["http"] + "/openapi.json", timeout=30) as reply:
            paths = json.load(reply)["paths"]
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    for path in re.findall(r'ask\("([^"]+)"', page):
        assert f"/{path}" in {*paths, "/metrics"}


def test_the_last_rewards_are_kept_and_no_more():
    metrics = Metrics(dict)
    assert metrics.stats()["mean_reward"] is None
    metrics.count_scored(Scored("sums", "completed", float(number % 2)) for number in range(100))
    metrics.count_scored([Scored("sums", "timeout", None)])
    figures = metrics.stats()
    assert figures["mean_reward"] == 0.5
    assert len(figures["recent"]) == 60
    assert figures["recent"][-2:] == [
        {"source": "sums", "outcome": "completed", "reward": 1.0},
        {"source": "sums", "outcome": "timeout", "reward": None},
    ]
