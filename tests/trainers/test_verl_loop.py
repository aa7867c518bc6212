"""verl's real agent loop workers play our rows: the tokens trained are those sampled, the rewards those of eval.

Ray starts once for all of it, and a script answers in the inference server's place, which needs a GPU.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import command_line
import pytest
import tool_shop
import venvs
from kinds import KINDS, write_targets, written
from serve_process import serve
from tool_shop import STORY

from treetune.cli.listing import TaskKind, cells
from treetune.core.policy import Completion
from treetune.models.scripted import Replay
from treetune.play.rollout import run_rollout
from treetune.sandbox import probe
from treetune.tasksets.target import load_taskset

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("verl")]

SUPPORT = Path(__file__).parents[1] / "support"

COUNTING = """
from pathlib import Path
from treetune import Contract, Environment, Step, Task, Taskset


class Countdown(Environment):
    MULTI_TURN = True

    def note(self, word):
        with (Path(self.task.extra_info["folder"]) / "log").open("a") as log:
            log.write(f"{self.task.ground_truth} {word}\\n")

    def start(self):
        self.note("start")
        if self.task.ground_truth == 13:
            raise RuntimeError("no machine")
        self.left = self.task.ground_truth
        return self.task.messages

    def step(self, action):
        self.left -= 1
        answer = action.text.split("</think>")[-1].strip()
        if answer == "boom":
            raise RuntimeError("the machine is gone")
        right = answer == str(self.left)
        info = {"metrics": {"left": self.left}}
        return Step("Go on.", reward=0.5 * right, done=not right or self.left == 0, info=info)

    def close(self):
        self.note("close")


class Counting(Taskset):
    def load_tasks(self):
        for number in (2, 3, 13):
            yield Task(prompt=f"Count down from {number}.", env_class="counting.py:Countdown",
                       reward_spec={"ground_truth": number}, extra_info={"folder": str(Path.cwd())})
        yield Task(prompt="Read on. " * 400 + "Count down from 1.", env_class="counting.py:Countdown",
                   reward_spec={"ground_truth": 1}, extra_info={"folder": str(Path.cwd())})


class Credited(Counting):
    CONTRACT = Contract(credit="turn", credit_discount=0.5)


class Together(Counting):
    def score_group(self, task, traces):
        return [len(trace.turns) / sum(len(one.turns) for one in traces) for trace in traces]
"""
SAMPLES = [
    {
        "description": "How many files are in /tmp/box?",
        "create": {"local": "default", "init": {"code": "mkdir /tmp/box; touch /tmp/box/one /tmp/box/two"}},
        "evaluation": {"match": "2"},
    }
]
QUESTIONS = [{"question": "What is 9 + 9?", "answer": "#### 18"}, {"question": "What is 2 + 2?", "answer": "#### 4"}]
GSM8K = """
train_tasks:
- loading_params: {args: [json], kwargs: {data_files: questions.jsonl, split: train}}
  prompt_template: "{question}"
  ground_truth: {column: answer, pattern: "#### (.+)"}
  data_source: sums
  env_class: gsm8k_multi_turn
