"""`treetune eval` on a server gives what it gives here, resumes, and never goes round a finite taskset twice."""

from __future__ import annotations

import json

import pytest
from command_line import ROOT
from serve_process import serve

SETS = """
from treetune import Task, Taskset
class Colour(Task, frozen=True, kw_only=True):
    shade: str = ""
class Colours(Taskset[Colour]):
    def load_tasks(self):
        for name in ("red", "green", "blue", "blue"):
            yield Colour(prompt=name, reward_spec={"ground_truth": name}, shade=name[0])
    def reward(self, task, answer): return float(answer == task.ground_truth and task.shade == answer[0])
    def gold(self, task): return task.ground_truth
class Endless(Taskset):
    INFINITE = True
    def load_tasks(self):
        number = 0
        while True:
            yield Task(prompt=str(number), reward_spec={"ground_truth": str(number)})
            number += 1
    def reward(self, task, answer): return float(answer == task.ground_truth)
    def gold(self, task): return task.ground_truth
class Ranked(Colours):
    def score_group(self, task, traces): return [trace.rollout / 10 for trace in traces]
"""


@pytest.fixture
def sets(tmp_path):
    (tmp_path / "sets.py").write_text(SETS)
    return tmp_path


def traces(folder):
    lines = [json.loads(line) for line in (folder / "traces.jsonl").read_text().splitlines()]
    return sorted((line["uid"], line["occurrence"], line["rollout"], line["reward"], line["outcome"]) for line in lines)


@pytest.mark.parametrize("name", ["Colours", "Endless", "Ranked"])
@pytest.mark.quick_cases(1)
def test_every_way_of_evaluating_gives_the_same(sets, treetune, name):
    options = ["-n", "6", "-r", "3", "--json"]
    here = treetune("eval", f"sets.py:{name}", "-m", "scripted:p=0.5", *options, "-o", "here")
    started = treetune("eval", f"sets.py:{name}", "-m", "scripted:p=0.5", *options, "--serve", "2", "-o", "started")
    with serve(sets, f"sets.py:{name}", "--zmq", "tcp://127.0.0.1:0", "-m", "scripted:p=0.5") as server:
        there = treetune("eval", server.address, *options, "-o", "there")
    assert [result.code for result in (here, started, there)] == [0, 0, 0], (started.err, there.err)
    assert traces(sets / "here") == traces(sets / "started") == traces(sets / "there")
    tasks = 6 if name == "Endless" else 4
    assert here.json["rollouts"] == there.json["rollouts"] == tasks * 3
    assert here.json["mean_reward"] == pytest.approx(there.json["mean_reward"])


def test_an_evaluation_on_a_server_moves_no_cursor_and_is_resumed(sets, sockets, treetune):
    address = f"ipc://{sockets}/server"
    options = ["sets.py:Colours", "--zmq", address, "-m", "scripted:gold"]
    with serve(sets, *options) as server:
        assert treetune("eval", "--server", address, "-n", "2", "-o", "run").code == 0
        assert "the next index is 0" in server.stop()
    lines = (sets / "run" / "traces.jsonl").read_text().splitlines(keepends=True)
    (sets / "run" / "traces.jsonl").write_text(lines[0])
    with serve(sets, *options):
        resumed = treetune("eval", "--resume", "-o", "run", "--json")
    assert resumed.json["rollouts"] == 2, resumed.err
    assert len((sets / "run" / "traces.jsonl").read_text().splitlines()) == 2


def test_what_cannot_be_evaluated_on_a_server_is_told(sets, treetune):
    with serve(sets, "sets.py:Endless", "--zmq", "tcp://127.0.0.1:0", "-m", "scripted:gold") as server:
        unbounded = treetune("eval", server.address)
        other = treetune("eval", server.address, "-n", "2", "-m", "gpt-5")
        both = treetune("eval", "arithmetic", "--server", server.address)
    assert [result.code for result in (unbounded, other, both)] == [2, 2, 2]
    assert "--num-tasks" in unbounded.err
    assert "it serves: scripted:gold" in other.err
    assert "leave out TARGET" in both.err


def test_the_servers_token_is_taken_from_the_environment(sets, treetune):
    options = ["sets.py:Colours", "--zmq", "tcp://127.0.0.1:0", "-m", "scripted:gold"]
    with serve(sets, *options, TREETUNE_TOKEN="abc") as server:
        without = treetune("eval", server.address)
        with_it = treetune("eval", server.address, "--json", TREETUNE_TOKEN="abc")
    assert without.code == 3
    assert "token" in without.err
    assert with_it.json["mean_reward"] == 1.0


