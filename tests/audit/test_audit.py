"""`treetune audit`: planted faults are found, each by its rule, and what is sound is left in peace."""

from __future__ import annotations

import asyncio
import re

import planted_tasks as planted
import pytest
from hypothesis import given
from hypothesis import strategies as st
from raising import raises_code

from treetune.audit import RULES, AuditConfig, Auditor, choose, costs
from treetune.audit.floors import least_share
from treetune.audit.leaks import find_pairs
from treetune.audit.sample import Wrapping
from treetune.audit.solvable import AGAIN_RULES
from treetune.core.finding import Severity
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.models.scripted import Echo
from treetune.play.host import LocalHost, always
from treetune.scorers import exact, number

ERROR, WARNING, NOTE = Severity

FAULTS = {
    "InvalidTask": ("invalid-task", ERROR),
    "StartFails": ("start-fails", ERROR),
    "GoldFailed": ("gold-failed", ERROR),
    "GoldNotRewarded": ("gold-not-rewarded", ERROR),
    "FormDiffers": ("answer-form-differs", WARNING),
    "FormUnsaid": ("answer-form-unsaid", WARNING),
    "Guessed": ("answer-guessed", WARNING),
    "GoldSaidOtherwise": ("gold-said-otherwise", WARNING),
    "GoldToolError": ("gold-tool-error", WARNING),
    "GoldWithoutTools": ("gold-tool-error", WARNING),
    "GoldUnknown": ("gold-unknown", WARNING),
    "TasksDiffer": ("tasks-differ", ERROR),
    "TasksDifferByHash": ("tasks-differ", ERROR),
    "RewardDiffers": ("reward-differs", ERROR),
    "ObservationsDiffer": ("observations-differ", WARNING),
    "NotPortable": ("not-portable", WARNING),
    "PaysEmpty": ("pays-empty", ERROR),
    "PaysEcho": ("pays-echo", ERROR),
    "PaysPromptWords": ("pays-prompt-words", ERROR),
    "PaysConstant": ("pays-constant", WARNING),
    "PaysRandom": ("pays-random", ERROR),
    "PaysLong": ("pays-long", ERROR),
    "PaysHedged": ("pays-hedged", ERROR),
    "PaysPart": ("pays-part", ERROR),
    "PaysFormat": ("pays-format", ERROR),
    "FormatPaid": ("format-paid", NOTE),
    "PaysOdd": ("pays-odd", ERROR),
    "GoldBeaten": ("gold-beaten", ERROR),
    "BreaksScoring": ("breaks-scoring", ERROR),
    "PaysExit": ("pays-exit", ERROR),
    "PaysOverwrittenChecker": ("pays-overwritten-checker", ERROR),
    "PaysReadExpected": ("pays-read-expected", ERROR),
    "TruthInPrompt": ("truth-in-prompt", ERROR),
    "LongTruthInPrompt": ("truth-in-prompt", WARNING),
    "TruthInTools": ("truth-in-tools", ERROR),
    "TruthInObservations": ("truth-in-observations", ERROR),
    "DuplicateTasks": ("duplicate-tasks", WARNING),
    "OtherTruths": ("duplicate-tasks", WARNING),
    "CloseFails": ("close-fails", WARNING),
    "ProcessesLeft": ("processes-left", WARNING),
}


def audit(taskset, policy=None, **settings):
    async def run():
        host = await LocalHost.open(taskset, always(policy or Echo()))
        other = settings.pop("other", None)
        return await Auditor(taskset, AuditConfig(**settings), other=other, other_name="val").run(host)

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def end_processes():
    yield
    for process in planted.LEFT:
        process.kill()
        process.wait()
    planted.LEFT.clear()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_by_its_rule(fault):
    rule, severity = FAULTS[fault]
    report = audit(getattr(planted, fault)(), rules=[rule])
    found = [finding for finding in report.findings if finding.severity is severity]
    assert [finding.rule for finding in found][:1] == [rule], report.findings
    assert found[0].remedy
    assert found[0].expected
    assert found[0].evidence or found[0].rule in ("gold-unknown", "not-portable")
    assert report.ok == (severity is not ERROR)


def test_calls_of_a_gold_answer_that_fail_are_quoted():
    (finding,) = audit(planted.GoldToolError(), rules=["solvable"]).findings
    assert finding.found == "3 of 12 gold answers make a tool call that fails"
    said = "there is no tool 'lookup'; did you mean 'look_up'?; there are: look_up"
    assert finding.evidence == [f"tasks 0, 4, 8: {said}"]
    forgotten = audit(planted.GoldWithoutTools(), rules=["gold-tool-error"]).findings[0]
    assert "tasks 0, 4, 8: gold() calls 'lookup', but the task offers no tools" in forgotten.evidence


