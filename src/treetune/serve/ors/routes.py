"""The routes of ORS. A session is an episode of one task, and is named by the header `X-Session-ID`.

Its tools are those of the task, and `answer`, by which a model says something. A call goes on where its client loses
the connection, and can be asked for again by its `task_id`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

from treetune.play.episode_table import FINISHED, EpisodeEnded
from treetune.serve.errors import Busy
from treetune.serve.http.asgi import Events, HttpRequest, Route, format_event
from treetune.serve.http.wire import HttpError, encode, read_body
from treetune.serve.openenv.rpc import action_of_call, with_answer
from treetune.serve.openenv.session import Session
from treetune.serve.openenv.wire import Reset, describe_tool, fault_of, read_reset
from treetune.serve.ors.wire import CallBody, CreateBody, blocks_of, error_result, events_of, result_of

if TYPE_CHECKING:
    from treetune.serve.openenv.door import OpenEnvDoor

SESSION_HEADER = b"x-session-id"
_MOST_ID = 128
_QUIET_SECONDS = 10.0
"""After so long a comment is sent: a client that hears nothing for 30 seconds asks again."""
_MOST_CALLS = 16
"""Of one session, under way at once."""


class OrsSession(Session):
    """An episode that is played by calls."""

    def __init__(self, door: OpenEnvDoor, id: str | None = None) -> None:
        super().__init__(door, id)
        self._calls: dict[str, asyncio.Task[str]] = {}
        """Those under way, and the last that ended, by the ids that clients know them by."""

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Begins a call; the id of it."""
        under_way = {id: call for id, call in self._calls.items() if not call.done()}
        if len(under_way) >= _MOST_CALLS:
            raise Busy(f"{_MOST_CALLS} calls of this session are under way", remedy="wait for their results")
        id, call = uuid.uuid4().hex, asyncio.create_task(self._run(name, arguments))
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # which nobody may ask for
        self._calls = {**under_way, id: call}
        return id

    def find_call(self, id: str) -> asyncio.Task[str] | None:
        return self._calls.get(id)

    async def _run(self, name: str, arguments: dict[str, Any]) -> str:
        assert self.opening is not None
        try:
            return result_of(await self.play(action_of_call(name, arguments, self.opening.tools)))
        except EpisodeEnded as error:
            if error.why is not FINISHED:
                raise
            return error_result(error.message)


class OrsRoutes:
    def __init__(self, door: OpenEnvDoor) -> None:
        self._door = door

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
        self._door.tasks.check_name(body.env_name)
        if id in self._door.sessions:
            raise HttpError(400, "usage", "Session already exists")
        asked = self._read_task(body)
        session = self._door.open_session(id=id, kind=OrsSession)
        try:
            await session.reset(asked)
            if await request.is_abandoned():
                raise HttpError(400, "bad_request", "the client has left")
        except BaseException:
            await self._door.close_session(session)
            raise
        return encode({"sid": id})

    def _read_task(self, body: CreateBody) -> Reset:
        tasks = self._door.tasks
        asked = Reset(split=body.split, index=body.index) if body.task_spec is None else read_reset(body.task_spec)
        tasks.check_split(asked.split)
        index = asked.task(self._door.server.streams.count)
        if index is None:
            raise HttpError(400, "usage", 'the task_spec names no task: {"split": ..., "index": ...}')
        return Reset(index=tasks.check_index(index))

    async def _delete(self, request: HttpRequest) -> bytes:
        id = _id_of(request)
        if isinstance(session := self._door.sessions.get(id), OrsSession):
            await self._door.close_session(session)
        return encode({"sid": id})

    async def _ping(self, request: HttpRequest) -> bytes:
        self._find(request)
        return encode({"status": "ok"})

    async def _tools(self, request: HttpRequest) -> bytes:
        """Those of a task; they may differ between tasks."""
        self._door.tasks.check_path(request)
        return _list_tools(await self._door.learn_tools())

    async def _task_tools(self, request: HttpRequest) -> bytes:
        self._door.tasks.check_path(request)
        return _list_tools((await self._find(request).ensure_begun()).tools)

    async def _prompt(self, request: HttpRequest) -> bytes:
        self._door.tasks.check_path(request)
        return encode(blocks_of((await self._find(request).ensure_begun()).observation))

    async def _call(self, request: HttpRequest) -> Events:
        self._door.tasks.check_path(request)
        session, body = self._find(request), read_body(CallBody, request.body)
        await session.ensure_begun()
        id = session.call(body.name, body.input) if body.task_id is None else body.task_id
        return _stream(id, session.find_call(id), session.hear)

    def _find(self, request: HttpRequest) -> OrsSession:
        session = self._door.sessions.get(_id_of(request))
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
    """The events of a call. Closing it early leaves the call to go on."""
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
