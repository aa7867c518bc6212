"""`GatewayServer` receives the requests of agents, and of the programs that run them.

    server = GatewayServer(gateway, "127.0.0.1:0", token="...")
    url = await server.start()

Agents use the base address `{url}/sessions/KEY/v1`, or `{url}/v1` with the key of their session as API key. With the
token, `POST /sessions` opens a session, `GET /sessions/KEY` returns its trace, and `DELETE` also ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import msgspec
import xxhash

from treetune.errors import TreetuneError
from treetune.gateway.call import Call, Refused, Reply
from treetune.gateway.dialects import Body, Dialect, Events, anthropic, chat, completions, google, responses
from treetune.gateway.gateway import Gateway, read_settings
from treetune.gateway.session import Session
from treetune.gateway.streaming import Part
from treetune.system import http_app, prometheus
from treetune.system.access import Access
from treetune.system.http_app import HttpRequest, JsonApp, Route, Scope
from treetune.system.http_body import check_values
from treetune.system.http_error import ErrorAnswer, HttpError, as_http_error, encode
from treetune.system.http_listener import HttpListener

QUIET_SECONDS = 10.0
"""After so long without text, a stream gets a comment, so that no proxy closes the connection."""
MOST_BYTES = 64 << 20
"""The maximum size of a request."""
GOOGLE = Dialect(google.read, google.write, google.GoogleEvents)
DIALECTS = {
    "/chat/completions": Dialect(chat.read, chat.write, chat.ChatEvents),
    "/responses": Dialect(responses.read, responses.write, responses.ResponseEvents),
    "/messages": Dialect(anthropic.read, anthropic.write, anthropic.MessageEvents),
    "/completions": Dialect(completions.read, completions.write, completions.CompletionEvents),
}
_KEY_HEADERS = (b"x-api-key", b"x-goog-api-key")
_RETRIES = b"x-stainless-retry-count"


class GatewayServer:
    def __init__(self, gateway: Gateway, address: str = "127.0.0.1:0", *, token: str, unix: str | None = None) -> None:
        """`token` is for those who open sessions; agents have only the key of theirs. `unix` is the path of a socket
        for agents on machines without a network."""
        self.gateway = gateway
        access = Access(token=token)
        self._listener, self._app = HttpListener(address, access, unix), _GatewayApp(gateway, access)

    async def start(self, listening: socket.socket | None = None) -> str:
        """Start listening, on this socket if one is given; return the address."""
        return await self._listener.start(self._app, listening=listening)

    async def close(self) -> None:
        """Cancel all calls, and stop listening."""
        self.gateway.close()
        await self._listener.close()


def list_variables(url: str, key: str) -> dict[str, str]:
    """The environment variables that lead the SDKs of an agent to its session."""
    base = f"{url}/sessions/{key}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": key,
        "GOOGLE_GEMINI_BASE_URL": base,
        "GEMINI_API_KEY": key,
    }


class _Asked(NamedTuple):
    """A request of an agent."""

    session: Session
    dialect: Dialect
    call: Call
    digest: bytes
    """Equal for a request and its retries."""
    is_retry: bool


class _GatewayApp(JsonApp):
    def __init__(self, gateway: Gateway, access: Access) -> None:
        routes = [
            Route("POST", "/sessions", self._open),
            Route("GET", "/sessions", self._list),
            Route("GET", "/sessions/*", self._show),
            Route("DELETE", "/sessions/*", self._drop),
            Route("POST", "/weights", self._change_weights),
            Route("GET", "/metrics", self._metrics, content_type=prometheus.CONTENT_TYPE),
            Route("GET", "/health", self._health, needs_token=False),
        ]
        remedy = "send `Authorization: Bearer TOKEN`"
        super().__init__(routes, access, max_bytes=MOST_BYTES, token_remedy=remedy, render_error=render_error)
        self._gateway = gateway

    # For those who run agents

    async def _health(self, request: HttpRequest) -> bytes:
        return encode({"status": "ok", "sessions": len(self._gateway.sessions)})

    async def _metrics(self, request: HttpRequest) -> bytes:
        return prometheus.render(self._gateway.figures())

    async def _change_weights(self, request: HttpRequest) -> bytes:
        return encode({"idle": await self._gateway.change_weights(request.body)})

    async def _open(self, request: HttpRequest) -> bytes:
        session = self._gateway.open(*read_settings(_decode(request.body or b"{}"), self._gateway))
        host = dict(request.headers).get(b"host", b"").decode("latin-1")
        url, environment = f"http://{host}/sessions/{session.key}", list_variables(f"http://{host}", session.key)
        return encode({"key": session.key, "url": url, "environment": environment})

    async def _list(self, request: HttpRequest) -> bytes:
        sessions = self._gateway.sessions.values()
        listed = [{"key": each.key, "counts": dict(each.counts), "over": each.over} for each in sessions]
        figures = self._gateway.figures()
        return encode({**figures.gauges, "sessions": listed, "counts": figures.counts})

    async def _show(self, request: HttpRequest) -> bytes:
        return encode(self._named(request).trace())

    async def _drop(self, request: HttpRequest) -> bytes:
        session = self._named(request)
        self._gateway.drop(session)
        return encode(session.trace())

    def _named(self, request: HttpRequest) -> Session:
        session = self._gateway.sessions.get(request.path.rpartition("/")[2])
        if session is None:
            raise HttpError(404, "unknown_session", "there is no such session")
        return session

    # For agents

    def find_route(self, scope: Scope) -> Route:
        """The route of a request. The key of an agent is checked here, before the body is read."""
        path, method = scope["path"], scope["method"]
        if (found := find_call(scope)) is None:
            return super().find_route(scope)
        session = self._gateway.sessions.get(found.key)
        if session is None:
            raise refuse_key(found.key, self._gateway.ended)
        rest = "/" + found.path.removeprefix("v1beta/").removeprefix("v1/")
        if rest == "/models" or (rest.startswith("/models/") and ":" not in rest):
            return self._route(method, "GET", path, partial(self._models, rest[len("/models/") :]))
        if rest == "/messages/count_tokens":
            return self._route(method, "POST", path, partial(self._count_tokens, session))
        if rest.startswith("/models/"):
            model, _, verb = rest[len("/models/") :].rpartition(":")
            if verb == "countTokens":
                return self._route(method, "POST", path, partial(self._count_google, session))
            if verb in ("generateContent", "streamGenerateContent"):
                stream = verb == "streamGenerateContent"
                if stream and parse_qs(scope["query_string"]).get(b"alt") != [b"sse"]:
                    raise Refused(400, "add ?alt=sse: other streams are not supported")
                more = {"model": model, "stream": stream}
                return self._route(method, "POST", path, partial(self._answer, session, GOOGLE, more))
        if (dialect := DIALECTS.get(rest)) is None:
            known = ", ".join((*DIALECTS, "/messages/count_tokens", "/models", "/models/MODEL:generateContent"))
            raise Refused(404, f"there is nothing at {rest:.80}; the paths are {known}", "not_found_error")
        return self._route(method, "POST", path, partial(self._answer, session, dialect, {}))

    @staticmethod
    def _route(method: str, only: str, path: str, handler: http_app.Handler) -> Route:
        if method != only:
            raise HttpError(405, "wrong_method", f"{path:.80} accepts {only}", allow=only)
        return Route(only, path, handler, needs_token=False)

    async def _models(self, name: str, request: HttpRequest) -> bytes:
        model = {"id": name or self._gateway.name, "object": "model", "created": 0, "owned_by": "treetune"}
        model |= {"type": "model", "name": f"models/{model['id']}", "display_name": model["id"]}
        return encode(model if name else {"object": "list", "data": [model], "models": [model], "has_more": False})

    async def _count_tokens(self, session: Session, request: HttpRequest) -> bytes:
        call = _read(anthropic.read_count, _decode(request.body))
        return encode({"input_tokens": session.count_tokens(call)})

    async def _count_google(self, session: Session, request: HttpRequest) -> bytes:
        body = _decode(request.body)
        call = _read(google.read, body.get("generateContentRequest") or body)
        return encode({"totalTokens": session.count_tokens(call)})

    async def _answer(
        self, session: Session, dialect: Dialect, more: Body, request: HttpRequest
    ) -> bytes | http_app.Events:
        call = _read(dialect.read, {**_decode(request.body), **more})
        retries = dict(request.headers).get(_RETRIES, b"0")
        digest = xxhash.xxh3_128_digest(request.path.encode() + request.body)
        is_retry = retries.strip() not in (b"", b"0")
        if call.stream:
            return _stream(_Asked(session, dialect, call, digest, is_retry), request)
        sample = await session.ask(call, digest, is_retry, on_leave=request.on_leave)
        return dialect.write(call, session.deliver(sample, digest))


async def _stream(asked: _Asked, request: HttpRequest) -> http_app.Events:
    """The events of an answer. An error before the first of them is an ordinary answer."""
    session, loop = asked.session, asyncio.get_running_loop()
    waiting: list[Part | None] = []  # None: nothing was sampled for a while
    changed = asyncio.Event()

    def hear(part: Part | None) -> None:
        waiting.append(part)
        changed.set()

    asking = asyncio.ensure_future(session.ask(asked.call, asked.digest, asked.is_retry, hear, request.on_leave))
    asking.add_done_callback(lambda _: changed.set())
    events, shown = asked.dialect.events(asked.call), _Shown()
    quiet = loop.call_later(QUIET_SECONDS, hear, None)
    try:
        begun = False
        while not asking.done():
            await changed.wait()
            changed.clear()
            if waiting:
                head = b"" if begun else events.begin()
                begun = True
                yield head + shown.write(events, waiting)
                waiting.clear()
                quiet.cancel()
                quiet = loop.call_later(QUIET_SECONDS, hear, None)
        last = (b"" if begun else events.begin()) + shown.write(events, waiting)
        try:
            reply = session.deliver(asking.result(), asked.digest, shown.content)
        except Exception as error:
            if not begun:
                raise
            yield last + events.fail(as_http_error(error))
            return
        yield last + shown.write(events, shown.missing(reply)) + b"".join(events.end(reply))
    finally:
        quiet.cancel()
        await _cancel(asking)


class _Shown:
    """What a stream has sent."""

    def __init__(self) -> None:
        self.content = ""
        self._has_reasoning = False

    def write(self, events: Events, parts: Sequence[Part | None]) -> bytes:
        return b"".join([b": sampling\n\n" if part is None else self._write(events, part) for part in parts])

    def _write(self, events: Events, part: Part) -> bytes:
        if part[0] == "content":
            self.content += part[1]
        else:
            self._has_reasoning = True
        return events.part(part)

    def missing(self, reply: Reply) -> list[Part]:
        """The parts of an answer that are sent at its end: text that could have begun a call, or a whole answer."""
        parts: list[Part] = []
        if not self._has_reasoning and (thought := reply.message.get("reasoning_content")):
            parts.append(("reasoning", thought))
        content = reply.message.get("content") or ""
        if content.startswith(self.content) and (rest := content[len(self.content) :]):
            parts.append(("content", rest))
        return parts


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task, and wait for its end, so that nothing is sampled for a client that has left."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await task


class FoundCall(NamedTuple):
    """The request of an agent."""

    key: str
    """That of its session."""
    path: str


def find_call(scope: Scope) -> FoundCall | None:
    """The session that a request of an agent names; None for requests of those who run agents."""
    first, _, rest = scope["path"][1:].partition("/")
    if first == "sessions" and "/" in rest:
        key, _, rest = rest.partition("/")
        return FoundCall(key, rest)
    return FoundCall(_find_key(scope), scope["path"][1:]) if first in ("v1", "v1beta") else None


def refuse_key(key: str, *ended: Mapping[str, str]) -> HttpError:
    """The error for a key of no open session. `ended` are the keys of sessions that were open, with the reasons."""
    why = next((those[key] for those in ended if key in those), None)
    if why is not None:
        return Refused(410, why, "session_over")
    return HttpError(401, "authentication_error", "this is not the key of a session")


def _find_key(scope: Scope) -> str:
    """The API key of a request."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    keys = [token] if scheme.lower() == b"bearer" else []
    keys += [headers[name] for name in _KEY_HEADERS if name in headers]
    keys += parse_qs(scope["query_string"]).get(b"key", [])
    return keys[0].strip().decode("latin-1") if keys else ""


def _decode(content: bytes) -> Body:
    try:
        check_values("the request", content)
        body = msgspec.json.decode(content)
    except TreetuneError as error:
        raise Refused(413, error.message) from None
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused(400, "the body is not an object")
    return body


def _read(read: Any, body: Body) -> Call:
    try:
        call: Call = read(body)
    except KeyError as error:
        raise Refused(400, f"the field {error} is missing") from None
    except (TypeError, AttributeError, ValueError, RecursionError) as error:
        raise Refused(400, f"the request is malformed: {error}") from None
    return call


def render_error(error: HttpError) -> bytes:
    """An error in a form that the SDKs of all dialects read."""
    found = msgspec.json.decode(error.body, type=ErrorAnswer)
    message = f"{found.error}; {found.remedy}" if found.remedy else found.error
    return encode(
        {"type": "error", "error": {"message": message, "type": error.kind, "code": error.kind, "param": None}}
    )
