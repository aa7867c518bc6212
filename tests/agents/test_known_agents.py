"""The table of known agents, without any of them."""

from __future__ import annotations

import json
from pathlib import Path

import npm_agents
import pytest
import venvs

from treetune.errors import UsageError
from treetune.gateway.agent import known_agents, read_agent

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH with empty programs of the known names."""
    for agent in known_agents().values():
        for name in [agent.command[0], *agent.starts]:
            (tmp_path / name).write_text("#!/bin/sh\n")
            (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("name", known_agents())
def test_a_known_agent_is_read_by_its_name(name, programs):
    agent = read_agent(name)
    assert agent.name == name
    assert "TREETUNE_TASK" in " ".join(agent.command)


@pytest.mark.parametrize("name", known_agents())
def test_one_that_is_missing_is_refused_with_the_version_that_was_tried(name, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError) as refused:
        read_agent(name)
    install = known_agents()[name].install
    assert install in str(refused.value)
    assert f"| `{name}` | `{install}` |" in DOCS.read_text()
    tried = [*npm_agents.PACKAGES, *venvs.AGENTS[1]]
    assert install.split()[-1].strip("'") in tried, "the tests play with another version"


def test_claude_code_sends_no_line_that_differs_in_every_request():
    assert known_agents()["claude-code"].env["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"


def test_the_settings_of_opencode_are_json():
    assert json.loads(known_agents()["opencode"].env["OPENCODE_CONFIG_CONTENT"])["provider"]["gateway"]


def test_settings_of_the_user_stand_over_the_table(programs):
    agent = read_agent({"name": "codex", "env": {"RUST_LOG": "info"}, "limits": {"calls": 7}})
    assert agent.command == read_agent("codex").command
    assert (agent.env, agent.limits.calls) == ({"RUST_LOG": "info"}, 7)
