"""Random agents behind a gateway, and what must hold of every one: edits of the history, compaction, branches, parallel
sub-agents, retries, aborted calls, streamed or not, in two dialects.

Used by the fast tests with tokenizers written for them, and, in an environment with real tokenizers, as a program:

    python random_agents.py SEEDS NAME...        # prints what was seen, as JSON
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections import Counter
from typing import Any

import aiohttp
from gateway_playing import BASH, EngineProcess, check_exact, playing, running_engine
from scripted_engine import make_tokenizer

from treetune.chat.tokens import ChatTokens
from treetune.runs.token_check import find_faults

RETRIED = {"x-stainless-retry-count": "1"}


class RandomAgent:
    """Holds OpenAI's messages, and sends them in either dialect."""

    def __init__(self, http: aiohttp.ClientSession, url: str, rng: random.Random, dialect: str) -> None:
        self.http, self.url, self.rng, self.dialect = http, url, rng, dialect
        self.delivered = 0
        self.with_system = True
        """Some templates have no system message."""
        self.seen: Counter[str] = Counter()

    async def ask(self, messages: list[Any], tools: list[Any], headers: dict[str, str] | None = None) -> Any:
        """The answer as OpenAI's message."""
        stream = self.rng.random() < 0.5
        self.seen["streamed" if stream else "plain"] += 1
        if self.dialect == "anthropic":
            return await self._ask_anthropic(messages, tools, stream, headers or {})
        body = {"model": "m", "messages": messages, "stream": stream, **({"tools": tools} if tools else {})}
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            if not stream:
                whole = await response.json()
                assert response.status == 200, whole
                return {key: value for key, value in whole["choices"][0]["message"].items() if value is not None}
            assert response.status == 200, await response.text()
            said: dict[str, Any] = {"role": "assistant", "content": ""}
            events = [event async for event in _events(response)]
            assert events[-1]["choices"][0]["finish_reason"], events[-1]
            for event in events:
                delta = event["choices"][0]["delta"]
                said["content"] += delta.get("content") or ""
                for call in delta.get("tool_calls") or []:
                    said.setdefault("tool_calls", []).append({k: v for k, v in call.items() if k != "index"})
            return said

    async def _ask_anthropic(self, messages: list[Any], tools: list[Any], stream: bool, headers: dict[str, str]) -> Any:
        body: dict[str, Any] = {"model": "m", "max_tokens": 4000, "stream": stream, "messages": []}
        for message in messages:
            match message["role"]:
                case "system":
                    mark = {"cache_control": {"type": "ephemeral"}} if self.rng.random() < 0.5 else {}
                    body["system"] = [{"type": "text", "text": message["content"], **mark}]
                case "user":
                    text: Any = message["content"]
                    parts = [{"type": "text", "text": text}] if self.rng.random() < 0.5 else text
                    body["messages"].append({"role": "user", "content": parts})
                case "tool":
                    id, content = message["tool_call_id"], message["content"]
                    block = {"type": "tool_result", "tool_use_id": id, "content": content}
                    body["messages"].append({"role": "user", "content": [block]})
                case "assistant":
                    blocks = [{"type": "text", "text": message["content"]}] if message.get("content") else []
                    for call in message.get("tool_calls") or []:
                        function = call["function"]
                        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"],
                                       "input": json.loads(function["arguments"])})  # fmt: skip
                    body["messages"].append({"role": "assistant", "content": blocks or ""})
        if tools:
            function = tools[0]["function"]
            body["tools"] = [
                {
                    "name": function["name"],
                    "description": function["description"],
                    "input_schema": function["parameters"],
                }
            ]
        async with self.http.post(f"{self.url}/v1/messages", json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            if not stream:
                blocks = (await response.json())["content"]
            else:
                blocks = _blocks([event async for event in _events(response)])
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        said = {"role": "assistant", "content": text}
        calls = [
            {
                "id": block["id"],
                "type": "function",
                "function": {"name": block["name"], "arguments": json.dumps(block["input"])},
            }
            for block in blocks
            if block["type"] == "tool_use"
        ]
        return {**said, "tool_calls": calls} if calls else said

    async def turn(self, messages: list[Any], tools: list[Any]) -> None:
        """One answer, and what comes after it."""
        said = await self.ask(messages, tools)
        self.delivered += 1
        messages.append(said)
        for call in said.get("tool_calls") or []:
            self.seen["calls"] += 1
            output = f"ok {json.loads(call['function']['arguments'])['command']}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
        if not said.get("tool_calls"):
            messages.append({"role": "user", "content": "Go on."})

    async def abort(self, messages: list[Any], tools: list[Any]) -> None:
        """A call that is given up while the engine is at it."""
        body = {"model": "m", "messages": [*messages[:-1], {"role": "user", "content": "[hang]"}], "tools": tools}
        body["stream"] = self.rng.random() < 0.5
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.15):
                async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as response:
                    await response.read()

    async def retry(self, messages: list[Any], tools: list[Any]) -> None:
        """A request that the SDK sends once more, because it believes the first lost."""
        body = {"model": "m", "messages": messages, **({"tools": tools} if tools else {})}
        url = f"{self.url}/v1/chat/completions"

        async def post(headers: dict[str, str]) -> Any:
            async with self.http.post(url, json=body, headers=headers) as response:
                return (await response.json())["choices"][0]["message"]

        first = await post({})
        self.delivered += 1
        assert await post(RETRIED) == first
        both = [asyncio.ensure_future(post({})), asyncio.ensure_future(post({}))]
        one, other = await asyncio.gather(*both)
        self.delivered += 2
        assert one != other, "an unmarked repetition is a new sample"

    async def play(self, turns: int, seed: int) -> None:
        rng = self.rng
        system = [{"role": "system", "content": f"be good {seed}"}] if self.with_system else []
        messages: list[Any] = [*system, {"role": "user", "content": f"begin {seed}"}]
        for _ in range(turns):
            tools = [BASH] if rng.random() < 0.9 else []
            await self.turn(messages, tools)
            change = rng.choice(["", "", "", "edit", "answer", "compact", "sub", "branch", "retry", "abort"])
            self.seen[change] += 1
            match change:
                case "edit":
                    messages[len(system)] = {"role": "user", "content": f"begin, edited {rng.random()}"}
                case "answer":
                    at = rng.choice([at for at, message in enumerate(messages) if message["role"] == "assistant"])
                    messages[at] = {**messages[at], "content": f"edited {rng.random()}"}
                case "compact":
                    messages = [*system, {"role": "user", "content": f"Summary {rng.random()}: go on"}]
                case "sub":
                    subs = [[*[{**m, "content": f"sub {at} {rng.random()}"} for m in system],
                             {"role": "user", "content": f"help {at} {rng.random()}"}] for at in range(3)]  # fmt: skip
                    await asyncio.gather(*(self._turns(sub) for sub in subs))
                case "branch":
                    ways = [[*messages, *self._next(messages, f"way {at}")] for at in range(3)]
                    await asyncio.gather(*(self.turn(way, tools) for way in ways))
                case "retry":
                    await self.retry(messages, tools)
                case "abort":
                    await self.abort(messages, tools)

    @staticmethod
    def _next(messages: list[Any], text: str) -> list[Any]:
        """One more message of the user's, if the template lets it stand there."""
        return [] if messages[-1]["role"] == "user" else [{"role": "user", "content": text}]

    async def _turns(self, messages: list[Any]) -> None:
        await self.turn(messages, [BASH])
        await self.turn(messages, [BASH])


