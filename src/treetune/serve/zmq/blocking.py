"""BlockingEnvClient: the client for programs without an event loop.

    with BlockingEnvClient("tcp://127.0.0.1:5555") as client:
        trace = client.run_rollout(client.sample())

An event loop runs in a thread of its own; calls may come from any thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

from treetune.environment import Step
from treetune.episode import Started
from treetune.host import Health, Info
from treetune.serve.zmq.client import EnvClient
from treetune.serve.zmq.wire import WireTask
from treetune.streams import State
from treetune.task import Task
from treetune.trace import Trace

T = TypeVar("T")


class BlockingEnvClient:
    def __init__(self, address: str, **options: Any) -> None:
        """The options are those of `EnvClient`."""
        self._client = EnvClient(address, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="treetune-client", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def info(self) -> Info:
        return self._wait(self._client.info())

    def health(self, deadline: float | None = None) -> Health:
        return self._wait(self._client.health(deadline))

    def sample(self, index: int | None = None, *, stream: str = "") -> Task:
        return self._wait(self._client.sample(index, stream=stream))

    def run_rollout(self, task: Task, **options: Any) -> Trace:
        return self._wait(self._client.run_rollout(task, **options))

    def run_group(self, task: Task, n: int, **options: Any) -> list[Trace]:
        return self._wait(self._client.run_group(task, n, **options))

    def start(self, task: Task) -> Started:
        return self._wait(self._client.start(task))

    def step(self, episode: str, action: Any, turn: int | None = None) -> Step:
        return self._wait(self._client.step(episode, action, turn))

    def cancel(self, id: str) -> bool:
        return self._wait(self._client.cancel(id))

    def observe(self, task: Task, reward: float, *, stream: str = "") -> None:
        self._wait(self._client.observe(task, reward, stream=stream))

    def state(self, stream: str | None = None) -> State:
        return self._wait(self._client.state(stream))

    def restore(self, state: State) -> None:
        self._wait(self._client.restore(state))

    def portable(self, task: Task) -> WireTask:
        return self._client.portable(task)

    def stats(self) -> dict[str, Any]:
        return self._wait(self._client.stats())

    def close(self) -> None:
        if self._thread.is_alive():
            self._wait(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
