"""`HttpSampler` samples with an engine over HTTP that takes and returns tokens: vLLM, SGLang.

    sampler = HttpSampler("http://127.0.0.1:8000/v1", "policy")
    await sampler(prompt, sampling, None)

It uses `/v1/completions` with `return_token_ids`: the chat route of both loses ids in streams with tool calls. A call
that is cancelled closes its connection, and the engine stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import deque
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec

from treetune.chat.sampled_tokens import TokenId, check_logprobs
from treetune.chat.tokens import Prompt
from treetune.core.policy import Sampling
from treetune.errors import ContextFullError, PolicyError, UsageError
from treetune.gateway.call import Hear, Sampled, join
from treetune.play.weights import parse_version
from treetune.system.http_body import MOST_BYTES

SECONDS = 600.0
"""The maximum duration of a call."""
_CONNECT_SECONDS = 10.0
_MOST_IDLE = 256


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[TokenId] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    """A completion, or one part of a stream."""

    choices: list[_Choice] = []
    weight_version: Any = None
    metadata: dict[str, Any] | None = None
    error: Any = None

    @property
    def version(self) -> int | None:
        if self.weight_version is not None:
            return parse_version(self.weight_version)
        return None if self.metadata is None else parse_version(self.metadata.get("weight_version"))


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


_decode = msgspec.json.Decoder(_Completion).decode
_encode = msgspec.json.Encoder().encode


class HttpSampler:
    def __init__(
        self, url: str, model: str | None = None, *, api_key: str | None = None, seconds: float = SECONDS
    ) -> None:
        """`model` is its name at the server; by default the first that the server lists."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise UsageError(f"{url!r} is not the address of an engine", remedy="write http://HOST:PORT/v1")
        self.url, self.model = url.rstrip("/"), model
        self.context: int | None = None
        """The length of the model's context, as the server states it."""
        self._has_asked = False
        self._host, self._port = parts.hostname, port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._path, self._seconds = parts.path.rstrip("/"), seconds
        self._idle: deque[_Connection] = deque()
        self._headers = f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n"
        self._headers += f"Authorization: Bearer {api_key}\r\n" if api_key else ""

    async def connect(self) -> None:
        """Ask the server for the name of its model and the length of the context. Raises PolicyError."""
        status, content = await self._send("GET", "/models", b"", None)
        try:
            models = msgspec.json.decode(content, type=_Models).data if status == 200 else []
        except msgspec.MsgspecError as error:
            raise PolicyError(f"{self.url}/models sent no list of models: {error}") from error
        if status != 200 or not models:
            raise PolicyError(f"{self.url}/models answered {status} without a model", remedy="is it an engine's /v1?")
        known = {model.id: model for model in models}
        if self.model is not None and self.model not in known:
            raise PolicyError(f"{self.url} has no model {self.model!r}; it has {', '.join(known)}")
        self.model = self.model or models[0].id
        self.context = known[self.model].max_model_len
        self._has_asked = True

    async def __call__(self, prompt: Prompt, sampling: Sampling, hear: Hear | None) -> Sampled:
        if not self._has_asked:
            with contextlib.suppress(*([PolicyError] if self.model is not None else [])):
                await self.connect()
        answer = _Answer(hear)
        payload = self._write(prompt, sampling, stream=hear is not None)
        status, content = await self._send("POST", "/completions", payload, answer.add if hear is not None else None)
        if status != 200:
            text = content[:300].decode(errors="replace")
            is_full = b"context length" in content or b"maximum context" in content
            raise (ContextFullError if is_full else PolicyError)(f"the engine answered {status}: {text}")
        if hear is None:
            answer.add(content)
        return answer.finish()

    def _write(self, prompt: Prompt, sampling: Sampling, stream: bool) -> bytes:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt.ids,
            "n": 1,
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
        for name in ("max_tokens", "temperature", "top_p", "seed"):
            if (value := getattr(sampling, name)) is not None:
                body[name] = value
        if sampling.stop:
            body["stop"] = sampling.stop
        return _encode({**body, **({"stream": True} if stream else {}), **sampling.extra})

    async def _send(
        self, method: str, path: str, payload: bytes, hear: Callable[[bytes], None] | None
    ) -> tuple[int, bytes]:
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(payload)}\r\n\r\n".encode()
        while True:
            connection, is_used = await self._connect()
            timer = asyncio.get_running_loop().call_later(self._seconds, self._give_up, connection)
            try:
                return await connection.ask(head, payload, hear)
            except _ClosedError:
                if not is_used or connection.has_heard:
                    raise  # else it was closed while it was idle
            finally:
                timer.cancel()
                if connection.is_free and len(self._idle) < _MOST_IDLE:
                    self._idle.append(connection)
                else:
                    connection.transport.abort()  # the engine stops

    def _give_up(self, connection: _Connection) -> None:
        connection.fail(PolicyError(f"the engine did not answer within {self._seconds:g} seconds"))

    async def _connect(self) -> tuple[_Connection, bool]:
        """A connection, and whether it was used before."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_free:
                return connection, True
        place = f"{self._host}:{self._port}"
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._ssl)
        except (OSError, TimeoutError) as error:
            raise PolicyError(f"no engine answers at {place}: {error or 'timeout'}") from error
        return connection, False

    def close(self) -> None:
        while self._idle:
            self._idle.pop().transport.abort()


class _Answer:
    """A completion that arrives, whole or in parts."""

    def __init__(self, hear: Hear | None) -> None:
        self._hear = hear
        self._parts: list[Sampled] = []
        self._finish: str | None = None

    def add(self, content: bytes) -> None:
        try:
            found = _decode(content)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise PolicyError(f"the engine sent no usable completion: {error}") from error
        if found.error is not None:
            raise PolicyError(f"the engine failed: {found.error!s:.300}")
        for choice in found.choices[:1]:
            self._finish = choice.finish_reason or self._finish
            ids = [] if choice.token_ids is None and not choice.text else choice.token_ids
            logprobs = None if choice.logprobs is None else choice.logprobs.token_logprobs
            version = found.version
            versions = None if version is None or ids is None else [version] * len(ids)
            part = Sampled(ids, logprobs, "", versions, choice.text)  # type: ignore[arg-type]  # they are checked last
            self._parts.append(part)
            if self._hear is not None and (ids or choice.text):
                self._hear(part)

    def finish(self) -> Sampled:
        if self._finish is None:
            raise PolicyError("the engine ended its answer before it was complete")
        ids, logprobs, _, versions, text = join(self._parts)
        if ids is None:
            return Sampled(None, finish=self._finish, text=text)
        return Sampled(ids, None if logprobs is None else check_logprobs(logprobs), self._finish, versions, text)


class _ClosedError(PolicyError):
    """The engine closed a connection before its answer was complete."""


class _Connection(asyncio.Protocol):
    """One connection to the engine, with one request at a time."""

    transport: asyncio.Transport
    _done: asyncio.Future[tuple[int, bytes]] | None = None

    def __init__(self) -> None:
        self.is_free = True
        """Whether it can take a request."""
        self.has_heard = False
        """Whether an answer to the last request has begun."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def ask(
        self, head: bytes, payload: bytes, hear: Callable[[bytes], None] | None
    ) -> asyncio.Future[tuple[int, bytes]]:
        self._parser, self._hear = httptools.HttpResponseParser(self), hear
        self._body, self._size, self.has_heard, self.is_free = bytearray(), 0, False, False
        self._done = asyncio.get_running_loop().create_future()
        if self.transport.is_closing():
            self.connection_lost(None)
        else:
            self.transport.writelines((head, payload))
        return self._done

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        self._size += len(data)
        if self.is_free or self._done is None or self._done.done():
            self.is_free = False
            self.transport.abort()  # it sends without being asked
            return
        try:
            if self._size > MOST_BYTES:
                raise PolicyError(f"it is larger than {MOST_BYTES >> 20} MB")
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            self.fail(error.__context__ if isinstance(error.__context__, Exception) else error)
        except (httptools.HttpParserError, PolicyError) as error:
            self.fail(PolicyError(f"the engine sent no HTTP answer: {error}"))

    def on_body(self, data: bytes) -> None:
        self._body += data
        if self._hear is None or self._parser.get_status_code() != 200 or b"\n" not in data:
            return
        *lines, rest = self._body.split(b"\n")
        self._body = bytearray(rest)
        for line in lines:
            if line.startswith(b"data:") and (event := line[5:].strip()) != b"[DONE]":
                self._hear(bytes(event))

    def on_message_complete(self) -> None:
        self.is_free = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result((self._parser.get_status_code(), bytes(self._body)))

    def connection_lost(self, error: Exception | None) -> None:
        self.is_free = False
        self.fail(_ClosedError(f"the engine closed the connection before its answer was complete: {error or 'end'}"))

    def fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
