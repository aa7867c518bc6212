"""Shared by all tests: the data folder and the command line."""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import command_line
import packing
import pytest
from command_line import Result
from hypothesis import settings

# Every property is tried a little here, and thoroughly in the thorough suite.
settings.register_profile("few", deadline=None, max_examples=10)
settings.register_profile("many", deadline=None, max_examples=100)
settings.load_profile(os.environ.get("TREETUNE_TEST_EXAMPLES", "few"))

# A job in the background is started deaf to Ctrl-C, and so would be the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """What `-n auto` means: two workers a core, because tests wait for processes as much as they compute."""
    return None if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else 2 * (os.cpu_count() or 1)


def pytest_configure(config: pytest.Config) -> None:
    """What is built and loaded in a run of the tests goes to a folder of its own, not to the user's cache."""
    if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the variables
        folder = tempfile.TemporaryDirectory(prefix="treetune-tests-")
        config.add_cleanup(folder.cleanup)
        os.environ["TREETUNE_TASK_CACHE_DIR"] = f"{folder.name}/tasks"
        os.environ["HF_HOME"] = f"{folder.name}/huggingface"
        os.environ["MPLCONFIGDIR"] = f"{folder.name}/matplotlib"  # reasoning-gym loads it, and it lists the fonts


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Collects without the garbage collector, which would walk through thousands of tests, now and in each of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    packing.sort_longest_first(items)
    packing.leave_the_rest_to_the_thorough_suite(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """TREETUNE_TEST_SKIPPED names a file for the ids of skipped tests: `pytest @FILE` runs them where they can."""
    if report.skipped and "PYTEST_XDIST_WORKER" not in os.environ and (file := os.environ.get("TREETUNE_TEST_SKIPPED")):
        with open(file, "a") as ids:
            ids.write(f"{report.nodeid}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> packing.GroupScheduling:
    """The tests of a file stay together, so that its fixtures are made once."""
    return packing.GroupScheduling(config, log)


@pytest.fixture
def treetune(tmp_path: Path) -> Callable[..., Result]:
    """Runs `treetune ARGUMENTS` in a fresh folder, as a user would; in this process."""

    def run(*arguments: object, **environment: str) -> Result:
        return command_line.run(tmp_path, [str(argument) for argument in arguments], environment)

    return run


@pytest.fixture
def treetune_process(tmp_path: Path) -> Callable[..., Result]:
    """The same in a process of its own, for what can only be seen there."""

    def run(*arguments: object, timeout: float = 60, **environment: str) -> Result:
        return command_line.run_process(tmp_path, [str(argument) for argument in arguments], environment, timeout)

    return run


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for sockets. Its name is short: the path of a socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="tt-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `train.jsonl` and `test.jsonl`: the real GSM8K where TREETUNE_TEST_DATA (or ../shared/data) has it,
    else a small synthetic one of the same shape."""
    data = Path(os.environ.get("TREETUNE_TEST_DATA", ROOT.parent / "shared" / "data"))
    if (data / "gsm8k" / "train.jsonl").exists():
        return data / "gsm8k"
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, numbers in {"train": range(200), "test": range(200, 250)}.items():
        rows = [
            {
                "question": f"Ann has {n} pears and buys {n + 2} more. How many?",
                "answer": f"{n}+{n + 2}\n#### {2 * n + 2}",
            }
            for n in numbers
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def browser():
    """A real one (Debian: `chromium`, `chromium-driver`)."""
    webdriver = pytest.importorskip("selenium.webdriver")
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("no chromedriver")
    options = webdriver.ChromeOptions()
    options.add_argument("--headless=new")
    options.add_argument("--disable-dev-shm-usage")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # Chromium's own wants another user; the pages are ours
    opened = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield opened
    opened.quit()


@pytest.fixture
def verdict_cache(tmp_path, monkeypatch):
    """Verdicts of judges in one test are not those of another."""
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def trained():
    """A model that is being trained, behind an endpoint."""
    from trained_model import trained_model

    with trained_model() as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=[0, 2], ids=["lone", "pool"])
def pulled(request, tmp_path_factory, trained):
    """A server that pulls its answers."""
    from trained_serving import pull_server

    with pull_server(tmp_path_factory.mktemp("pulled"), trained, "Talks", "-w", request.param) as server:
        yield server


@pytest.fixture
def play(pulled, trained):
    """Runs a test's coroutine with a client, and options that name a model of its own."""
    from serving import run
    from trained_serving import watching

    def start(test):
        async def work():
            async with watching(pulled, trained) as (client, watch):
                return await test(client, watch)

        return run(work())

    return start
