"""`treetune.evaluate`: one call does what `treetune eval` does, wherever it is made."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest
from raising import raises_code

import treetune as tt
from treetune.core.taskset_config import TasksetConfig
from treetune.errors import ConfigError, UsageError

pytestmark = pytest.mark.usefixtures("verdict_cache")


class DoublesConfig(TasksetConfig, frozen=True, kw_only=True):
    factor: int = 2


class Doubles(tt.Taskset[tt.Task, DoublesConfig]):
    def load_tasks(self):
        return [tt.Task(prompt=str(n), reward_spec={"ground_truth": str(self.config.factor * n)}) for n in range(6)]

    def reward(self, task, answer):
        return float(answer == task.ground_truth)


def double(request):
    return str(2 * int(request.messages[-1]["content"]))


def rewards(run):
    return {trace.key: trace.reward for trace in run.traces()}


def test_it_gives_what_the_command_line_gives(treetune, tmp_path):
    said = treetune("eval", "arithmetic", "-m", "scripted:p=0.5", "-n", 20, "-r", 2, "-o", "cli", "--json").json
    run = tt.evaluate("arithmetic", "scripted:p=0.5", num_tasks=20, num_rollouts=2, output=tmp_path / "python")
    assert isinstance(run, tt.Run)
    assert run.mean_reward == run.summary.mean_reward == said["mean_reward"]
    assert rewards(run) == rewards(tt.Run(tmp_path / "cli"))
    assert run.config == tt.Run(tmp_path / "cli").config


def test_a_taskset_and_its_class_are_targets_and_a_function_answers(tmp_path):
    of_class = tt.evaluate(Doubles, double, output=tmp_path / "class")
    assert (of_class.mean_reward, of_class.model, len(of_class)) == (1.0, "scripted:double", 6)
    tripled = tt.evaluate(Doubles, double, taskset={"factor": 3}, output=tmp_path / "tripled", num_tasks=4)
    assert tripled.mean_reward == 0.25
    made = tt.evaluate(Doubles(DoublesConfig(factor=3)), double, output=tmp_path / "made", num_tasks=4)
    assert rewards(made) == rewards(tripled)
    assert made.config["taskset"]["factor"] == 3
    with raises_code("usage", "taskset="):
        tt.evaluate(Doubles(), double, taskset={"factor": 3}, output=tmp_path / "both")


def test_the_run_of_a_class_in_a_file_can_be_run_again(treetune, tmp_path):
    run = tt.evaluate(Doubles, "scripted:echo", output=tmp_path / "one", taskset={"factor": 1})
    again = treetune("eval", "one/config.yaml", "-o", "two", "--json")
    assert (again.code, again.json["mean_reward"]) == (0, run.mean_reward) == (0, 1.0)


def test_a_policy_stays_its_callers(tmp_path):
    class Counting:
        name, asked, closed = "counting", 0, False

        async def complete(self, request):
            self.asked += 1
            return tt.Completion(text=double(request))

        async def close(self):
            self.closed = True

    policy = Counting()
    for number in range(2):
        run = tt.evaluate(Doubles, policy, output=tmp_path / str(number))
    assert (run.model, run.mean_reward, policy.asked, policy.closed) == ("scripted:counting", 1.0, 12, False)
    with pytest.raises(UsageError, match="is not a policy"):
        tt.evaluate(Doubles, Counting, output=tmp_path / "class")
    with raises_code("usage", "workers"):
        tt.evaluate(Doubles, policy, workers=2, output=tmp_path / "workers")


def test_a_function_in_a_file_is_a_script_of_the_command_line_too(treetune, tmp_path):
    (tmp_path / "own.py").write_text("def shout(request): return request.messages[-1]['content'].upper()\n")
    assert treetune("eval", "reverse-text", "-m", "scripted:own.py:shout", "-n", 2, "--json").json["rollouts"] == 2


def test_it_works_within_a_running_loop_and_in_a_thread(tmp_path):
    async def cell():
        return tt.evaluate(Doubles, double, output=tmp_path / "cell")

    assert asyncio.run(cell()).mean_reward == 1.0
    found = []
    thread = threading.Thread(target=lambda: found.append(tt.evaluate(Doubles, double, output=tmp_path / "thread")))
    thread.start()
    thread.join()
    assert found[0].mean_reward == 1.0


def test_awaited_it_plays_on_the_callers_loop(tmp_path):
    loops = set()

    async def answer(request):
        loops.add(asyncio.get_running_loop())
        return double(request)

    async def cell():
        run = await tt.evaluate_async(Doubles, answer, output=tmp_path / "run", num_tasks=3)
        return run, asyncio.get_running_loop()

    run, loop = asyncio.run(cell())
    assert (len(run), loops) == (3, {loop})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"target": "arithmetic", "model": "scripted:gold"}, "num-tasks"),
        ({"target": "arithmetik", "model": "scripted:gold"}, "did you mean 'arithmetic'"),
        ({"target": Doubles}, "no model given"),
        ({"target": Doubles, "model": double, "num_rolouts": 2}, "did you mean 'num_rollouts'"),
        ({"target": Doubles, "model": double, "sampling": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"target": Doubles, "model": double, "taskset": {"faktor": 1}}, "did you mean 'factor'"),
        ({"model": double}, "pass a target"),
        ({"target": 3, "model": double}, "pass a TARGET"),
    ],
)
def test_what_cannot_run_is_an_exception_with_its_remedy(tmp_path, arguments, said):
    with pytest.raises(UsageError, match=said):
        tt.evaluate(**arguments, output=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_several_faults_are_told_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        tt.evaluate(Doubles, double, output=tmp_path / "run", max_concurrent=0, taskset={"faktor": 1})
    assert len(error.value.faults) == 2


def test_rollouts_that_fail_are_in_the_run_and_are_tried_again(tmp_path):
    broken = {"is": True}

    def flaky(request):
        if broken["is"] and request.task.idx > 3:
            raise OSError("no answer")
        return double(request)

    run = tt.evaluate(Doubles, flaky, output=tmp_path / "run")
    assert (run.summary.errors, run.mean_reward) == (2, 1.0)
    with raises_code("usage", "--resume"):
        tt.evaluate(Doubles, flaky, output=tmp_path / "run")
    broken["is"] = False
    assert tt.evaluate(Doubles, flaky, output=tmp_path / "run", resume=True).summary.errors == 0


def test_a_run_is_gone_on_with_by_its_folder_alone(tmp_path):
    tt.evaluate("arithmetic", "scripted:gold", num_tasks=5, output=tmp_path / "run")
    assert len(tt.evaluate(output=tmp_path / "run", resume=True, num_tasks=8)) == 8


def test_progress_is_shown_where_it_is_asked_for(tmp_path, capfd):
    tt.evaluate(Doubles, double, output=tmp_path / "silent")
    assert capfd.readouterr() == ("", "")
    tt.evaluate(Doubles, double, output=tmp_path / "shown", progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    assert "scripted:double" in err


def test_workers_play_it(tmp_path):
    run = tt.evaluate("arithmetic", "scripted:gold", num_tasks=6, workers=1, output=tmp_path / "run")
    assert (len(run), run.mean_reward) == (6, 1.0)


SCRIPT = """
import asyncio, sys, time
import treetune

