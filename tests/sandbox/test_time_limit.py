"""A time limit is that of the program, not of the machine: load does not change how a command ends."""

from __future__ import annotations

import asyncio
import sqlite3
import time

import pytest
from busy_machine import busy_machine

from treetune import Task
from treetune.core.environment import Action
from treetune.sandbox import Bubblewrap, Ended, SandboxLimits
from treetune.sandbox.probe import probe
from treetune.sandbox.shell import Shell
from treetune.system.time_limit import CLOCK_FACTOR, TimeLimit
from treetune.tasksets.code import lcb, scorers
from treetune.tasksets.code.scorers import Code
from treetune.tasksets.text2sql import Text2SqlEnvironment

in_sandbox = pytest.mark.skipif(not probe().available, reason=str(probe()))
in_shell = pytest.mark.skipif(not probe(shell=True).available, reason=str(probe(shell=True)))

WORK = "import time\nwhile time.process_time() < 0.8: pass\nprint('done')"
"""Processor time that takes more than two seconds on a busy machine."""


@in_sandbox
@pytest.mark.thorough
def test_a_program_on_a_busy_machine_has_its_seconds():
    with busy_machine():
        result = Bubblewrap().run_blocking([Bubblewrap().python, "-c", WORK], limits=SandboxLimits(seconds=2))
    assert (result.ended, result.text) == (Ended.COMPLETED, "done\n")


@in_sandbox
def test_one_that_works_on_is_ended_and_so_is_one_that_waits():
    limits = SandboxLimits(seconds=1)
    for command in (["sh", "-c", "while :; do :; done"], ["sleep", "100"], ["cat", "/dev/zero"]):
        assert Bubblewrap().run_blocking(command, limits=limits).ended in (Ended.TIMEOUT, Ended.OUTPUT)


@in_sandbox
def test_several_processes_that_work_together_have_no_less_than_by_the_clock():
    command = "for i in 1 2 3 4; do (timeout 0.6 sh -c 'while :; do :; done') & done; wait; echo done"
    result = Bubblewrap().run_blocking(["bash", "-c", command], limits=SandboxLimits(seconds=2))
    assert (result.ended, result.text) == (Ended.COMPLETED, "done\n")


@in_shell
@pytest.mark.parametrize("way", ["execute", "run"])
@pytest.mark.thorough
def test_a_command_of_a_shell_on_a_busy_machine_has_its_seconds(way):
    async def play():
        async with await Shell.open(SandboxLimits(seconds=2)) as shell:
            python = Bubblewrap().python
            await shell.put("/tmp/work.py", WORK.encode())
            with busy_machine():
                if way == "run":
                    return await shell.run([python, "/tmp/work.py"])
                return await shell.execute(f"{python} /tmp/work.py")

    result = asyncio.run(play())
    assert (result.ended, result.text) == (Ended.COMPLETED, "done\n")


@in_sandbox
@pytest.mark.thorough
def test_a_case_on_a_busy_machine_has_its_seconds(monkeypatch):
    monkeypatch.setattr(lcb, "CLOCK_SECONDS", 2.0)
    answer = f"```python\n{WORK}\n```"
    with busy_machine():
        score = asyncio.run(Code().score(answer, [{"input": "", "output": "done"}]))
    assert (score.reward, score.explanation) == (1.0, "right")


@in_sandbox
@pytest.mark.thorough
def test_tests_on_a_busy_machine_have_their_seconds(monkeypatch):
    limits = SandboxLimits(seconds=2, memory_mb=1024)
    monkeypatch.setattr(scorers, "LIMITS", limits)
    code = "def work():\n    import time\n    while time.process_time() < 0.8: pass\n    return 1"
    with busy_machine():
        tested = asyncio.run(scorers.run_tests(code, ["assert work() == 1"]))
    assert (tested.passed, tested.why) == (1, "")


@pytest.mark.thorough
def test_a_query_on_a_busy_machine_has_its_seconds(tmp_path, monkeypatch):
    file = tmp_path / "numbers.sqlite"
    sqlite3.connect(file).close()
    query = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < {}) SELECT max(x) FROM n"
    count = 200_000
    while True:  # as much as takes this machine a second
        began = time.process_time()
        sqlite3.connect(":memory:").execute(query.format(count)).fetchall()
        if time.process_time() - began > 0.7:
            break
        count *= 2
    monkeypatch.setattr("treetune.tasksets.text2sql.TRY_SECONDS", 3.0)
    task = Task(
        prompt="?",
        env_class="text2sql",
        reward_spec={"ground_truth": "SELECT 1"},
        extra_info={"db_path": str(file), "db_id": "numbers", "max_turns": 3},
    )
    environment = Text2SqlEnvironment(task)
    with busy_machine():
        step = asyncio.run(environment.step(Action("text", f"<sql>{query.format(count)}</sql>")))
    assert str(count) in str(step.observation.content)


def test_a_limit_counts_the_clock_while_nothing_works_and_no_more_than_ten_times_otherwise(tmp_path, monkeypatch):
    """Against a clock and a /proc of this test's own."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    (tmp_path / "7").mkdir()

    def work(ticks: int) -> None:
        fields = ["S", *["0"] * 10, str(ticks), "0", "0", "0", *["0"] * 20]
        (tmp_path / "7" / "stat").write_text(f"7 (a) b) {' '.join(fields)}\n")

    def count(share: float) -> float:
        """How long a limit of 2 seconds lasts by the clock for a program that gets this share of a processor."""
        work(0)
        limit, began = TimeLimit(2, str(tmp_path)), now[0]
        while (left := limit.left()) > 0:
            now[0] += left
            work(int(100 * share * (now[0] - began)))
        return now[0] - began

    assert count(0.0) == pytest.approx(2, abs=0.3)
    assert count(1.0) == pytest.approx(2, abs=0.3)
    assert count(4.0) == pytest.approx(2, abs=0.3)
    assert count(0.25) == pytest.approx(8, abs=1)
    assert count(0.06) == pytest.approx(2 * CLOCK_FACTOR, abs=1)
