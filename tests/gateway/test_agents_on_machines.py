"""Agents on the machine of a task, which reach nothing but the model, and agents in Python."""

from __future__ import annotations

import asyncio
import json
import socket
import sys

import pytest
from raising import raises_code

from treetune import Completion, Environment, Step, Task, Taskset, build_taskset, open_run, run_rollout
from treetune.core.agent import AgentMachine
from treetune.core.contract import Limits
from treetune.gateway import AgentPolicy, PythonAgent, known_agents, read_agent
from treetune.play.weights import Weights
from treetune.sandbox import Ended, Result, probe

pytestmark = pytest.mark.filterwarnings("ignore:.*stands in for the tasks' images")
sandboxed = pytest.mark.skipif(not probe(shell=True).available, reason=str(probe(shell=True)))
PYTHON = "/usr/bin/python3"
ASK = """
import json, os, subprocess, sys, urllib.request

def ask(messages, **more):
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

task = open(os.environ["TREETUNE_TASK"]).read()
messages = [{"role": "user", "content": task}]
"""
WORKS = (
    ASK
    + """
command = ask(messages)
done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
messages += [{"role": "assistant", "content": command}, {"role": "user", "content": done.stdout}]
print(ask(messages))
"""
)
COUNT = {
    "description": "How many text files are in /var/data?",
    "create": {"local": "default", "init": {"code": "mkdir -p /var/data; touch /var/data/a.txt /var/data/b.txt"}},
    "evaluation": {"match": "2"},
}


class Model:
    """Answers the first message with a command, and later ones with what they say."""

    name = "model"

    def __init__(self, command="ls /var/data/*.txt | wc -l"):
        self.command, self.asked = command, []

    async def complete(self, request):
        self.asked.append(request.messages)
        return Completion(text=self.command if len(request.messages) == 1 else request.messages[-1]["content"].strip())

    async def close(self): ...


def play(taskset, program, model=None, **settings):
    """The trace of a program in Python."""

    async def work():
        policy = AgentPolicy({"command": [PYTHON, "-c", program], **settings}, model or Model())
        try:
            return await run_rollout(taskset, next(iter(taskset.draw(1))), policy)
        finally:
            await policy.close()

    return asyncio.run(work())


@pytest.fixture
def count(tmp_path):
    (tmp_path / "samples.json").write_text(json.dumps([COUNT]))
    return build_taskset({"id": "os-interaction", "data": str(tmp_path / "samples.json")})


@sandboxed
def test_an_agent_works_on_the_machine_of_its_task(count):
    model = Model()
    trace = play(count, WORKS, model)
    assert (trace.reward, trace.answer, trace.warnings) == (1.0, "2", [])
    assert [turn.message["content"] for turn in trace.turns] == ["2"]
    assert [call.message["content"] for call in trace.agent.calls] == [model.command, "2"]
    assert [call.observed[-1]["content"] for call in trace.agent.calls] == [model.asked[0][0]["content"], "2\n"]
    (main,) = trace.agent.lineage
    assert (main.kind, main.calls, main.origin) == ("main", [0, 1], None)
    assert trace.agent.on_machine


@sandboxed
def test_an_agent_is_given_the_problem_and_not_the_protocol_of_the_environment(count):
    trace = play(count, "import os; print(open(os.environ['TREETUNE_TASK']).read())")
    assert trace.answer == COUNT["description"] + "\n\nAnswer with the answer alone, without other words."
    assert "the agent did not call the model" in trace.warnings


REACH = """
import http.client, json, os, socket, sys
url = os.environ["OPENAI_BASE_URL"]
port = int(url.split(":")[2].split("/")[0])
found = []
for place in [("127.0.0.1", PORT), ("10.0.0.1", 80), ("1.1.1.1", 53), ("127.0.0.1", 22)]:
    try:
        socket.create_connection(place, 2)
        found.append(place)
    except OSError:
        pass
def status(path, method="GET"):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request(method, path)
    return connection.getresponse().status
print(json.dumps({
    "reached": found, "models": status("/" + url.split("/", 3)[3] + "/models"),
    "guess": status("/sessions/guess/v1/models"), "open": status("/sessions", "POST"), "list": status("/sessions"),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "keys": [value for value in os.environ.values() if "secret" in value],
}))
"""


