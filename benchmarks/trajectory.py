"""What it costs to build a trajectory from its turns, beside the loop that trainers carry.

    python -m benchmarks.trajectory

Each episode has turns of 150 given and 100 sampled tokens, and each prompt holds all that came before it, as an
inference engine is given it. Where AReaL is installed, its tensors are built too.
"""

from __future__ import annotations

import random
from typing import Any

from benchmarks.measure import cost, show
from treetune.chat.tokens import Tokens
from treetune.errors import MissingExtraError

EPISODES, TURNS, GIVEN, SAMPLED = 40, 10, 150, 100
TOKENS = EPISODES * TURNS * (GIVEN + SAMPLED)
Turn = tuple[list[int], list[int], list[float], list[int]]


def episode(rng: random.Random) -> list[Turn]:
    turns: list[Turn] = []
    so_far: list[int] = []
    for version in range(TURNS):
        prompt = so_far + [rng.randrange(150_000) for _ in range(GIVEN)]
        completion = [rng.randrange(150_000) for _ in range(SAMPLED)]
        turns.append((prompt, completion, [rng.uniform(-3, 0) for _ in completion], [version] * SAMPLED))
        so_far = prompt + completion
    return turns


def ours(turns: list[Turn]) -> Any:
    tokens = Tokens()
    for prompt, completion, logprobs, versions in turns:
        tokens.add_turn(prompt, completion, logprobs, versions)
    (sequence,) = tokens.sequences
    return sequence.ids, sequence.mask, sequence.logprobs, sequence.versions


def by_length(turns: list[Turn]) -> Any:
    """The usual loop: the new part of a prompt is what is longer than what there was. Nothing is checked."""
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for prompt, completion, their_logprobs, their_versions in turns:
        given = len(prompt) - len(ids)
        ids += prompt[-given:] + completion
        mask += [0] * given + [1] * len(completion)
        logprobs += [0.0] * given + their_logprobs
        versions += [-1] * given + their_versions
    return ids, mask, logprobs, versions


def main() -> None:
    rng = random.Random(0)
    episodes = [episode(rng) for _ in range(EPISODES)]
    assert [ours(turns) for turns in episodes] == [by_length(turns) for turns in episodes]
    mine = cost(lambda: [ours(turns) for turns in episodes], repeat=5, per=TOKENS)
    theirs = cost(lambda: [by_length(turns) for turns in episodes], repeat=5, per=TOKENS)
    show("trajectory: one token, every prompt checked", mine, "cut by length, unchecked", theirs, "1 us")
    print(f"  {1 / mine.cpu:,.0f} tokens a CPU second")
    try:
        from treetune.trainers.areal import tensors
    except MissingExtraError:
        print("  no AReaL here: its tensors are not measured")
        return

    def built() -> None:
        for turns in episodes:
            tokens = Tokens()
            for turn in turns:
                tokens.add_turn(*turn)
            tensors(tokens.sequences, 1.0)

    whole = cost(built, repeat=5, per=TOKENS)
    show("trajectory: one token, with AReaL's tensors", whole, target="1 us")
    print(f"  {1 / whole.cpu:,.0f} tokens a CPU second")


if __name__ == "__main__":
    main()
