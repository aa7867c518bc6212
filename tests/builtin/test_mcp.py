"""Tools of MCP servers: a real one of the SDK's, and one that misbehaves, each in its own process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from raising import raises_code

pytest.importorskip("mcp")

from treetune import Outcome, Task, Taskset, run_rollout
from treetune.core.contract import Limits
from treetune.core.policy import Completion, Request
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import message_of_action
from treetune.core.trace import Trace
from treetune.data.rows.scorer import ScoredBy, describe_taskset, taskset_of
from treetune.errors import ConfigError

SERVERS = Path(__file__).parent.parent / "support" / "mcp"
SDK = [sys.executable, str(SERVERS / "sdk_server.py")]
PLAIN = [sys.executable, "-I", str(SERVERS / "plain_server.py")]


class Riddle(Taskset):
    def load_tasks(self) -> list[Task]:
        return [Task(prompt="Say ok.", reward_spec={"ground_truth": "ok"})]

    def reward(self, task: Task, answer: str) -> float:
        return float(answer == "ok")


class Script:
    """Says one thing after the other."""

    name = "script"

    def __init__(self, *answers: Any) -> None:
        self._answers = answers

    async def complete(self, request: Request) -> Completion:
        answer = self._answers[request.turn]
        if isinstance(answer, str):
            return Completion(answer)
        return Completion(message=message_of_action(answer), finish_reason="tool_calls")

    async def close(self) -> None: ...


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "arguments": arguments}


def riddle(*tools: Any) -> Riddle:
    return Riddle(TasksetConfig(tools=list(tools)))


def plain(folder: Path, *ways: str, **settings: Any) -> dict[str, Any]:
    """The server that misbehaves; it leaves its process ids in the folder."""
    return {"mcp": {"command": [*PLAIN, *ways], "env": {"PIDS": str(folder), **settings.pop("env", {})}, **settings}}


def play(taskset: Taskset, *answers: Any, **options: Any) -> Trace:
    return asyncio.run(run_rollout(taskset, taskset[0], Script(*answers), **options))


def results(trace: Trace) -> list[Any]:
    return [made.result for turn in trace.turns for made in turn.calls]


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def alive(folder: Path) -> list[str]:
    """The processes that left their ids in the folder and still run."""
    return [file.name for file in folder.iterdir() if is_alive(file.name)]


def ends(condition: Callable[[], Any], seconds: float = 30) -> bool:
    until = time.monotonic() + seconds
    while condition() and time.monotonic() < until:
        time.sleep(0.05)
    return not condition()


def test_the_tools_of_a_real_server_are_used_and_one_that_is_killed_in_the_middle_is_told(monkeypatch):
    monkeypatch.setenv("SECRET_OF_MINE", "x")
    taskset = riddle("calculator", {"mcp": {"command": SDK, "env": {"NAMED": "1"}, "start_timeout": 120}})
    trace = play(
        taskset,
        [call("put", item="red", count=2), call("calculator", expression="6*7")],
        [call("look"), call("photo"), call("fail"), call("variables"), call("whoami"), call("put", count="many")],
        call("die"),
        call("look"),
        "ok",
    )
    assert (trace.outcome, trace.reward, trace.failure) == (Outcome.COMPLETED, 1.0, None)
    put, six, look, photo, fail, variables, pid, wrong, die, after = results(trace)
    assert (put, six, json.loads(look)) == ("2 red", "42", {"red": 2})
    assert photo[0] == {"type": "text", "text": "the shelf:"}
    assert photo[1]["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert fail.startswith("Error: fail: ")
    assert wrong.startswith("Error: put: ")
    assert "NAMED" in json.loads(variables)
    assert "SECRET_OF_MINE" not in json.loads(variables)
    for told in (die, after):
        assert "was killed by SIGKILL, so it can no longer be called" in told
    assert not is_alive(pid)
    schema = next(tool["function"] for tool in trace.tools if tool["function"]["name"] == "put")
    assert schema["description"] == "Puts items on the shelf."
    assert schema["parameters"]["required"] == ["item"]
    assert trace.metrics == {"tool_calls": 10.0, "tool_errors": 4.0}


@pytest.fixture
def address() -> Any:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    with subprocess.Popen([*SDK, str(port)], stderr=subprocess.DEVNULL) as server:
        assert ends(lambda: not _listens(port), 120)
        yield f"http://127.0.0.1:{port}/mcp"
        server.kill()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    except OSError:
        return False


def test_a_server_at_an_address_is_used_and_one_that_goes_is_told(address):
    taskset = riddle({"mcp": {"url": address, "prefix": "shelf_", "only": ["put", "die"], "timeout": 20}})
    trace = play(taskset, call("shelf_put", item="red"), call("shelf_die"), call("shelf_put", item="red"), "ok")
    put, die, after = results(trace)
    assert put == "1 red"
    assert die.startswith("Error: shelf_die: ")
    assert after.startswith("Error: shelf_put: ")
    assert trace.reward == 1.0
    failed = play(taskset, "ok")
    assert failed.outcome is Outcome.ENVIRONMENT_ERROR
    assert failed.failure is not None
    assert address in failed.failure.message


def test_what_a_server_prints_by_mistake_is_passed_over(tmp_path):
    assert results(play(riddle(plain(tmp_path, "garbage")), call("echo", text="hä"), "ok")) == ["hä"]


def test_a_result_that_is_too_large_is_an_error_of_the_call(tmp_path):
    trace = play(riddle(plain(tmp_path)), call("big", size=9_000_000), call("big", size=100_000), call("echo"), "ok")
    refused, cut, echo = results(trace)
    assert refused == "Error: big: the result has more than 8388608 bytes; ask for less"
    assert cut.endswith("of 100000 characters]")
    assert (echo, trace.reward) == ("", 1.0)


def test_a_call_that_hangs_is_told_and_the_server_is_gone_afterwards(tmp_path):
    trace = play(riddle(plain(tmp_path, timeout=0.5)), call("hang"), "ok")
    assert results(trace) == ["Error: hang did not answer within 0.5 seconds"]
    assert (trace.reward, alive(tmp_path)) == (1.0, [])


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        (["crash"], "ended with code 3 before it listed its tools\n  | no database at 10.0.0.1"),
        (["silent"], "did not list its tools within 1 seconds"),
    ],
)
def test_a_server_that_does_not_start_fails_the_episode_and_says_why(tmp_path, ways, said):
    trace = play(riddle(plain(tmp_path, *ways, start_timeout=20.0 if ways == ["crash"] else 1.0)), "ok")
    assert trace.outcome is Outcome.ENVIRONMENT_ERROR
    assert trace.failure is not None
    assert trace.failure.phase == "start"
    assert said in trace.failure.message
    assert "run that command by hand" in trace.failure.message
    assert alive(tmp_path) == []


def test_a_program_that_is_not_there_is_named():
    trace = play(riddle({"mcp": {"command": ["no-such-program"]}}), "ok")
    assert trace.failure is not None
    assert "there is no program no-such-program" in trace.failure.message


def test_what_a_server_itself_has_started_ends_with_it(tmp_path):
    trace = play(riddle(plain(tmp_path, "child")), call("echo", text="a"), call("die"), "ok")
    assert results(trace)[1].startswith("Error: die: the server of this tool was killed by SIGKILL")
    assert len(list(tmp_path.iterdir())) == 2
    assert ends(lambda: alive(tmp_path))


def test_a_rollout_that_runs_out_of_time_leaves_no_process(tmp_path):
    trace = play(riddle(plain(tmp_path, "stubborn")), call("hang"), "ok", limits=Limits(timeout=1.5))
    assert trace.outcome is Outcome.TIMEOUT
    assert alive(tmp_path) == []


def test_rollouts_that_are_cancelled_at_any_moment_leave_no_process(tmp_path):
    taskset = riddle(plain(tmp_path))

    async def cancel(seconds: float) -> None:
        rollout = asyncio.ensure_future(run_rollout(taskset, taskset[0], Script(call("hang"), "ok")))
        await asyncio.sleep(seconds)
        rollout.cancel()
        await asyncio.wait([rollout])
        assert rollout.cancelled()

    async def cancel_all() -> None:
        await run_rollout(taskset, taskset[0], Script("ok"))
        await asyncio.gather(*(cancel(number * 0.02) for number in range(12)))

    asyncio.run(cancel_all())
    assert alive(tmp_path) == []


@pytest.mark.thorough
def test_fifty_episodes_side_by_side_leave_no_process_and_no_descriptor(tmp_path):
    taskset = riddle(plain(tmp_path))

    async def run(count: int) -> list[Trace]:
        scripts = [
            Script(call("echo", text=str(number)), call("die" if number % 5 == 0 else "echo"), "ok")
            for number in range(count)
        ]
        return await asyncio.gather(*(run_rollout(taskset, taskset[0], script) for script in scripts))

    async def count_descriptors() -> tuple[int, int, list[Trace]]:
        await run(2)
        before = len(os.listdir("/proc/self/fd"))
        traces = await run(50)
        return before, len(os.listdir("/proc/self/fd")), traces

    before, after, traces = asyncio.run(count_descriptors())
    assert [results(trace)[0] for trace in traces] == [str(number) for number in range(50)]
    assert {trace.reward for trace in traces} == {1.0}
    assert len(list(tmp_path.iterdir())) == 52
    assert after <= before  # what an earlier test left to the collector may be closed meanwhile
    assert alive(tmp_path) == []


def test_tools_of_two_servers_with_one_name_need_a_prefix(tmp_path):
    two = [plain(tmp_path), plain(tmp_path, "other")]
    trace = play(riddle(*two), "ok")
    assert trace.failure is not None
    assert "two tools called 'echo'" in trace.failure.message
    assert "prefix" in trace.failure.message
    two[1]["mcp"]["prefix"] = "b_"
    assert results(play(riddle(*two), [call("echo", text="1"), call("b_echo", text="2")], "ok")) == ["1", "2"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"comand": ["x"]}, "unknown key; did you mean 'command'?"),
        ({"command": ["x"], "url": "http://x"}, "give either command"),
        ({"url": "ftp://x"}, "is not an address"),
        ({"command": []}, "names no program"),
        ({"command": ["x"], "token_env": "T"}, "belong to a url"),
        ({"command": ["x"], "timeout": 0}, "timeout"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_played(settings, said):
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        riddle({"mcp": settings})


def test_a_task_cannot_say_which_server():
    with raises_code("usage", "'mcp'"):
        riddle("mcp")
    taskset = riddle()
    task = Task(prompt="Say ok.", tools=["mcp"])
    trace = asyncio.run(run_rollout(taskset, task, Script("ok")))
    assert trace.failure is not None
    assert "does not name a server" in trace.failure.message


def test_a_row_that_names_a_command_is_refused_unless_a_build_of_ones_own_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TREETUNE_TASK_CACHE_DIR", str(tmp_path / "cache"))
    evil = {"id": "arithmetic", "tools": [{"mcp": {"command": ["touch", str(tmp_path / "was_run")]}}]}
    with raises_code("untrusted-code", "--trust"):
        taskset_of(ScoredBy("taskset", json.dumps(evil)))
    with raises_code("untrusted-code", "--trust"):
        taskset_of(ScoredBy("taskset", json.dumps({**evil, "tools": evil["tools"][0]})))
    assert taskset_of(ScoredBy("taskset", json.dumps(evil)), trust=True).config.tools == evil["tools"]
    own = {"id": "arithmetic", "tools": [{"mcp": {"command": ["true"]}}]}
    describe_taskset(taskset_of(ScoredBy("taskset", json.dumps(own)), trust=True))  # as a build does
    assert taskset_of(ScoredBy("taskset", json.dumps(own))).config.tools == own["tools"]


TASKS = """
from treetune import Task, Taskset

