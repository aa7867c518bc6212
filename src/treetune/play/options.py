"""How rollouts and groups are played: the options that every host takes, here, in a server and over the wire.

trace = await host.run_rollout(task, sampling=Sampling(seed=0), max_staleness=2)
"""

from __future__ import annotations

from typing import Literal, TypedDict

from treetune.core.policy import Sampling
from treetune.play.episode import Limits
from treetune.play.weights import Stale

NoVariance = Literal["keep", "drop", "refill"]
"""What becomes of a group whose rewards are all the same: it is given, dropped (an empty list), or played anew."""


class PlayOptions(TypedDict, total=False):
    """How rollouts are played; any may be left out."""

    model: str | None
    endpoint: str | None
    sampling: Sampling | None
    limits: Limits | None
    occurrence: int
    step: int | None
    """The trainer's, which their traces keep."""
    attempt: int
    """How often the task was given out before; of a task with a lease it is known."""
    request: str | None
    """A name by which `cancel` can stop it."""
    version: int | None
    """The weights are at least of this version by now."""
    max_staleness: int | None
    """By how many versions the weights may move on while a rollout is played; absent: by any number."""
    stale: Stale
    """What becomes of one that is older: `cut` ends it with the outcome `stale`, `mark` only says so in its trace."""
    finish: bool
    """False: the lease of the task goes on when they have ended, until `finish(task)`."""


class GroupOptions(PlayOptions, total=False):
    """How groups are played."""

    of: int | None
    """So many rollouts are begun; the first n that are scored are the group, and the others are cancelled."""
    no_variance: NoVariance
    """Of a group whose rewards are all the same: `keep` gives it, `drop` an empty list; `refill` plays it anew."""
    refills: int
    """How often; then it is dropped."""
