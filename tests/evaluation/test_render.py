"""An environment's own view of a trace: in the terminal, for viewers, and never a reason to fail."""

from __future__ import annotations

import time

import pytest
from made_runs import make_run, make_trace

from treetune import Rendered
from treetune.core.trace import Turn
from treetune.evaluation import render, rendering
from treetune.runs.run import Run
from treetune.tasksets.shell.environment import OSInteractionEnvironment

BOARDS = """
from treetune import Environment, Rendered, Step, Task, Taskset
import os, sys, time


class Cell(Task, frozen=True, kw_only=True):
    goal: int = 0


class Line(Environment):
    task: Cell

    def step(self, action):
        return Step(done=True, reward=1.0, info={"answer": action.text})

    @classmethod
    def render(cls, trace):
        assert type(trace.task).__name__ == "Cell"
        BODY


class Boards(Taskset[Cell]):
    def load_tasks(self):
        return [Cell(prompt="go", env_class="boards.py:Line", goal=3, reward_spec={"ground_truth": "x"})]


class Makes(Taskset[Cell]):
    def load_tasks(self):
        return [Cell(prompt="go", goal=3)]

    def environment(self, task):
        return Line(task)

    @classmethod
    def render(cls, trace):
        return "of the taskset: " + "." * trace.task.goal
"""


def played(treetune, folder, body, name="Boards"):
    (folder / "boards.py").write_text(BOARDS.replace("BODY", body))
    assert treetune("eval", f"boards.py:{name}", "-m", "scripted:echo", "-o", "run").code == 0
    return Run(folder / "run")


def test_a_rollout_is_shown_as_its_environment_renders_it(treetune, tmp_path):
    run = played(treetune, tmp_path, 'return Rendered("." * trace.task.goal + "x", "shell")')
    assert render(run, "0/0") == (Rendered("...x", "shell"), None)
    assert render(run, run.columns.entries[0])[0] == Rendered("...x", "shell")
    shown = treetune("show", "run", "--rollout", "0/0")
    assert "rendered:\n  ...x" in shown.out
    assert treetune("show", "run", "--rollout", "0/0", "--json").json["rendered"] == {"text": "...x", "kind": "shell"}


def test_a_taskset_renders_where_it_makes_its_environments(treetune, tmp_path):
    run = played(treetune, tmp_path, "return None", "Makes")
    assert render(run, "0/0") == (Rendered("of the taskset: ..."), None)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise ValueError('no board')", "render failed at boards.py:19: ValueError: no board"),
        ("sys.exit(3)", "SystemExit"),
        ("return 17", "return text, a Rendered, or None"),
        ("return {'kind': 'video', 'text': ''}", "return text, a Rendered, or None"),
        ("time.sleep(60)", "render took more than 0.2 seconds"),
    ],
)
def test_whatever_goes_wrong_is_a_note(treetune, tmp_path, monkeypatch, body, why):
    run = played(treetune, tmp_path, body)
    if "sleep" in body:
        monkeypatch.setattr(rendering, "_SECONDS", 0.2)
    began = time.monotonic()
    rendered, told = render(run, "0/0")
    assert rendered is None
    assert why in told
    assert time.monotonic() - began < 30
    shown = treetune("show", "run", "--rollout", "0/0")
    assert shown.code == 0
    assert "not rendered: " in shown.out


def test_the_code_of_a_run_that_is_not_this_users_is_not_run(treetune, tmp_path, monkeypatch):
    body = f"open({str(tmp_path / 'harm')!r}, 'w'); return 'x'"
    run = played(treetune, tmp_path, body)
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "another user"))
    rendered, told = render(run, "0/0")
    assert rendered is None
    assert "names code that you did not build" in told
    assert not (tmp_path / "harm").exists()


def test_a_method_of_that_name_with_another_meaning_is_left_alone(treetune, tmp_path):
    body = "return None\n\n    def render(self, mode='human'):\n        raise AssertionError"
    assert render(played(treetune, tmp_path, body), "0/0") == (None, None)


def test_a_render_that_is_no_classmethod_is_told(treetune, tmp_path):
    body = "return None\n\n    def render(self, trace):\n        return 'x'"
    assert "mark it @classmethod" in render(played(treetune, tmp_path, body), "0/0")[1]


def test_what_has_nothing_to_render_says_nothing(tmp_path):
    assert render(make_run(tmp_path, [[1.0]]), "0/0") == (None, None)


def test_wikispeedia_shows_the_way(treetune, tmp_path):
    (tmp_path / "links.tsv").write_text("a\tb\nb\tc\nc\td\nd\ta\n")
    options = ["--taskset.graph", "links.tsv", "--taskset.min_distance", 2, "--taskset.max_distance", 2]
    assert treetune("eval", "wikispeedia", *options, "-m", "scripted:gold", "-n", 1, "-o", "run").code == 0
    run = Run(tmp_path / "run")
    trace = run.trace(run.columns.entries[0])
    way = [turn.info["answer"] for turn in trace.turns]
    rendered, _ = render(run, run.columns.entries[0])
    first, *steps, last = rendered.text.splitlines()
    assert first.endswith(f"to {way[-1]}: 2 clicks are enough")
    assert [line.split() for line in steps] == [["1", "click", way[0], way[0]], ["2", "click", way[1], way[1]]]
    assert last == "reached in 2 clicks, 2 are enough"


def test_os_interaction_shows_a_session(tmp_path):
    script = "Act: bash\n\n```bash\ncd /tmp\nls | wc -l\n```"
    calls = [{"id": "1", "type": "function", "function": {"name": "bash_action", "arguments": '{"script": "pwd"}'}}]
    said = [
        {"content": script},
        {"content": "Hm."},
        {"content": None, "tool_calls": calls},
        {"content": "Act: answer(3)"},
    ]
    replies = ["How many files?", "3", "Nothing was done: say Act.", "/tmp"]
    trace = make_trace(0, 0, 1.0)
    trace.explanation = "all checks passed"
    trace.turns = [
        Turn([{"role": "user", "content": reply}], {"role": "assistant", **message})
        for reply, message in zip(replies, said, strict=True)
    ]
    rendered = OSInteractionEnvironment.render(trace)
    assert rendered.kind == "shell"
    assert rendered.text.splitlines() == [
        "$ cd /tmp",
        "> ls | wc -l",
        "3",
        "# nothing was done: say Act: bash with a block that begins with ```bash, Act: answer(...), or Act: finish",
        "$ pwd",
        "/tmp",
        "# answer: 3",
        "# all checks passed",
    ]
    trace.turns.append(Turn([{"role": "user", "content": "?"}]))  # cut off before it answered
    assert OSInteractionEnvironment.render(trace).text.endswith("# answer: 3\n# all checks passed")