"""
LOOPS = """
- {name: treetune, _target_: treetune.trainers.verl.loop.TreetuneLoop}
- {name: single_turn_agent, _target_: treetune.trainers.verl.loop.SingleTurnLoop}
- {name: raising, _target_: treetune.trainers.verl.loop.TreetuneLoop, on_failure: raise}
- {name: dropping, _target_: treetune.trainers.verl.loop.TreetuneLoop, on_failure: drop, attempts: 1}
- {name: hasty, _target_: treetune.trainers.verl.loop.TreetuneLoop, model_timeout: 0.5}
- {name: short, _target_: treetune.trainers.verl.loop.TreetuneLoop, max_turns: 2, turn_discount: 0.5}
- {name: served, _target_: treetune.trainers.verl.loop.TreetuneLoop, urls: [SERVED], patience: 1}
- {name: pool, _target_: treetune.trainers.verl.loop.TreetuneLoop, urls: [DYING, OTHER], patience: 1}
- {name: wrong, _target_: treetune.trainers.verl.loop.TreetuneLoop, urls: [OTHER], patience: 1}
"""
"""Each with other settings; the capital words are addresses of task servers."""
WORDS = [said.written() for said in STORY]
NINE = ["Let me think.", "It may be\n#### 17", "No:\n#### 18"]
FOUR = ["It is\n#### 4"]
SHELL = ["Think: I look.\n\nAct: bash\n\n```bash\nls /tmp/box | wc -l\n```", "Act: answer(2)"]
THOUGHTS = ["<think>First.</think>1", "<think>Then.</think>0"]
LONG = "1" * 4000


class Played(NamedTuple):
    answers: dict[str, Any]
    log: list[str]


def runs(files: dict[str, list[str]], killed: tuple[int, int]) -> list[dict[str, Any]]:
    counting = {"files": files["counting"]}
    two, three = "Count down from 2.", "Count down from 3."
    known = [
        {"name": f"{name} {worker}", "worker": worker, "files": files[name], "says": says}
        for worker in ("v0", "v1")
        for name, says in {
            "gsm8k": {"9 + 9": [NINE], "2 + 2": [FOUR]},
            "shop": {"red 0": [WORDS], "red 1": [WORDS]},
            "shell": {"/tmp/box": [SHELL]},
        }.items()
        if name in files
    ]
    known += [
        {"name": f"kind {kind}", "worker": "v1", "files": files[kind], "rows": [0],
         "says": {"": [[written(action) for action in KINDS[kind][1]]]}}
        for kind in (TaskKind.MULTI_TURN, TaskKind.TOOLS)
    ]  # fmt: skip
    group = {"says": {three: [["2", "1", "0"], ["2", "boom"], ["9"], ["2", "boom"]]}, "rows": [1], "n": 3}
    bad = {"says": {two: [["1", "0"]], three: [["2", "1", "0"]]}, "rows": [0, 1, 2]}
    engine = {"says": {two: [["1", "0"]], three: [["2", "!raise"]]}, "rows": [0, 1]}
    return [
        *known,
        {"name": "one answer v0", "worker": "v0", "agent": "single_turn_agent", **counting, **group},
        {"name": "one answer v1", "worker": "v1", "agent": "single_turn_agent", **counting, **group},
        {"name": "a bad task v0", "worker": "v0", **counting, **bad},
        {"name": "a bad task v1", "worker": "v1", **counting, **bad},
        {"name": "raised v0", "worker": "v0", "agent": "raising", **counting, **bad},
        {"name": "a group v0", "worker": "v0", **counting, **group},
        {"name": "a group v1", "worker": "v1", **counting, **group},
        {"name": "together v0", "worker": "v0", "files": files["together"], **group},
        {"name": "together v1", "worker": "v1", "files": files["together"], **group},
        {"name": "dropped v1", "worker": "v1", "agent": "dropping", **counting, **group},
        {"name": "again v1", "worker": "v1", **counting, "rows": [0], "says": {two: [["boom"], ["1", "0"]]}},
        {"name": "rewritten v1", "worker": "v1", **counting, "rows": [0], "says": {two: [THOUGHTS]}},
        {"name": "rewritten v0", "worker": "v0", **counting, "rows": [0], "says": {two: [THOUGHTS]}},
        {"name": "credited v1", "worker": "v1", "files": files["credited"], "rows": [0], "says": {two: [THOUGHTS]}},
        {"name": "credited v0", "worker": "v0", "files": files["credited"], "rows": [0], "says": {two: [THOUGHTS]}},
        {"name": "long v0", "worker": "v0", **counting, "rows": [0], "says": {two: [[LONG]]}},
        {"name": "prompt v0", "worker": "v0", **counting, "rows": [3], "says": {"from 1.": [["0"]]}},
        {"name": "short v1", "worker": "v1", "agent": "short", **counting, "rows": [1], "says": {three: [["2", "1"]]}},
        {"name": "engine v0", "worker": "v0", **counting, **engine},
        {"name": "engine v1", "worker": "v1", **counting, **engine},
        {"name": "late v0", "worker": "v0", "agent": "hasty", **counting, "rows": [0], "says": {two: [["!hang"]]}},
        {"name": "cancelled", "worker": "here", **counting, "rows": [0, 1], "cancelled_after": 3,
         "says": {two: [["1", "!hang"]], three: [["2", "1", "!hang"]]}},
        {"name": "wrong v1", "worker": "v1", "agent": "wrong", "files": files["shop"], "rows": [1],
         "says": {"red 1": [WORDS]}},
        {"name": "pool v1", "worker": "v1", "agent": "pool", **counting, "rows": [0, 1], "n": 2,
         "says": {two: [["1", f"!kill {killed[0]} 0"], ["1", "0"]], three: [["2", "1", "0"]]}},
        {"name": "served v0", "worker": "v0", "agent": "served", **counting, "rows": [0, 1], "n": 2,
         "says": {two: [["1", "0"]], three: [["2", "1", "0"]]}},
        {"name": "killed v0", "worker": "v0", "agent": "served", **counting, "rows": [0],
         "says": {two: [["1", f"!kill {killed[1]} 0"]]}},
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("verl_loop")


@pytest.fixture(scope="module")
def played(folder) -> Played:
    """What the workers made of all runs."""
    python = venvs.venv(*venvs.VERL)
    (folder / "model").mkdir()
    venvs.run(python, SUPPORT / "tiny_model.py", folder / "model", "forgets")
    caches = {"TREETUNE_TASK_CACHE_DIR": str(folder / "cache"), "HF_HOME": str(folder / "library")}
    served = folder / "served"
    served.mkdir()
    for place in (folder, served):
        (place / "counting.py").write_text(COUNTING)
    tool_shop.write(folder)
    write_targets(folder)
    (folder / "samples.json").write_text(json.dumps(SAMPLES))
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    (folder / "gsm8k.yaml").write_text(GSM8K)
    (folder / "shell.yaml").write_text("taskset: {id: os-interaction, data: samples.json}")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.chdir(folder)
        for name, value in caches.items():
            patch.setenv(name, value)
        files = {name: build(folder, target) for name, target in targets().items()}
        start = ["counting.py:Counting", "--http", "127.0.0.1:0"]
        servers = [stack.enter_context(serve(served, *start, **caches)) for _ in range(3)]
        loops = LOOPS
        for word, server in zip(("DYING", "SERVED", "OTHER"), servers, strict=True):
            loops = loops.replace(word, json.dumps(server.report["http"]))
        (folder / "loops.yaml").write_text(loops)
        asked = {
            "model": str(folder / "model"),
            "loops": str(folder / "loops.yaml"),
            "runs": runs(files, (servers[0].process.pid, servers[1].process.pid)),
        }
        (folder / "request.json").write_text(json.dumps(asked))
        side = SUPPORT / "verl_side.py"
        venvs.run(python, side, "loops", folder / "request.json", folder / "answer.json", timeout=900, **caches)
    return Played(json.loads((folder / "answer.json").read_text()), (folder / "log").read_text().split("\n"))


def targets() -> dict[str, str]:
    found = {"gsm8k": "gsm8k.yaml", "shop": "shop.py:Shopping", "counting": "counting.py:Counting"}
    found |= {"together": "counting.py:Together", "credited": "counting.py:Credited"}
    found |= {kind: KINDS[kind][0] for kind in (TaskKind.MULTI_TURN, TaskKind.TOOLS)}
    return {**found, "shell": "shell.yaml"} if probe(shell=True).launcher is not None else found


def build(folder: Path, target: str) -> list[str]:
    done = command_line.run(folder, ["build", target, "--format", "verl", "--json"], {})
    assert done.code == 0, done.err
    files: list[str] = done.json["train_files"]
    return files


def samples(played: Played, name: str) -> list[dict[str, Any]]:
    found = played.answers[name]["samples"]
    return found["samples"] if isinstance(found, dict) else found


def rewards(played: Played, name: str) -> list[float]:
    return [sum(sample["rm_scores"]) for sample in samples(played, name)]


def check_tokens(played: Played, name: str) -> None:
    """Each sample was sampled in calls of one request, each call was given what came before it, and what is trained on
    are its tokens with their log-probabilities, all of them and nothing else."""
    by_request = defaultdict(list)
    for call in played.answers[name]["calls"]:
        by_request[call["request"]].append(call)
    left = list(by_request.values())
    for sample in samples(played, name):
        ids = sample["prompts"] + sample["responses"]
        calls = next(calls for calls in left if calls[0]["prompt"] == sample["prompts"])
        left.remove(calls)
        mask, logprobs = [0] * len(ids), [0.0] * len(ids)
        for call in calls:
            given, end = len(call["prompt"]), len(call["prompt"]) + len(call["sampled"])
            assert ids[:end] == call["prompt"] + call["sampled"]
            mask[given:end], logprobs[given:end] = [1] * (end - given), call["logprobs"]
        first = len(sample["prompts"])
        assert sample["response_mask"] == mask[first:]
        assert sample["logprobs"] == pytest.approx(logprobs[first:])
        placed(sample)
        assert sample["fields"]["min_global_steps"] == 10
        assert sample["fields"]["max_global_steps"] == 20 + len(calls) - 1
        assert sample["num_turns"] == 2 * len(calls) == 2 * sample["info"]["num_turns"]
    assert not left


def in_eval(folder: Path, target: str, *scripts: list[str]) -> list[tuple[float, bool]]:
    """What eval makes of the same answers, one script for each task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        taskset = load_taskset(target)
        tasks = taskset.select_tasks()

    async def play() -> list[tuple[float, bool]]:
        traces = []
        for task, script in zip(tasks, scripts, strict=True):
            policy = tool_shop.Script() if script is WORDS else Replay([Completion(text=text) for text in script])
            traces.append(await run_rollout(taskset, task, policy))
        return [(trace.shaped_reward, trace.passed()) for trace in traces]

    return asyncio.run(play())


