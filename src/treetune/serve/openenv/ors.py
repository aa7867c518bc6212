"""The routes of ORS (ors-sdk 0.1), and the task routes, which OpenEnv has, too.

    POST /my-tasks/call {"name": "answer", "input": {"text": "42"}}
    event: end
    data: {"ok": true, "output": {"blocks": [...], "metadata": {...}, "reward": 1.0, "finished": true}}

A session is an episode of one task; the header `X-Session-ID` names it. Its tools are those of the task, plus `answer`
for the model's text. If the client loses the connection, the call continues, and its `task_id` fetches the result
later.

The task routes list tasks by split and index. For example, POST /my-tasks/task {"split": "train", "index": 3} answers
{"task": {"split": "train", "index": 3}}, which starts the task as `reset(**task)` or as the `task_spec` of an ORS
session.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec

from treetune.core.environment import Observation, Step
from treetune.play.episode_table import FINISHED, EpisodeEnded
from treetune.play.toolbox import parts_of
from treetune.serve.errors import Busy
from treetune.serve.http.wire import read_body, read_content
from treetune.serve.openenv.session import Session, SessionTable, action_of_call, with_answer
from treetune.serve.openenv.wire import Reset, describe_tool, fault_of, read_reset
from treetune.system.http_app import Events, HttpRequest, Route, format_event
from treetune.system.http_error import HttpError, encode

MOST_TASKS = 100_000
"""The maximum number of tasks that one answer lists."""
_TYPES = {"train": "train", "test": "test"}


class SplitBody(msgspec.Struct, forbid_unknown_fields=True):
    split: str


class TaskBody(SplitBody, forbid_unknown_fields=True):
    index: int


class RangeBody(SplitBody, forbid_unknown_fields=True):
    start: int | None = None
    stop: int | None = None


class TaskRoutes:
    def __init__(self, sessions: SessionTable) -> None:
        self._sessions, self._server = sessions, sessions.server

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
        """The taskset's name, as a part of a path."""
        return re.sub(r"[^a-z0-9_.-]+", "-", self._server.taskset.name.lower()).strip("-") or "tasks"

    def check_name(self, name: str | None) -> None:
        if name is not None and name.lower() != self.name:
            raise HttpError(404, "unknown_path", f"unknown environment {name!r:.80}")

    def check_path(self, request: HttpRequest) -> None:
        """Raises HttpError unless the path names the environment."""
        self.check_name(request.path.split("/")[1])

    def spec(self, index: int) -> dict[str, Any]:
        return {"split": self._sessions.split, "index": index}

    def check_index(self, index: int) -> int:
        """Checks the index of a task; a negative one counts from the end."""
        count = self._server.streams.count
        if index < 0 and count is not None:
            index += count
        if index < 0 or (count is not None and index >= count):
            raise HttpError(400, "usage", "Invalid task index")
        return index

    def _size(self, asked: str) -> int:
        count = self._server.streams.count
        if count is None:
            problem = f"{asked} is not supported for this environment: its tasks are endless"
            raise HttpError(501, "usage", f"{problem}. Name an index, or a seed.")
        return count

    async def _list(self, request: HttpRequest) -> bytes:
        return encode([self.name])

    async def _splits(self, request: HttpRequest) -> bytes:
        self.check_path(request)
        return encode([{"name": self._sessions.split, "type": _TYPES.get(self._sessions.split, "validation")}])

    def _read(self, request: HttpRequest, kind: Any) -> Any:
        self.check_path(request)
        body = read_body(kind, request.body)
        self._sessions.check_split(body.split)
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


_CHUNK = 4096
"""Characters per event: the client reads lines and rejects long ones."""
SESSION_HEADER = b"x-session-id"
_MOST_ID = 128
_QUIET_SECONDS = 10.0
"""After this much silence, a comment is sent, because a client that receives nothing for 30 seconds repeats its
request."""
_MOST_CALLS = 16
"""The maximum number of concurrent calls of one session."""


