"""`treetune eval` as a user runs it: results, run folders, resuming, killing."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

from treetune.runs.run import Run
from treetune.runs.summary import pass_at_k, standard_error

SLOW = """
import time
from treetune import Task, Taskset

class Slow(Taskset):
    def load_tasks(self):
        for n in range(60):
            yield Task(prompt=f"say {n // 2}", reward_spec={"ground_truth": f"say {n // 2}"})  # every task twice

    def reward(self, task, answer):
        time.sleep(0.02)
        return float(answer == task.ground_truth)
"""


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def keys(path: Path) -> Counter:
    return Counter((trace["uid"], trace["occurrence"], trace["rollout"]) for trace in lines(path))


def test_gold_is_rewarded_and_echo_is_not(treetune):
    gold = treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 50, "-r", 2, "--json")
    assert gold.code == 0
    assert (gold.json["mean_reward"], gold.json["rollouts"], gold.json["pass_at_k"]) == (1.0, 100, {"1": 1.0, "2": 1.0})
    assert treetune("eval", "arithmetic", "-m", "scripted:echo", "-n", 50, "--json").json["mean_reward"] == 0.0


def test_a_coin_lands_near_a_half_and_the_standard_error_says_so(treetune):
    coin = treetune(
        "eval", "arithmetic", "-m", "scripted:p=0.5", "-n", 100, "-r", 4, "--taskset.level", 5, "--json"
    ).json
    assert 0.01 < coin["stderr"] < 0.04
    assert abs(coin["mean_reward"] - 0.5) < 4 * coin["stderr"]
    assert coin["pass_at_k"]["1"] < coin["pass_at_k"]["2"] < coin["pass_at_k"]["4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["arithmetic", "-m", "scripted:gold"], "--num-tasks"),
        (["arithmetik", "-m", "scripted:gold", "-n", 1], "did you mean 'arithmetic'"),
        (["arithmetic", "-m", "scripted:gold", "-n", 1, "--taskset.levl", 2], "did you mean 'level'"),
        (["arithmetic", "-m", "scripted:gold", "-n", 1, "--num-rolouts", 2], "--num-rollouts"),
        (["arithmetic", "-m", "scripted:gold", "-n", "many"], "'--num-tasks'"),
        (["arithmetic", "-n", 1], "-m"),
        (["arithmetic", "-m", "scripted:gould", "-n", 1], "did you mean 'gold'"),
        (["absent.yaml", "-m", "scripted:gold"], "absent.yaml"),
        (["arithmetic", "-m", "scripted:gold", "-n", 1, "--taskset.level"], "needs a value"),
        (["arithmetic", "-m", "local:nowhere", "-n", 1], "nowhere"),
        (["--resume"], "-o"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_to_do(treetune, tmp_path, arguments, said):
    result = treetune("eval", *arguments)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "runs").exists()


def test_with_json_an_error_is_one_object_too(treetune):
    result = treetune("eval", "arithmetic", "-m", "scripted:gold", "--json")
    assert result.code == 2
    assert "INFINITE" in result.json["error"]


def test_the_run_folder_can_be_run_again(treetune, tmp_path):
    first = treetune(
        "eval", "arithmetic", "-m", "scripted:p=0.5", "-n", 20, "-o", "one", "--taskset.level", 2,
        "--sampling.temperature", 0.7, "--json",
    ).json  # fmt: skip
    again = treetune("eval", "one/config.yaml", "-o", "two", "--json").json
    assert again["mean_reward"] == first["mean_reward"]
    assert keys(tmp_path / "one" / "traces.jsonl") == keys(tmp_path / "two" / "traces.jsonl")
    config = yaml.safe_load((tmp_path / "one" / "config.yaml").read_text())
    assert (config["taskset"]["level"], config["sampling"]["temperature"]) == (2, 0.7)
    summary = json.loads((tmp_path / "one" / "summary.json").read_text())
    assert summary["data_sources"]["arithmetic"]["rollouts"] == 20
    assert summary["outcomes"] == {"completed": 20}


def test_a_run_folder_is_never_overwritten(treetune):
    assert treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "run").code == 0
    result = treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "run")
    assert result.code == 2
    assert "--resume" in result.err


def test_killed_and_resumed_it_has_every_rollout_exactly_once(treetune, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    arguments = ["eval", "slow.py:Slow", "-m", "scripted:echo", "-r", "2", "-c", "4", "-o", "run"]
    traces = tmp_path / "run" / "traces.jsonl"
    for wanted in (10, 40):
        extra = ["--resume"] if traces.exists() else []
        process = subprocess.Popen([sys.executable, "-m", "treetune", *arguments, *extra], cwd=tmp_path)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and (not traces.exists() or traces.read_bytes().count(b"\n") < wanted):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert wanted <= traces.read_bytes().count(b"\n") < 120
    with open(traces, "ab") as file:
        file.write(b'{"task": {"idx": 3, "prompt": "cut sho')  # what a kill in the middle of a write leaves
    result = treetune(*arguments, "--resume", "--json")
    assert result.code == 0
    assert (result.json["rollouts"], result.json["tasks"], result.json["mean_reward"]) == (120, 60, 1.0)
    assert len(keys(traces)) == 120
    assert set(keys(traces).values()) == {1}
    assert {occurrence for _, occurrence, _ in keys(traces)} == {0, 1}


def test_resume_runs_again_only_what_failed(treetune, tmp_path):
    (tmp_path / "flaky.py").write_text(
        "import os\nfrom treetune import Task, Taskset\n"
        "class Flaky(Taskset):\n"
        "    def load_tasks(self): return [Task(prompt=str(n)) for n in range(10)]\n"
        "    def reward(self, task, answer):\n"
        "        open('calls', 'a').write(answer + ' ')\n"
        "        if task.idx >= 7 and not os.path.exists('mended'): raise OSError('disk on fire')\n"
        "        return 1.0\n"
    )
    first = treetune("eval", "flaky.py:Flaky", "-m", "scripted:echo", "-o", "run", "--json")
    assert first.code == 1
    assert (first.json["outcomes"], first.json["mean_reward"]) == ({"completed": 7, "environment_error": 3}, 1.0)
    assert "disk on fire" in first.err
    (tmp_path / "mended").touch()
    (tmp_path / "calls").unlink()
    again = treetune("eval", "--resume", "-o", "run", "--json")
    assert (again.code, again.json["scored"], again.json["rollouts"]) == (0, 10, 10)
    assert sorted((tmp_path / "calls").read_text().split()) == ["7", "8", "9"]
    assert len(lines(tmp_path / "run" / "traces.jsonl")) == 10
    assert len(lines(tmp_path / "run" / "superseded.jsonl")) == 3


def test_resume_refuses_a_changed_config_by_naming_the_difference(treetune):
    treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 5, "-o", "run")
    refused = treetune(
        "eval", "arithmetic", "-m", "scripted:echo", "-n", 5, "-o", "run", "--resume", "--taskset.level", 2
    )
    assert refused.code == 2
    assert "model: 'scripted:gold' -> 'scripted:echo'" in refused.err
    assert "taskset.level: 1 -> 2" in refused.err
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 5, "-o", "run", "--resume", "-c", 2).code == 0


def test_resume_compares_with_the_config_the_run_began_with_not_with_an_edited_file(treetune, tmp_path):
    treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 6, "-o", "run")
    traces, config = tmp_path / "run" / "traces.jsonl", tmp_path / "run" / "config.yaml"
    traces.write_bytes(b"".join(traces.read_bytes().splitlines(keepends=True)[:3]))
    config.write_text(config.read_text().replace("scripted:gold", "scripted:echo"))
    refused = treetune("eval", "--resume", "-o", "run")
    assert refused.code == 2
    assert "model: 'scripted:gold' -> 'scripted:echo'" in refused.err
    assert len(lines(traces)) == 3
    config.write_text(config.read_text().replace("scripted:echo", "scripted:gold"))
    assert treetune("eval", "--resume", "-o", "run", "--json").json["rollouts"] == 6


SCORER = """
from treetune import Environment, Step, Task, Taskset
class Graded(Taskset):
    def load_tasks(self): return [Task(prompt=str(n)) for n in range(6)]
    def reward(self, task, answer): return {reward}