def test_a_sound_taskset_has_no_findings():
    report = audit(planted.Sound())
    assert report.findings == []
    assert report.ok
    assert report.facts["played_again_in"].endswith("8 of them in another")
    assert report.rollouts > 100
    assert report.costs["gold: turns"].median == 1


@pytest.mark.parametrize("sound", ["Choices", "Numbers", "Groups", "Program", "Explained"])
def test_what_is_sound_has_no_error(sound):
    report = audit(getattr(planted, sound)(), skip=[*AGAIN_RULES])
    assert [finding for finding in report.findings if finding.severity is not NOTE] == []


def test_an_environment_that_takes_long_is_noted(monkeypatch):
    assert audit(planted.Sound(), rules=["slow-environment"]).findings == []
    monkeypatch.setattr(costs, "SLOW_SECONDS", 0.03)  # not ten seconds a task, in a test
    (finding,) = audit(planted.Slow(), rules=["slow-environment"]).findings
    assert (finding.rule, finding.severity) == ("slow-environment", NOTE)
    assert "seconds of the environment" in finding.found


def test_every_rule_has_a_planted_fault():
    with_model = {name for name, rule in RULES.items() if rule.family == "spread"}
    elsewhere = {
        "train-val-overlap",
        "train-val-near",
        "truth-on-machine",
        "reference-done-already",
        "slow-environment",
    }
    assert {rule for rule, _ in FAULTS.values()} | with_model | elsewhere == set(RULES)


def test_rules_are_chosen_by_name_and_family():
    assert choose([], []) is None
    assert choose(["costs"], ["close-fails"]) == {"slow-environment", "processes-left"}
    assert choose(["pays-empty,pays-echo"], []) == {"pays-empty", "pays-echo"}
    with raises_code("unknown-name", "pays-emty"):
        choose(["pays-emty"], [])


class Listed(Taskset):
    """The tasks that it is given."""

    def __init__(self, *tasks):
        super().__init__()
        self.given = list(tasks)

    def load_tasks(self):
        return self.given

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return task.ground_truth


def asks(prompt, truth):
    return Task(prompt=prompt, reward_spec={"ground_truth": truth})


CLIPS = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips?"


def test_tasks_that_both_splits_have_are_found_also_in_other_words():
    train = Listed(asks(CLIPS, "72"), asks("What is six times seven?", "42"), asks("What is 3 + 4, please?", "7"))
    val = Listed(
        asks("what is six times  seven", "42"),  # the same but for how it is written
        asks(CLIPS.replace("her friends", "her friends,").replace("How many clips?", "How many clips in all?"), "72"),
        asks("What is 3 + 5, please?", "8"),  # of the same template, and another task
        asks(CLIPS.replace("48", "52"), "78"),
    )
    report = audit(train, other=val, rules=["train-val-overlap", "train-val-near"])
    found = {finding.rule: finding for finding in report.findings}
    assert found["train-val-overlap"].severity is ERROR
    assert found["train-val-overlap"].rows == [1]
    assert found["train-val-near"].severity is WARNING
    assert found["train-val-near"].rows == [0]
    assert "task 1 of val" in found["train-val-near"].evidence[0]
    assert audit(train, other=Listed(asks("Who was first?", "Ada")), rules=["no-leak"]).findings == []


def test_a_number_of_a_word_problem_is_no_leak_by_itself():
    tasks = [asks(f"Ada has {n} apples and gets {n + 3} more. How many does Bo have, who has {2 * n}?", str(2 * n))
             for n in range(10, 40)]  # fmt: skip
    found = audit(Listed(*tasks), rules=["truth-in-prompt"]).findings
    assert [finding.severity for finding in found] == [NOTE]


@pytest.mark.parametrize(
    ("prompt", "truth"),
    [
        ("2 + 3? Answer: 5", "5"),
        ("2 + 3? (ground truth: 5)", "5"),
        ("What is the capital of France? The correct answer is Paris.", "Paris"),
        ("2 + 3? expected answer = 5", "5"),
    ],
)
def test_a_prompt_that_says_which_answer_is_right_is_an_error(prompt, truth):
    found = audit(Listed(asks(prompt, truth), asks("Another?", "yes")), rules=["truth-in-prompt"]).findings
    assert [(finding.severity, finding.rows) for finding in found] == [(ERROR, [0])]


@pytest.mark.parametrize(
    "prompt",
    [
        "2 + 3? Write Answer: and the number, for example Answer: 5",
        "2 + 3? Answer: 50 or more?",
        "2 + 3? The answer is in the book on page 51.",
    ],
)
def test_a_prompt_that_only_looks_like_it_is_none(prompt):
    assert audit(Listed(asks(prompt, "5"), asks("Another?", "yes")), rules=["truth-in-prompt"]).findings == []


