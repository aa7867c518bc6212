"""Episodes of rows, for trainers that read rows and play them: in this process, or on task servers.

episodes = RowEpisodes()                               # or RowEpisodes(["http://10.0.0.5:5000"])
async with await episodes.start(scorer, task) as episode:
    step = await episode.step("an answer")

In this process a row is played by the taskset that its `scorer` names, so that it earns what `eval` gives. Servers must
serve the tasks that the rows were built from: they are asked for a task by its uid, and refused where they have none.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Self

from treetune.core.mixture import ask_owner
from treetune.core.task import Task
from treetune.core.taskset import Taskset
from treetune.core.taskset_config import TasksetConfig
from treetune.core.tool import Tool, ToolSource
from treetune.data.rows.scorer import row_tools, taskset_of, with_type
from treetune.errors import TreetuneError, UsageError
from treetune.play.episode import Limits
from treetune.serve import Denied, Misused, RemoteEpisode, ServeError, TaskServerClient
from treetune.trainers.local_episodes import LocalEpisode, or_error


class RowEpisodes:
    def __init__(
        self,
        urls: str | Sequence[str] = (),
        *,
        token_env: str = "TREETUNE_TOKEN",
        timeout: float = 600.0,
        patience: float = 60.0,
        attempts: int = 2,
    ) -> None:
        """`urls` are task servers; without them rows are played here. `token_env` names the variable that holds their
        token. `timeout` is for one start or step, `patience` for a server that does not answer. A start that fails by
        the environment's doing is tried `attempts` times in all."""
        if attempts < 1:
            raise UsageError(f"attempts must be at least 1, got {attempts}")
        urls = [urls] if isinstance(urls, str) else list(urls)
        token = os.environ.get(token_env) or None
        self._limits = Limits(timeout=timeout)
        self._client = TaskServerClient(urls, token=token, timeout=timeout, patience=patience) if urls else None
        self.attempts = attempts

    async def start(self, scorer: str, task: Task) -> LocalEpisode | RemoteEpisode:
        """An episode of a row's task; raises a `ServeError` where there is none to be had."""
        left = self.attempts
        while True:
            left -= 1
            begun = await or_error(self._begin(scorer, task))
            if not isinstance(begun, ServeError):
                return begun
            if not left or is_misuse(begun):
                raise begun

    async def _begin(self, scorer: str, task: Task) -> LocalEpisode | RemoteEpisode:
        if self._client is not None:
            index = task.extra_info.get("index")
            return await self._client.start(index if isinstance(index, int) else None, uid=task.uid)
        taskset = taskset_of(scorer)
        typed = with_type(task, taskset)
        episode = await LocalEpisode.start(_WithRowTools(taskset) if task.tools else taskset, typed, self._limits)
        episode.info = {"data_source": task.data_source}
        return episode

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


@lru_cache(maxsize=16)
def _open(loop: asyncio.AbstractEventLoop, urls: tuple[str, ...], settings: tuple[tuple[str, Any], ...]) -> RowEpisodes:
    return RowEpisodes(urls, **dict(settings))


def share_episodes(urls: str | Sequence[str] = (), **settings: Any) -> RowEpisodes:
    """Those of the running event loop, made once: for trainers that make their objects anew for every episode."""
    urls = (urls,) if isinstance(urls, str) else tuple(urls)
    return _open(asyncio.get_running_loop(), urls, tuple(sorted(settings.items())))


def is_misuse(error: TreetuneError) -> bool:
    """Whether it is a fault of the setup, which every row would meet, and no other attempt mends."""
    return isinstance(error, Misused | Denied)


class _WithRowTools(Taskset[Task, TasksetConfig]):
    """The taskset of a row that names tools itself."""

    environment = ask_owner("environment")
    reward = ask_owner("reward")

    def __init__(self, owner: Taskset[Any, Any]) -> None:
        super().__init__()
        self.name, self._of_row = owner.name, owner

    def _owner(self, task: Task) -> tuple[Taskset[Any, Any], Task]:
        return self._of_row, task

    def load_tasks(self) -> list[Task]:
        return []

    def offers_tools(self, task: Task) -> bool:
        return True

    def tools_for(self, task: Task) -> list[Tool | ToolSource]:
        return row_tools(task, self._of_row)
