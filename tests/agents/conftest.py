"""The table of what the agents did, at the end of a run."""

from __future__ import annotations

import pytest

ROWS = pytest.StashKey[list[tuple[str, ...]]]()
HEAD = ("agent", "version", "task", "reward", "calls", "sequences", "trained exactly", "seconds")


@pytest.fixture
def table(request: pytest.FixtureRequest) -> list[tuple[str, ...]]:
    return request.config.stash.setdefault(ROWS, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    for row in [HEAD, *config.stash.get(ROWS, [])] if ROWS in config.stash else []:
        terminalreporter.write_line(f"| {' | '.join(row)} |")
