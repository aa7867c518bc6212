"""A real model in the process of a gateway, asked by an agent: python gateway_model.py MODEL

Prints what was sampled, and how far its logprobs are from those of a fresh pass over the same tokens."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import aiohttp

from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.gateway import Gateway, GatewayServer
from treetune.gateway.local_model import LocalSampler
from treetune.models.local import LocalPolicy
from treetune.runs.token_check import TokenCheck


async def main(path: str) -> dict[str, Any]:
    policy = LocalPolicy(path)
    gateway = Gateway(policy.tokenizer, LocalSampler(policy))
    server = GatewayServer(gateway, token="t")
    base, session = await server.start(), gateway.open(records=True)
    messages = [{"role": "user", "content": "Name three colours."}]
    async with aiohttp.ClientSession() as http:
        url = f"{base}/sessions/{session.key}/v1/chat/completions"
        for turn in range(6):
            body = {"messages": messages, "max_tokens": 24, "seed": turn, "temperature": 1.2, "stream": turn % 2 == 1}
            async with http.post(url, json=body) as response:
                text = await response.text()
                assert response.status == 200, text
            if turn % 2:
                parts = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
                said = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
            else:
                said = json.loads(text)["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"And {turn} more?"}]
    await server.close()
    record, tokens = session.record("agent")
    check = TokenCheck(policy.score)
    check.add(Trace(task=Task(), uid="", agent=record, tokens=tokens))
    assert not check.faults
    counts = check.counts
    return {
        "calls": counts.calls,
        "trained": counts.trained,
        "sampled": counts.sampled,
        "difference": check.difference,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