class CreateBody(msgspec.Struct, forbid_unknown_fields=True):
    env_name: str | None = None
    task_spec: dict[str, Any] | None = None
    split: str | None = None
    index: int | None = None
    secrets: dict[str, str] | None = None
    """Ignored: the server's config holds what an environment needs."""

    def __post_init__(self) -> None:
        by_index = self.split is not None and self.index is not None
        if (self.task_spec is not None) == by_index:
            raise ValueError("Provide either task_spec or both split and index, not both/neither")


class CallBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    input: dict[str, Any]
    task_id: str | None = None
    """The id of an earlier call whose result is requested again."""


class OrsSession(Session):
    """An episode that is played by calls."""

    def __init__(self, sessions: SessionTable, id: str) -> None:
        super().__init__(sessions, id)
        self._calls: dict[str, asyncio.Task[str]] = {}
        """Running calls, and the calls that ended last, by their `task_id`."""

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Starts a call; returns its id."""
        under_way = {id: call for id, call in self._calls.items() if not call.done()}
        if len(under_way) >= _MOST_CALLS:
            raise Busy(f"{_MOST_CALLS} calls of this session are in progress", remedy="wait for their results")
        id, call = uuid.uuid4().hex, asyncio.create_task(self._run(name, arguments))
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # the result may never be read
        self._calls = {**under_way, id: call}
        return id

    def find_call(self, id: str) -> asyncio.Task[str] | None:
        return self._calls.get(id)

    async def _run(self, name: str, arguments: dict[str, Any]) -> str:
        assert self.first is not None
        try:
            return result_of(await self.play(action_of_call(name, arguments, self.first.started.tools)))
        except EpisodeEnded as error:
            if error.why is not FINISHED:
                raise
            return error_result(error.message)


class OrsRoutes:
    def __init__(self, sessions: SessionTable, tasks: TaskRoutes) -> None:
        self._sessions, self._tasks = sessions, tasks

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/create_session", self._new_id, "ors.create_session"),
            Route("POST", "/delete_session", self._forget_id, "ors.delete_session"),
            Route("POST", "/create", self._create, "ors.create"),
            Route("POST", "/delete", self._delete, "ors.delete"),
            Route("POST", "/ping", self._ping, "ors.ping"),
            Route("GET", "/*/tools", self._tools, "ors.tools"),
            Route("GET", "/*/task_tools", self._task_tools, "ors.task_tools"),
            Route("GET", "/*/prompt", self._prompt, "ors.prompt"),
            Route("POST", "/*/call", self._call, "ors.call"),
        ]

    async def _new_id(self, request: HttpRequest) -> Events:
        async def events() -> AsyncGenerator[bytes]:
            yield format_event("task_id", str(uuid.uuid4()).encode())
            yield format_event("end", b"")

        return events()

    async def _forget_id(self, request: HttpRequest) -> bytes:
        return encode({"sid": _id_of(request)})

    async def _create(self, request: HttpRequest) -> bytes:
        id, body = _id_of(request), read_body(CreateBody, request.body)
        self._tasks.check_name(body.env_name)
        if id in self._sessions.by_id:
            raise HttpError(400, "usage", "Session already exists")
        asked = self._read_task(body)
        session = self._sessions.add(OrsSession(self._sessions, id))
        try:
            await session.reset(asked)
            if await request.is_abandoned():
                raise HttpError(400, "bad_request", "the client has left")
        except BaseException:
            await self._sessions.close(session)
            raise
        return encode({"sid": id})

    def _read_task(self, body: CreateBody) -> Reset:
        asked = Reset(split=body.split, index=body.index) if body.task_spec is None else read_reset(body.task_spec)
        self._sessions.check_split(asked.split)
        index = asked.task(self._sessions.server.streams.count)
        if index is None:
            raise HttpError(400, "usage", 'the task_spec does not name a task: {"split": ..., "index": ...}')
        return Reset(index=self._tasks.check_index(index))

    async def _delete(self, request: HttpRequest) -> bytes:
        id = _id_of(request)
        if isinstance(session := self._sessions.by_id.get(id), OrsSession):
            await self._sessions.close(session)
        return encode({"sid": id})

    async def _ping(self, request: HttpRequest) -> bytes:
        self._find(request)
        return encode({"status": "ok"})

    async def _tools(self, request: HttpRequest) -> bytes:
        """Returns the tools of one task; other tasks may have others."""
        self._tasks.check_path(request)
        return _list_tools(await self._sessions.list_tools())

    async def _task_tools(self, request: HttpRequest) -> bytes:
        self._tasks.check_path(request)
        return _list_tools((await self._find(request).ensure_started()).started.tools)

    async def _prompt(self, request: HttpRequest) -> bytes:
        self._tasks.check_path(request)
        return encode(blocks_of((await self._find(request).ensure_started()).started.observation))

    async def _call(self, request: HttpRequest) -> Events:
        self._tasks.check_path(request)
        session, body = self._find(request), read_body(CallBody, request.body)
        await session.ensure_started()
        id = session.call(body.name, body.input) if body.task_id is None else body.task_id
        return _stream(id, session.find_call(id), session.hear)

    def _find(self, request: HttpRequest) -> OrsSession:
        session = self._sessions.by_id.get(_id_of(request))
        if not isinstance(session, OrsSession):
            raise HttpError(404, "unknown_episode", "Active environment not found")
        session.hear()
        return session


def _id_of(request: HttpRequest) -> str:
    id = dict(request.headers).get(SESSION_HEADER, b"").decode("latin-1").strip()
    if not id or len(id) > _MOST_ID:
        raise HttpError(400, "bad_request", "X-Session-ID header is required")
    return id


def _list_tools(tools: list[dict[str, Any]]) -> bytes:
    return encode({"tools": [describe_tool(tool, "input_schema") for tool in with_answer(tools)]})


async def _stream(id: str, call: asyncio.Task[str] | None, hear: Callable[[], None]) -> AsyncGenerator[bytes]:
    """Streams the events of a call. If it is closed early, the call continues."""
    if call is None:
        yield format_event("error", b"unknown task_id")
        return
    yield format_event("task_id", id.encode())
    while not (await asyncio.wait([call], timeout=_QUIET_SECONDS))[0]:
        hear()
        yield b": still at it\n\n"
    try:
        result = call.result()
    except BaseException as error:
        problem = str(fault_of(error)) if isinstance(error, Exception) else "the call was cancelled"
        yield format_event("error", " ".join(problem.split()).encode())
        return
    for event in events_of(result):
        yield event


def blocks_of(observation: Observation) -> list[dict[str, Any]]:
    """Converts an observation to the blocks of a prompt or a result."""
    blocks: list[dict[str, Any]] = []
    for content in map(read_content, parts_of(observation.messages())):
        if isinstance(content, str):
            blocks.append({"text": content, "detail": None, "type": "text"})
        else:
            blocks.append({"data": content[1], "mimeType": content[0], "detail": None, "type": "image"})
    return blocks


def result_of(step: Step) -> str:
    """The result of a call. A failed call that changed nothing is an ORS error, whose text is shown to the model."""
    errors = [call.error for call in step.calls if call.error is not None]
    if errors and not step.done and not step.reward:
        return error_result(errors[0])
    output = {
        "blocks": blocks_of(step.observation),
        "metadata": step.info or None,
        "reward": step.reward,
        "finished": step.done,
    }
    return encode({"ok": True, "output": output}).decode()


def error_result(problem: str) -> str:
    return encode({"ok": False, "error": problem}).decode()


def events_of(result: str) -> Iterator[bytes]:
    """Yields a result as events."""
    for begin, end in _cut(result):
        name = "end" if end == len(result) else "chunk"
        yield format_event(name, result[begin:end].encode())


def _cut(text: str) -> Iterator[tuple[int, int]]:
    """Cuts the text so that no part begins with a space, which the client would drop."""
    begin = 0
    while begin < len(text):
        end = min(begin + _CHUNK, len(text))
        while end < len(text) and text[end].isspace():
            end += 1
        yield begin, end
        begin = end