async def _events(response: aiohttp.ClientResponse) -> Any:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _blocks(events: list[Any]) -> list[Any]:
    assert events[-1]["type"] == "message_stop", events[-1]
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "json": ""})
        if event["type"] == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            for name in ("text", "thinking"):
                block[name] = block.get(name, "") + delta.get(name, "")
            block["json"] += delta.get("partial_json", "")
    return [{**block, "input": json.loads(block["json"])} if block["json"] else block for block in blocks]


async def play(engine: EngineProcess, tokenizer: str, seed: int, turns: int = 10) -> Counter[str]:
    """One random agent; returns what was seen."""
    rng = random.Random(f"{tokenizer}/{seed}")
    script = {"seed": seed, "texts": rng.random() < 0.7}
    options = {"rewrites": rng.choice(["keep", "split"])}
    async with playing(engine, tokenizer, script=script, **options) as place, aiohttp.ClientSession() as http:
        session = place.gateway.open(records=True)
        agent = RandomAgent(http, place.url(session), rng, rng.choice(["chat", "anthropic"]))
        roles = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
        agent.with_system = ChatTokens(make_tokenizer(tokenizer)).render(roles) is not None
        await agent.play(turns, seed)
        sequences = [each.tokens for each in session.trace().sequences]
        check_exact(engine, sequences, agent.delivered)
        record, tokens = session.record("random")
        assert len(record.calls) == agent.delivered
        assert tokens is not None
        assert list(find_faults(tokens, record)) == []
        assert session.counts["upstream_failures"] == 0
        agent.seen["sequences"] += len(sequences)
        agent.seen["delivered"] += agent.delivered
        return agent.seen


def play_all(engine: EngineProcess, tokenizer: str, seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            total += asyncio.run(play(engine, tokenizer, seed))
        except AssertionError as error:
            raise AssertionError(f"{tokenizer}, seed {seed}: {error}") from error
    return total


if __name__ == "__main__":
    with running_engine() as engine:
        print(json.dumps({name: play_all(engine, name, range(int(sys.argv[1]))) for name in sys.argv[2:]}))
