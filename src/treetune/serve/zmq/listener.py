"""`ZmtpListener`: what a ROUTER socket does for a server, on sockets of our own, with a bound on everything.

    listening, address = bind_listening("tcp://127.0.0.1:0")
    listener = ZmtpListener(listening, on_batch, admits)
    listener.send([identity, id, data])

libzmq keeps every part of a message until its last has come, and has no option for how many there may be: 50 MB of
empty parts took 1.6 GB, before a server saw who had sent them. Here the parts beyond the first few are dropped as they
arrive, and so is a large part from a client without the token. It speaks ZMTP 3 without security (NULL), to DEALER
sockets. Encrypted connections stay with libzmq (`sockets.py`): only clients with the server's key can send a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from treetune.errors import UsageError
from treetune.serve import descriptors
from treetune.serve.bodies import Holding
from treetune.serve.zmq.sockets import MOST_BYTES, MOST_PARTS, SMALL_BYTES, Frames

HANDSHAKE_SECONDS = 30.0
"""Within which a connection must complete its handshake."""
MOST_UNREAD_BYTES = 64 << 20
"""Replies that wait for a client that does not read; further ones are dropped."""
_MOST_COMMAND_BYTES = 4 << 10
_CLOSE_SECONDS = 1.0
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"

log = logging.getLogger("treetune.serve")


class ZmtpListener:
    def __init__(
        self, listening: socket.socket, on_batch: Callable[[list[Frames]], None], admits: Callable[[Frames], bool]
    ) -> None:
        """`on_batch` is given the messages of one round of the event loop, each with the identity of its connection
        first. `admits` decides by the frames before it whether a large one is taken; else it is dropped, and empty."""
        self.admits = admits
        self._on_batch = on_batch
        self._listening = listening
        self._loop = asyncio.get_running_loop()
        self._peers: dict[bytes, _Peer] = {}
        self._batch: list[Frames] = []
        self._number = 0
        self._closed = False
        self._accepting = asyncio.ensure_future(self._accept())

    async def _accept(self) -> None:
        make = self._loop.create_unix_server if self._listening.family == socket.AF_UNIX else self._loop.create_server
        self._server = await make(lambda: _Peer(self), sock=self._listening, backlog=1024)

    def send(self, frames: Sequence[bytes]) -> None:
        """Never waits: where the connection is gone, or its client reads nothing, the message is dropped."""
        peer = self._peers.get(frames[0])
        if peer is None or peer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            log.debug("a message was dropped: its client is gone, or does not read")
            return
        last = len(frames) - 1
        peer.transport.write(b"".join([_pack(frames[at], at != last) for at in range(1, last + 1)]))

    def take(self, frames: Frames) -> None:
        """A whole message has come."""
        if not self._batch:
            self._loop.call_soon(self._flush)
        self._batch.append(frames)

    def _flush(self) -> None:
        batch, self._batch = self._batch, []
        if self._closed:
            return
        try:
            self._on_batch(batch)
        except Exception:
            log.exception("a batch of messages failed")

    def add(self, peer: _Peer) -> bytes:
        self._number += 1
        identity = self._number.to_bytes(8, "big")
        self._peers[identity] = peer
        return identity

    def remove(self, identity: bytes) -> None:
        self._peers.pop(identity, None)

    async def close(self) -> None:
        """Sends what is still to be sent, for a moment."""
        self._closed = True
        await self._accepting
        path = self._listening.getsockname() if self._listening.family == socket.AF_UNIX else ""
        self._server.close()
        if isinstance(path, str) and path:
            with contextlib.suppress(OSError):
                os.unlink(path)
        for peer in list(self._peers.values()):
            peer.transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while self._peers:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        for peer in list(self._peers.values()):
            peer.transport.abort()


class _Peer(asyncio.Protocol):
    """One connection: its greeting, its handshake, its messages."""

    transport: asyncio.Transport

    def __init__(self, listener: ZmtpListener) -> None:
        self._listener = listener
        self._identity = b""
        self._buffer = b""
        """The beginning of a frame whose rest has not come."""
        self._frames: Frames = []
        """Of the message that is arriving."""
        self._large: bytearray | None = None
        """A frame that came in many pieces."""
        self._left = 0
        """Bytes of it that have not come."""
        self._large_more = False
        self._held = Holding()
        self._read = self._read_greeting
        self._timer: asyncio.TimerHandle | None = None

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._identity = self._listener.add(self)
        connection = transport.get_extra_info("socket")
        if descriptors.count_left(connection.fileno()) <= descriptors.RESERVED:
            descriptors.warn("further connections of pull clients are closed")
            self.transport.abort()
            return
        if connection.family != socket.AF_UNIX:
            # A peer that vanished without a word is noticed.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if (option := getattr(socket, name, None)) is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.transport.abort)
        self.transport.write(_GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.remove(self._identity)
        self._held.release()
        self._end_handshake()

    def _end_handshake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def data_received(self, data: bytes) -> None:
        if self._large is not None or self._left:
            data = self._read_large(data)
        if self._buffer:
            data = self._buffer + data
        self._buffer = self._read(data) if data else b""

    # What it says first

    def _read_greeting(self, data: bytes) -> bytes:
        if len(data) < _GREETING_BYTES:
            if data[0] != 0xFF or (len(data) > 10 and (data[9] != 0x7F or data[10] < 3)):
                self.transport.abort()
                return b""
            return data
        is_null = data[12:32].rstrip(b"\0") == b"NULL"
        if data[0] != 0xFF or data[9] != 0x7F or data[10] < 3 or not is_null:
            self.transport.abort()
            return b""
        self.transport.write(bytes([_COMMAND, len(_READY)]) + _READY)
        self._read = self._read_ready
        return self._read(data[_GREETING_BYTES:]) if len(data) > _GREETING_BYTES else b""

    def _read_ready(self, data: bytes) -> bytes:
        if len(data) < 2:
            return data
        size = 2 + data[1]
        if data[0] != _COMMAND:
            self.transport.abort()
            return b""
        if len(data) < size:
            return data
        if not data.startswith(b"\x05READY", 2):
            self.transport.abort()
            return b""
        self._end_handshake()
        self._read = self._read_frames
        return self._read(data[size:]) if len(data) > size else b""

    # Messages

    def _read_frames(self, data: bytes) -> bytes:
        """Takes the whole frames in it, and gives back the rest."""
        at, end, frames = 0, len(data), self._frames
        while end - at >= 2:
            flags = data[at]
            if flags & _LONG:
                if end - at < 9:
                    break
                size, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            else:
                size, begin = data[at + 1], at + 2
            if flags > 7 or size > (_MOST_COMMAND_BYTES if flags & _COMMAND else MOST_BYTES):
                self.transport.abort()
                return b""
            if size > SMALL_BYTES:
                self._begin_large(size, bool(flags & _MORE))
                rest = self._read_large(data[begin:])
                if not rest:
                    return b""
                data, at, end, frames = rest, 0, len(rest), self._frames
                continue
            if end - begin < size:
                break
            at = begin + size
            if flags & _COMMAND:
                self._obey(data[begin:at])
                continue
            if len(frames) <= MOST_PARTS:
                frames.append(data[begin:at])
            if not flags & _MORE:
                self._end_message()
                frames = self._frames
        return data[at:]

    def _end_message(self) -> None:
        frames, self._frames = self._frames, []
        # One of too many parts is no request: without its frames it is counted as malformed.
        self._listener.take([self._identity, *frames] if len(frames) <= MOST_PARTS else [self._identity])

    def _begin_large(self, size: int, more: bool) -> None:
        self._left, self._large_more = size, more
        taken = len(self._frames) < MOST_PARTS and self._listener.admits([self._identity, *self._frames])
        self._large = bytearray() if taken else None
        if self._large is not None and not self._held.add(size):
            self.transport.abort()

    def _read_large(self, data: bytes) -> bytes:
        """Takes what belongs to a large frame, and returns what follows it."""
        part = data[: self._left] if len(data) > self._left else data
        self._left -= len(part)
        if self._large is not None:
            self._large += part
        if self._left:
            return b""
        if len(self._frames) <= MOST_PARTS:
            self._frames.append(bytes(self._large) if self._large is not None else b"")
        self._large = None
        self._held.release()
        if not self._large_more:
            self._end_message()
        return data[len(part) :]

    def _obey(self, command: bytes) -> None:
        if command.startswith(b"\x04PING"):
            context = command[7:23]
            self.transport.write(bytes([_COMMAND, 5 + len(context)]) + b"\x04PONG" + context)


def _pack(frame: bytes, more: bool) -> bytes:
    size = len(frame)
    if size < 256:
        return bytes((more, size)) + frame
    return struct.pack(">BQ", _LONG | more, size) + frame


def bind_listening(address: str) -> tuple[socket.socket, str]:
    """A socket that listens there, and the address with its real port."""
    try:
        if address.startswith("ipc://"):
            return _bind_path(address.removeprefix("ipc://")), address
        parts = urlsplit(address)
        host = "0.0.0.0" if parts.hostname in (None, "*") else parts.hostname
        found = socket.getaddrinfo(host, parts.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, place = min(found, key=lambda one: one[0] != socket.AF_INET)
        listening = socket.create_server(place, family=family, backlog=1024)
    except OSError as error:
        raise UsageError(f"cannot listen on {address}: {error}", remedy="is another server there?") from None
    listening.setblocking(False)
    name, port = listening.getsockname()[:2]
    return listening, f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


def _bind_path(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.startswith("@"):
            path = "\0" + path[1:]
        elif os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # of a server that was killed
        listening.bind(path)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