class Ranked(Graded):
    def score_group(self, task, traces): return [{reward} + trace.rollout for trace in traces]
class Judge(Environment):
    def step(self, action): return Step(reward={reward}, done=True)
"""


def rewards(folder):
    return {(trace["task"]["idx"], trace["rollout"]): trace["reward"] for trace in lines(folder / "traces.jsonl")}


def test_a_run_whose_scorer_changed_is_not_gone_on_with_but_scored_again(treetune, tmp_path):
    scorer, run = tmp_path / "graded.py", tmp_path / "run"
    scorer.write_text(SCORER.format(reward=0.25))
    treetune("eval", "graded.py:Graded", "-m", "scripted:echo", "-o", "run")
    traces = run / "traces.jsonl"
    half = b"".join(traces.read_bytes().splitlines(keepends=True)[:3])
    traces.write_bytes(half)
    scorer.write_text(SCORER.format(reward=0.75))
    refused = treetune("eval", "--resume", "-o", "run")
    assert refused.code == 2
    assert "code of Graded changed" in refused.err
    assert "--rescore" in refused.err
    assert traces.read_bytes() == half
    told = treetune("eval", "--resume", "--rescore", "-o", "run", "--json")
    assert told.code == 0, told.err
    assert "3 of 3 rewards changed" in told.err
    assert (told.json["rollouts"], told.json["mean_reward"]) == (6, 0.75)
    assert rewards(run) == {(at, 0): 0.75 for at in range(6)}
    assert (run / "superseded.jsonl").read_bytes() == half
    # From now on it is a run of the scorer as it is.
    assert treetune("eval", "--resume", "-o", "run", "--json").json["mean_reward"] == 0.75


def test_groups_are_scored_again_together(treetune, tmp_path):
    (tmp_path / "graded.py").write_text(SCORER.format(reward=0.25))
    treetune("eval", "graded.py:Ranked", "-m", "scripted:echo", "-r", 2, "-o", "run")
    (tmp_path / "graded.py").write_text(SCORER.format(reward=5.0))
    assert treetune("eval", "--resume", "--rescore", "-o", "run").code == 0
    assert rewards(tmp_path / "run") == {(at, number): 5.0 + number for at in range(6) for number in range(2)}


def test_a_scorer_that_is_an_environment_is_seen_to_change(treetune, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"question": f"q{n}", "a": "1"}) + "\n" for n in range(3)))
    (tmp_path / "judge.py").write_text(SCORER.format(reward=0.25))
    (tmp_path / "tasks.yaml").write_text(
        "val_tasks:\n- loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}\n"
        "  prompt_template: '{question}'\n  ground_truth: {column: a}\n  env_class: 'judge.py:Judge'\n"
    )
    first = treetune("eval", "tasks.yaml", "-m", "scripted:echo", "-o", "run", "--json")
    assert first.code == 0, first.err
    (tmp_path / "judge.py").write_text(SCORER.format(reward=0.5))
    assert "changed" in treetune("eval", "--resume", "-o", "run").err
    assert treetune("eval", "--resume", "--rescore", "-o", "run", "--json").json["mean_reward"] == 0.5


def test_an_environment_of_a_module_is_seen_to_change(treetune, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "a": "1"}) + "\n")
    (tmp_path / "judge_of_eval.py").write_text(SCORER.format(reward=0.25))
    (tmp_path / "tasks.yaml").write_text(
        "val_tasks:\n- loading_params: {args: [json], kwargs: {data_files: rows.jsonl, split: train}}\n"
        "  prompt_template: '{question}'\n  ground_truth: {column: a}\n  env_class: 'judge_of_eval:Judge'\n"
    )
    assert treetune("eval", "tasks.yaml", "-m", "scripted:echo", "-o", "run").code == 0
    assert treetune("eval", "--resume", "-o", "run").code == 0
    (tmp_path / "judge_of_eval.py").write_text(SCORER.format(reward=0.5))
    refused = treetune("eval", "--resume", "-o", "run")
    assert (refused.code, "changed" in refused.err) == (2, True)


DOUBLES = """
from treetune import Task, Taskset

