"""The interface of every host: its methods, the options of rollouts and groups, and its info.

    task = await host.sample()
    trace = await host.run_rollout(task, sampling=Sampling(seed=0), max_staleness=2)

`play/host.py` is the host in this process; the client of a server (`EnvClient`) is another. The options are the same in
Python and over the wire.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol, TypedDict, Unpack

import msgspec

from treetune.core.contract import Contract, Limits
from treetune.core.environment import Observation, Step
from treetune.core.policy import Sampling
from treetune.core.task import Task
from treetune.core.trace import Trace
from treetune.play.streams import State
from treetune.play.weights import PAUSE_SECONDS, Calls, Stale

PROTOCOL = 3
"""The version of the messages between hosts and clients. 2: a failed rollout has no reward. 3: requests have a frame
that identifies the client."""

NoVariance = Literal["keep", "drop", "refill"]
"""How to handle a group with equal rewards: keep it, drop it (return an empty list), or play it again."""


class Started(msgspec.Struct, frozen=True):
    """The response to a start: the id of the episode, its first observation and its tools."""

    episode: str
    observation: Observation
    tools: list[dict[str, Any]] = []
    """The tools that may be called, in OpenAI's form."""
    contract: Contract = Contract()
    """The contract of the episode: its limits, and the meaning of its reward."""


class PlayOptions(TypedDict, total=False):
    """How rollouts are played. All keys are optional."""

    model: str | None
    """One of the host's models. Absent: its default."""
    endpoint: str | None
    """The address of a model server. A task server accepts only those on its list."""
    sampling: Sampling | None
    limits: Limits | None
    """Limits that narrow those of the host."""
    occurrence: int
    """How often the same task came earlier in the order."""
    step: int | None
    """The trainer's step, which is recorded in the traces."""
    attempt: int
    """How often the task was handed out before. Known for a task with a lease."""
    request: str | None
    """A name that `cancel` can stop it by."""
    version: int | None
    """A version that the weights have reached or passed."""
    max_staleness: int | None
    """By how many versions the weights may advance during a rollout. Absent: any number."""
    stale: Stale
    """How to handle a rollout that exceeds it: `cut` ends it with the outcome `stale`, `mark` only marks its trace."""
    finish: bool
    """Set to False to keep the lease of the task until `finish(task)`, instead of finishing it with the rollouts."""


class GroupOptions(PlayOptions, total=False):
    """How groups are played."""

    of: int | None
    """The number of rollouts to start. The first n that are scored form the group, and the others are cancelled."""
    no_variance: NoVariance
    """How to handle a group with equal rewards: `keep` returns it, `drop` an empty list; `refill` plays it again."""
    refills: int
    """How often to play a group again before it is dropped."""


class Info(msgspec.Struct, kw_only=True):
    """A description of a host and its tasks."""

    name: str = ""
    num_tasks: int | None = None
    """The number of tasks in an epoch; None only if the order is endless."""
    requires_group_scoring: bool = False
    """Whether tasks are scored in groups. If so, `run_rollout` is refused for such tasks: use `run_group`."""
    fingerprint: str = ""
    """A digest that changes with the code, the config and the data behind the tasks."""
    cursor: int = 0
    """The next index of the unnamed stream."""
    cursors: dict[str, int] = {}
    capacity: int | None = None
    """The maximum number of concurrent rollouts; None if there is no limit."""
    by_index: bool = True
    """Whether `sample` accepts an index; False if the taskset is only a generator."""
    protocol: int = PROTOCOL
    models: list[str] = []


class Health(msgspec.Struct):
    """The health of a host. Only a host that is ready to serve answers."""

    ready: bool = True
    in_flight: int = 0


class Host(Protocol):
    async def info(self) -> Info: ...
    async def health(self) -> Health: ...
    async def sample(self, index: int | None = None, *, stream: str = "", lease: float | None = None) -> Task:
        """Return the next task of a stream, or the task at `index` without moving a cursor. With a `lease`, in seconds,
        the task is handed out again unless the lease is finished or renewed in time: by a rollout or an episode of the
        task, or by `finish` or `renew`."""
        ...

    async def renew(self, task: Task, lease: float | None = None) -> bool:
        """Restart the lease of a task, optionally with a new duration; return whether there is one."""
        ...

    async def finish(self, task: Task) -> bool:
        """End the lease because the task is done; return whether there was one."""
        ...

    async def give_back(self, task: Task) -> bool:
        """End the lease, and hand out the task again at once; return whether there was one."""
        ...

    def draw(self, num_tasks: int | None = None) -> AsyncIterator[tuple[Task, int]]:
        """Yield the first tasks of the order, each once, with its occurrence. No cursor moves."""
        ...

    async def run_rollout(self, task: Task, *, rollout: int = 0, **options: Unpack[PlayOptions]) -> Trace: ...
    async def run_group(
        self, task: Task, n: int, *, rollouts: Sequence[int] | None = None, **options: Unpack[GroupOptions]
    ) -> list[Trace]:
        """Play n rollouts of one task, scored together if the taskset does so. `rollouts` gives their numbers."""
        ...

    async def set_version(self, version: int, *, model: str | None = None, endpoint: str | None = None) -> None:
        """Set the version of a model's weights."""
        ...

    async def pause(
        self,
        *,
        calls: Calls = "finish",
        seconds: float = PAUSE_SECONDS,
        model: str | None = None,
        endpoint: str | None = None,
    ) -> bool:
        """Stop rollouts from calling the model until `resume`, or for at most `seconds`, while its weights are updated.
        Calls that are running are awaited (`finish`), aborted and repeated later (`abort`), or left alone (`leave`).
        Returns whether no call is running."""
        ...

    async def resume(
        self, version: int | None = None, *, model: str | None = None, endpoint: str | None = None
    ) -> None:
        """End the pause, and optionally set the version of the weights."""
        ...

    async def start(self, task: Task, *, step: int | None = None) -> Started: ...
    async def step(self, episode: str, action: Any, turn: int | None = None) -> Step: ...
    async def cancel(self, id: str) -> bool: ...
    async def observe(self, task: Task, reward: float, *, stream: str = "") -> None: ...
    async def state(self, stream: str | None = None) -> State: ...
    async def restore(self, state: State) -> None: ...
    async def close(self) -> None: ...
