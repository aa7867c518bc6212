"""The rollouts of a run as a log of Inspect's, and its list of samples: what `inspect view` asks for first.

    python inspect_log.py write runs/x/traces.jsonl log.eval
    python inspect_log.py read log.eval                    # CPU and wall seconds, how many, megabytes

Run in an environment with `inspect-ai`, without Treetune.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any


def sample(trace: dict[str, Any]) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score

    messages: list[Any] = []
    for turn in trace["turns"]:
        messages += [ChatMessageUser(content=message["content"]) for message in turn["observed"]]
        messages.append(ChatMessageAssistant(content=turn["message"]["content"]))
    return EvalSample(
        id=trace["task"]["idx"],
        epoch=trace["rollout"] + 1,
        input=trace["task"]["prompt"][-1]["content"],
        target=trace["task"]["reward_spec"]["ground_truth"],
        messages=messages,
        output=ModelOutput.from_content("made", messages[-1].text),
        scores={"reward": Score(value=trace["reward"] or 0.0, answer=trace["answer"])},
        metadata={"source": trace["task"]["data_source"]},
    )


async def write(traces: Path, log: Path) -> None:
    from inspect_ai.log import EvalConfig, EvalDataset, EvalPlan, EvalSpec, EvalStats
    from inspect_ai.log._recorders.eval import EvalRecorder

    spec = EvalSpec(
        created="2026-01-01T00:00:00+00:00", task="made", dataset=EvalDataset(), model="made", config=EvalConfig()
    )
    recorder = EvalRecorder(str(log.parent))
    await recorder.log_init(spec, str(log))
    await recorder.log_start(spec, EvalPlan())
    with traces.open("rb") as file:
        for number, line in enumerate(file, 1):
            await recorder.log_sample(spec, sample(json.loads(line)))
            if number % 5000 == 0:
                await recorder.flush(spec)
    await recorder.log_finish(spec, "success", EvalStats(), None, None, header_only=True)


def read(log: Path) -> None:
    from inspect_ai.log import read_eval_log_sample_summaries

    cpu, wall = time.process_time(), time.perf_counter()
    found = len(read_eval_log_sample_summaries(log))
    seconds = time.process_time() - cpu, time.perf_counter() - wall
    print(json.dumps([*seconds, found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000]))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        asyncio.run(write(Path(sys.argv[2]), Path(sys.argv[3])))
    else:
        read(Path(sys.argv[2]))
