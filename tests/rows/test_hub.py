"""The hub that other tests load their datasets from, under the real `datasets`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hub import Hub, make_gsm8k

pytestmark = pytest.mark.skipif(not (find_spec("datasets") and find_spec("pyarrow")), reason="needs datasets")

TRAIN = [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(30)]
TEST = [{"question": f"{n} and 1?", "answer": f"#### {n + 1}"} for n in range(5)]

# The loaded Dataset does not know its revision: `info.download_checksums` is None. Its builder does: for a repository
# of the hub `builder.hash` is the resolved commit, and a dataset prepared from that builder comes from that commit even
# if `main` moves in between.
LOAD = """
import json, sys, datasets
builder = datasets.load_dataset_builder(sys.argv[1], name="main", **json.loads(sys.argv[2]))
builder.download_and_prepare()
rows = builder.as_dataset(split="train").to_list()
by_name = datasets.load_dataset(sys.argv[1], name="main", split="train", **json.loads(sys.argv[2]))
print(json.dumps({"rows": rows, "by_name": by_name.to_list(), "commit": builder.hash}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    make_gsm8k(tmp_path / "hub", TRAIN, TEST)
    with Hub(tmp_path / "hub") as hub:
        yield hub


def load(hub: Hub, repo: str, **arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LOAD, repo, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **hub.environment(hub.folder.parent / "home")},
    )


def loaded(hub: Hub, **arguments: str) -> dict[str, Any]:
    done = load(hub, "openai/gsm8k", **arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.thorough
def test_a_dataset_loads_by_its_hub_name_in_order_and_tells_its_commit(hub):
    assert loaded(hub) == {"rows": TRAIN, "by_name": TRAIN, "commit": hub.commit}
    assert ("GET", f"/datasets/openai/gsm8k/resolve/{hub.commit}/main/train-00000-of-00001.parquet") in hub.requests


def test_a_pinned_revision_outlives_a_push(hub):
    first = hub.commit
    make_gsm8k(hub.folder, TRAIN[:3], TEST)
    assert hub.push() != first
    assert loaded(hub, revision=first) == {"rows": TRAIN, "by_name": TRAIN, "commit": first}
    assert loaded(hub) == {"rows": TRAIN[:3], "by_name": TRAIN[:3], "commit": hub.commit}


@pytest.mark.parametrize(
    ("repo", "arguments", "message"),
    [
        ("openai/gsm9k", {}, "Dataset 'openai/gsm9k' doesn't exist on the Hub or cannot be accessed."),
        ("openai/gsm8k", {"revision": "0" * 40}, f"Revision '{'0' * 40}' doesn't exist for dataset 'openai/gsm8k'"),
    ],
)
@pytest.mark.thorough
def test_what_is_not_there_is_not_found_at_once(hub, repo, arguments, message):
    start = time.monotonic()
    done = load(hub, repo, **arguments)
    assert time.monotonic() - start < 30
    assert done.returncode == 1
    assert f"DatasetNotFoundError: {message}" in done.stderr


def test_files_come_in_ranges_and_missing_ones_with_the_hubs_error_code(hub):
    url = f"{hub.url}/datasets/openai/gsm8k/resolve/main"
    card = (hub.folder / "openai" / "gsm8k" / "README.md").read_bytes()

    def get(path: str, **headers: str) -> Any:
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            urllib.request.Request(f"{url}/{path}", headers=headers), timeout=10
        )

    for asked, part in {"bytes=2-5": card[2:6], "bytes=7-": card[7:], "bytes=-4": card[-4:]}.items():
        with get("README.md", Range=asked) as answer:
            assert (answer.status, answer.read(), answer.headers["X-Repo-Commit"]) == (206, part, hub.commit)
    for path, asked, status, code in [("README.md", "bytes=9999-", 416, None), ("no.txt", "", 404, "EntryNotFound")]:
        with pytest.raises(urllib.error.HTTPError) as error:
            get(path, Range=asked)
        assert (error.value.code, error.value.headers["X-Error-Code"]) == (status, code)
        error.value.close()
