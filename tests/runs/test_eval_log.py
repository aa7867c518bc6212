"""A run as a log of Inspect: what we read of it is what was written, and the real Inspect reads and shows it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.parse
import urllib.request
import zipfile
from contextlib import contextmanager

import pytest
import venvs
from agent_runs import make_agent_run
from made_runs import make_run, make_trace
from pictures import png
from task_servers import free_port

from treetune import Task
from treetune.chat.calls import ToolCall
from treetune.chat.images import image_part, to_url
from treetune.core.trace import Failure, Outcome, Timing, Trace, Turn
from treetune.runs.discovery import open_run
from treetune.runs.eval_log import write_eval_log
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run


def rich_trace():
    """A rollout with an image, a call, a thought, rewards of turns and what a scorer tells."""
    asked = [{"type": "text", "text": "What is it?"}, image_part(to_url(png((9, 9, 9))))]
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    task = Task(idx=7, prompt=prompt, data_source="pictures", reward_spec={"ground_truth": ["a dot", {"x": 1}]})
    call = {"id": "c1", "type": "function", "function": {"name": "zoom", "arguments": '{"by": 2}'}}
    look = {"role": "assistant", "content": "I look.", "reasoning_content": "It is small.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "name": "zoom", "content": "no such zoom"}
    turns = [
        Turn(
            observed=prompt,
            message=look,
            calls=[ToolCall("c1", "zoom", {"by": 2}, "no such zoom", 0.5, error="no such zoom")],
            policy_seconds=1.0,
        ),
        Turn(
            observed=[result],
            message={"role": "assistant", "content": "a dot \U0001f600"},
            reward=0.75,
            info={"tries": 2},
            finish_reason="stop",
        ),
    ]
    tool = {"type": "function", "function": {"name": "zoom", "description": "Look closer.", "parameters": {}}}
    trace = Trace(
        task=task, uid=task.uid, occurrence=2, rollout=1, step=3, model="some/model", reward=0.75, turns=turns
    )
    trace.tools, trace.answer, trace.explanation, trace.success = [tool], "a dot", "near enough", True
    trace.metrics = {"length": 9.0}
    trace.usage.prompt_tokens, trace.usage.completion_tokens = 20, 6
    trace.timing = Timing(policy=2.0, environment=0.5, total=3.0, began=1_790_000_000.0)
    return trace


def cut_trace(task, outcome, **more):
    trace = make_trace(task, 0, 0.25, **more)
    trace.outcome = outcome
    return trace


@pytest.fixture
def run(tmp_path):
    make_run(tmp_path / "run", [[1.0, 0.0], [0.5, None]], model="some/model")
    with RunFolder(tmp_path / "run", TRACES) as folder:
        folder.append(rich_trace())
        folder.append(cut_trace(3, Outcome.TRUNCATED))
        late = cut_trace(4, Outcome.TIMEOUT)
        late.fail(Outcome.TIMEOUT, Failure("RolloutTimeout", "after 3 s", "policy"))
        folder.append(late)
    return Run(tmp_path / "run")


def test_a_log_that_is_read_again_has_the_same_rollouts(run, tmp_path):
    write_eval_log(run, tmp_path / "out.eval", run.traces())
    again = open_run(tmp_path / "out.eval")
    assert len(again) == 7
    assert (again.kind, again.model, again.taskset) == ("inspect", "some/model", "arithmetic")
    assert again.mean_reward == run.mean_reward
    before, after = ({(each.uid, each.rollout): each for each in each_run.traces()} for each_run in (run, again))
    assert before.keys() == after.keys()
    for key, trace in before.items():
        other = after[key]
        assert (other.reward, other.outcome, other.success) == (trace.reward, trace.outcome, trace.success)
        assert [turn.message for turn in other.turns] == [turn.message for turn in trace.turns]
        assert (other.metrics, other.step, other.task.data_source) == (
            trace.metrics,
            trace.step,
            trace.task.data_source,
        )
    rich = next(trace for trace in after.values() if trace.step == 3)
    expected = rich_trace()
    assert rich.messages == expected.messages
    assert rich.turns[0].calls == expected.turns[0].calls
    assert (rich.answer, rich.explanation, rich.timing.began) == ("a dot", "near enough", 1_790_000_000.0)
    assert (rich.usage, rich.timing.total) == (expected.usage, 3.0)
    assert rich.task.ground_truth == ["a dot", '{"x":1}']


def test_only_what_a_query_fits_is_written(run, tmp_path):
    write_eval_log(run, tmp_path / "out.eval", run.traces("reward<0.6 scored"))
    assert sorted(entry.reward for entry in open_run(tmp_path / "out.eval").columns.entries) == [0.0, 0.25, 0.5]


def test_images_are_written_once_and_failures_have_no_score(run, tmp_path):
    write_eval_log(run, tmp_path / "out.eval", run.traces())
    with zipfile.ZipFile(tmp_path / "out.eval") as members:
        rich = json.loads(members.read("samples/7-2_epoch_2.json"))
        failed = json.loads(members.read("samples/1_epoch_2.json"))
        late = json.loads(members.read("samples/4_epoch_1.json"))
    assert len(rich["attachments"]) == 1
    assert json.dumps(rich).count("data:image/png") == 1
    assert (failed["scores"], failed["error"]["message"]) == ({}, "ZeroDivisionError: division by zero")
    assert (late["scores"], late["limit"]["type"], late["limit"]["reason"]) == ({}, "time", "after 3 s")


def test_the_command_line_converts_a_run_of_any_program(treetune, run, tmp_path):
    done = treetune("convert", "run", "logs/out.eval", "--where", "scored", "--json").json
    assert (done["rollouts"], done["kind"]) == (5, "treetune")
    assert "exists" in treetune("convert", "run", "logs/out.eval").err
    back = treetune("convert", "logs/out.eval", "back/traces.jsonl")
    assert "5 rollouts of logs/out.eval" in back.out
    assert Run(tmp_path / "back").mean_reward == run.mean_reward
    assert treetune("compare", "run", "logs/out.eval", "--json").json["comparisons"][0]["scored"]["difference"] == 0
    assert "--to FORMAT" in treetune("convert", "run", "out.parquet").err
    assert "--to FORMAT" in treetune("convert", "reverse-text", "out.jsonl").err


def test_the_calls_of_an_agent_are_the_conversation(tmp_path):
    run = make_agent_run(tmp_path / "agent")
    write_eval_log(run, tmp_path / "out.eval", run.traces("agent_calls>0"))
    with zipfile.ZipFile(tmp_path / "out.eval") as members:
        sample = json.loads(members.read("samples/0_epoch_1.json"))
    said = [(message["role"], message["content"]) for message in sample["messages"]]
    assert said[:2] == [("system", "You add."), ("user", "What is 4 + 1?")]
    assert said[-1] == ("assistant", "Then it is 7.")
    assert sample["output"]["completion"] == "Then it is 6.", "what the agent handed in"
    assert sample["turn_count"] == 7
    pool = sample["events_data"]["messages"]
    calls = [event for event in sample["events"] if event["event"] == "model"]
    inputs = [[pool[at]["content"] for first, end in call["input_refs"] for at in range(first, end)] for call in calls]
    assert inputs[0] == ["Name this."]
    assert inputs[4] == ["You check.", "It is 5.", "I see 5, too.", "Sure?"]
    assert inputs[6] == [*inputs[5], "Then it is 6.", "And again?"]


# The real Inspect

READ = """
import json, sys
from inspect_ai.log import read_eval_log, read_eval_log_sample_summaries
log = read_eval_log(sys.argv[1], resolve_attachments=True)
found = {"model": log.eval.model, "task": log.eval.task, "epochs": log.eval.config.epochs, "status": log.status}
found["results"] = {score.name: score.metrics["mean"].value for score in log.results.scores}
found["samples"] = [
    {
        "id": sample.id, "epoch": sample.epoch, "input": len(str(sample.input)), "target": sample.target,
        "messages": [message.role for message in sample.messages], "text": sample.messages[-1].text,
        "scores": {name: score.value for name, score in sample.scores.items()},
        "answer": {name: score.answer for name, score in sample.scores.items()}.get("reward"),
        "error": sample.error and sample.error.message, "limit": sample.limit and sample.limit.type,
        "usage": {name: usage.total_tokens for name, usage in sample.model_usage.items()},
        "events": [event.event for event in sample.events],
        "inputs": [len(event.input) for event in sample.events if event.event == "model"],
        "calls": [(event.function, event.arguments, event.error and event.error.message)
                  for event in sample.events if event.event == "tool"],
        "image": "data:image/png" in sample.model_dump_json(), "seconds": sample.total_time,
        "metadata": sample.metadata,
    }
    for sample in log.samples
]
found["summaries"] = [
    (summary.id, summary.epoch, summary.completed, summary.error, summary.limit, summary.message_count)
    for summary in read_eval_log_sample_summaries(sys.argv[1])
]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_inspect_reads_the_calls_of_an_agent(tmp_path):
    run = make_agent_run(tmp_path / "agent")
    write_eval_log(run, tmp_path / "out.eval", run.traces())
    found = json.loads(venvs.run(venvs.venv(*venvs.INSPECT), "-c", READ, tmp_path / "out.eval"))
    agent, _ = found["samples"]
    assert agent["inputs"] == [1, 2, 4, 2, 4, 6, 8]
    assert agent["messages"][-2:] == ["user", "assistant"]
    assert agent["text"] == "Then it is 7."