def check_rewards(played: Played, name: str, expected: list[tuple[float, bool]]) -> None:
    assert rewards(played, name) == pytest.approx([reward for reward, _ in expected])
    assert [sample["info"]["acc"] for sample in samples(played, name)] == [float(passed) for _, passed in expected]


WORKERS = pytest.mark.parametrize("worker", ["v0", "v1"])


@WORKERS
def test_several_attempts_at_a_question_train_what_was_sampled_and_earn_what_eval_says(played, folder, worker):
    check_tokens(played, f"gsm8k {worker}")
    check_rewards(played, f"gsm8k {worker}", in_eval(folder, "gsm8k.yaml", NINE, FOUR))
    assert played.answers[f"gsm8k {worker}"]["agents"] == ["treetune"] * 2
    first = samples(played, f"gsm8k {worker}")[0]
    assert first["fields"]["turn_scores"] == pytest.approx([0.0, 0.04, 1.0])
    own = {"turns": 3.0, "success": 1.0}
    assert first["info"] == {**own, "acc": 1.0, "num_turns": 3, "truncated": 0.0, "failed": 0.0, "raw_reward": 1.04}


@WORKERS
def test_tools_are_called_and_answered_in_the_words_of_the_template(played, folder, worker):
    check_tokens(played, f"shop {worker}")
    check_rewards(played, f"shop {worker}", in_eval(folder, "shop.py:Shopping", WORDS, WORDS))
    assert rewards(played, f"shop {worker}") == [0.0, 1.0]


