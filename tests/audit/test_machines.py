"""The audit of tasks on a machine, with real sandboxes."""

from __future__ import annotations

import pytest
from test_audit import audit

from treetune import build_taskset
from treetune.core.finding import Severity
from treetune.sandbox import probe

pytestmark = [
    pytest.mark.skipif(not probe().available, reason=str(probe())),
    pytest.mark.filterwarnings("ignore:.*stands in for the tasks' images"),
]
ERROR, WARNING, NOTE = Severity
TEST = "if [ \"$(cat out.txt)\" = 'a rather long line' ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
SOLVE = "echo 'a rather long line' > out.txt\n"


def write_task(folder, test=TEST, dockerfile="FROM python:3.12-slim\nWORKDIR /app\n", **copied):
    for name, text in {
        "task.toml": 'schema_version = "1.4"\n',
        "instruction.md": "Write a rather long line to out.txt.\n",
        "tests/test.sh": test,
        "solution/solve.sh": SOLVE,
        "environment/Dockerfile": dockerfile,
        **{f"environment/{name}": text for name, text in copied.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def find(folder, *rules):
    report = audit(build_taskset({"id": "harbor", "folder": str(folder)}), rules=list(rules))
    return {finding.rule: finding for finding in report.findings}


LOOKS = ("truth-on-machine", "reference-done-already")


@pytest.mark.thorough
def test_a_sound_machine_holds_nothing_and_pays_no_script(tmp_path):
    write_task(tmp_path / "task")
    assert find(tmp_path, *LOOKS, "pays-exit", "pays-overwritten-checker", "gold-not-rewarded") == {}


def test_a_solution_on_the_machine_is_found(tmp_path):
    dockerfile = "FROM python:3.12-slim\nWORKDIR /app\nCOPY my-solution.txt out.txt ./\n"
    write_task(tmp_path / "task", dockerfile=dockerfile, **{"my-solution.txt": SOLVE, "out.txt": "old"})
    found = find(tmp_path, *LOOKS)
    assert found["truth-on-machine"].severity is ERROR
    assert "/app/my-solution.txt contains" in found["truth-on-machine"].evidence[0]
    assert "out.txt exists before the first action" in found["reference-done-already"].evidence[0]


@pytest.mark.thorough
def test_tests_that_pass_whatever_was_done_pay_a_script_that_exits(tmp_path):
    write_task(tmp_path / "task", test="echo 1 > /logs/verifier/reward.txt\n")
    found = find(tmp_path, "pays-exit")
    assert found["pays-exit"].severity is ERROR


def test_a_checker_that_the_policy_can_replace_is_found(tmp_path):
    """It begins with what the policy wrote."""
    test = ". ~/.bashrc 2>/dev/null\ngrep -qx 'a rather long line' out.txt && r=1 || r=0\n"
    write_task(tmp_path / "task", test=test + "echo $r > /logs/verifier/reward.txt\n")
    found = find(tmp_path, "pays-overwritten-checker", "gold-not-rewarded")
    assert found["pays-overwritten-checker"].severity is ERROR
