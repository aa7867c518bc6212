"""`treetune cache` shows and prunes the verdicts that were paid for."""

from __future__ import annotations

import os
import time

import pytest

from treetune.core.policy import Usage
from treetune.scorers.judges.model import VerdictCache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    kept = VerdictCache({"model": "judge"})
    for prompt in ("old", "new"):
        kept.keep(prompt, "VERDICT", Usage())
    day = time.time() - 10 * 86400
    os.utime(kept.path_of("old"), (day, day))
    return kept


def test_verdicts_are_counted_and_pruned_by_their_age(treetune, cache):
    assert treetune("cache", "list", "--json").json["verdicts"]["number"] == 2
    assert "verdicts of judges: 2" in treetune("cache", "list").out
    assert treetune("cache", "prune", "--damaged", "--json").json["verdicts"]["number"] == 0
    pruned = treetune("cache", "prune", "--older-than", "5", "--json").json["verdicts"]
    assert (pruned["number"], pruned["size"] > 0) == (1, True)
    assert (cache.find("old"), cache.find("new").answer) == (None, "VERDICT")
    assert treetune("cache", "prune", "--older-than", "5", "--all", "--json").json["verdicts"]["number"] == 1
    assert cache.find("new") is None
    assert treetune("cache", "list", "--json").json["verdicts"] == {"number": 0, "size": 0}