@WORKERS
def test_a_shell_is_used_over_several_turns(played, folder, worker):
    if f"shell {worker}" not in played.answers:
        pytest.skip("no sandbox here")
    check_tokens(played, f"shell {worker}")
    check_rewards(played, f"shell {worker}", in_eval(folder, "shell.yaml", SHELL))
    assert rewards(played, f"shell {worker}") == pytest.approx([0.95**2])  # os-interaction declares that discount


@pytest.mark.parametrize("kind", [TaskKind.MULTI_TURN, TaskKind.TOOLS])
def test_a_kind_of_task_that_the_matrix_gives_it_is_played(played, kind):
    assert cells()["task"][kind]["verl"] is True
    check_tokens(played, f"kind {kind}")
    assert rewards(played, f"kind {kind}") == [1.0]


def check_masked(sample: dict[str, Any]) -> None:
    assert sample["response_mask"] == [0]
    assert sample["logprobs"] == [0.0]
    assert sample["info"]["failed"] == 1.0
    assert (sample["num_turns"], sample["info"]["num_turns"]) == (0, 0)


def test_a_task_that_cannot_be_played_trains_nothing_and_fails_no_batch(played):
    one, two, bad = samples(played, "a bad task v0")
    assert [sum(sample["rm_scores"]) for sample in (one, two)] == [1.0, 1.5]
    check_masked(bad)
    assert bad["info"]["acc"] is None  # verl's validation leaves it out
    assert bad["info"]["left"] is None  # the environment's own metric
    assert {"acc", "num_turns", "truncated", "failed", "raw_reward", "left"} <= set(one["info"])
    assert set(one["info"]) == set(two["info"]) == set(bad["info"])


