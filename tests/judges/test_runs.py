"""Judges in evaluations: what is recorded, what is paid, what a ceiling and a kill leave behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from judge_endpoint import serving
from scripted_judges import named

pytestmark = pytest.mark.usefixtures("verdict_cache")

TOWNS = ["Paris", "Rome", "Paris again", "Bonn"]
RUBRIC = """\
criteria:
  - {name: right, text: It names the town., weight: 3}
  - {name: polite, text: It is polite.}
"""


def write_tasks(folder: Path, scorer: dict, towns: list[str] = TOWNS, **keys) -> Path:
    rows = [json.dumps({"question": f"Town {number}?", "town": town}) for number, town in enumerate(towns)]
    (folder / "towns.jsonl").write_text("\n".join(rows))
    source = {"args": ["json"], "kwargs": {"data_files": str(folder / "towns.jsonl"), "split": "train"}}
    taskset = {"id": "dataset", "data_source": "towns", "loading_params": source, "prompt_template": "{question}"}
    config = {"taskset": {**taskset, "ground_truth": "town", "scorer": {"kind": "judge", **scorer}}, **keys}
    (folder / "tasks.yaml").write_text(json.dumps(config))  # JSON is YAML
    return folder / "tasks.yaml"


def traces_in(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "traces.jsonl").read_text().splitlines()]


@pytest.fixture
def served(tmp_path):
    with serving("Fair") as endpoint:
        yield endpoint


def at(endpoint) -> dict:
    return {"model": "judge", "endpoint": {"base_url": endpoint.url, "max_retries": 0}}


def test_a_yaml_task_is_judged_and_every_call_is_in_the_trace(treetune, tmp_path, served):
    (tmp_path / "right.yaml").write_text(RUBRIC)
    write_tasks(tmp_path, {**at(served), "rubric": "right.yaml"})
    (tmp_path / "elsewhere").mkdir()
    result = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run", "--json")
    assert (result.code, result.json["mean_reward"]) == (0, 0.5)
    assert (result.json["judge_calls"], result.json["judge_cache_hits"]) == (8, 0)
    assert (result.json["judge_prompt_tokens"], result.json["judge_completion_tokens"]) == (800, 80)
    assert (result.json["prompt_tokens"], result.json["completion_tokens"]) == (0, 0)  # the model's own, apart
    first = traces_in(tmp_path / "run")[0]
    assert [call["asked"] for call in first["judgements"]] == ["right", "polite"]
    assert first["judgements"][0]["verdict"] == {"right": "yes"}
    assert sorted(served.prompts()) == sorted(
        call["prompt"] for trace in traces_in(tmp_path / "run") for call in trace["judgements"]
    )
    assert "secret" not in (tmp_path / "run" / "config.yaml").read_text()


def test_scoring_again_asks_only_what_changed_in_the_rubric(treetune, tmp_path, served):
    (tmp_path / "right.yaml").write_text(RUBRIC)
    write_tasks(tmp_path, {**at(served), "rubric": "right.yaml"})
    treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run")
    assert len(served.answered) == 8
    again = treetune("rescore", "run", "--json").json["after"]
    assert (again["judge_calls"], again["judge_cache_hits"], again["judge_prompt_tokens"]) == (8, 8, 0)
    (tmp_path / "right.yaml").write_text(RUBRIC.replace("polite.", "polite and short."))
    again = treetune("rescore", "run", "--json").json["after"]
    assert (again["judge_calls"], again["judge_cache_hits"]) == (8, 4)
    assert len(served.answered) == 12
    refused = treetune("eval", "--resume", "-o", "run")
    assert refused.code == 2
    assert "polite and short" in refused.err
    shown = treetune("eval", "--resume", "--rescore", "-o", "run")
    assert "8 calls, 8 of them from the cache" in shown.out
    assert len(served.answered) == 12


@pytest.mark.parametrize("key", ["max_judge_tokens", "max_tokens_total"])
def test_a_run_stops_at_its_ceiling_says_so_and_goes_on_with_a_higher_one(treetune, tmp_path, served, key):
    write_tasks(tmp_path, at(served), max_concurrent=1)
    option = "--" + key.replace("_", "-")
    stopped = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run", option, 200, "--json")
    assert stopped.code == 1
    assert stopped.json["stopped"] == f"220 tokens reach {key}: 200"
    assert (stopped.json["rollouts"], stopped.json["errors"], stopped.json["interrupted"]) == (2, 0, False)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stopped"]
    assert len(served.answered) == 2
    again = treetune("eval", "--resume", "-o", "run")
    assert f"stopped: 220 tokens reach {key}: 200; resume with: treetune eval --resume -o run" in again.err + again.out
    assert len(served.answered) == 2
    done = treetune("eval", "--resume", "-o", "run", option, 10_000, "--json")
    assert (done.code, done.json["rollouts"], done.json["stopped"]) == (0, 4, None)
    assert len(served.answered) == 4


def test_scoring_again_stops_at_a_ceiling_too(treetune, tmp_path, served):
    write_tasks(tmp_path, at(served), max_concurrent=1)
    treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run")
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "run" / "config.yaml").write_text(config.replace("model: judge", "model: another"))
    part = treetune("rescore", "run", "--max-judge-tokens", 100, "--trust", "--json")
    assert (part.code, part.json["after"]["rollouts"]) == (1, 1)
    assert part.json["after"]["stopped"] == "110 tokens reach max_judge_tokens: 100"


def test_a_dead_judge_is_a_failure_with_its_cause_and_costs_no_second_answer(treetune, tmp_path):
    with serving("Fair") as endpoint:
        write_tasks(tmp_path, at(endpoint))
        assert treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "first").code == 0
        towns = [*TOWNS, "New York"]
        judge = at(endpoint)
        write_tasks(tmp_path, {**judge, "endpoint": {**judge["endpoint"], "preflight": False}}, towns)
    dead = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run", "--json")
    assert dead.code == 1
    assert (dead.json["scored"], dead.json["errors"], dead.json["judge_cache_hits"]) == (4, 1, 4)  # verdicts of before
    assert (
        "1 of 5 rollouts have no reward: the mean is 0.5000 over the scored, 0.4000 over all" in dead.json["warnings"]
    )
    (failed,) = [trace for trace in traces_in(tmp_path / "run") if trace["failure"]]
    assert (failed["outcome"], failed["reward"], failed["failure"]["type"]) == ("environment_error", None, "JudgeError")
    assert endpoint.url in failed["failure"]["message"]
    assert endpoint.url in failed["judgements"][0]["failure"]
    # Alive again at another address: the answers are there, and only the verdict is missing.
    with serving("Fair") as endpoint:
        config = (tmp_path / "run" / "config.yaml").read_text()
        (tmp_path / "run" / "config.yaml").write_text(
            "\n".join(
                line.partition("base_url:")[0] + f"base_url: {endpoint.url}" if "127.0.0.1" in line else line
                for line in config.splitlines()
            )
        )
        after = treetune("rescore", "run", "--trust", "--json").json["after"]
    assert (after["scored"], after["rollouts"]) == (5, 5)


def test_a_run_that_is_killed_pays_for_no_verdict_twice(tmp_path, treetune, verdict_cache):
    with serving("Fair", most=2) as endpoint:
        write_tasks(tmp_path, at(endpoint), max_concurrent=4)
        command = [sys.executable, "-m", "treetune", "eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run"]
        process = subprocess.Popen(command, cwd=tmp_path, env={**os.environ}, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 60
            while len(list(verdict_cache.rglob("verdicts/*/*.json"))) < 2:
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        paid = set(endpoint.prompts())
        assert len(paid) == 2
        endpoint.most = 100
        done = treetune("eval", "--resume", "-o", "run", "--json")
        assert (done.code, done.json["rollouts"], done.json["mean_reward"]) == (0, 4, 0.5)
        asked = Counter(endpoint.prompts())
    # What waited when it was killed may have been sent twice; what was answered was not.
    assert {prompt for prompt, times in asked.items() if times > 1}.isdisjoint(paid)


def test_rollouts_of_a_group_are_compared(treetune, tmp_path):
    write_tasks(tmp_path, {"model": named("Fair"), "method": "pairwise"}, ["Paris"])
    model = ["-m", "scripted:p=0.5", "--sampling.seed", 1]
    result = treetune("eval", "tasks.yaml", *model, "-r", 4, "-o", "run", "--json")
    traces = traces_in(tmp_path / "run")
    answers = [trace["turns"][-1]["message"]["content"] for trace in traces]
    assert set(answers) == {"Paris", "I do not know."}
    assert [trace["reward"] for trace in traces] == [float(answer == "Paris") for answer in answers]
    assert result.json["judge_calls"] == 2  # equal answers are not compared
    assert result.json["judge_cache_hits"] == 0
    again = treetune("rescore", "run", "--json").json
    assert (again["changed"], again["after"]["judge_cache_hits"]) == (0, 2)
    alone = treetune("eval", "tasks.yaml", *model, "-o", "alone", "--json")
    assert alone.json["errors"] == 1
    assert "pass -r 2 or more" in traces_in(tmp_path / "alone")[0]["failure"]["message"]


def test_a_python_taskset_names_a_judge_as_its_scorer(treetune, tmp_path):
    (tmp_path / "right.yaml").write_text(RUBRIC)
    (tmp_path / "towns.py").write_text(
        "from pathlib import Path\n"
        "from treetune import Task, Taskset\n"
        "from treetune.scorers import judge\n"
        "class Towns(Taskset):\n"
        f"    scorer = judge(model={named('Fair')!r}, rubric=str(Path(__file__).with_name('right.yaml')))\n"
        "    def load_tasks(self):\n"
        "        return [Task(prompt='A town?', reward_spec={'ground_truth': town}) for town in ('Paris', 'Rome')]\n"
    )
    result = treetune("eval", "towns.py:Towns", "-m", "scripted:gold", "-o", "run", "--json")
    assert (result.json["mean_reward"], result.json["judge_calls"]) == (0.5, 4)
    (tmp_path / "right.yaml").write_text(RUBRIC.replace("weight: 3", "weight: 2"))
    assert "scorer.criteria" in treetune("eval", "towns.py:Towns", "-m", "scripted:gold", "--resume", "-o", "run").err


@pytest.mark.parametrize(
    ("scorer", "says"),
    [
        ({"model": "scripted:echo", "rubric": "absent.yaml"}, "cannot read"),
        (
            {"model": "judge", "endpoint": {"base_url": "http://x/v1", "api_key_env": "NO_SUCH_KEY"}},
            "NO_SUCH_KEY is not",
        ),
        (
            {"model": "judge", "endpoint": {"base_url": "http://x/v1", "api_key_env": "NO_SUCH_KEY"}},
            "or set scorer.endpoint.api_key_env",
        ),
        ({"model": "judge", "metod": "grade"}, "taskset.scorer.metod: unknown key; did you mean 'method'"),
        ({}, "taskset.scorer: a judge needs either model"),
        ({"model": "m", "method": "guess"}, "taskset.scorer.method: expected one of grade, equal, rubric, pairwise"),
        ({"judges": [{"modle": "m"}]}, r"taskset.scorer.judges[0].modle: unknown key; did you mean 'model'"),
        ({"model": "m", "criteria": [{"name": "a"}]}, "taskset.scorer.criteria[0].text: is required"),
    ],
)
def test_what_is_wrong_with_a_judge_is_said_before_the_first_rollout(treetune, tmp_path, scorer, says):
    write_tasks(tmp_path, scorer)
    result = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run")
    assert result.code == 2
    assert says in result.err
    assert not (tmp_path / "run").exists()


def test_a_part_of_a_reward_may_be_judged(treetune, tmp_path):
    path = write_tasks(tmp_path, {})
    config = json.loads(path.read_text())
    judge = {"kind": "judge", "model": named("Harsh")}
    parts = [{"weight": 0.75, "scorer": "includes"}, {"weight": 0.25, "scorer": judge}]
    config["taskset"]["scorer"] = {"kind": "weighted", "parts": parts}
    path.write_text(json.dumps(config))
    result = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run", "--json")
    assert (result.json["mean_reward"], result.json["judge_calls"]) == (0.75, 4)


def test_a_judge_that_does_not_answer_is_told_before_anything_is_played(treetune, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        judge = {"kind": "judge", "model": "judge", "endpoint": {"base_url": url}}
        write_tasks(tmp_path, {"kind": "weighted", "parts": [{"weight": 1, "scorer": judge}]})
        result = treetune("eval", "tasks.yaml", "-m", "scripted:gold", "-o", "run")
    assert result.code == 3
    assert f"nothing answers at {url}" in result.err
    assert "correct scorer.endpoint.base_url" in result.err
    assert not (tmp_path / "run").exists()
