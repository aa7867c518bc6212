"""Public agents in front of a real vLLM. Its model is too small to call tools. For some agents, a grammar has it call
their shell each time, until the calls of the session are spent:

    python vllm_agents_side.py URL MODEL PYTHON NAME...

Prints a line for each: its calls, whether its samples are those in the sequences of its trace, and, without a grammar,
how far their logprobs are from those of a fresh pass of vLLM over the same tokens. It runs where transformers is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from agent_playing import count_files, play
from transformers import AutoTokenizer

from treetune.chat.tokens import ChatTokens, Prompt, TokenSequence
from treetune.core.policy import Sampling
from treetune.gateway import HttpSampler, Sampled
from treetune.gateway.call import Hear
from treetune.gateway.prompts import Prompts, TokenModel

CALLING = {"openai, streamed": "shell", "anthropic, streamed": "shell", "mini-swe-agent": "bash"}
CALL = r'<tool_call>\n\{{"name": "{}", "arguments": \{{"command": "(ls|pwd|date)( -[a-z])?"\}}\}}\n</tool_call>'


class Recorder(HttpSampler):
    """Remembers what the engine was given and what it sampled."""

    def __init__(self, url: str, model: str) -> None:
        super().__init__(url, model)
        self.samples: list[tuple[list[int], list[int]]] = []

    async def __call__(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        sampled = await super().__call__(prompt, sampling, hear)
        assert sampled.ids is not None
        self.samples.append((list(prompt.ids), list(sampled.ids)))
        return sampled


def fresh_logprobs(url: str, model: str, ids: list[int]) -> list[float]:
    body = {"model": model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        found = json.load(answer)["choices"][0]["prompt_logprobs"]
    return [0.0, *(one[str(token)]["logprob"] for one, token in zip(found[1:], ids[1:], strict=True))]


def stretches(sequence: TokenSequence) -> list[tuple[int, int]]:
    """Where the tokens that are trained begin and end, a pair for each sample."""
    edges = [at for at, (one, other) in enumerate(pairwise([0, *sequence.mask, 0])) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


async def look(url: str, model: str, python: Path, name: str) -> dict[str, Any]:
    sampler = Recorder(url, model)
    given = TokenModel(Prompts(ChatTokens(AutoTokenizer.from_pretrained(model))), sampler)
    with tempfile.TemporaryDirectory() as folder:
        taskset, _ = count_files(Path(folder))
        extra = {"structured_outputs": {"regex": CALL.format(CALLING[name])}} if name in CALLING else {}
        sampling = Sampling(max_tokens=40, temperature=1.0, extra=extra)
        trace = await play(name, python, given, taskset, sampling, limits={"calls": 6})
    sampler.close()
    assert trace.failure is None, trace.failure
    assert trace.agent is not None
    samples = Counter((tuple(prompt), tuple(ids)) for prompt, ids in sampler.samples)
    trained: Counter[Any] = Counter()
    worst = 0.0
    for sequence in trace.tokens.sequences if trace.tokens is not None else []:
        fresh = sequence.logprobs if name in CALLING else fresh_logprobs(url, model, sequence.ids)
        for begin, end in stretches(sequence):
            trained[tuple(sequence.ids[:begin]), tuple(sequence.ids[begin:end])] += 1
            worst = max(worst, *(abs(fresh[at] - sequence.logprobs[at]) for at in range(begin, end)))
    return {
        "calls": trace.agent.counts["calls"],
        "kinds": [each.kind for each in trace.agent.lineage],
        "sampled": samples.total(),
        "trained": trained.total(),
        "same": trained == samples,
        "worst": worst,
        "over": trace.agent.over,
        "warnings": trace.warnings,
    }


if __name__ == "__main__":
    url, model, python, *names = sys.argv[1:]
    for name in names:
        print(json.dumps([name, asyncio.run(look(url, model, Path(python), name))]), flush=True)
