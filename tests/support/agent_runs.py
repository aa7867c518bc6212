"""A run of an agent with a title, tools, a sub-agent and an edited answer, whose model has a script and tokens."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from made_runs import make_trace
from scripted_engine import make_tokenizer

from treetune.chat.tokens import ChatTokens
from treetune.core.agent import Assignment
from treetune.core.trace import Trace
from treetune.evaluation import EvalConfig, read_config
from treetune.gateway import AgentPolicy, PythonAgent, Sampled
from treetune.gateway.prompts import Prompts, TokenModel
from treetune.runs.folder import TRACES, RunFolder
from treetune.runs.run import Run

CALL = '<tool_call>\n{"name":"add","arguments":{"a":4,"b":1}}\n</tool_call>'
SAID = ["A title", f"I add.{CALL}", "It is 5.", "I see 5, too.", "Yes, five.", "Then it is 6.", "Then it is 7."]
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}


async def _play(assignment, client):
    await client.chat([{"role": "user", "content": "Name this."}])
    messages = [{"role": "system", "content": "You add."}, {"role": "user", "content": assignment.problem}]
    said = await client.chat(messages, [ADD])
    arguments = json.loads(said["tool_calls"][0]["function"]["arguments"])
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": str(sum(arguments.values()))}
    messages += [said, result]
    said = await client.chat(messages, [ADD])
    checks = [{"role": "system", "content": "You check."}, {"role": "user", "content": said["content"]}]
    checks += [await client.chat(checks, [ADD]), {"role": "user", "content": "Sure?"}]
    await client.chat(checks, [ADD])
    messages[2] = {**messages[2], "content": "It is fabricated."}
    messages += [said, {"role": "user", "content": "One more?"}]
    said = await client.chat(messages, [ADD])
    await client.chat([*messages, said, {"role": "user", "content": "And again?"}], [ADD])
    return said["content"]


class _Sampler:
    context = 4096

    def __init__(self) -> None:
        self.answers = iter(SAID)

    async def __call__(self, prompt, sampling, hear):
        ids = make_tokenizer("calls:hermes")(next(self.answers) + "<end>")["input_ids"]
        return Sampled(ids, [-0.5] * len(ids))


async def play_agent() -> Trace:
    trace = make_trace(0, 0, 1.0, said="Then it is 6.")
    agent = AgentPolicy(PythonAgent("adder", _play))
    behind = TokenModel(Prompts(ChatTokens(make_tokenizer("calls:hermes"), call_format="hermes")), _Sampler())
    (await agent.play_behind(behind, Assignment("What is 4 + 1?", trace.task))).write_to(trace)
    await agent.close()
    return trace


def make_agent_run(folder: Path) -> Run:
    what = read_config({"taskset": {"id": "arithmetic"}, "model": "made"}, EvalConfig)
    with RunFolder.create(folder, TRACES, what) as run:
        run.append(asyncio.run(play_agent()))
        run.append(make_trace(1, 0, 0.0))
    return Run(folder)