class Doubles(Taskset):
    def load_tasks(self):
        for n in range(6):
            yield Task(prompt=f"Double {n}.", reward_spec={"ground_truth": str(2 * n)})

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth
"""


def test_tasks_can_be_chosen_by_their_index(treetune, tmp_path):
    (tmp_path / "doubles.py").write_text(DOUBLES)
    chosen = ("--task", 4, "--task", 1, "--task", 4)
    shuffled = ("--taskset.shuffle.seed", 3)
    found = treetune(
        "eval", "doubles.py:Doubles", "-m", "scripted:gold", *chosen, "-r", 2, *shuffled, "-o", "run", "--json"
    )
    assert (found.json["tasks"], found.json["rollouts"], found.json["mean_reward"]) == (2, 4, 1.0)
    entries = Run(tmp_path / "run").select()
    assert sorted(entry.idx for entry in entries) == [1, 1, 4, 4]  # of load order, whatever the order is
    again = treetune("eval", tmp_path / "run" / "config.yaml", "--task", 2, "-o", "again", "--json")
    assert (again.json["tasks"], again.json["rollouts"]) == (1, 2)
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "--task", 9, "-o", "endless").code == 0
    wrong = treetune("eval", "doubles.py:Doubles", "-m", "scripted:gold", "--task", 6, "-o", "wrong")
    assert wrong.code != 0
    assert "6" in wrong.err


def test_scoring_again_can_be_previewed(treetune, tmp_path):
    (tmp_path / "doubles.py").write_text(DOUBLES)
    treetune("eval", "doubles.py:Doubles", "-m", "scripted:p=0.5", "-r", 2, "-o", "run")
    before = (tmp_path / "run" / "traces.jsonl").read_bytes()
    (tmp_path / "doubles.py").write_text(DOUBLES.replace("float(answer == task.ground_truth)", "0.25"))
    preview = treetune("rescore", "run", "--dry-run", "--json").json
    assert preview["changed"] == len(preview["rows"]) == 12
    assert {row["after"] for row in preview["rows"]} == {0.25}
    assert [row["at"] for row in preview["rows"]] == list(range(12))
    some = treetune("rescore", "run", "--dry-run", "--where", "task<2", "-n", 3, "--json").json
    assert ([row["task"] for row in some["rows"]], some["left"]) == ([0, 0, 1], 1)
    said = treetune("rescore", "run", "--dry-run", "--where", "reward=1")
    assert "rewards would change" in said.out
    assert "nothing was written" in said.out
    assert (tmp_path / "run" / "traces.jsonl").read_bytes() == before
    assert not (tmp_path / "run" / "rescored").exists()
    assert "--dry-run" in treetune("rescore", "run", "--where", "failed").err


def test_rescore_goes_with_resume(treetune):
    result = treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 2, "--rescore", "-o", "run")
    assert (result.code, "--resume" in result.err) == (2, True)


def test_a_resumed_run_may_ask_for_more_but_not_for_less(treetune, tmp_path):
    run = tmp_path / "run"
    arguments = ["eval", "arithmetic", "-m", "scripted:gold", "-o", "run", "--json"]
    treetune(*arguments, "-n", 4)
    first = lines(run / "traces.jsonl")
    more = treetune(*arguments, "--resume", "-n", 7)
    assert (more.code, more.json["rollouts"]) == (0, 7), more.err
    assert [trace for trace in lines(run / "traces.jsonl")[:4]] == first
    assert treetune("eval", "--resume", "-o", "run", "--json").json["rollouts"] == 7
    assert treetune("eval", "--resume", "-o", "run", "-r", 2, "--json").json["rollouts"] == 14
    refused = treetune(*arguments, "--resume", "-n", 4, "-r", 2)
    assert refused.code == 2
    assert "num_tasks: 7 -> 4" in refused.json["error"]
    assert treetune("eval", run / "config.yaml", "-o", "again", "--json").json["rollouts"] == 14


def test_resume_may_go_on_at_another_endpoint(treetune):
    start = ("eval", "arithmetic", "-m", "served", "-n", 2, "-o", "run", "--json", "--endpoint.preflight", "false")
    first = treetune(*start, "--endpoint.base_url", "http://127.0.0.1:9/v1", "--endpoint.max_retries", 0)
    assert first.json["outcomes"] == {"policy_error": 2}
    again = treetune(
        "eval", "--resume", "-o", "run", "--endpoint.base_url", "http://127.0.0.1:10/v1", "--endpoint.timeout", 5,
        "--endpoint.max_connections", 3, "--json",
    )  # fmt: skip
    assert again.json["outcomes"] == {"policy_error": 2}
    assert "127.0.0.1:9/v1' -> 'http://127.0.0.1:10/v1'" in again.err
    assert again.json["data_sources"]["arithmetic"]["tasks"] == again.json["tasks"] == 2


def test_a_run_can_be_resumed_and_run_again_from_another_folder(treetune, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "mine.py").write_text(
        "from treetune import Environment, Step, Task, Taskset\n"
        "class Env(Environment):\n    def step(self, action): return Step(reward=1.0, done=True)\n"
        "class Mine(Taskset):\n    def load_tasks(self): return [Task(env_class='mine.py:Env', prompt='x')] * 2\n"
        "    def gold(self, task): return 'x'\n"
    )
    (tmp_path / "sub" / "mix.yaml").write_text(
        "taskset: {id: union, sources: [{id: 'mine.py:Mine'}, {custom_cls: {path: mine.py, name: Mine}}]}\n"
        "model: scripted:gold\n"
    )
    assert treetune("eval", "sub/mine.py:Mine", "-m", "scripted:gold", "--json").json["mean_reward"] == 1.0
    assert treetune("eval", "sub/mix.yaml", "-o", "run", "--json").json["mean_reward"] == 1.0
    sources = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["taskset"]["sources"]
    file = str(tmp_path / "sub" / "mine.py")
    assert (sources[0]["id"], sources[1]["custom_cls"]["path"]) == (f"{file}:Mine", file)
    for arguments in (["--resume", "-o", tmp_path / "run"], [tmp_path / "run" / "config.yaml", "-o", tmp_path / "two"]):
        done = subprocess.run(
            [sys.executable, "-m", "treetune", "eval", *map(str, arguments)], cwd="/", capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "changed" not in done.stderr


def test_resume_without_a_run_says_so(treetune, tmp_path):
    result = treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 5, "-o", "nowhere", "--resume")
    assert result.code == 2
    assert "no run to resume" in result.err
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 2, "-o", "runs/some").code == 0
    for verb in (["eval", "--resume", "-o", "runs/sone"], ["rescore", "runs/sone"]):
        result = treetune(*verb)
        assert result.code == 2
        assert "there is no run runs/sone; did you mean 'runs/some'?" in result.err
        assert "treetune list" not in result.err
    (tmp_path / "runs/some/config.yaml").unlink()
    result = treetune("eval", "--resume", "-o", "runs/some")
    assert "runs/some has no config.yaml" in result.err
    assert "did you mean" not in result.err


DEEP = b'{"task":{"idx":0,"more":' + b"[" * 9999 + b"]" * 9999 + b'},"uid":"x"}\n'
DAMAGES = {
    "a line that was cut": (lambda lines: [lines[0], lines[1][:50], *lines[2:]], ["1 line", "line 2:"], 2),
    "garbage": (lambda lines: [lines[0], b"{garbage}\n", *lines[1:]], ["1 line", "line 2:"], 0),
    "a line twice": (lambda lines: [*lines[:4], lines[1], *lines[4:]], ["1 line", "is repeated"], 0),
    "the last lines twice": (lambda lines: [*lines, *lines[-2:]], ["2 lines", "are repeated"], 0),
    "too deep": (lambda lines: [*lines, DEEP], ["line 9:", "deep"], 0),
    "overwritten": (lambda lines: [*lines[:3], b"#" * 50 + lines[3][50:], *lines[4:]], ["line 4:"], 1),
    "not UTF-8": (lambda lines: [lines[0].replace(b"reverse", b"revers\xff"), *lines[1:]], ["line 1:"], 1),
}


def damaged_run(treetune, folder, change):
    """The rewards of a run, before its lines were changed."""
    treetune("eval", "reverse-text", "-m", "scripted:p=0.5", "-o", "run")
    lines = (folder / "run" / "traces.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "run" / "traces.jsonl").write_bytes(b"".join(change(lines)))
    return [json.loads(line)["reward"] for line in lines]


@pytest.mark.parametrize("damage", DAMAGES)
def test_lines_that_are_damaged_or_doubled_are_named_and_resuming_replaces_them(treetune, tmp_path, damage):
    change, told, _ = DAMAGES[damage]
    rewards = damaged_run(treetune, tmp_path, change)
    rescored = treetune("rescore", "run", "-o", "again", "--json")
    assert all(word in " ".join(rescored.json["after"]["warnings"]) for word in told)
    resumed = treetune("eval", "--resume", "-o", "run", "--json")
    assert all(word in " ".join(resumed.err.split()) for word in [*told, "superseded.jsonl"])
    figures = resumed.code, resumed.json["rollouts"], resumed.json["mean_reward"]
    assert figures == (0, 8, sum(rewards) / 8)
    assert (tmp_path / "run" / "superseded.jsonl").read_bytes()  # nothing is lost
    assert Run(tmp_path / "run").warnings == []


@pytest.mark.parametrize("damage", list(DAMAGES)[:5])  # an index hides bytes that were overwritten until they are read
@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.quick_cases(3)
def test_all_who_read_a_damaged_run_count_the_same_rollouts(treetune, tmp_path, damage, has_index):
    change, told, lost = DAMAGES[damage]
    rewards = damaged_run(treetune, tmp_path, change)
    if not has_index:
        (tmp_path / "run" / "index.jsonl").unlink()
    run = Run(tmp_path / "run")
    assert len(run) == len(list(run.traces())) == 8 - lost
    assert lost or run.mean_reward == sum(rewards) / 8
    assert all(word in " ".join(run.summary.warnings) for word in told)
    for verb in (["show", "run"], ["compare", "run", "run"], ["rescore", "run", "--dry-run"]):
        shown = treetune(*verb)
        assert all(word in " ".join(shown.err.split()) for word in told), verb
    before = treetune("rescore", "run", "-o", "again", "--json").json["before"]
    assert before["mean_reward"] == run.mean_reward == run.summary.mean_reward


def test_the_last_line_may_be_cut_by_a_kill_and_nothing_is_said(treetune, tmp_path):
    treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "run")
    traces = tmp_path / "run" / "traces.jsonl"
    traces.write_bytes(traces.read_bytes()[:-50])
    assert Run(tmp_path / "run").warnings == []
    resumed = treetune("eval", "--resume", "-o", "run", "--json")
    assert (resumed.code, resumed.json["rollouts"], "traces.jsonl" in resumed.err) == (0, 8, False)


def test_a_number_that_was_not_finite_spoils_only_itself(treetune, tmp_path):
    treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "run")
    traces = tmp_path / "run" / "traces.jsonl"
    lines = [json.loads(line) for line in traces.read_text().splitlines()]
    lines[2]["tokens"] = {"sequences": [{"ids": [1, 2], "mask": [0, 1], "logprobs": [0.0, None]}]}
    lines[3]["metrics"] = {"bonus": None, "length": 3.0}
    lines[4]["turns"][0]["reward"] = None
    traces.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    run = Run(tmp_path / "run")
    assert (len(run), run.mean_reward, run.warnings) == (8, 1.0, [])
    found = list(run.traces())
    assert (found[2].tokens, found[3].metrics) == (None, {"length": 3.0})
    told = [trace.warnings for trace in found if trace.warnings]
    assert [warning.rpartition(": ")[2] for (warning,) in told] == ["tokens", "metric bonus", "a turn's reward"]
    rescored = treetune("rescore", "run", "-o", "again", "--json").json
    assert (rescored["before"]["rollouts"], rescored["after"]["mean_reward"]) == (8, 1.0)
    assert "finite numbers" in " ".join(rescored["before"]["warnings"])
    resumed = treetune("eval", "--resume", "-o", "run", "--json")
    assert (resumed.code, resumed.json["rollouts"]) == (0, 8)
    assert "finite numbers" in " ".join(resumed.json["warnings"])


def test_ctrl_c_leaves_a_usable_run_folder(treetune, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    arguments = ["eval", "slow.py:Slow", "-m", "scripted:echo", "-r", "2", "-c", "2", "-o", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", *arguments], cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    traces = tmp_path / "run" / "traces.jsonl"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (not traces.exists() or traces.read_bytes().count(b"\n") < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert b"treetune eval --resume -o run" in out
    assert re.search(rb"mean reward +1\.0000 .* over (\d+) scored", out)  # of those that had ended
    assert b"treetune show run" in out
    assert b"Traceback" not in err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rollouts"] >= 5
    assert treetune("eval", "--resume", "-o", "run", "--json").json["rollouts"] == 120


def test_a_run_that_was_killed_as_it_began_can_begin_again(treetune, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traces.jsonl").touch()
    assert treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", "2", "-o", "run", "--json").json["rollouts"] == 2


def test_two_runs_cannot_write_to_one_folder(treetune, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", "eval", "slow.py:Slow", "-m", "scripted:echo", "-c", "1", "-o", "run"],
        cwd=tmp_path,
    )
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (tmp_path / "run" / "config.yaml").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGSTOP)  # it must not end before the other asks, however slow that is
        result = treetune("eval", "slow.py:Slow", "-m", "scripted:echo", "-o", "run", "--resume")
        assert result.code == 2
        assert "another process" in result.err
    finally:
        process.kill()
        process.wait()


def test_a_group_is_scored_together_and_resumed_as_a_whole(treetune, tmp_path):
    (tmp_path / "ranked.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Ranked(Taskset):\n"
        "    def load_tasks(self): return [Task(prompt=str(n)) for n in range(5)]\n"
        "    def reward(self, task, answer): return 0.0\n"
        "    def score_group(self, task, traces): return [t.rollout / (len(traces) - 1) for t in traces]\n"
    )
    arguments = ("eval", "ranked.py:Ranked", "-m", "scripted:echo", "-r", 3, "-o", "run", "--json")
    assert treetune(*arguments).json["mean_reward"] == 0.5
    traces = tmp_path / "run" / "traces.jsonl"
    traces.write_bytes(b"".join(traces.read_bytes().splitlines(keepends=True)[:-1]))
    again = treetune(*arguments, "--resume").json
    assert (again["mean_reward"], again["rollouts"]) == (0.5, 15)
    assert set(keys(traces).values()) == {1}


def test_only_grouped_tasks_are_run_again_as_a_whole(treetune, tmp_path):
    (tmp_path / "both.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Grouped(Taskset):\n    def load_tasks(self): return [Task(prompt=f'g{n}') for n in range(2)]\n"
        "    def reward(self, task, answer): open('calls', 'a').write(answer + ' '); return 0.0\n"
        "    def score_group(self, task, traces): return [1.0] * len(traces)\n"
        "class Single(Grouped):\n    def load_tasks(self): return [Task(prompt=f's{n}') for n in range(2)]\n"
        "    score_group = Taskset.score_group\n"
    )
    (tmp_path / "both.yaml").write_text(
        "taskset: {id: union, sources: [{id: 'both.py:Grouped'}, {id: 'both.py:Single'}]}\n"
        "model: scripted:echo\nnum_rollouts: 4\n"
    )
    treetune("eval", "both.yaml", "-o", "run")
    traces = tmp_path / "run" / "traces.jsonl"
    gone = {("g1", 2), ("s1", 2)}
    kept = [line for line in traces.read_bytes().splitlines(keepends=True)
            if (json.loads(line)["task"]["prompt"], json.loads(line)["rollout"]) not in gone]  # fmt: skip
    traces.write_bytes(b"".join(kept))
    (tmp_path / "calls").unlink()
    assert treetune("eval", "--resume", "-o", "run", "--json").json["rollouts"] == 16
    assert sorted((tmp_path / "calls").read_text().split()) == ["g1", "g1", "g1", "g1", "s1"]


def test_traces_of_tasks_that_are_gone_are_moved_aside(treetune, tmp_path):
    source = "from treetune import Task, Taskset\nclass Few(Taskset):\n" \
        "    def load_tasks(self): return [Task(prompt=str(n)) for n in range({})]\n" \
        "    def reward(self, task, answer): return 1.0\n"  # fmt: skip
    (tmp_path / "few.py").write_text(source.format("6"))
    treetune("eval", "few.py:Few", "-m", "scripted:echo", "-o", "run")
    (tmp_path / "few.py").write_text(source.format("2, 9"))
    assert treetune("eval", "--resume", "-o", "run").code == 2
    result = treetune("eval", "--resume", "--rescore", "-o", "run", "--json")
    assert result.json["rollouts"] == 7
    assert "no longer has" in result.err
    assert len(lines(tmp_path / "run" / "traces.jsonl")) == 7


def test_a_dry_run_writes_nothing(treetune, tmp_path):
    result = treetune("eval", "arithmetic", "-m", "scripted:gold", "-n", 3, "--dry-run", "--json")
    assert result.json["config"]["num_tasks"] == 3
    assert not list(tmp_path.iterdir())
    assert "did you mean 'gold'" in treetune("eval", "arithmetic", "-m", "scripted:gould", "-n", 3, "--dry-run").err
    assert treetune("eval", "arithmetic", "-m", "local:nowhere", "-n", 3, "--dry-run").code == 2


def test_a_taskset_that_fails_while_giving_tasks_is_named(treetune, tmp_path):
    (tmp_path / "broken.py").write_text(
        "from treetune import Task, Taskset\nclass Broken(Taskset):\n"
        "    def load_tasks(self):\n        yield Task(prompt='a')\n        raise KeyError('column')\n"
        "    def reward(self, task, answer): return 1.0\n"
    )
    result = treetune("eval", "broken.py:Broken", "-m", "scripted:echo", "-o", "run")
    assert result.code == 3
    assert "Broken.load_tasks() failed: KeyError: 'column'" in result.err
    assert "raise KeyError" in result.err, "the author is shown the line"


def test_a_taskset_that_needs_a_container_is_refused_before_its_first_task(monkeypatch):
    from treetune import Taskset
    from treetune.errors import TasksetError
    from treetune.evaluation import refuse_unservable
    from treetune.sandbox import Capability

    class Boxed(Taskset):
        NEEDS_CONTAINER = True

        def load_tasks(self):
            raise RuntimeError("was drawn")

    nothing = Capability(cause="bubblewrap is not installed", remedy="apt-get install bubblewrap")
    monkeypatch.setattr("treetune.sandbox.probe", lambda: nothing)
    with pytest.raises(TasksetError, match=r"Boxed runs code.*bubblewrap is not installed\n.*apt-get install"):
        refuse_unservable(Boxed())
    monkeypatch.setattr("treetune.sandbox.probe", lambda: Capability(launcher=object()))
    refuse_unservable(Boxed())


def test_a_stuck_environment_does_not_keep_the_program_from_ending(treetune_process, tmp_path):
    (tmp_path / "stuck.py").write_text(
        "import time\nfrom treetune import Task, Taskset\nclass Stuck(Taskset):\n"
        "    def load_tasks(self): return [Task(prompt='a')]\n"
        "    def reward(self, task, answer): time.sleep(3600)\n"
    )
    arguments = ["eval", "stuck.py:Stuck", "-m", "scripted:echo", "--limits.timeout", 0.3, "--json"]
    result = treetune_process(*arguments, timeout=20)
    assert result.code == 1
    assert result.json["outcomes"] == {"timeout": 1}
    assert result.json["mean_reward"] is None


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_on_a_terminal_the_display_is_live(tmp_path):
    leader, follower = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", "eval", "reverse-text", "-m", "scripted:gold",
         "--taskset.shuffle.seed", "3"],
        cwd=tmp_path, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )  # fmt: skip
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        if not part:
            break
        shown += part
    assert process.wait(timeout=20) == 0
    os.close(leader)
    text = shown.decode()
    assert "taskset.shuffle" in text
    assert "8/8" in text
    assert "mean reward" in text
    assert "completed" in text


def test_the_standard_error_counts_tasks_as_clusters():
    independent = standard_error([[1.0], [0.0], [1.0], [0.0]])
    clustered = standard_error([[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    assert independent == clustered == pytest.approx(0.2887, abs=1e-4)
    assert standard_error([[1.0, 0.0]]) == pytest.approx(0.5)
    assert standard_error([[1.0]]) is None


def test_pass_at_k_is_the_unbiased_estimate():
    estimates = pass_at_k([[True, False, False, False], [False] * 4])
    assert estimates == {"1": pytest.approx(0.125), "2": pytest.approx(0.25), "4": pytest.approx(0.5)}


RAISES = """
from treetune import Environment, Step, Task, Taskset

