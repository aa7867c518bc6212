"""Runs in AReaL's virtual environment: its workflow has an agent play the tasks of a server, as `treetune train areal`
starts it. What samples is `agent_session.sample`, because AReaL's engines need a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import agent_session
import sides
from areal.api import ModelResponse
from areal.infra.workflow_executor import check_trajectory_format
from areal.utils.dynamic_import import import_from_string
from real_letters import letters_tokenizer
from serving import serving

from treetune.errors import TreetuneError
from treetune.serve.http import HttpConfig
from treetune.serve.http.routes import HttpDoor
from treetune.tasksets.target import load_taskset
from treetune.trainers.areal import __main__ as starting
from treetune.trainers.areal.workflow import open_agent, open_servers


class Engine:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def get_version(self) -> int:
        return 3

    async def agenerate(self, request: Any) -> ModelResponse:
        prompt = list(request.input_ids)
        ids, logprobs = agent_session.sample(self.tokenizer, prompt)
        return ModelResponse(
            input_tokens=prompt, output_tokens=ids, output_logprobs=logprobs,
            output_versions=[agent_session.version(prompt)] * len(ids), stop_reason="stop",
        )  # fmt: skip


def play(agent: str, planned_target: str, target: str, group_norm: str = "none") -> dict[str, Any]:
    """The rows of a group of two episodes, and those of one alone; or why none was played."""
    tokenizer = letters_tokenizer()
    tokenizer.chat_template = agent_session.TEMPLATE
    tokenizer.save_pretrained(Path("model"))
    planned = sides.plan("areal", planned_target, Path("model").absolute(), f"agent={agent}", num_tasks=1)
    request, words = starting.read_arguments(planned["command"][3:])
    config = starting.read_config(words)

    async def run() -> Any:
        async with serving(load_taskset(target), doors=[HttpDoor(HttpConfig(address=":0"))], drain_seconds=0) as server:
            options = starting.describe(config, config.gconfig.new(n_samples=2), server.address) | request.own
            flow = import_from_string(starting.WORKFLOW)(**options, group_norm=group_norm)
            loop, row = asyncio.get_running_loop(), {"task_index": 0}
            try:
                return await asyncio.gather(*(flow.arun_episode(Engine(tokenizer), row) for _ in range(2)))
            finally:
                await open_servers(loop, *flow._access)[0].close()
                await open_agent(loop, flow._agent).close()

    try:
        trajectories = asyncio.run(run())
    except TreetuneError as error:
        return {"refused": str(error)}
    rows = []
    for number, found in enumerate(trajectories):
        if found is None:
            continue
        assert check_trajectory_format(found, batch_size=len(found["input_ids"]))
        for at, length in enumerate(found["attention_mask"].sum(1).tolist()):
            values = {name: found[name][at][:length].tolist() for name in ("loss_mask", "logprobs", "versions")}
            ids, reward = found["input_ids"][at][:length].tolist(), found["rewards"][at].item()
            rows.append({"rollout": number, "ids": ids, "mask": values.pop("loss_mask"), **values, "reward": reward})
    return {"rows": rows, "alone": agent_session.alone(tokenizer)}


if __name__ == "__main__":
    sides.answer(play)