@sandboxed
def test_an_agent_on_a_machine_reaches_only_its_session(count, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    with socket.create_server(("127.0.0.1", 0)) as service:
        found = json.loads(play(count, REACH.replace("PORT", str(service.getsockname()[1]))).answer)
    assert found == {
        "reached": [], "models": 200, "guess": 401, "open": 401, "list": 401, "interfaces": ["lo"], "keys": []
    }  # fmt: skip


@sandboxed
@pytest.mark.parametrize(
    ("program", "settings", "outcome", "warning"),
    [
        ("raise SystemExit('no idea')", {}, "completed", "the agent ended with exit code 1: no idea"),
        ("import time; print('2', flush=True); time.sleep(60)", {"limits": {"seconds": 1}}, "truncated", "was ended"),
        (ASK + "ask(messages); ask(messages)", {"limits": {"calls": 1}}, "truncated", "exit code 1"),
        ("x = [bytearray(50 << 20) for _ in range(400)]", {"memory_mb": 64}, "completed", "exit code 1"),
    ],
    ids=["crash", "time", "calls", "memory"],
)
def test_what_an_agent_does_to_itself_is_scored(count, program, settings, outcome, warning):
    trace = play(count, program, **settings)
    assert trace.outcome == outcome
    assert trace.reward == (1.0 if "time" in program else 0.0)  # what it had printed counts
    assert any(warning in each for each in trace.warnings), trace.warnings


class OutOfMemory:
    """A shell whose machine ends for want of memory while the agent runs. Where cgroups count, the kernel only ends
    the largest process."""

    async def put(self, path, content): ...

    async def run(self, command, **settings):
        ended = Ended.COMPLETED if "forwarder" in str(command) else Ended.MEMORY
        return Result(exit_code=0 if ended is Ended.COMPLETED else 137, stdout=b"1", ended=ended, seconds=0.1)


class Brought(Environment):
    machine = AgentMachine(OutOfMemory())


def test_an_agent_that_brings_down_its_machine_earns_nothing():
    class Mine(Taskset):
        def load_tasks(self):
            return [Task(prompt="Work.", env_class="x")]

        def environment(self, task):
            return Brought(task)

    trace = play(Mine(), "")
    assert (trace.reward, trace.outcome) == (0.0, "completed"), trace.failure
    assert "memory" in trace.explanation


@sandboxed
def test_a_model_that_fails_is_no_fault_of_the_agent(count):
    class Broken(Model):
        async def complete(self, request):
            raise ValueError("out of memory")

    trace = play(count, WORKS, Broken())
    assert (trace.reward, trace.outcome) == (None, "policy_error")
    assert "out of memory" in trace.failure.message


@sandboxed
def test_the_answer_may_be_a_file_or_the_state_of_the_machine(count, tmp_path):
    assert play(count, "open('answer.txt', 'w').write('2')", answer="file:answer.txt").reward == 1.0
    missing = play(count, "print(2)", answer="file:answer.txt")
    assert (missing.reward, missing.outcome) == (0.0, "completed")
    done = {**COUNT, "evaluation": {"check": [{"code": "test -f /root/made"}]}}
    (tmp_path / "samples.json").write_text(json.dumps([done]))
    taskset = build_taskset({"id": "os-interaction", "data": str(tmp_path / "samples.json")})
    assert play(taskset, "open('made', 'w'); print('done')", answer="machine").reward == 1.0


@sandboxed
def test_a_harbor_task_is_verified_after_the_agent(tmp_path):
    files = {
        "task.toml": 'schema_version = "1.4"\n', "instruction.md": "Write hello to greeting.txt.\n",
        "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
        "tests/test.sh": "grep -q hello greeting.txt; echo $((1 - $?)) > /logs/verifier/reward.txt\n",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / "task" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "task" / name).write_text(text)
    taskset = build_taskset({"id": "harbor", "folder": str(tmp_path / "task")})
    trace = play(taskset, WORKS, Model("echo hello > greeting.txt"))
    assert (trace.reward, trace.agent.calls[0].observed[0]["content"]) == (1.0, "Write hello to greeting.txt.")
    assert play(taskset, WORKS, Model("echo bye > greeting.txt")).reward == 0.0


@sandboxed
def test_a_task_without_a_machine_is_played_in_a_sandbox_of_its_own():
    program = "import os; print(sorted(os.environ)); print(os.listdir('/root'), os.path.exists('/home/x'))"
    taskset = build_taskset({"id": "arithmetic"})
    trace = play(taskset, program, sandbox="machine")
    assert "[] False" in trace.turns[0].message["content"]
    assert "USERPROFILE" not in trace.turns[0].message["content"]


# Agents in Python


def plays(taskset, agent, model=None):
    async def work():
        policy = AgentPolicy(agent, model or Model())
        try:
            return await run_rollout(taskset, next(iter(taskset.draw(1))), policy)
        finally:
            await policy.close()

    return asyncio.run(work())


PYTHON_AGENT = """
async def agent(task, client):
    said = await client.chat([{"role": "user", "content": task.problem}])
    again = [{"role": "user", "content": task.problem}, said, {"role": "user", "content": "sure?"}]
    return (await client.chat(again))["content"]

async def broken(task, client):
    raise RuntimeError("I give up")

async def number(task, client):
    return 3
"""


def test_an_async_function_is_an_agent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PYTHON_AGENT)
    arithmetic = build_taskset({"id": "arithmetic"})
    trace = plays(arithmetic, "mine.py:agent")
    assert trace.turns[0].message["content"] == "sure?"
    assert [len(call.observed) for call in trace.agent.calls] == [1, 1]
    crashed = plays(arithmetic, "mine.py:broken")
    assert (crashed.reward, crashed.outcome) == (0.0, "completed")
    assert "RuntimeError: I give up" in crashed.warnings[0]
    assert "returned a int" in plays(arithmetic, "mine.py:number").failure.message


