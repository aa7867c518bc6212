"""The adapter with the real agentrl-worker: small tasks, async and not, played, cancelled, failing, served."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import venvs

pytestmark = pytest.mark.slow
SIDE = Path(__file__).parents[1] / "support" / "agentbench_side.py"


@pytest.fixture(scope="module")
def side():
    python = venvs.venv(*venvs.AGENTBENCH)

    def ask(what: str, *arguments: str, **environment: str):
        return json.loads(venvs.run(python, SIDE, what, *arguments, timeout=120, **environment).splitlines()[-1])

    return ask


def test_a_task_that_calls_for_actions_is_given_them_one_by_one(side):
    said = side("adapter")
    assert said["indices"] == [1, 2, 3]
    assert said["first"] == [
        {"role": "system", "content": "Answer with a number."},
        {"role": "user", "content": "Twice 3?"},
    ]
    assert said["second"] == [[{"role": "user", "content": "No."}], 0.0, False]
    info = {"status": "completed", "metrics": {"score": 0.5}, "result": {"right": True}, "success": True}
    assert said["end"] == [True, 1.0, info]
    assert said["lost"] == [True, 0.0, True]
    assert said["tools"][0]["function"]["name"] == "say"
    assert "assistant" in said["bad"]
    assert said["still"] == 1.0
    assert said["open"] is True


def test_no_more_episodes_run_than_the_task_allows_and_no_place_is_lost(side):
    said = side("concurrency")
    assert said == {"waits": True, "full": True, "index": 1, "cancelled": True}


def test_a_task_without_async_is_played_and_cancelled(side):
    said = side("blocking")
    assert said["shown"] == [{"role": "user", "content": "Say a"}]
    assert said["rewards"] == [1.0, 0.0]
    assert said["ended"] == ["a", "b", "b"]
    assert said["abandoned"] is True


def test_a_task_that_fails_is_an_error_not_a_reward(side):
    said = side("failing")
    assert [("no database" in said["errors"][0]), ("database lost" in said["errors"][1])] == [True, True]
    assert said["reward"] == 1.0


def test_it_is_served_like_any_taskset(side):
    said = side("host")
    assert (said["count"], said["index"]) == (3, 2)
    assert said["shown"][-1] == {"role": "user", "content": "Twice 2?"}
    assert said["steps"] == [[[{"role": "user", "content": "No."}], 0.0, False], [[], 1.0, True]]
    assert said["info"]["success"] is True
    assert said["cancelled"] is True
    assert said["again"] == [True, 1.0]
    assert said["extra"] is True


def test_rows_name_their_task_for_other_processes(side, tmp_path):
    cache = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path)}
    scorer = side("describe", **cache)
    assert side("play_described", scorer, **cache) == {"shown": "Twice 2?", "reward": 1.0, "name": "Doubling"}
