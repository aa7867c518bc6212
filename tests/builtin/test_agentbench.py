"""The names of AgentBench's tasks, without agentrl-worker: each resolves, or says what it needs."""

from __future__ import annotations

import json

import pytest

from treetune import load_taskset
from treetune.builtin.shell.taskset import OSInteraction
from treetune.errors import ConfigError, MissingExtraError, UnknownNameError, UsageError


@pytest.fixture
def checkout(tmp_path):
    """What a checkout of AgentBench has of the os tasks."""
    folder = tmp_path / "data" / "os_interaction"
    for path, samples in {
        "data/dev.json": [{"description": "one", "evaluation": {"match": "1"}}],
        "data/1/a.json": [
            {
                "description": "two",
                "create": {"init": {"file": "init/x.sh"}},
                "evaluation": {"match": "2"},
            }
        ],
    }.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(samples))
    script = folder / "scripts" / "1" / "init" / "x.sh"
    script.parent.mkdir(parents=True)
    script.write_text("touch /made")
    return tmp_path


@pytest.mark.parametrize(("name", "description"), [("os-dev", "one"), ("os-std", "two")])
def test_os_tasks_run_on_our_own_machines(checkout, name, description):
    taskset = load_taskset(f"agentbench:{name}", {"taskset.root": str(checkout)})
    assert isinstance(taskset, OSInteraction)
    assert taskset[0].sample.description == description
    assert taskset[0].sample.refusal is None


def test_os_tasks_ask_for_a_checkout():
    with pytest.raises(ConfigError, match="checkout"):
        load_taskset("agentbench:os-dev")


@pytest.mark.parametrize("name", ["dbbench-dev", "kg-dev"])
def test_other_tasks_say_what_they_need(name):
    with pytest.raises((UsageError, MissingExtraError), match=r"agentrl-worker|checkout"):
        load_taskset(f"agentbench:{name}").count()


def test_a_name_that_nothing_answers_to(tmp_path):
    with pytest.raises(UnknownNameError, match="os-dev"):
        load_taskset("agentbench:os-dve")
