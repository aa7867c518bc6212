"""`-m local:ORG/NAME`: a model of the hub's, from a local server that speaks the hub's API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import venvs
from hub import Hub

FETCH = "import sys; from treetune.system.hub import fetch_model; print(fetch_model(sys.argv[1]))"


def fetch(name: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", FETCH, name], capture_output=True, text=True, env=told, timeout=60)


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "hub" / "org" / "tiny"
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin", "chat_template.jinja"):
        (folder / name).write_text(name)
    return folder


def test_a_model_is_fetched_once_without_its_pickles_and_kept(repository, tmp_path):
    with Hub(tmp_path / "hub") as hub:
        environment = hub.environment(tmp_path / "home")
        done = fetch("org/tiny", environment)
        assert done.returncode == 0, done.stderr
        kept = {path.name for path in Path(done.stdout.strip()).iterdir()}
        assert kept == {"config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"}
    assert fetch("org/tiny", environment).stdout == done.stdout  # the hub is gone
    absent = fetch("org/other", environment)
    assert "the hub cannot be reached" in absent.stderr


def test_pickles_are_taken_where_there_is_nothing_else(repository, tmp_path):
    (repository / "model.safetensors").unlink()
    with Hub(tmp_path / "hub") as hub:
        done = fetch("org/tiny", hub.environment(tmp_path / "home"))
    assert (Path(done.stdout.strip()) / "pytorch_model.bin").exists()


def test_an_unknown_and_a_gated_model_are_told(repository, tmp_path):
    with Hub(tmp_path / "hub") as hub:
        environment = hub.environment(tmp_path / "home")
        assert "no model at org/absent, and none on the hub" in fetch("org/absent", environment).stderr
        hub.gated.add("org/tiny")
        assert "accept its terms" in fetch("org/tiny", environment).stderr


def test_a_path_that_is_not_there_is_no_name_on_the_hub(treetune):
    for path in ("./models/x", "/nowhere/x", "x", "a/b/c", "model.gguf"):
        result = treetune("eval", "reverse-text", "-m", f"local:{path}")
        assert result.code == 2
        assert f"no model at {path}" in result.err


@pytest.mark.slow
def test_a_model_of_the_hub_is_evaluated(tmp_path):
    place = tmp_path / "hub" / "org" / "small"
    shutil.copytree(venvs.smollm2(), place)
    with Hub(tmp_path / "hub") as hub:
        printed = venvs.run(
            venvs.venv(*venvs.MODELS), "-m", "treetune", "eval", "arithmetic", "-m", "local:org/small", "-n", 2,
            "--sampling.max_tokens", 8, "-o", tmp_path / "run", "--json", **hub.environment(tmp_path / "home"),
        )  # fmt: skip
    summary = json.loads(printed)
    assert (summary["rollouts"], summary["errors"]) == (2, 0)