@pytest.mark.slow
def test_inspect_reads_every_part_of_a_log(run, tmp_path):
    write_eval_log(run, tmp_path / "out.eval", run.traces())
    found = json.loads(venvs.run(venvs.venv(*venvs.INSPECT), "-c", READ, tmp_path / "out.eval"))
    assert (found["model"], found["task"], found["epochs"], found["status"]) == (
        "some/model",
        "arithmetic",
        2,
        "success",
    )
    assert found["results"]["reward"] == pytest.approx((0.5 + 0.5 + 0.75 + 0.25) / 4)
    samples = {(str(sample["id"]), sample["epoch"]): sample for sample in found["samples"]}
    assert samples.keys() == {("0", 1), ("0", 2), ("1", 1), ("1", 2), ("7-2", 2), ("3", 1), ("4", 1)}
    rich = samples["7-2", 2]
    assert rich["messages"] == ["system", "user", "assistant", "tool", "assistant"]
    assert (rich["text"], rich["target"]) == ("a dot \U0001f600", ["a dot", '{"x":1}'])
    assert rich["scores"] == {"reward": 0.75, "success": True, "length": 9.0}
    assert (rich["answer"], rich["usage"], rich["seconds"]) == ("a dot", {"some/model": 26}, 3.0)
    assert rich["events"] == ["sample_init", "model", "tool", "model", "score", "score", "score"]
    assert (rich["inputs"], rich["calls"]) == ([2, 4], [["zoom", {"by": 2}, "no such zoom"]])
    assert rich["image"]
    assert rich["metadata"]["turns"][1] == {"reward": 0.75, "info": {"tries": 2}}
    assert (samples["1", 2]["error"], samples["1", 2]["scores"]) == ("ZeroDivisionError: division by zero", {})
    assert (samples["3", 1]["limit"], samples["4", 1]["limit"]) == ("turn", "time")
    summaries = {(str(id), epoch): rest for id, epoch, *rest in found["summaries"]}
    assert summaries["7-2", 2] == [True, None, None, 5]
    assert summaries["1", 2][1].startswith("ZeroDivisionError")


@contextmanager
def inspect_view(folder):
    """The address of `inspect view` on a folder of logs."""
    port = free_port()
    python = venvs.venv(*venvs.INSPECT)
    command = [python.parent / "inspect", "view", "start", "--log-dir", folder, "--port", str(port)]
    with open(folder / "view.txt", "w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def ask(url):
    until = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.loads(answer.read())
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="its server is started as on Linux")
def test_inspect_view_serves_a_log(run, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    write_eval_log(run, logs / "out.eval", run.traces())
    with inspect_view(logs) as url:
        (listed,) = ask(f"{url}/api/log-files")["files"]
        assert listed["name"].endswith("logs/out.eval")
        assert listed["task"] == "arithmetic"
        log = ask(f"{url}/api/logs/{urllib.parse.quote(str(logs / 'out.eval'), safe='')}")
        assert len(log["samples"]) == 7
        assert log["results"]["headline"]["scorer"] == "reward"