def test_the_v1_trainer_is_told_of_a_prompt_that_cannot_be_played_at_all(played):
    found = played.answers["a bad task v1"]["samples"]
    assert found["states"] == ["finished", "finished", "failure"]
    assert rewards(played, "a bad task v1") == [1.0, 1.5]


def test_raising_is_a_choice(played):
    assert "no machine" in played.answers["raised v0"]["samples"]


@WORKERS
def test_a_failed_episode_leaves_the_mean_of_its_group_as_it_is(played, worker):
    found = sorted(samples(played, f"a group {worker}"), key=lambda sample: sample["info"]["failed"])
    *scored, masked = found
    assert sorted(sum(sample["rm_scores"]) for sample in scored) == [0.0, 1.5]
    check_masked(masked)
    assert sum(masked["rm_scores"]) == 0.75
    assert masked["info"]["acc"] == (0.5 if worker == "v1" else None)
    if worker == "v1":  # its metrics want a number of every sample
        assert masked["tag"] == {"min_global_steps": 10, "max_global_steps": 21}


@WORKERS
def test_grpo_compares_the_others_as_if_the_failed_one_were_not_there(played, worker):
    name = f"a group {worker}"
    for sample, advantages in zip(samples(played, name), played.answers[name]["advantages"], strict=True):
        reward = sum(sample["rm_scores"])
        expected = 0.0 if sample["info"]["failed"] else reward - 0.75
        trained = {advantage for advantage, mask in zip(advantages, sample["response_mask"], strict=True) if mask}
        assert trained == (set() if sample["info"]["failed"] else {expected})
        assert {advantage for advantage in advantages} <= {0.0, expected}


def test_validation_has_its_figures_by_data_source_and_no_zero_for_a_failure(played):
    (found,) = played.answers["a bad task v0"]["validation"].values()
    assert (found["acc"], found["failed"], found["num_turns"]) == (
        {"mean@1": 1.0},
        {"mean@1": pytest.approx(1 / 3)},
        {"mean@1": pytest.approx(5 / 3)},
    )
    assert played.answers["gsm8k v1"]["validation"]["sums"]["acc"] == {"mean@1": 1.0}


def test_a_failed_episode_can_be_dropped_from_its_group(played):
    assert played.answers["dropped v1"]["samples"]["states"] == ["finished"]
    assert sorted(rewards(played, "dropped v1")) == [0.0, 1.5]


def test_a_failed_episode_is_played_again(played):
    assert rewards(played, "again v1") == [1.0]
    (sample,) = samples(played, "again v1")
    assert sample["info"]["failed"] == 0.0
    assert sample["fields"]["turn_scores"] == [0.5, 0.5]


def test_rewritten_history_makes_two_samples_where_the_trainer_takes_them(played):
    first, second = samples(played, "rewritten v1")
    calls = played.answers["rewritten v1"]["calls"]
    for sample, call in zip((first, second), calls, strict=True):
        assert (sample["prompts"], sample["responses"]) == (call["prompt"], call["sampled"])
        assert set(sample["response_mask"]) == {1}
    assert rewards(played, "rewritten v1") == [1.0, 1.0]
    assert (first["uid"][:-2], second["uid"][:-2]) == (first["uid"][:-2],) * 2
    # The v0 trainer takes one: it goes on from what was sampled.
    check_tokens(played, "rewritten v0")


def test_the_trainer_knows_which_turns_are_in_which_row_and_what_each_has_earned(played):
    rows = samples(played, "credited v1")
    assert len(rows) == 2
    for turn, row in enumerate(rows):
        credit = row["fields"]["turn_credit"]
        assert (credit["by"], credit["discount"], credit["rewards"]) == ("turn", 0.5, [0.5, 0.5])
        assert [list(span) for span in credit["spans"]] == [[turn, 0, len(row["responses"])]]
    assert "no credit by turn" in played.answers["credited v0"]["samples"]  # the v0 trainer has none


def test_an_answer_is_cut_to_what_verl_has_room_for(played):
    (sample,) = samples(played, "long v0")
    assert len(sample["responses"]) == 3000
    assert set(sample["response_mask"]) == {1}
    assert rewards(played, "long v0") == [0.0]


