"""Connects a session to an MCP server within limits: a process with messages over its pipes, or an HTTP client.

    process = await ServerProcess.start(server)
    async with ClientSession(process.incoming, process.outgoing) as session: ...
    await process.stop()

    async with open_client(server) as client:
        streamable_http_client(server.url, http_client=client)

The SDK's own transports collect messages of any size, and do not end what a server has started. Here a message has at
most `MOST_BYTES`, and the whole process group ends with the episode. If this process is killed, the kernel ends the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import anyio
import httpx2
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter

from treetune.errors import EnvironmentFault
from treetune.system.http_body import BodyTooLarge
from treetune.tasksets.mcp import McpServer

MOST_BYTES = 8 << 20
"""Maximum size of one message. A longer result is an error of the call."""
LINES_KEPT = 12
"""Lines of standard error to keep for the error message about a failed server."""
_CHUNK = 1 << 16
_MOST_LINE = 400
_POLITE_SECONDS, _TERM_SECONDS, _KILL_SECONDS = 2.0, 2.0, 2.0
"""Timeouts in seconds after closing its input, after SIGTERM, and after SIGKILL."""
_KNOWN_SECONDS = 1.0
_POLL = 0.01
_WATCH_SECONDS = 0.5
_ID_FIRST = re.compile(rb'\s*\{\s*"jsonrpc"\s*:\s*"2\.0"\s*,\s*"id"\s*:\s*(\d{1,18})\s*,')
_ID_LAST = re.compile(rb'"id"\s*:\s*(\d{1,18})\s*(?:,\s*"jsonrpc"\s*:\s*"2\.0"\s*)?\}\s*$')


class ServerProcess:
    """A server process. A session of the SDK reads `incoming` and writes `outgoing`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._received, self.incoming = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        self.outgoing, self._to_send = anyio.create_memory_object_stream[SessionMessage](0)
        self.last_lines: deque[str] = deque(maxlen=LINES_KEPT)
        """The last lines of its standard error, and those of its standard output that are not messages."""
        pumps = (self._read_messages(), self._write_messages(), self._read_errors(), self._watch())
        self._pumps = [asyncio.create_task(pump) for pump in pumps]

    @classmethod
    async def start(cls, server: McpServer) -> ServerProcess:
        assert server.command is not None
        environment = server.variables()
        program = server.command[0]
        path = environment.get("PATH", os.defpath)
        if server.cwd is not None and not os.path.isdir(server.cwd):
            raise EnvironmentFault(f"MCP server {server.shown}: there is no folder {server.cwd}", remedy="correct cwd")
        here = os.path.join(server.cwd or ".", program) if os.sep in program else program
        if shutil.which(here, path=path) is None:
            remedy = "install it, or correct command; a relative path is taken from cwd"
            raise EnvironmentFault(f"MCP server {server.shown}: there is no program {program}", remedy=remedy)
        guard = shutil.which("setpriv")
        process = await asyncio.create_subprocess_exec(
            *([guard, "--pdeathsig", "KILL", "--"] if guard else []),
            *server.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            cwd=server.cwd,
            start_new_session=True,
        )
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> str | None:
        """How it ended; None if it has not."""
        code = self._process.returncode
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"

    async def wait_for_end(self) -> str | None:
        """Return how it ended. Its pipes close a moment before that is known."""
        await self._ends_within(_KNOWN_SECONDS)
        return self.ended

    async def stop(self) -> None:
        """End it and everything it has started."""
        assert self._process.stdin is not None
        for stream in (self.incoming, self.outgoing, self._to_send):
            stream.close()
        with contextlib.suppress(OSError, RuntimeError):
            self._process.stdin.close()
        if not await self._ends_within(_POLITE_SECONDS):
            self._signal(signal.SIGTERM)
            await self._ends_within(_TERM_SECONDS)
        self._signal(signal.SIGKILL)  # its children may still run
        await self._ends_within(_KILL_SECONDS)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.wait(self._pumps)
        self._received.close()
        with contextlib.suppress(PermissionError):
            self._process._transport.close()  # type: ignore[attr-defined]  # else a pipe that others hold stays open

    async def _ends_within(self, seconds: float) -> bool:
        """Whether it ends in time. `wait()` would also wait for its pipes to close, which other processes may hold
        open."""
        until = asyncio.get_running_loop().time() + seconds
        while self._process.returncode is None and asyncio.get_running_loop().time() < until:  # noqa: ASYNC110
            await asyncio.sleep(_POLL)
        return self._process.returncode is not None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    # Messages over its pipes

    async def _read_messages(self) -> None:
        assert self._process.stdout is not None
        with self._received:
            line, head, dropped = bytearray(), b"", False
            while chunk := await self._process.stdout.read(_CHUNK):
                *whole, rest = chunk.split(b"\n")
                for part in whole:
                    line += part
                    await self._receive(self._refuse(head, bytes(line)) if dropped else self._parse(bytes(line)))
                    line, head, dropped = bytearray(), b"", False
                line += rest
                if len(line) > MOST_BYTES:
                    head, dropped = (head or bytes(line[:200])), True
                    line = line[-200:]

    async def _watch(self) -> None:
        """End calls to a server that has ended, even if a process that it started holds its pipes."""
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(_WATCH_SECONDS)
        await asyncio.sleep(_WATCH_SECONDS)  # to read its last output
        self._received.close()

    async def _receive(self, message: SessionMessage | None) -> None:
        if message is not None:
            # After the session, the rest is still read: a server that cannot write does not end.
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                await self._received.send(message)

    def _parse(self, line: bytes) -> SessionMessage | None:
        """Parse a message; None for anything else, such as stray output."""
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(line))
        except (ValueError, RecursionError):
            if line.strip():
                self._note(b"(standard output) " + line)
            return None

    def _refuse(self, head: bytes, tail: bytes) -> SessionMessage | None:
        """Return an error in place of an answer that was too long, if the request it answers is known."""
        self._note(b"(standard output) a message of more than %d bytes" % MOST_BYTES)
        if (found := _ID_FIRST.match(head) or _ID_LAST.search(tail)) is None:
            return None
        error = ErrorData(code=INTERNAL_ERROR, message=f"the result has more than {MOST_BYTES} bytes; ask for less")
        return SessionMessage(JSONRPCError(jsonrpc="2.0", id=int(found[1]), error=error))

    async def _write_messages(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            async for message in self._to_send:
                stdin.write(message.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
                await stdin.drain()
        except (OSError, RuntimeError, anyio.ClosedResourceError):
            self._received.close()  # so that no call waits for an answer

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        line = b""
        while chunk := await self._process.stderr.read(_CHUNK):
            *whole, line = (line + chunk).split(b"\n")
            for one in whole:
                self._note(one)
            line = line[-_MOST_LINE:]
        self._note(line)

    def _note(self, line: bytes) -> None:
        if line.strip():
            self.last_lines.append(line[:_MOST_LINE].decode(errors="replace").rstrip())


# Servers at a URL


def open_client(server: McpServer) -> httpx2.AsyncClient:
    seconds = httpx2.Timeout(server.start_timeout, read=max(server.timeout, 300.0))
    headers = {"Accept-Encoding": "identity", **server.all_headers()}
    return httpx2.AsyncClient(headers=headers, timeout=seconds, event_hooks={"response": [_bound]})


async def _bound(response: httpx2.Response) -> None:
    if (encoding := response.headers.get("content-encoding", "identity")) != "identity":
        await response.aclose()
        raise BodyTooLarge(f"{response.url} sent a reply with Content-Encoding {encoding}, which was not requested")
    by_event = response.headers.get("content-type", "").startswith("text/event-stream")
    response.stream = _BoundedStream(response.stream, str(response.url), by_event)


class _BoundedStream(httpx2.AsyncByteStream):
    """Limits the size of a whole reply or, in a stream of events, of each event: a session may be long."""

    def __init__(self, stream: Any, url: str, by_event: bool) -> None:
        self._stream, self._url, self._by_event = stream, url, by_event

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, end = 0, b""
        async for piece in self._stream:
            size += len(piece)
            if self._by_event:
                # An event ends with an empty line. The rest after the last event in this chunk begins the next event.
                text = (end + piece).replace(b"\r", b"")
                if (at := text.rfind(b"\n\n")) >= 0:
                    size = len(text) - at - 2
                end = text[-1:]
            if size > MOST_BYTES:
                raise BodyTooLarge.of(self._url, MOST_BYTES)
            yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()
