"""BlockingEnvClient: a client for programs without an event loop.

with BlockingEnvClient("tcp://127.0.0.1:5555") as client:
    trace = client.run_rollout(client.sample())
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from treetune.core.task import Task
from treetune.play.group import Group
from treetune.serve.task_signer import WireTask
from treetune.serve.zmq.client import EnvClient
from treetune.system.threads import run_in_background

P = ParamSpec("P")
R = TypeVar("R")


def _wait_for(
    method: Callable[Concatenate[EnvClient, P], Coroutine[Any, Any, R]],
) -> Callable[Concatenate[BlockingEnvClient, P], R]:
    """Wraps a method of `EnvClient` so that it waits for its result."""

    @functools.wraps(method)
    def call(client: BlockingEnvClient, /, *arguments: P.args, **options: P.kwargs) -> R:
        result: R = run_in_background(method(client._client, *arguments, **options))
        return result

    return call


class BlockingEnvClient:
    """An `EnvClient` whose methods wait for their results. Any thread may call them."""

    def __init__(self, address: str, **options: Any) -> None:
        """Takes the options of `EnvClient`."""
        self._client = EnvClient(address, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    info = _wait_for(EnvClient.info)
    health = _wait_for(EnvClient.health)
    sample = _wait_for(EnvClient.sample)
    renew = _wait_for(EnvClient.renew)
    finish = _wait_for(EnvClient.finish)
    give_back = _wait_for(EnvClient.give_back)
    run_rollout = _wait_for(EnvClient.run_rollout)
    run_group = _wait_for(EnvClient.run_group)
    set_version = _wait_for(EnvClient.set_version)
    pause = _wait_for(EnvClient.pause)
    resume = _wait_for(EnvClient.resume)
    start = _wait_for(EnvClient.start)
    step = _wait_for(EnvClient.step)
    cancel = _wait_for(EnvClient.cancel)
    observe = _wait_for(EnvClient.observe)
    state = _wait_for(EnvClient.state)
    restore = _wait_for(EnvClient.restore)
    stats = _wait_for(EnvClient.stats)
    close = _wait_for(EnvClient.close)

    def sample_groups(self, n: int, **options: Any) -> Iterator[Group]:
        """Like `EnvClient.sample_groups`. Groups continue to run between two calls of the iterator."""
        groups = self._client.sample_groups(n, **options)

        async def next_group() -> Group | None:
            return await anext(groups, None)

        try:
            while (group := run_in_background(next_group())) is not None:
                yield group
        finally:
            run_in_background(groups.aclose())

    def portable(self, task: Task) -> WireTask:
        return self._client.portable(task)

    def attempt_of(self, task: Task) -> int:
        return self._client.attempt_of(task)