class Strict(Environment):
    def step(self, action):
        return Step("", float(int(action.text) == int(self.task.ground_truth)), True)

class Sums(Taskset):
    def load_tasks(self):
        for n in range(4):
            yield Task(prompt=str(n), reward_spec={"ground_truth": str(n)}, data_source="even" if n % 2 == 0 else "odd")

    def environment(self, task):
        return Strict(task)

    def gold(self, task):
        return task.ground_truth if task.idx % 2 == 0 else "one"
"""


def test_both_means_are_told_and_a_difference_is_warned_of(treetune, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    shown = treetune("eval", "raises.py:Sums", "-m", "scripted:gold", "-r", 2, "-o", "run")
    assert shown.code == 1
    assert "warning: 4 of 8 rollouts have no reward: the mean is 1.0000 over the scored, 0.5000 over all" in shown.out
    assert "4 x environment_error (environment): ValueError at raises.py:6" in shown.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["mean_reward"], summary["mean_reward_all"]) == (1.0, 0.5)
    assert (summary["pass_at_k"]["2"], summary["pass_at_k_all"]) == (1.0, {"1": 0.5, "2": 0.5})
    assert summary["data_sources"]["odd"] == {
        "tasks": 2, "rollouts": 4, "mean_reward": None, "mean_reward_all": 0.0, "scored": 0
    }  # fmt: skip
    assert len(summary["warnings"]) == 2
    again = treetune("rescore", "run", "--json")
    assert (again.json["after"]["mean_reward_all"], again.json["skipped"], again.json["changed"]) == (0.5, 4, 0)
    assert "over all" in again.err


def test_an_answer_that_makes_a_scorer_raise_counts_in_the_mean(treetune, tmp_path):
    (tmp_path / "raises.py").write_text(
        RAISES.replace("def environment(self, task):\n        return Strict(task)", "def reward(self, task, answer):\n"
        "        return float(int(answer) == int(task.ground_truth))").replace('"one"', '"9" * 5000')
    )  # fmt: skip
    done = treetune("eval", "raises.py:Sums", "-m", "scripted:gold", "--json")
    assert (done.code, done.json["mean_reward"], done.json["mean_reward_all"]) == (0, 0.5, 0.5)
    assert done.json["warnings"] == [
        "2 x Sums.reward() raised ValueError at raises.py:14 for an answer, which counts as 0"
    ]


@pytest.mark.parametrize(("returned", "named"), [("str(right)", "str '0.0'"), ("right or None", "None")])
def test_a_reward_that_is_no_number_is_named_and_counts_in_the_mean(treetune, tmp_path, returned, named):
    (tmp_path / "odd.py").write_text(f"""
