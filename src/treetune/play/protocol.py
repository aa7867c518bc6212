"""What every host offers: the methods, the options of rollouts and groups, its info.

    task = await host.sample()
    trace = await host.run_rollout(task, sampling=Sampling(seed=0), max_staleness=2)

`play/host.py` is the host in this process; the client of a server (`EnvClient`) is one too. The options are the same in
Python and over the wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack

import msgspec

from treetune.core.environment import Step
from treetune.core.policy import Sampling
from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.play.episode import Limits, Started
from treetune.play.streams import State
from treetune.play.weights import PAUSE_SECONDS, Calls, Stale

PROTOCOL = 3
"""The version of the messages between hosts and clients. 2: a failed rollout has no reward. 3: a request has a frame
that says who asks."""

NoVariance = Literal["keep", "drop", "refill"]
"""What becomes of a group whose rewards are all the same: it is kept, dropped (an empty list), or played again."""


class PlayOptions(TypedDict, total=False):
    """How rollouts are played; any may be left out."""

    model: str | None
    """One of those that the host has; absent: its own."""
    endpoint: str | None
    """The address of a server of models. A task server takes only those on its list."""
    sampling: Sampling | None
    limits: Limits | None
    """Within those of the host."""
    occurrence: int
    """How often the same task came before in the order."""
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
    """False: the lease of the task stays when they have ended, until `finish(task)`."""


class GroupOptions(PlayOptions, total=False):
    """How groups are played."""

    of: int | None
    """So many rollouts are begun; the first n that are scored are the group, and the others are cancelled."""
    no_variance: NoVariance
    """Of a group whose rewards are all the same: `keep` gives it, `drop` an empty list; `refill` plays it again."""
    refills: int
    """How often; then it is dropped."""


class Info(msgspec.Struct, kw_only=True):
    """What a host serves."""

    name: str = ""
    num_tasks: int | None = None
    """How many tasks an epoch has; None only where there is no end."""
    requires_group_scoring: bool = False
    """`run_rollout` is refused where a task is scored in a group: use `run_group`."""
    fingerprint: str = ""
    """Changes with the code, the config and the data behind the tasks."""
    cursor: int = 0
    """The next index of the stream without a name."""
    cursors: dict[str, int] = {}
    capacity: int | None = None
    """The most rollouts under way at once; None: no limit."""
    by_index: bool = True
    """Whether `sample` can be asked for an index: not where the taskset is only a generator."""
    protocol: int = PROTOCOL
    models: list[str] = []


class Health(msgspec.Struct):
    """Answered only by a host that is ready to serve."""

    ready: bool = True
    in_flight: int = 0


class Host(Protocol):
    async def info(self) -> Info: ...
    async def health(self) -> Health: ...
    async def sample(self, index: int | None = None, *, stream: str = "", lease: float | None = None) -> Task:
        """The next task of a stream; with an index the task at that index, and no cursor moves. With a `lease`, in
        seconds, the task is given out again unless it is finished or renewed in time: by a rollout or an episode of it,
        by `finish` or `renew`."""
        ...

    async def renew(self, task: Task, lease: float | None = None) -> bool:
        """Restarts the lease of a task, perhaps with other seconds; returns whether there is one."""
        ...

    async def finish(self, task: Task) -> bool:
        """Ends the lease: the task is done. Returns whether it had one."""
        ...

    async def give_back(self, task: Task) -> bool:
        """Ends the lease, and gives the task out again at once. Returns whether it had one."""
        ...

    def draw(self, num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
        """The first tasks of the order, each once, with its occurrence; no cursor moves."""
        ...

    async def run_rollout(self, task: Task, *, rollout: int = 0, **options: Unpack[PlayOptions]) -> Trace: ...
    async def run_group(
        self, task: Task, n: int, *, rollouts: Sequence[int] | None = None, **options: Unpack[GroupOptions]
    ) -> list[Trace]:
        """n rollouts of one task, scored together where the taskset does so. `rollouts` are their numbers."""
        ...

    async def set_version(self, version: int, *, model: str | None = None, endpoint: str | None = None) -> None:
        """Sets the version of the weights of a model."""
        ...

    async def pause(
        self,
        *,
        calls: Calls = "finish",
        seconds: float = PAUSE_SECONDS,
        model: str | None = None,
        endpoint: str | None = None,
    ) -> bool:
        """No rollout asks the model until `resume`, for so many seconds at most: its weights are being changed. Calls
        under way are waited for (`finish`), aborted and later made again (`abort`), or left alone (`leave`). Says
        whether none is under way."""
        ...

    async def resume(
        self, version: int | None = None, *, model: str | None = None, endpoint: str | None = None
    ) -> None:
        """Ends the pause, with this version of the weights."""
        ...

    async def start(self, task: Task, *, step: int | None = None) -> Started: ...
    async def step(self, episode: str, action: Any, turn: int | None = None) -> Step: ...
    async def cancel(self, id: str) -> bool: ...
    async def observe(self, task: Task, reward: float, *, stream: str = "") -> None: ...
    async def state(self, stream: str | None = None) -> State: ...
    async def restore(self, state: State) -> None: ...
    async def close(self) -> None: ...
