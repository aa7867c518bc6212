"""`--json`: one object on standard output whatever happens, and an exit code that says what happened."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest

TASKSET = """
import os, sys
from treetune import Task, Taskset
class Broken(Taskset):
    def load_tasks(self): return [Task(prompt=str(n)) for n in range(3)]
    def reward(self, task, answer): return 1.0
    {methods}
"""
EVAL = ("eval", "broken.py:Broken", "-m", "scripted:echo", "-o", "run")
SHOW = ("show", "broken.py:Broken")


@pytest.mark.parametrize(
    ("methods", "command", "said"),
    [
        ("def __init__(self, config=None): raise ValueError('boom')", EVAL, "making Broken failed: ValueError: boom"),
        ("def load_tasks(self): pass", SHOW, "Broken.load_tasks() failed: TypeError"),
        ("def load_tasks(self): pass", (*EVAL, "--dry-run"), "Broken.load_tasks() failed: TypeError"),
        ("def load_tasks(self): pass", (*EVAL, "--taskset.shuffle.seed", "1"), "Broken.load_tasks() failed"),
        ("def count(self): return 1 / 0", (*EVAL, "--taskset.shuffle.seed", "1"), "count() failed: ZeroDivision"),
        ("def load_tasks(self): return [Task(prompt='\\ud800')]", EVAL, "task 0 cannot be saved"),
        ("def load_tasks(self): return [Task(prompt=5)]", EVAL, "$.prompt"),
        ("def load_tasks(self): return [Task(reward_spec={'ground_truth': object()})]", SHOW, "object is unsupported"),
        ("def load_tasks(self): return [{'prompt': 'x'}]", EVAL, "returned a dict"),
        ("def gold(self, task): return task.reward_spec['no']", SHOW, "gold() of task 0 failed: KeyError: 'no'"),
        ("def gold(self, task): return 5", SHOW, "gold() returned a int for task 0: 5"),
        ("def source(self): raise LookupError('data')", EVAL, "unexpected LookupError: data"),
        ("def load_tasks(self): sys.exit(0)", SHOW, "sys.exit(0) was called"),
    ],
)
def test_what_cannot_run_exits_3_with_one_object(treetune, tmp_path, methods, command, said):
    (tmp_path / "broken.py").write_text(TASKSET.format(methods=methods))
    result = treetune(*command, "--json")
    assert result.code == 3
    assert said in result.json["error"]
    assert f"error: {result.json['error']}" in result.err


def test_an_unexpected_error_says_whose_code_failed(treetune, tmp_path):
    (tmp_path / "broken.py").write_text(TASKSET.format(methods="def source(self): raise LookupError('data')"))
    result = treetune(*EVAL, "--json")
    assert f"a fault in {tmp_path / 'broken.py'}, line 7" in result.json["remedy"]
    assert "Traceback" in result.err
    (tmp_path / "main.py").write_text(
        "import treetune.cli.show\ntreetune.cli.show._as_text = None\n"
        "import sys\nfrom treetune.cli import main\nmain(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "main.py", "show", "reverse-text"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 3
    assert "a bug in Treetune: please report it" in done.stderr


def test_what_user_code_prints_goes_to_standard_error(treetune, tmp_path):
    (tmp_path / "broken.py").write_text(
        TASKSET.format(methods="def gold(self, task): print('printed'); os.system('echo from a child'); return 'x'")
    )
    for command in (("eval", "broken.py:Broken", "-m", "scripted:gold"), SHOW, ("validate", "broken.py:Broken")):
        result = treetune(*command, "--json")
        assert result.code == 0
        assert isinstance(result.json, dict)
        assert "printed" in result.err
        assert "from a child" in result.err


def test_the_object_goes_to_a_file_while_messages_go_to_a_pipe(tmp_path):
    with (tmp_path / "out.json").open("ab") as file:
        file.write(b" ")
        file.flush()
        command = [sys.executable, "-m", "treetune", "list", "--json"]
        said = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, timeout=60).stderr
    assert said == b""
    assert "arithmetic" in json.loads((tmp_path / "out.json").read_text())["tasksets"]


def test_a_scorer_that_exits_does_not_end_the_program(treetune, tmp_path):
    (tmp_path / "broken.py").write_text(TASKSET.format(methods="def reward(self, task, answer): sys.exit(0)"))
    result = treetune(*EVAL, "--json")
    assert result.code == 1
    assert result.json["outcomes"] == {"environment_error": 3}


def test_a_group_that_fails_without_a_word_does_not_end_the_run(treetune, tmp_path):
    (tmp_path / "broken.py").write_text(
        TASKSET.format(methods="def score_group(self, task, traces): assert not traces")
    )
    result = treetune(*EVAL, "--json")
    assert result.json["outcomes"] == {"environment_error": 3}


@pytest.mark.parametrize(
    ("command", "wait_for"),
    [
        ((*EVAL, "-c", "2"), "run/traces.jsonl"),
        (("profile", *EVAL[1:4], "-c", "2"), "rates.jsonl.runs/scripted-echo-b255fb79/traces.jsonl"),
        (("validate", "broken.py:Broken", "-c", "2", "-o", "run"), "run/results.jsonl"),
        (("rescore", "done", "-o", "run"), "run/traces.jsonl"),
        (SHOW, "drawn"),
    ],
)
@pytest.mark.quick_cases(2)
def test_ctrl_c_prints_what_there_is(treetune, tmp_path, command, wait_for):
    methods = (
        "def validate(self, task): return True\n    def gold(self, task):\n        import time; time.sleep(0.3)\n"
        "        open('drawn', 'w').write('x'); return task.prompt\n"
    )
    many = TASKSET.format(methods=methods).replace("range(3)", "range(1000)")
    slow = many.replace("return 1.0", "import time; time.sleep(0.3); return 1.0")
    (tmp_path / "broken.py").write_text(many)
    if command[0] == "rescore":
        assert treetune(*EVAL[:-1], "done").code == 0
    (tmp_path / "broken.py").write_text(slow)
    process = subprocess.Popen(
        [sys.executable, "-m", "treetune", *command, *(["-n", "1000"] if command is SHOW else []), "--json"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if (tmp_path / wait_for).exists() and (tmp_path / wait_for).stat().st_size:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["interrupted"] is True
    assert b"Traceback" not in err


@pytest.mark.parametrize("folder", ["/proc/self", "file/run"])
def test_a_folder_that_cannot_be_written_is_named(treetune, tmp_path, folder):
    (tmp_path / "file").touch()
    result = treetune("eval", "reverse-text", "-m", "scripted:gold", "-o", folder, "--json")
    assert result.code == 3
    assert f"cannot write to {folder}" in result.json["error"]


def test_a_full_disk_ends_the_run_with_what_was_written_kept(treetune, tmp_path):
    # A limit on the size of files stands in for the end of the disk.
    command = f"trap '' XFSZ; ulimit -f 16; {sys.executable} -m treetune eval arithmetic -m scripted:gold -n 200 -o run"
    done = subprocess.run(["bash", "-c", f"{command} --json"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 3
    assert "cannot write to run: File too large" in json.loads(done.stdout)["error"]
    assert treetune("eval", "--resume", "-o", "run", "--json").json["rollouts"] == 200


def test_letters_that_a_terminal_cannot_show_are_no_error(treetune, tmp_path):
    (tmp_path / "broken.py").write_text(TASKSET.format(methods="def gold(self, task): return 'ü'"))
    assert treetune(*SHOW, "--json", PYTHONIOENCODING="ascii").json["tasks"][0]["gold"] == "ü"
    assert treetune(*SHOW, PYTHONIOENCODING="ascii").code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ("--taskset.level", 2, "arithmetic", "-m", "scripted:gold", "-n", 1),
        ("--taskset.level=2", "arithmetic", "-m", "scripted:gold", "-n", 1),
        ("-m", "scripted:gold", "--taskset.level", 2, "-n", 1, "arithmetic"),
    ],
)
def test_an_override_may_stand_anywhere(treetune, arguments):
    assert treetune("eval", *arguments, "--dry-run", "--json").json["config"]["taskset"]["level"] == 2


def test_verbs_without_overrides_refuse_them(treetune):
    result = treetune("list", "--taskset.level", 2, "--json")
    assert (result.code, "--taskset.level" in result.json["error"]) == (2, True)


def test_one_gold_answer_that_fails_hides_no_other_task(treetune, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.py").write_text(
        "from treetune import Task, Taskset\n"
        "class Some(Taskset):\n"
        "    def load_tasks(self): return [Task(prompt=str(n), reward_spec={'ground_truth': n}) for n in range(3)]\n"
        "    def gold(self, task): return str(6 // (task.ground_truth - 1))\n"
    )
    shown = treetune("show", "some.py:Some", "--json").json["tasks"]
    assert [task.get("gold") for task in shown] == ["-6", None, "6"]
    assert "ZeroDivisionError" in shown[1]["gold_failure"]
    assert "gold_failure: Some.gold() of task 1 failed" in treetune("show", "some.py:Some").out


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("show", "nowhere"), "unknown-name"),
        (("show", "arithmetic", "--taskset.levle", "2"), "unknown-key"),
        (("show", "arithmetic", "--taskset.level", "high"), "config"),
        (("show", "missing.py:Tasks"), "code-not-loaded"),
        (("show", "arithmetic", "--nope"), "usage"),
    ],
)
def test_an_error_has_a_code_that_stays(treetune, command, code):
    result = treetune(*command, "--json")
    assert (result.code, result.json["code"]) == (2, code)
