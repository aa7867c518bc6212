"""Sets that are ready by name, read from a hub on this machine: what they ask, and what answers earn."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pyarrow.parquet as pq
import pytest
from filelock import FileLock
from hub import Hub
from ready_hub import GSM8K, HUMANEVAL, MBPP, SETS, pinned_revisions, write_sets

from treetune.core.policy import Completion
from treetune.models.scripted import Replay
from treetune.play.rollout import run_rollout
from treetune.sandbox import probe
from treetune.tasksets.target import load_taskset
from treetune.trainers.verl import compute_score

BUILD = """
import json, sys
from treetune.tasksets.target import load_taskset
from treetune.trainers.verl import compute_score
built = {}
for name in sys.argv[1:]:
    for split in ("val", "train"):
        try:
            sidecar, path, hit = load_taskset(name, split=split).build()
            built[f"{name} {split}"] = {"rows": sidecar.rows, "revision": sidecar.revision, "dropped": sidecar.dropped}
        except Exception as error:
            built[f"{name} {split}"] = str(error)
try:
    load_taskset("gpqa", {"taskset.loading_params.args": "[my-org/gated]"}).build()
except Exception as error:
    built["gated"] = [str(error), error.remedy]
print(json.dumps(built))
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory, worker_id):
    """Every set, built once from the hub, for all processes of the tests: what was built, and the cache that has it."""
    alone = worker_id == "master"
    folder = tmp_path_factory.mktemp("ready") if alone else tmp_path_factory.getbasetemp().parent / "ready-sets"
    folder.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "built.json").exists():
            (folder / "built.json").write_text(build_sets(folder))
    return json.loads((folder / "built.json").read_text()), folder


def build_sets(folder):
    write_sets(folder / "hub")
    with Hub(folder / "hub") as hub:
        hub.commits |= dict.fromkeys(pinned_revisions(), hub.commits[hub.commit])
        hub.gated = {"my-org/gated"}
        environment = {**os.environ, **hub.environment(folder / "home"), "TREETUNE_TASK_CACHE_DIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", BUILD, *SETS], capture_output=True, text=True, env=environment, timeout=300
        )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def built(hub, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(hub[1]))
    return hub[0]


NO_TRAINING = ("math500", "aime24", "gpqa", "humaneval", "ifeval")
"""Sets that are there to be measured by."""


@pytest.mark.thorough
def test_every_set_is_built_whole_from_the_hub_at_its_revision(built):
    for name, rows in SETS.items():
        of_set = built[f"{name} val"]
        assert isinstance(of_set, dict), f"{name}: {of_set}"
        assert (of_set["rows"], sum(of_set["dropped"].values())) == (len(rows), 0), name
        assert of_set["revision"] in pinned_revisions() or name == "triviaqa"
        if name in NO_TRAINING:
            assert "no list 'train'" in built[f"{name} train"]
        else:
            assert built[f"{name} train"]["rows"] == len(rows)
    assert len(pinned_revisions()) == len(SETS) - 1


MULTIPLE_CHOICE = (
    "Answer the following multiple choice question. The last line of your response should be of the following format: "
    "'Answer: $LETTER' (without quotes) where LETTER is one of {}. Think step by step before answering.\n\n"
)
PROMPTS = {
    "gsm8k": GSM8K[0]["question"] + ' Let\'s think step by step and output the final answer after "####".',
    "math500": "What is $\\frac{1}{4} + \\frac{1}{4}$? Let's think step by step and output the final answer within "
    "\\boxed{}.",
    "aime24": "Find $5^2 + 8$. Let's think step by step and output the final answer within \\boxed{}.",
    "mmlu": MULTIPLE_CHOICE.format("ABCD") + "What is 2 + 2?\n\nA) 3\nB) 4\nC) 5\nD) 6",
    "arc": MULTIPLE_CHOICE.format("the letters below")
    + "Which of these is a mammal?\n\nA) trout\nB) whale\nC) eagle\nD) frog",
    "gpqa": MULTIPLE_CHOICE.format("ABCD")
    + "Which particle of number 0 has no charge?\n\nA) positron 0\nB) electron 0\nC) neutron\nD) proton 0",
    "humaneval": "Read the following function signature and docstring, and fully implement the function described. "
    "Your response should only contain the code for this function.\n\n" + HUMANEVAL[0]["prompt"],
    "mbpp": "You are an expert Python programmer, and here is your task:\nWrite a function to find the larger of two "
    "numbers.\nYour code should pass these tests:\n" + "\n".join(MBPP[0]["test_list"]),
    "ifeval": "Write about tea in less than 30 words and without commas.",
    "triviaqa": "Answer the question with a short answer and nothing else.\n\nWhich American-born Sinclair won a "
    "prize?",
}


@pytest.mark.parametrize("name", SETS)
def test_the_prompt_of_a_set_is_what_its_convention_says(built, name):
    (message,) = load_taskset(name)[0].messages
    assert (message["role"], message["content"]) == ("user", PROMPTS[name])