from treetune import Task, Taskset
class Odd(Taskset):
    def load_tasks(self): return [Task(prompt="2 + 1", reward_spec={{"ground_truth": "3"}})]
    def reward(self, task, answer):
        right = float(answer == task.ground_truth)
        return right if right else {returned}
    def gold(self, task): return task.ground_truth
""")
    done = treetune("eval", "odd.py:Odd", "-m", "scripted:echo", "-r", 2, "--json")
    assert (done.code, done.json["mean_reward"], done.json["scored"]) == (0, 0.0, 2)
    assert done.json["warnings"] == [f"2 x Odd.reward() returned {named} for an answer, which counts as 0"]


NO_GOLD = """
from treetune import Environment, Step, Task, Taskset
from treetune.scorers import exact

class Says(Environment):
    def step(self, action):
        return Step(reward=1.0, done=True)

class Knows(Says):
    @classmethod
    def gold(cls, task):
        return None if task.idx == 0 else "b"

class Silent(Taskset):
    ENV = None
    def load_tasks(self):
        return [Task(prompt=f"{n}", reward_spec={"ground_truth": "b"}, env_class=self.ENV) for n in range(2)]
    def reward(self, task, answer):
        return 1.0

class SilentEnvironment(Silent):
    ENV = "silent.py:Says"

