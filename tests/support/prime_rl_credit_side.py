"""Runs beside prime-rl's source: the advantages of its GRPO, and its samples, of episodes that verifiers has recorded.

    python prime_rl_credit_side.py CHECKOUT GROUP < EPISODES        # prints what each episode trains, as JSON

Tried with commit 559b44772e471d1538537b8805cc77f3824a5e64. numpy takes the mean that torch takes there. prime-rl makes
a sample of each branch; they are not made here, because they ask for images in the words of verifiers 0.3.
"""

from __future__ import annotations

import asyncio
import json
import sys
import types

import numpy as np

CHECKOUT, GROUP = sys.argv[1], int(sys.argv[2])
PLACES = [f"{CHECKOUT}/src/prime_rl", f"{CHECKOUT}/packages/prime-rl-configs/src/prime_rl"]
torch = types.ModuleType("torch")
torch.tensor, torch.float32 = np.array, np.float32
sys.modules["torch"] = torch
for name, places in {"": PLACES, ".orchestrator.algo": [f"{PLACES[0]}/orchestrator/algo"]}.items():
    package = types.ModuleType(f"prime_rl{name}")
    package.__path__ = places
    sys.modules[package.__name__] = package

import verifiers.v1 as vf  # noqa: E402
from prime_rl.configs.algorithm import GRPOAlgoConfig  # noqa: E402
from prime_rl.orchestrator.algo.grpo import GRPOAlgorithm  # noqa: E402
from prime_rl.orchestrator.trajectories import iter_trainable_branches  # noqa: E402


def trained_by(episode: vf.WireEpisode) -> dict:
    samples = [sample for trace in episode.traces for sample in iter_trainable_branches(trace)]
    pairs = [pair for branch, mask in samples for pair in zip(mask, branch.advantages, strict=True)]
    return {"samples": len(samples), "advantages": [advantage for trained, advantage in pairs if trained]}


def main() -> None:
    episodes = [vf.WireEpisode.model_validate_json(each) for each in json.load(sys.stdin)]
    algorithm = GRPOAlgorithm(GRPOAlgoConfig(), None)
    for first in range(0, len(episodes), GROUP):
        asyncio.run(algorithm.finalize_group(episodes[first : first + GROUP]))
    print(json.dumps([trained_by(episode) for episode in episodes]))


main()