class Asks(Environment):
    MULTI_TURN = True

    def step(self, action):
        return Step("again", done=action.text == "stop")


def test_an_environment_with_several_turns_says_how_an_answer_is_handed_in(tmp_path, treetune):
    class Mine(Taskset):
        def load_tasks(self):
            return [Task(prompt="Say stop.", env_class="asks")]

        def environment(self, task):
            return Asks(task)

    failed = play(Mine(), "print('go')")
    assert "override `hand_in`" in failed.failure.message
    assert play(Mine(), "print('stop')").outcome == "completed"


def test_settings_of_an_agent_come_from_yaml_and_are_kept_in_the_run(treetune, tmp_path):
    (tmp_path / "config.yaml").write_text(
        f"taskset: {{id: arithmetic}}\nmodel: scripted:gold\nnum_tasks: 1\n"
        f'agent: {{command: [{sys.executable}, -c, \'open("a", "w").write("7")\'], answer: file:a, env: {{A: b}}}}\n'
    )
    assert treetune("eval", "config.yaml", "-o", "run", "--json").code == 0
    (trace,) = open_run(tmp_path / "run").traces()
    assert trace.turns[0].message["content"] == "7"
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("taskset: {id: arithmetic}\nmodel: scripted:gold\nagent: {comand: [sh], answer: nowhere}\n")
    result = treetune("eval", "wrong.yaml", "-n", 1)
    assert result.code == 2
    assert "did you mean 'command'" in result.err


def test_an_agent_that_is_not_there_is_refused_with_how_to_install_it():
    with raises_code("usage", "pip install no-agent"):
        read_agent({"command": ["no-such-agent"], "install": "pip install no-agent"})


def test_a_pause_of_the_weights_extends_the_time_of_an_agent():
    async def agent(task, client):
        return (await client.chat([{"role": "user", "content": "7"}]))["content"]

    async def work():
        taskset, weights = build_taskset({"id": "arithmetic"}), Weights()
        policy = AgentPolicy(PythonAgent("mine", agent), Model())
        await weights.pause()
        limits = Limits(timeout=1.0)
        playing = asyncio.ensure_future(
            run_rollout(taskset, next(iter(taskset.draw(1))), policy, limits=limits, weights=weights)
        )
        await asyncio.sleep(1.5)
        weights.resume(2)
        trace = await playing
        await policy.close()
        return trace

    trace = asyncio.run(work())
    assert trace.outcome == "completed", trace.failure
    assert trace.timing.paused > 0.5


def test_known_agents_run_in_a_sandbox_because_a_model_chooses_their_commands():
    assert {agent.sandbox for agent in known_agents().values()} == {"machine"}