class Shelves(Taskset):
    def load_tasks(self):
        return [Task(prompt=f"Put {n} red.", reward_spec={"ground_truth": str(n)}) for n in range(3)]

    def reward(self, task, answer):
        return float(answer == task.ground_truth)

    def gold(self, task):
        return [{"tool": "echo", "arguments": {"text": task.ground_truth}}, task.ground_truth]
"""


@pytest.fixture
def shelves(tmp_path) -> Path:
    """An evaluation in YAML, with a lone server under `tools`."""
    (tmp_path / "pids").mkdir()
    (tmp_path / "tasks.py").write_text(TASKS)
    server = plain(tmp_path / "pids")
    (tmp_path / "eval.yaml").write_text(yaml.safe_dump({"taskset": {"id": "tasks.py:Shelves", "tools": server}}))
    return tmp_path


@pytest.mark.parametrize("workers", [[], ["--serve", "2"]], ids=["here", "pool"])
@pytest.mark.quick_cases(1)
def test_an_evaluation_uses_the_server_that_its_config_names(treetune, shelves, workers):
    done = treetune("eval", str(shelves / "eval.yaml"), "-m", "scripted:gold", "-o", "run", *workers)
    assert done.code == 0, done.err
    traces = [json.loads(line) for line in (shelves / "run" / "traces.jsonl").read_text().splitlines()]
    assert sorted(trace["turns"][0]["calls"][0]["result"] for trace in traces) == ["0", "1", "2"]
    assert {trace["reward"] for trace in traces} == {1.0}
    assert len(list((shelves / "pids").iterdir())) == 3
    assert ends(lambda: alive(shelves / "pids"))


def test_an_evaluation_that_is_killed_leaves_no_server(shelves):
    """A server that heeds neither the end of its input nor SIGTERM is ended by the kernel."""
    if not Path("/usr/bin/setpriv").exists():
        pytest.skip("needs setpriv, of util-linux")
    pids = shelves / "pids"
    node = {"id": "tasks.py:Shelves", "tools": plain(pids, "stubborn", timeout=300)}
    (shelves / "eval.yaml").write_text(yaml.safe_dump({"taskset": node}))
    (shelves / "tasks.py").write_text(TASKS.replace('"echo"', '"hang"'))
    command = [sys.executable, "-m", "treetune", "eval", "eval.yaml", "-m", "scripted:gold", "-o", "run"]
    with subprocess.Popen(command, cwd=shelves, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        assert ends(lambda: len(list(pids.iterdir())) < 3, 120)
        running.send_signal(signal.SIGTERM)
        running.wait(60)
    assert ends(lambda: alive(pids))


def test_a_missing_sdk_is_told_once_and_before_anything_is_played(treetune, shelves, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.client.streamable_http", None)
    result = treetune("eval", shelves / "eval.yaml", "-m", "scripted:gold", "-o", "run")
    assert result.code == 3
    assert result.err.count("the MCP SDK is not installed") == 1
    assert "treetune[mcp]" in result.err
    assert treetune("show", shelves / "eval.yaml", "-n", "1").code == 0