def test_a_prompt_that_is_too_long_is_not_cut_but_left_out(played):
    (sample,) = samples(played, "prompt v0")
    check_masked(sample)
    assert played.answers["prompt v0"]["calls"] == []


def test_limits_and_discount_of_the_loop_hold(played):
    (sample,) = samples(played, "short v1")
    own = {"left": 1.0, "success": 1.0, "raw_reward": 1.0}
    assert sample["info"] == {**own, "acc": 1.0, "num_turns": 2, "truncated": 1.0, "failed": 0.0}
    assert rewards(played, "short v1") == [0.25]  # 0.5 + 0.5, discounted twice


def placed(sample: dict[str, Any]) -> list[float]:
    """The rewards at the last sampled token of each turn."""
    mask = [*sample["response_mask"], 0]
    ends = [at for at in range(len(mask) - 1) if mask[at] and not mask[at + 1]]
    found = [sample["rm_scores"][at] for at in ends]
    assert sum(found) == pytest.approx(sum(sample["rm_scores"]))  # none elsewhere
    return found


@WORKERS
def test_the_trainer_gets_the_reward_of_each_turn_where_it_ended(played, worker):
    first, second = samples(played, f"gsm8k {worker}")
    assert placed(first) == pytest.approx([0.0, 0.04, 1.0])
    assert placed(second) == [1.0]
    if worker == "v1":
        (short,) = samples(played, "short v1")
        assert placed(short) == [0.5, -0.25]  # the last turn has what the discount changes: 1 / 4 in all


@WORKERS
def test_each_call_of_the_model_has_a_seed_of_its_own(played, worker):
    runs = [played.answers[f"{name} {worker}"]["calls"] for name in ("a group", "gsm8k")]
    seeds = [call["seed"] for calls in runs for call in calls]
    assert None not in seeds
    assert len({call["seed"] for call in played.answers[f"one answer {worker}"]["calls"]} - {None}) == 3
    assert len(set(seeds)) == len(seeds) > 8


def test_rollouts_of_a_task_are_scored_together_and_a_divided_group_is_refused(played):
    found = sorted(samples(played, "together v1"), key=lambda sample: sample["info"]["failed"])
    *scored, masked = found
    assert sorted(sum(sample["rm_scores"]) for sample in scored) == [0.25, 0.75]
    assert {sample["info"]["raw_reward"] for sample in scored} == {0.25, 0.75}
    check_masked(masked)
    assert sum(masked["rm_scores"]) == 0.5
    assert "divided between verl's workers" in played.answers["together v0"]["samples"]  # verl's n is 1 there


def test_an_engine_that_fails_is_the_trainers_to_deal_with(played):
    assert "the engine is gone" in played.answers["engine v0"]["samples"]
    assert played.answers["engine v1"]["samples"]["states"] == ["finished", "failure"]
    assert rewards(played, "engine v1") == [1.0]


def test_a_model_that_does_not_answer_in_time_gives_no_reward(played):
    (sample,) = samples(played, "late v0")
    check_masked(sample)


def test_a_worker_that_cancels_leaves_no_episode(played):
    assert played.answers["cancelled"]["samples"] == "cancelled"


def test_no_environment_of_any_run_was_left_open(played):
    words = [line.split()[1] for line in played.log if line]
    assert words.count("start") > 20
    assert words.count("start") == words.count("close")


def test_episodes_are_played_on_task_servers(played):
    check_tokens(played, "served v0")
    assert rewards(played, "served v0") == [1.0, 1.0, 1.5, 1.5]


def test_a_server_that_dies_in_the_middle_costs_no_reward_where_there_is_another(played):
    assert played.answers["pool v1"]["samples"]["states"] == ["finished", "finished"]
    assert rewards(played, "pool v1") == [1.0, 1.0, 1.5, 1.5]


def test_a_server_that_dies_alone_gives_a_sample_that_trains_nothing(played):
    (sample,) = samples(played, "killed v0")
    check_masked(sample)


def test_a_server_of_other_tasks_is_refused(played):
    assert played.answers["wrong v1"]["samples"] == {"states": ["failure"], "samples": []}
    assert played.answers["wrong v1"]["calls"] == []
