"""Servers that pull answers from a model that is being trained; built once for each module that asks for them."""

from __future__ import annotations

import pytest
from serving import run
from trained_model import trained_model
from trained_serving import pull_server, watching


@pytest.fixture(scope="module")
def model():
    with trained_model() as endpoint:
        yield endpoint


@pytest.fixture(scope="module", params=[0, 2], ids=["lone", "pool"])
def pulled(request, tmp_path_factory, model):
    with pull_server(tmp_path_factory.mktemp("pulled"), model, "Talks", "-w", request.param) as server:
        yield server


@pytest.fixture
def play(pulled, model):
    """Runs a test's coroutine with a client, and options that name a model of its own."""

    def start(test):
        async def work():
            async with watching(pulled, model) as (client, watch):
                return await test(client, watch)

        return run(work())

    return start
