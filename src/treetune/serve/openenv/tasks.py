"""The routes that tell of tasks, which OpenEnv and ORS share: which there are, by split and index.

    POST /my-tasks/task {"split": "train", "index": 3}   ->   {"task": {"split": "train", "index": 3}}

What is told of a task is what begins it: `reset(**task)`, or the `task_spec` of an ORS session. Its prompt is what the
episode shows first; what it is scored by stays here.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from treetune.serve.http.asgi import HttpRequest, Route
from treetune.serve.http.wire import HttpError, encode, read_body
from treetune.serve.server import EnvServer

MOST_TASKS = 100_000
"""That one answer lists."""
_TYPES = {"train": "train", "test": "test"}


class SplitBody(msgspec.Struct, forbid_unknown_fields=True):
    split: str


class TaskBody(SplitBody, forbid_unknown_fields=True):
    index: int


class RangeBody(SplitBody, forbid_unknown_fields=True):
    start: int | None = None
    stop: int | None = None


class TaskRoutes:
    def __init__(self, server: EnvServer, split: str) -> None:
        self._server, self.split = server, split

    def routes(self) -> list[Route]:
        return [
            Route("GET", "/list_environments", self._list, "openenv.list_environments"),
            Route("GET", "/*/splits", self._splits, "openenv.splits"),
            Route("POST", "/*/tasks", self._tasks, "openenv.tasks"),
            Route("POST", "/*/num_tasks", self._count, "openenv.num_tasks"),
            Route("POST", "/*/task", self._task, "openenv.task"),
            Route("POST", "/*/task_range", self._range, "openenv.task_range"),
        ]

    @property
    def name(self) -> str:
        """The taskset's, as a part of a path."""
        return re.sub(r"[^a-z0-9_.-]+", "-", self._server.taskset.name.lower()).strip("-") or "tasks"

    def check_name(self, name: str | None) -> None:
        if name is not None and name.lower() != self.name:
            raise HttpError(404, "unknown_path", f"unknown environment {name!r:.80}")

    def check_path(self, request: HttpRequest) -> None:
        """That the path names our environment."""
        self.check_name(request.path.split("/")[1])

    def spec(self, index: int) -> dict[str, Any]:
        return {"split": self.split, "index": index}

    def check_split(self, split: str | None) -> None:
        if split is not None and split != self.split:
            raise HttpError(400, "usage", f"Invalid split: there is only {self.split!r}")

    def check_index(self, index: int) -> int:
        """The place of a task; a negative one counts from the end."""
        count = self._server.streams.count
        if index < 0 and count is not None:
            index += count
        if index < 0 or (count is not None and index >= count):
            raise HttpError(400, "usage", "Invalid task index")
        return index

    def _size(self, asked: str) -> int:
        count = self._server.streams.count
        if count is None:
            problem = f"{asked} is not supported for this environment: its tasks have no end"
            raise HttpError(501, "usage", f"{problem}. Name an index, or a seed.")
        return count

    async def _list(self, request: HttpRequest) -> bytes:
        return encode([self.name])

    async def _splits(self, request: HttpRequest) -> bytes:
        self.check_path(request)
        return encode([{"name": self.split, "type": _TYPES.get(self.split, "validation")}])

    def _read(self, request: HttpRequest, kind: Any) -> Any:
        self.check_path(request)
        body = read_body(kind, request.body)
        self.check_split(body.split)
        return body

    async def _tasks(self, request: HttpRequest) -> bytes:
        self._read(request, SplitBody)
        listed = range(min(self._size("list_tasks"), MOST_TASKS))
        return encode({"tasks": [self.spec(index) for index in listed], "env_name": self.name})

    async def _count(self, request: HttpRequest) -> bytes:
        self._read(request, SplitBody)
        return encode({"num_tasks": self._size("num_tasks")})

    async def _task(self, request: HttpRequest) -> bytes:
        body = self._read(request, TaskBody)
        return encode({"task": self.spec(self.check_index(body.index))})

    async def _range(self, request: HttpRequest) -> bytes:
        body = self._read(request, RangeBody)
        count = self._server.streams.count
        if count is None and (body.start is None or body.stop is None or min(body.start, body.stop) < 0):
            self._size("get_task_range")
        chosen = range(count if count is not None else body.stop or 0)[slice(body.start, body.stop)]
        if len(chosen) > MOST_TASKS:
            raise HttpError(400, "too_large", f"{len(chosen)} tasks at once; ask for at most {MOST_TASKS}")
        return encode({"tasks": [self.spec(index) for index in chosen]})
