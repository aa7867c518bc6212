"""Has the taskset score the episodes of a task together, where a trainer sees all of them.

await score_group(played)        # played: the `TokenEpisode`s of one task
[each.reward for each in played]
"""

from __future__ import annotations

from collections.abc import Sequence

from treetune.serve import ServeError
from treetune.trainers.rollout_log import trace_of_tokens
from treetune.trainers.token_episode import TokenEpisode


async def score_group(group: Sequence[TokenEpisode]) -> None:
    """Set the rewards of episodes of one task to those of the taskset's `score_group`, if it has one. Episodes without
    a reward are left out."""
    played = [each for each in group if each.reward is not None and each.contract.group_score]
    if not played or not hasattr(played[0].episode, "score_group"):
        return
    traces = list(map(trace_of_tokens, played))
    await played[0].episode.score_group(traces)
    for each, trace in zip(played, traces, strict=True):
        if trace.failure is None:
            each.group_reward = trace.reward
        else:
            each.failure = ServeError(trace.failure.full_message)