class ByEnvironment(Silent):
    ENV = "silent.py:Knows"

class ByEnvironmentOfLast(Silent):
    def load_tasks(self):
        return [Task(prompt="0"), Task(prompt="1", env_class="silent.py:Knows")]

class Some(Silent):
    def gold(self, task):
        return None if task.idx == 0 else "b"

class ByScorer(Silent):
    scorer = exact()
    reward = Taskset.reward
"""


@pytest.mark.parametrize("model", ["scripted:gold", "scripted:p=0.5"])
@pytest.mark.parametrize("name", ["Silent", "SilentEnvironment"])
def test_gold_answers_of_a_taskset_that_has_none_are_refused_before_the_run(treetune, tmp_path, name, model):
    (tmp_path / "silent.py").write_text(NO_GOLD)
    refused = treetune("eval", f"silent.py:{name}", "-m", model, "-o", "run")
    assert (refused.code, (tmp_path / "run").exists()) == (2, False)
    assert f"error: {model} gives gold answers, and {name} has none\n  -> write gold(task), or use" in refused.err
    both = treetune("eval", f"silent.py:{name}", "-m", "scripted:echo", "-m", model, "-o", "run")
    assert (both.code, (tmp_path / "run").exists()) == (2, False)


@pytest.mark.parametrize("name", ["Some", "ByEnvironment", "ByEnvironmentOfLast", "ByScorer"])
def test_gold_answers_of_some_tasks_are_played(treetune, tmp_path, name):
    (tmp_path / "silent.py").write_text(NO_GOLD)
    played = treetune("eval", f"silent.py:{name}", "-m", "scripted:gold", "--json").json
    assert (played["rollouts"], played["scored"]) == (2, 2 if name == "ByScorer" else 1)
    sources = [{"id": "silent.py:Silent"}, {"id": f"silent.py:{name}"}]
    (tmp_path / "both.yaml").write_text(json.dumps({"taskset": {"id": "union", "sources": sources}}))
    assert treetune("eval", "both.yaml", "-m", "scripted:gold", "--json").json["rollouts"] == 4
    assert treetune("eval", "silent.py:Silent", "-m", "scripted:p=0", "--json").json["scored"] == 2


def test_fewer_tasks_than_were_asked_for_are_told(treetune, tmp_path):
    (tmp_path / "silent.py").write_text(NO_GOLD)
    said = "there are only 2 tasks; -n is 100,000\n"
    arguments = ("eval", "silent.py:Silent", "-m", "scripted:echo", "-r", 3, "-n")
    assert said in treetune(*arguments, 100_000).out
    assert said in treetune(*arguments, 100_000, "--json").err
    assert treetune(*arguments, 100_000, "-m", "scripted:p=0").out.count(said) == 2
    assert "there are only" not in treetune(*arguments, 2).out


def test_a_timeout_reward_counts_and_is_not_tried_again(treetune, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW.replace("time.sleep(0.02)", "time.sleep(5)"))
    limits = ("--limits.timeout", 0.1, "--limits.timeout_reward", 0)
    done = treetune("eval", "slow.py:Slow", "-m", "scripted:echo", "-n", 2, *limits, "-o", "run", "--json")
    assert (done.code, done.json["mean_reward"], done.json["outcomes"]) == (0, 0.0, {"timeout": 2})
    again = treetune("eval", "--resume", "-o", "run", "--json")
    assert (again.json["rollouts"], again.json["scored"]) == (2, 2)
    assert not (tmp_path / "run" / "superseded.jsonl").exists()
