"""A turn of an episode in our agent loop for verl, beside verl's own `tool_agent`. Run: python -m benchmarks.verl_loop

Both call the same tool in each of eight turns, 64 episodes at a time, with an engine that answers at once. What counts
is the CPU of a turn without its tokenisation: that of templates and tokenizers is taken off both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import Cost, show

TESTS = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(TESTS))

TASKS = '''
from treetune import Environment, Step, Task, Taskset, tool


class Shop(Environment):
    @tool
    async def search(self, query: str, limit: int) -> str:
        """Find items. query: what to look for. limit: how many."""
        return " ".join(f"{query} {number}" for number in range(limit))

    def step(self, action):
        return Step(reward=float(action.text == "red 1"), done=True)


class Shopping(Taskset):
    def load_tasks(self):
        return [Task(prompt="Find something red.", env_class="shop.py:Shop")]
'''

TOOL = '''
from verl.tools.function_tool import function_tool


@function_tool
async def search(query: str, limit: int) -> str:
    """Find items.

    Args:
        query: what to look for
        limit: how many
    """
    return " ".join(f"{query} {number}" for number in range(limit))
'''

TEMPLATE = """
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>
{"name": ..., "arguments": ...}
</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

RUN = '''
import asyncio, json, sys, threading, time
import hydra
from hydra import compose, initialize_config_module
from verl.experimental.agent_loop.agent_loop import (
    AgentLoopWorker, DictConfigWrap, ToolListWrap, _agent_loop_registry)
import verl.experimental.agent_loop.tool_agent_loop
from verl.workers.rollout.replica import TokenOutput

model, rows, loops, tool, turns, episodes = sys.argv[1:]
turns, episodes = int(turns), int(episodes)
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=[
        f"actor_rollout_ref.model.path={model}", "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loops}",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={tool}",
        "actor_rollout_ref.rollout.multi_turn.format=hermes", "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.rollout.prompt_length=4000", "actor_rollout_ref.rollout.response_length=8000"])

local, recorded = threading.local(), []


def noted(function):
    """Writes down the outermost calls, in whichever thread they run."""
    def call(*args, **kwargs):
        if recorded is None or getattr(local, "inside", False):
            return function(*args, **kwargs)
        local.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            local.inside = False
            recorded.append((function, args, kwargs))
    return call


def tokenise(calls):
    local.inside = True
    for function, args, kwargs in calls:
        function(*args, **kwargs)
    local.inside = False


class Engine:
    def __init__(self):
        self.turns = {}

    async def generate(self, request_id, *, prompt_ids, sampling_params, **rest):
        turn = self.turns[request_id] = self.turns.get(request_id, 0) + 1
        return answers[0] if turn < turns else answers[1]


engine = Engine()
worker = AgentLoopWorker(config, engine)
tokenizer = worker.tokenizer
call = 'I look.\\n<tool_call>\\n{"name": "search", "arguments": {"query": "red", "limit": 5}}\\n</tool_call>'
said = [tokenizer(text).input_ids + [tokenizer.eos_token_id] for text in (call, "red 1")]
answers = [TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"global_steps": 1}) for ids in said]
kind = type(tokenizer)
names = ("__call__", "apply_chat_template", "encode", "decode", "batch_decode", "convert_tokens_to_ids")
tokenizer.__class__ = type("Timed", (kind,), {name: noted(getattr(kind, name)) for name in names})
row = json.loads(open(rows).read())


def loops_of(agent):
    """verl makes one for every row, by the same means for both."""
    wrapped = {"trainer_config": DictConfigWrap(config), "data_config": DictConfigWrap(config.data)}
    given = {"server_manager": engine, "tokenizer": tokenizer, "processor": None, "dataset_cls": worker.dataset_cls,
             "hf_model_type": worker.hf_model_type, "tools": ToolListWrap(worker.tools)}
    return [hydra.utils.instantiate(config=_agent_loop_registry[agent], **wrapped, **given) for _ in range(episodes)]


async def play(agent, loops):
    sampling = {"temperature": 1.0, "logprobs": True}
    rows = ({**row, "uid": str(number), "tools_kwargs": {}} for number in range(episodes))
    return await asyncio.gather(*(loop.run(dict(sampling), **row) for loop, row in zip(loops, rows)))


async def spend(agent):
    loops = loops_of(agent)
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = await play(agent, loops)
    return outputs, time.process_time() - cpu, time.perf_counter() - wall


per = 1 / turns / episodes
found = {}
for agent in ("treetune", "tool_agent") * 6:
    recorded = []
    outputs, _, _ = asyncio.run(spend(agent))
    assert {sum(output.response_mask) for output in outputs} == {(turns - 1) * len(said[0]) + len(said[1])}
    calls, recorded = recorded, None
    _, cpu, wall = asyncio.run(spend(agent))
    words = time.process_time()
    tokenise(calls)
    words = time.process_time() - words
    found.setdefault(agent, []).append((cpu * per, wall * per, words * per))
best = {agent: [min(column) for column in zip(*costs)] for agent, costs in found.items()}
found = {agent: [cpu - words, wall, words] for agent, (cpu, wall, words) in best.items()}
print(json.dumps(found))
'''


def main(turns: int = 8, episodes: int = 64) -> None:
    import venvs

    python = venvs.venv(*venvs.VERL)
    with tempfile.TemporaryDirectory() as folder:
        found = _measure(python, Path(folder), turns, episodes)
    ours, theirs = (Cost(*found[agent][:2]) for agent in ("treetune", "tool_agent"))
    words = {agent: f"{found[agent][2] * 1000:.2f} ms" for agent in found}
    note = f"tokenisation, beside it: {words['treetune']} and {words['tool_agent']}"
    show("verl: a turn of our agent loop", ours, "verl's own tool_agent", theirs, target="0.5 ms", note=note)


def _measure(python: Path, place: Path, turns: int, episodes: int) -> dict[str, list[float]]:
    import os

    import venvs

    from treetune.data.rows.formats import FORMATS
    from treetune.data.rows.scorer import scored_by
    from treetune.tasksets.target import load_taskset
    from treetune.trainers.verl import write_loops

    venvs.run(python, TESTS / "tiny_model.py", place / "model")
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (place / "shop.py").write_text(TASKS)
    (place / "tools.py").write_text(TOOL)
    (place / "run.py").write_text(RUN)
    os.environ["TREETUNE_TASK_CACHE_DIR"] = str(place / "cache")
    taskset = load_taskset(f"{place}/shop.py:Shopping")
    row: dict[str, Any] = FORMATS["verl"].row_of(taskset[0], scorer=scored_by(taskset, taskset[0]).text)
    (place / "row.json").write_text(json.dumps({**row, "raw_prompt": row["prompt"], "index": 0}))
    arguments = (place / "model", place / "row.json", write_loops(), place / "tools.py", str(turns), str(episodes))
    cache = os.environ["TREETUNE_TASK_CACHE_DIR"]
    told = venvs.run(python, place / "run.py", *arguments, TREETUNE_TASK_CACHE_DIR=cache)
    found: dict[str, list[float]] = json.loads(told.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
