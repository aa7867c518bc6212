"""`treetune view` in a real browser: what a person does there and sees.

with view(folder) as address, Page(browser, address) as page:
    page.go("/run/0/groups")
    page.sees("#groups", "mixed")
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


@contextmanager
def view(*arguments, folder=None):
    """`treetune view` in a folder, once it listens; gives its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", "view", *map(str, arguments), "--no-browser", "--port", "0", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
    )
    try:
        lines = b""
        while not lines.endswith(b"}\n"):
            line = process.stdout.readline()
            assert line, process.stderr.read().decode()
            lines += line
        yield json.loads(lines)["address"]
    finally:
        process.terminate()
        process.communicate(timeout=30)


class Page:
    def __init__(self, browser, address):
        self.browser, self.address = browser, address
        self.resize(1400, 900)
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        browser.get(address)
        browser.get_log("browser")  # what was said before is not ours
        self.sees("main", r"\S")

    def __enter__(self):
        return self

    def __exit__(self, *error):
        """Leaves the page: one that still asks a server which has ended would complain."""
        self.browser.get("about:blank")

    # What one does

    def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def go(self, address, until="main *"):
        """Opens a view by the fragment of its address."""
        self.browser.execute_script("location.hash = arguments[0]", f"#{address}")
        self.waits(lambda: self.all(until), f"{until} at {address}")
        return self

    def press(self, *keys):
        from selenium.webdriver import ActionChains

        actions = ActionChains(self.browser)
        for key in keys:
            actions.send_keys(key)
        actions.perform()

    def click(self, css, text=""):
        """Clicks the first that has the text."""
        self.waits(lambda: any(text in (each.text or "") for each in self.all(css)), f"{css} with {text!r}")
        element = next(each for each in self.all(css) if text in (each.text or ""))
        element.click()

    def type(self, css, text):
        element = self.one(css)
        element.clear()
        element.send_keys(text)
        return element

    # What one sees

    def all(self, css):
        return self.browser.find_elements("css selector", css)

    def one(self, css):
        self.waits(lambda: self.all(css), css)
        return self.all(css)[0]

    def text(self, css):
        return self.runs("return document.querySelector(arguments[0])?.innerText ?? ''", css)

    def texts(self, css):
        return self.runs("return [...document.querySelectorAll(arguments[0])].map(each => each.innerText)", css)

    def sees(self, css, pattern):
        """Waits until the text of an element has the pattern."""
        self.waits(lambda: re.search(pattern, self.text(css), re.S), f"{pattern!r} in {css}")
        return self.text(css)

    def waits(self, condition, what):
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.support.ui import WebDriverWait

        ignored = [StaleElementReferenceException]
        try:
            WebDriverWait(self.browser, 30, 0.03, ignored).until(lambda _: condition())
        except Exception as error:
            raise AssertionError(f"no {what}: {self.text('main')[:800]!r}; {self.complaints()}") from error

    def runs(self, script, *arguments):
        return self.browser.execute_script(script, *arguments)

    def calls(self, module, expression):
        """What an expression of a module of the page gives."""
        name = expression.split("(")[0]
        script = f"""const [module, done] = arguments;
            import(module).then(({{ {name} }}) => done({expression}), error => done(String(error)))"""
        return self.browser.execute_async_script(script, f"/page/{module}")

    @property
    def hash(self):
        return self.runs("return decodeURIComponent(location.hash)")

    def asked(self):
        """The addresses of all requests since the page was opened."""
        return self.runs("return performance.getEntriesByType('resource').map(entry => entry.name)")

    def complaints(self):
        """What the browser said of errors, and of what the page was not allowed."""
        return [line["message"] for line in self.browser.get_log("browser")]

    def keep(self, name):
        """A picture for the docs, where they are asked for (TREETUNE_TEST_SCREENSHOTS=1)."""
        if os.environ.get("TREETUNE_TEST_SCREENSHOTS") != "1":
            return
        from PIL import Image

        file = DOCS / f"{name}.png"
        self.resize(1280, 760)
        self.runs("document.activeElement.blur(); document.getElementById('main').scrollTo(0, 0)")
        self.browser.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": 640, "y": 5})
        self.browser.execute_async_script("setTimeout(arguments[0], 300)")
        self.browser.save_screenshot(str(file))
        Image.open(file).convert("RGB").quantize(200).save(file, optimize=True)
        self.resize(1400, 900)