LARGER = "```python\ndef larger(a, b):\n    return max(a, b)\n```"
ANSWERS = {
    # name: (number of the task, right answers, wrong ones)
    "gsm8k": (1, ["#### 1000", "So 500 * 2.\n#### 1,000"], ["#### 100", "#### 1000 or 2000", "1000 I think"]),
    "math500": (0, ["\\boxed{0.5}", "It is $\\boxed{\\frac12}$."], ["\\boxed{2}", "\\boxed{1/2} or \\boxed{1}"]),
    "aime24": (
        0,
        ["\\boxed{33}", "So it is \\boxed{033}."],
        ["\\boxed{34}", "\\boxed{33} or \\boxed{34}", "33"],
    ),
    "mmlu": (
        1,
        ["They take in CO2.\n\nAnswer: D", "Answer: (D)", "**Answer: D**", "Answer: Carbon dioxide"],
        ["D", "Answer: A", "Answer: A or D", "A, B, C, D", "Answer: $LETTER"],
    ),
    "arc": (1, ["Answer: B", "Answer: heat"], ["heat", "Answer: A", "Answer: 1", "Answer: B or C", "It is A or B"]),
    "gpqa": (0, ["Answer: C", "Answer: neutron"], ["Answer: A", "Answer: A or C", "proton 0"]),
    "humaneval": (
        0,
        [
            "```python\ndef total(numbers: List[int]) -> int:\n    return sum(numbers)\n```",
            "    return sum(numbers)",
            "```python\n    result = 0\n    for one in numbers:\n        result += one\n    return result\n```",
        ],
        [
            "```python\ndef total(numbers):\n    return 3\n```",
            "return sum(numbers)!",
            "The sum of the numbers.",
            "```python\nimport os\nos._exit(0)\n```",
            "```python\nclass Same(int):\n    __eq__ = lambda *_: True\ndef total(numbers):\n    return Same()\n```",
        ],
    ),
    "mbpp": (0, [LARGER, "def larger(a, b):\n    return max(a, b)"], [LARGER.replace("max", "min"), "max(a, b)"]),
    "ifeval": (0, ["Tea is a drink made of leaves."], ["Tea, a drink.", "tea " * 40]),
    "triviaqa": (
        0,
        ["Sinclair Lewis", "sinclair lewis.", "the Sinclair Lewis", "Harry Sinclair Lewis"],
        ["Lewis Carroll", "Sinclair", "Sinclair Lewis or Upton Sinclair", "not Sinclair Lewis"],
    ),
}
RUNS_CODE = ("humaneval", "mbpp")


def needs_sandbox(name):
    if name in RUNS_CODE and not probe().available:
        pytest.skip(str(probe()))
    if name == "math500":
        pytest.importorskip("math_verify")


def rewards_of(name, number, answers):
    """What answers to a task earn, played as `eval` plays them; a failure has no reward."""
    taskset = load_taskset(name)

    async def play():
        policies = [Replay([Completion(text=answer)]) for answer in answers]
        return await asyncio.gather(*(run_rollout(taskset, taskset[number], policy) for policy in policies))

    traces = asyncio.run(play())
    return {answer: trace.reward for answer, trace in zip(answers, traces, strict=True)}


@pytest.mark.parametrize("name", SETS)
def test_right_answers_earn_1_and_wrong_hedged_and_empty_ones_nothing(built, name):
    needs_sandbox(name)
    number, right, wrong = ANSWERS[name]
    assert rewards_of(name, number, right) == dict.fromkeys(right, 1.0)
    nothing = [*wrong, "", *(["I do not know."] if name != "ifeval" else [])]  # which has no comma
    assert rewards_of(name, number, nothing) == dict.fromkeys(nothing, 0.0)


@pytest.mark.parametrize("name", SETS)
def test_every_task_of_a_set_is_valid_and_pays_its_gold_answer(built, name, treetune, hub):
    needs_sandbox(name)
    done = treetune("validate", name, "--json", TREETUNE_TASK_CACHE_DIR=str(hub[1]))
    assert done.code == 0, done.err + done.out
    found, rows = done.json, len(SETS[name])
    assert (found["tasks"], found["invalid"], found["findings"]) == (rows, 0, [])
    assert found["gold_checked"] == (0 if name == "ifeval" else rows)  # which gives no answers


def test_the_right_option_of_gpqa_stands_anywhere_and_always_in_the_same_place(built):
    letters = [task.ground_truth for task in load_taskset("gpqa")]
    assert set(letters) == set("ABCD")
    assert letters == [task.ground_truth for task in load_taskset("gpqa")]


@pytest.mark.parametrize("name", SETS)
def test_a_row_for_verl_is_scored_as_eval_scores_its_task(built, name):
    needs_sandbox(name)
    number, right, wrong = ANSWERS[name]
    row = pq.read_table(load_taskset(name).get_parquet_path()).to_pylist()[number]
    given = (row["data_source"], row["reward_model"]["ground_truth"], row["extra_info"])
    for answer, reward in {right[0]: 1.0, wrong[0]: 0.0}.items():
        scored = compute_score(given[0], answer, given[1], given[2])
        assert scored["score"] == reward, answer


def test_a_set_whose_terms_nobody_has_accepted_is_told_with_the_remedy(built):
    message, remedy = built["gated"]
    assert "is a gated dataset" in message
    assert remedy == "accept its terms at https://huggingface.co/datasets/my-org/gated, then set HF_TOKEN"
