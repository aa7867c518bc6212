"""The real small model plays the story of tools: run by tests/evaluation/test_local_model.py in its environment.

    python local_tools_side.py MODEL FOLDER

A model of 135 million parameters calls no tools by itself. So the sampler is told which token comes next, and all else
is real: the chat template, the tokens, the forward passes and their logprobs.
"""

from __future__ import annotations

import asyncio
import json
import sys
from itertools import chain
from pathlib import Path

import tool_shop

from treetune import run_rollout
from treetune.core.policy import Sampling
from treetune.models import local
from treetune.tasksets.target import load_taskset


def main(model: str, folder: str) -> None:
    target = tool_shop.write(Path(folder))
    policy = local.LocalPolicy(model)
    # Cut into pieces: tokens that the tokenizer would not make of the text.
    texts = [said.written() for said in tool_shop.STORY]
    pieces = [[text[at : at + 5] for at in range(0, len(text), 5)] + [policy.tokenizer.eos_token] for text in texts]
    script = [id for piece in chain(*pieces) for id in policy.tokenizer(piece, add_special_tokens=False)["input_ids"]]
    following = iter(script)
    local._sample = lambda logits, temperature, top_p, rng: next(following)
    taskset = load_taskset(target)
    trace = asyncio.run(run_rollout(taskset, taskset[1], policy, sampling=Sampling(max_tokens=500)))
    tool_shop.check_messages(trace)
    assert tool_shop.story_of(trace) == tool_shop.expected(target)
    assert [turn.finish_reason for turn in trace.turns] == ["tool_calls"] * 3
    assert trace.tokens is not None
    for sequence in trace.tokens.sequences:
        assert all((logprob < 0) == bool(mine) for logprob, mine in zip(sequence.logprobs, sequence.mask, strict=True))
    mine = [
        id for sequence in trace.tokens.sequences for id, mine in zip(sequence.ids, sequence.mask, strict=True) if mine
    ]
    assert mine == script
    given = policy.tokenizer.decode(trace.tokens.sequences[-1].ids)
    assert given.count("<tool_response>") == 4
    print(json.dumps({"sequences": len(trace.tokens.sequences), "sampled": len(mine)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