def test_an_encrypted_servers_key_is_taken_from_the_environment(sets, treetune):
    options = ["sets.py:Colours", "--zmq", "tcp://127.0.0.1:0", "-m", "scripted:gold", "--curve-key", "key"]
    with serve(sets, *options) as server:
        key = server.report["server_key"]
        with_it = treetune("eval", server.address, "--json", TREETUNE_SERVER_KEY=key)
        top = treetune("top", server.address, "--json", TREETUNE_SERVER_KEY=key)
    assert with_it.json["mean_reward"] == 1.0
    assert top.json["requests"]["run_rollout"] == 4


PROFILE = ("--taskset.profile.path", "rates.jsonl", "--taskset.profile.min_solve_rate", "0.5")


def test_a_server_is_a_target_at_both_its_doors(sets, treetune):
    doors = ["--zmq", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0", "-m", "scripted:gold"]
    here = treetune("eval", "sets.py:Colours", "-m", "scripted:echo", "--json")
    with serve(sets, "sets.py:Colours", *doors) as server:
        zmq, http = server.address, server.report["http"]
        shown = [treetune("show", address, "-n", "3", "--json").json for address in (zmq, http)]
        over_zmq = treetune("eval", zmq, "--json")
        over_http = treetune("eval", http, "-m", "scripted:echo", "-r", "2", "--json", "-o", "run")
        tops = [treetune("top", address, "--json").json for address in (zmq, http)]
        once = treetune("top", http, "--once")
        refused = {verb: treetune(verb, http) for verb in ("validate", "serve")}
        twice = treetune("eval", http, "-m", "scripted:echo", "--serve", "1")
        unknown = treetune("eval", http)
        profiled = treetune("profile", zmq, "-r", "2", "-o", "rates.jsonl", "--json")
        not_shown = treetune("profile", http, "-m", "scripted:echo")
    prompts = ["red", "green", "blue"]
    assert [task["prompt"] for task in shown[0]["tasks"]] == prompts
    assert [task["prompt"] for task in shown[1]["tasks"]] == [[{"role": "user", "content": name}] for name in prompts]
    assert over_zmq.json["mean_reward"] == 1.0, over_zmq.err
    assert profiled.json["models"][0]["column"] == "avg@2_scripted:gold", profiled.err
    assert treetune("eval", "sets.py:Colours", "-m", "scripted:gold", *PROFILE, "--json").json["tasks"] == 4
    assert (not_shown.code, "does not show its tasks" in not_shown.err) == (2, True)
    # Over HTTP the policy is here: each colour says itself, as it does without a server.
    assert (over_http.code, over_http.json["rollouts"], over_http.json["tasks"]) == (0, 8, 4), over_http.err
    assert over_http.json["mean_reward"] == here.json["mean_reward"] == 1.0
    assert len({uid for uid, *_ in traces(sets / "run")}) == 4
    assert tops[0]["requests"]["http.step"] == tops[1]["requests"]["http.step"] == 8
    assert (tops[1]["name"], tops[1]["outcomes"]) == ("Colours", {"completed": 12, "cancelled": 3})
    assert "http.step" in once.out
    for verb, result in refused.items():
        assert (result.code, f"`{verb}` needs the tasks themselves" in result.err) == (2, True), result.err
    assert "is one already" in twice.err
    assert "no model given" in unknown.err


def test_a_server_that_is_none_is_told(treetune):
    wrong = treetune("eval", "ftp://127.0.0.1:1", "-m", "scripted:echo")
    absent = [
        treetune(verb, "http://127.0.0.1:1", *further) for verb, *further in (["show"], ["eval", "-m", "scripted:echo"])
    ]
    assert (wrong.code, "it must begin with tcp://" in wrong.err) == (2, True)
    assert all(result.code == 3 and "is a task server running there?" in result.err for result in absent)


def test_the_example_can_be_evaluated_with_workers(treetune):
    result = treetune(
        "eval", f"{ROOT}/examples/curriculum.yaml", "-m", "scripted:gold", "-n", "20", "--serve", "1", "--json"
    )
    assert result.json["mean_reward"] == 1.0
