"""Sets that are ready by name, read from a hub on this machine: what they ask, and what answers earn."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml
from hub import Hub
from ready_hub import GSM8K, SETS, write_sets

from treetune import ready

BUILD = """
import json, sys
from treetune.target import load_taskset
built = {}
for name in sys.argv[1:]:
    for split in ("val", "train"):
        try:
            taskset = load_taskset(name, split=split)
        except Exception as error:
            assert "no list 'train'" in str(error), error
            continue
        sidecar, path, hit = taskset.build()
        built[f"{name} {split}"] = {"rows": sidecar.rows, "revision": sidecar.revision, "dropped": sidecar.dropped}
print(json.dumps(built))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Every set, built once from the hub: what was built, and the cache that has it."""
    folder = tmp_path_factory.mktemp("ready")
    write_sets(folder / "hub")
    with Hub(folder / "hub") as hub:
        hub.commits |= dict.fromkeys(pinned_revisions(), hub.commits[hub.commit])
        environment = {**os.environ, **hub.environment(folder / "home"), "TREETUNE_TASK_CACHE_DIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", BUILD, *SETS], capture_output=True, text=True, env=environment, timeout=300
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), folder


@pytest.fixture
def built(hub, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(hub[1]))
    return hub[0]


def pinned_revisions():
    declared = [task for name in SETS for task in yaml.safe_load(ready.find(name).read_text())["val_tasks"]]
    kwargs = [task["loading_params"]["kwargs"] for task in declared]
    return [given["revision"] for given in kwargs if "revision" in given]


def test_every_set_is_built_whole_from_the_hub_at_its_revision(built):
    for name, rows in SETS.items():
        assert (built[f"{name} val"]["rows"], built[f"{name} val"]["dropped"]) == (len(rows), {}), name
    assert built["gsm8k val"]["revision"] in pinned_revisions()
    assert built["gsm8k train"]["rows"] == len(GSM8K)
