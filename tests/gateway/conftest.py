"""The scripted engine of these tests: one process for all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway_playing import EngineProcess, running_engine


@pytest.fixture(scope="session")
def engine() -> Iterator[EngineProcess]:
    with running_engine() as engine:
        yield engine
