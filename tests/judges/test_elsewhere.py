"""A judge is a scorer like any other: behind both doors, in a pool, and in the rows of every trainer."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from http_playing import BOTH, playing
from judge_endpoint import serving
from raising import raises_code
from scripted_judges import named
from test_runs import RUBRIC, TOWNS, write_tasks

from treetune import Task, Taskset
from treetune.data.rows.scorer import ScoredBy, ScoredEnvironment, describe_scorer, taskset_of
from treetune.evaluation import EvalConfig, Evaluation
from treetune.play.episode import Episode
from treetune.runs.folder import TRACES
from treetune.runs.rolling import RollingRun
from treetune.scorers import judge
from treetune.serve.zmq.client import EnvClient

pytestmark = pytest.mark.usefixtures("verdict_cache")


class Towns(Taskset):
    scorer = judge(model=named("Fair"), method="equal")

    def load_tasks(self):
        return [Task(prompt="A town?", reward_spec={"ground_truth": town}) for town in ("Paris", "Rome")]


@BOTH
def test_a_rollout_over_zmq_and_an_episode_over_http_bring_their_judgements(tmp_path, workers):
    async def play():
        taskset = Towns()
        kept = RollingRun(tmp_path / "run", Evaluation(EvalConfig(taskset={}, model=""), taskset), 1 << 30)
        async with playing(taskset, workers=workers, traces=kept, address="tcp://127.0.0.1:0") as client:
            async with EnvClient(client.server.doors[0].address) as zmq:
                trace = await zmq.run_rollout(await zmq.sample(0))
            episode = await client.begun(task_index=1)
            status, answer = await client.step(episode, {"type": "text", "content": "It is Rome."})
            return trace, status, answer

    trace, status, answer = asyncio.run(play())
    assert (trace.reward, [call.asked for call in trace.judgements]) == (1.0, ["reference first", "answer first"])
    assert (status, answer["reward"]) == (200, 0.0)
    assert [call["verdict"] for call in answer["info"]["judgements"]] == [{"equal": "different"}] * 2
    played = {trace.task.idx: trace for trace in TRACES.read(tmp_path / "run")}
    assert [len(played[index].judgements) for index in (0, 1)] == [2, 2]
    assert "judgements" not in played[1].turns[0].info  # they are in the trace once


def build(treetune, folder, scorer: dict, format: str = "verl") -> list[dict]:
    path = write_tasks(folder, scorer)
    config = json.loads(path.read_text())
    node = {key: value for key, value in config["taskset"].items() if key != "id"}
    path.write_text(json.dumps({"train_tasks": [node]}))
    result = treetune("build", "tasks.yaml", "--format", format, "--json")
    assert result.code == 0, result.err
    import pyarrow.parquet as pq

    (path,) = folder.glob("cache/*.parquet")
    return pq.read_table(path).to_pylist()


def score_in_a_process(row: dict, *answers: str, **environment: str) -> subprocess.CompletedProcess:
    """As verl's reward workers do, which know nothing but the row."""
    code = (
        "import json, sys\nfrom treetune.trainers.verl import compute_score\n"
        "row, *answers = json.loads(sys.argv[1])\n"
        "truth = row['reward_model']['ground_truth']\n"
        "for answer in answers:\n"
        "    print(compute_score(row['data_source'], answer, truth, row['extra_info'])['score'])\n"
    )
    command = [sys.executable, "-c", code, json.dumps([row, *answers])]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_a_row_is_judged_from_itself_alone_and_carries_no_key(treetune, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-of-the-judge")
    (tmp_path / "right.yaml").write_text(RUBRIC)
    with serving("Fair") as endpoint:
        endpoint_of = {"base_url": endpoint.url, "api_key_env": "JUDGE_KEY", "max_retries": 0}
        rows = build(treetune, tmp_path, {"model": "judge", "endpoint": endpoint_of, "rubric": "right.yaml"})
        (tmp_path / "right.yaml").unlink()
        scorer = rows[0]["extra_info"]["scorer"]
        assert "secret" not in json.dumps(rows)
        assert ("JUDGE_KEY" in scorer, "It names the town." in scorer, "right.yaml" in scorer) == (True, True, False)
        scored = score_in_a_process(rows[0], "It is Paris.", "It is Rome.")
        assert scored.stdout.split() == ["1.0", "0.0"], scored.stderr
        assert endpoint.answered[0]["headers"]["Authorization"] == "Bearer secret-of-the-judge"

        # Somebody else's rows would have this user's key sent to an address of their choice.
        asked = len(endpoint.answered)
        foreign = score_in_a_process(rows[0], "It is Bonn.", TREETUNE_TASK_CACHE_DIR=str(tmp_path / "other"))
        assert foreign.returncode == 1
        assert "a row calls a model that your builds did not name" in foreign.stderr
        assert len(endpoint.answered) == asked
        other = {"TREETUNE_TASK_CACHE_DIR": str(tmp_path / "other"), "TREETUNE_TRUST": "1"}
        assert score_in_a_process(rows[0], "It is Bonn.", **other).returncode == 0
    dead = score_in_a_process(rows[0], "It is Rome, I think.")
    assert dead.returncode == 1  # an error, never a zero
    assert "could not be scored: the judge judge gave no verdict" in dead.stderr


def test_rows_of_somebody_else_may_name_no_judge_in_whatever_part():
    described = json.dumps(
        {
            "scorer": {
                "kind": "weighted",
                "parts": [
                    {"weight": 0.5, "scorer": {"kind": "includes"}},
                    {"weight": 0.5, "scorer": {"kind": "judge", "model": "judge"}},
                ],
            }
        }
    )
    with raises_code("untrusted-code", "--trust", "TREETUNE_TRUST=1"):
        taskset_of(ScoredBy.read(described))


def test_what_skyrl_plays_asks_the_judge_too():
    scorer = describe_scorer(Towns.scorer).text
    task = Task(prompt="A town?", reward_spec={"ground_truth": "Paris"}, extra_info={"scorer": scorer})

    class Rows(Taskset):
        def load_tasks(self):
            return [task]

        def environment(self, task):
            return ScoredEnvironment(task)

    async def play(answer):
        episode = await Episode.start(Rows(), task)
        await episode.step(answer)
        return episode.result

    assert [asyncio.run(play(answer)).reward for answer in ("It is Paris.", "Rome")] == [1.0, 0.0]
    assert len(asyncio.run(play("It is Paris.")).judgements) == 2


def test_trls_reward_function_has_all_answers_of_a_batch_judged_at_once(tmp_path):
    from treetune.trainers.trl import score_rows

    file = tmp_path / "together.py"
    file.write_text(
        "import asyncio, re\n"
        "class Together:\n"
        "    waiting, all_here = 0, None\n"
        "    async def complete(self, request):\n"
        "        cls = type(self)\n"
        "        cls.all_here = cls.all_here or asyncio.Event()\n"
        "        cls.waiting += 1\n"
        "        if cls.waiting == 4:\n"
        "            cls.all_here.set()\n"
        "        await asyncio.wait_for(cls.all_here.wait(), 30)\n"
        "        prompt = request.messages[0]['content']\n"
        "        code = re.search('VERDICT (\\\\w+)', prompt)[1]\n"
        "        return f\"VERDICT {code}: {'C' if 'It is Paris' in prompt else 'I'}\"\n"
    )
    scorer = describe_scorer(judge(model=f"scripted:{file}:Together")).text
    answers = ["It is Paris.", "It is Rome.", "It is Bonn.", "It is Paris, perhaps."]
    rewards = score_rows(
        [[{"role": "user", "content": "A town?"}]] * 4,
        answers,
        data_source=["towns"] * 4,
        ground_truth=["Paris"] * 4,
        reward_spec=[{"ground_truth": "Paris"}] * 4,
        extra_info=[{"scorer": scorer, "index": number} for number in range(4)],
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0]


def test_an_unreadable_verdict_is_an_error_of_the_row_that_trl_gave():
    from treetune.trainers.single_turn import play_row

    task = Task(prompt="A town?", reward_spec={"ground_truth": "Paris"}, data_source="towns")
    with raises_code("taskset", "scripted_judges.py:Refuses"):
        play_row(describe_scorer(judge(model=named("Refuses"))), task, "Paris")


def test_rows_cannot_be_compared_with_each_other(treetune, tmp_path):
    path = write_tasks(tmp_path, {"model": named("Fair"), "method": "pairwise"})
    config = json.loads(path.read_text())
    node = {key: value for key, value in config["taskset"].items() if key != "id"}
    path.write_text(json.dumps({"train_tasks": [node]}))
    refused = treetune("build", "tasks.yaml")
    assert refused.code == 2
    assert "only scores groups, and here each" in refused.err
    with raises_code("usage", "treetune serve"):
        taskset_of(describe_scorer(judge(model=named("Fair"), method="pairwise")))


def test_a_run_folder_of_somebody_else_may_have_no_judge_called(treetune, tmp_path):
    with serving("Fair") as endpoint:
        write_tasks(tmp_path, {"model": "judge", "endpoint": {"base_url": endpoint.url}})
        treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run")
        asked = len(endpoint.answered)
        assert asked == len(TOWNS)
        refused = treetune("rescore", "run", TREETUNE_TASK_CACHE_DIR=str(tmp_path / "other"))
        assert refused.code == 2
        assert "would call a server" in refused.err
        assert len(endpoint.answered) == asked