class Slow(treetune.Taskset):
    def load_tasks(self):
        return [treetune.Task(prompt=str(n)) for n in range(200)]

    def reward(self, task, answer):
        time.sleep(0.05)
        return 1.0

def main():
    treetune.evaluate(Slow, "scripted:echo", output="run", max_concurrent=4, resume="again" in sys.argv)

async def cell():
    main()

if __name__ == "__main__":
    if "cell" in sys.argv:
        asyncio.run(cell())
    elif "notebook" in sys.argv:  # whose loop leaves Ctrl-C as Python has it
        asyncio.new_event_loop().run_until_complete(cell())
    else:
        main()
"""


@pytest.mark.parametrize("how", ["script", "cell", "notebook"])
@pytest.mark.quick_cases(1)
def test_ctrl_c_leaves_a_run_to_go_on_with(tmp_path, treetune, how):
    (tmp_path / "slow.py").write_text(SCRIPT)
    traces = tmp_path / "run" / "traces.jsonl"
    process = subprocess.Popen([sys.executable, "slow.py", how], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not traces.exists() or traces.read_bytes().count(b"\n") < 8):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in said
    assert "resume it with: treetune.evaluate(output='run', resume=True)" in said
    run = tt.Run(tmp_path / "run")
    done = len(run)
    assert 8 <= done == run.summary.rollouts < 200
    assert (tmp_path / "run" / "summary.json").exists()
    again = treetune("eval", "--resume", "-o", "run", "--json")
    assert (again.code, again.json["rollouts"]) == (0, 200), again.err


def test_a_script_may_evaluate_a_class_of_its_own_at_its_top_level(tmp_path):
    """The file is loaded once more for its class, and the call is not made again there."""
    (tmp_path / "top.py").write_text(
        "import treetune\n\n\nclass Twos(treetune.Taskset):\n    def load_tasks(self):\n"
        "        yield treetune.Task(prompt='2')\n\n    def reward(self, task, answer):\n"
        "        return float(answer == '2')\n\n\n"
        "print(treetune.evaluate(Twos, lambda request: '2').mean_reward)\n"
    )
    done = subprocess.run([sys.executable, "top.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1.0\n", done.stderr
