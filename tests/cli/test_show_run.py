"""A run in the terminal: where it is said to be, and what `treetune show` makes of it."""

from __future__ import annotations

import pytest
from made_runs import make_run, make_trace

from treetune.runs.folder import TRACES, RunFolder

RAISES = """
from treetune import Task, Taskset


class Raises(Taskset):
    def load_tasks(self):
        return [Task(prompt=word) for word in ("one", "two", "three")]

    def reward(self, task, answer):
        if task.prompt == "two":
            open("/nowhere/at/all")
        return 1.0
"""


@pytest.fixture
def folder(tmp_path):
    make_run(tmp_path / "runs" / "first", [[1.0, 0.5], [0.0, None]])
    with RunFolder(tmp_path / "runs" / "first", TRACES) as run:
        run.append(make_trace(2, 0, 0.0, source="other"))
    make_run(tmp_path / "runs" / "second", [[1.0]])
    return tmp_path


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--failed"], ["1/1"]),
        (["--reward", "<1"], ["0/1", "1/0", "2/0"]),
        (["--reward", "=0.5"], ["0/1"]),
        (["--source", "other"], ["2/0"]),
        (["--reward", "<1", "--source", "made"], ["0/1", "1/0"]),
        (["--source", "made", "--where", "failed | solved"], ["0/0", "1/1"]),
    ],
)
def test_the_options_of_show_choose_rollouts(folder, treetune, options, found):
    shown = treetune("show", "runs/first", *options, "--json").json
    assert [f"{each['idx']}/{each['rollout']}" for each in shown["rollouts"]] == found


def test_an_eval_ends_with_where_its_run_is_and_how_to_look_at_the_failures(treetune, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    told = treetune("eval", "raises.py:Raises", "-m", "scripted:echo", "-o", "my run")
    assert told.code == 1
    assert "run folder: my run" in told.out
    assert "look at the failures: treetune show 'my run' --failed" in told.out
    shown = treetune("show", "my run", "--failed")
    assert "1 of 1 rollouts" in shown.out
    assert "raises.py:11" in shown.out
    good = treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", "good")
    assert "look at it: treetune show good\n" in good.out


def test_a_reward_that_raises_is_shown_with_its_file_and_line(treetune, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES)
    told = treetune("eval", "raises.py:Raises", "-m", "scripted:echo", "-o", "run")
    (line,) = [line for line in told.out.splitlines() if line.startswith("task 1 ")]
    assert "FileNotFoundError at raises.py:11: " in line
    assert "1 x environment_error (environment): FileNotFoundError at raises.py:11" in told.out


def test_the_cause_of_a_failure_is_told_with_its_remedy(treetune, tmp_path):
    refusal = 'raise TreetuneError(f"judge of {task.prompt} said\\nnothing " + 99 * "at all ", remedy="ask another")'
    source = RAISES.replace('if task.prompt == "two":\n            open("/nowhere/at/all")', refusal)
    (tmp_path / "raises.py").write_text("from treetune.errors import TreetuneError\n" + source)
    told = treetune("eval", "raises.py:Raises", "-m", "scripted:echo", "-c", 1, "-o", "run")
    (line,) = [line for line in told.out.splitlines() if line.startswith("warning: 3 x ")]
    assert "(environment): TreetuneError at raises.py:11: judge of one said nothing at all at all" in line
    assert line.endswith("… -> ask another")
    assert 300 < len(line) < 450
    shown = " ".join(treetune("show", "run", "--failed").out.split())
    assert "TreetuneError (environment) at raises.py:11: judge of two said nothing" in shown
    assert shown.count("-> ask another") == 3


def test_a_failed_turn_has_no_reward_and_our_own_errors_no_frames_of_ours(treetune, tmp_path):
    (tmp_path / "raises.py").write_text(RAISES.replace("return 1.0", 'return "1.0"'))
    treetune("eval", "raises.py:Raises", "-m", "scripted:echo", "-o", "run")
    refused = treetune("show", "run", "--rollout", "0/0").out
    assert "turn 1  no reward" in refused
    assert "NoScoreError (environment): Raises.reward() returned str '1.0'" in refused
    assert "Traceback" not in refused
    raised = treetune("show", "run", "--rollout", "1/0").out
    assert "Traceback" in raised
    assert "rollout.py" in raised  # an error of somebody else's has the whole way


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("runs/fist", "there is no run runs/fist; did you mean 'runs/first'?"),
        ("runs/nothing-like-it", "there is no run runs/nothing-like-it"),
        ("runs", "name one of the runs in it: runs/first"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--failed"]])
def test_a_run_that_is_not_there_is_told_and_nobody_is_asked_for_it(folder, treetune, target, said, options):
    told = treetune("show", target, *options)
    assert told.code == 2
    assert said in told.err
    assert "hub" not in told.err


def test_text_of_a_model_cannot_steer_the_terminal(tmp_path, treetune):
    make_run(tmp_path / "run", [])
    with RunFolder(tmp_path / "run", TRACES) as run:
        run.append(make_trace(0, 0, 1.0, said="ok \x1b]0;owned\x07 \x1b[2J \x9b31m end", answer="\x1b[31mred"))
    for shown in (treetune("show", "run"), treetune("show", "run", "--rollout", "0/0")):
        assert "\x1b" not in shown.out
        assert "\x9b" not in shown.out
    assert "␛[2J" in shown.out


def test_a_taskset_in_a_file_beside_runs_is_no_run(folder, treetune):
    (folder / "runs" / "mine.py").write_text(
        "from treetune import Task, Taskset\n\nclass Mine(Taskset):\n"
        "    def load_tasks(self):\n        yield Task(prompt='x')\n\n"
        "    def reward(self, task, answer):\n        return 0.0\n"
    )
    assert "prompt: x" in treetune("show", "runs/mine.py:Mine").out


def test_options_of_a_run_are_refused_for_tasks(treetune):
    assert "applies to a run" in treetune("show", "arithmetic", "--failed").err
    assert "there is no run elsewhere/x" in treetune("show", "elsewhere/x", "--reward", "<1").err