def test_a_choice_that_the_prompt_gives_away_is_found_and_how_to_answer_is_not():
    class Tells(planted.Choices):
        def prompt(self, index):
            return f"{super().prompt(index)}\n{self.note(index)}"

        def note(self, index):
            return f"The correct answer is {self.truth(index)}."

    class Explains(Tells):
        def note(self, index):
            return "End with a line that says Answer: B"

    told = audit(Tells(), rules=["truth-in-prompt"]).findings
    assert [(finding.severity, finding.count) for finding in told] == [(ERROR, 40)]
    assert audit(Explains(), rules=["truth-in-prompt"]).findings == []


def test_chance_is_no_fault_and_what_is_above_it_is():
    class Skewed(planted.Choices):
        def truth(self, index):
            return "B" if index % 8 else super().truth(index)

    report = audit(planted.Choices(), rules=["pays-constant", "pays-random"])
    assert report.findings == []
    assert {floor.expected for floor in report.floors if floor.policy.startswith("always")} == {0.25}
    found = audit(Skewed(), rules=["pays-constant"]).findings
    assert [finding.severity for finding in found] == [ERROR]
    assert "always 'B', the right answer of 9" in found[0].found
    assert "chance would earn" in found[0].found


def test_the_same_seed_tries_the_same_tasks():
    tasks = [audit(planted.Numbers(), num_tasks=5, seed=seed, rules=["pays-empty"]).tasks for seed in (0, 0, 1)]
    assert tasks[0] == tasks[1] != tasks[2]
    assert len(tasks[0]) == 5


def test_the_format_of_answers_is_read_from_gold_answers():
    worked = Wrapping.of("12 and 60 give 72.\nSo it is\n#### 72", "72")
    assert worked == Wrapping("#### ", "")
    assert worked.write("5") == "#### 5"
    assert Wrapping.of("<answer>Paris</answer>", ["Paris", "paris"]) == Wrapping("<answer>", "</answer>")
    assert Wrapping.of("no truth in it", "72") is None
    assert Wrapping.shared(["Act: answer(3)", "Act: answer(log)"]) == Wrapping("Act: answer(", ")")
    assert Wrapping.shared(["#### 12", "#### 17"]) == Wrapping("#### ", "")  # no number is cut in two
    assert Wrapping.shared(["otter", "walnut"]) == Wrapping()
    assert Wrapping("(", ")").read("(5)") == "5"
    assert Wrapping("(", ")").read("5)") is None


def test_programs_are_no_format_to_fill():
    """A block of code with another number in it may well be the right program."""
    report = audit(planted.Program(), rules=["pays-prompt-words", "pays-format", "pays-hedged"])
    assert report.findings == []
    assert {floor.policy for floor in report.floors} <= {"prompt-number", "prompt-word"}


@given(st.text(max_size=200), st.text(max_size=60))
def test_texts_that_are_the_same_are_found_and_others_are_compared_by_their_words(text, other):
    pairs = list(find_pairs([text], [other, text]))
    assert (0, 1, 1.0) in pairs
    assert all(alike >= 0.8 for _, _, alike in pairs)


def test_of_nearly_equal_texts_none_is_missed():
    words = [f"w{number}" for number in range(60)]
    texts = [" ".join([*words[:place], "changed", *words[place + 1 :]]) for place in range(60)]
    near = {one for one, _, alike in find_pairs(texts, [" ".join(words)])}
    assert near == set(range(60))


def test_the_bound_of_a_share_is_that_of_wilson():
    assert least_share(0, 50) == 0
    assert least_share(50, 50) == pytest.approx(0.883, abs=0.001)
    assert least_share(12, 50) == pytest.approx(0.120, abs=0.005)


class Measured(planted.Sound):
    """What stands before or after the number is not a part of the answer, and half of a choice is none."""

    def truth(self, index):
        return [f"{index + 20} km", f"x = {index + 20}", f"{index + 20}.0", "yes"][index % 4]

    def reward(self, task, answer):
        said, truth = (re.findall(r"[0-9.]+|yes", text)[-1:] for text in (answer, task.ground_truth))
        return float(bool(said) and said[0].rstrip("0").rstrip(".") == truth[0].rstrip("0").rstrip("."))


class Rounded(planted.Sound):
    """Numbers with a tolerance, and texts of which a full stop is not a part."""

    scorer = number(relative=0.01)

    def truth(self, index):
        return f"{(index + 2) ** 0.5:.6f}"

    reward = Taskset.reward


class Stopped(Rounded):
    scorer = exact()

    def truth(self, index):
        return f"{'abcdefghijklmnopqrstuvwxyz'[index % 26]}."


@pytest.mark.parametrize("taskset", [Measured, Rounded, Stopped])
def test_a_part_that_says_what_the_whole_says_may_be_paid(taskset):
    report = audit(taskset(), rules=["pays-part"])
    assert not [finding for finding in report.findings if finding.rule == "pays-part"]
