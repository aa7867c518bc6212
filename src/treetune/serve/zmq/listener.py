"""`ZmtpListener` does what a ROUTER socket does for a server, on plain sockets, with a limit on everything.

    listener = ZmtpListener(on_batch, admits)
    address = await listener.start("tcp://127.0.0.1:0")
    listener.send([identity, id, data])

libzmq keeps every part of a message until the last one arrives, and has no option that limits their number: 50 MB of
empty parts took 1.6 GB before the server knew the sender. Here the parts beyond the first few are dropped as they
arrive, and so is a large part from a client without the token. It speaks ZMTP 3 without security (NULL) to DEALER
sockets. Encrypted connections stay with libzmq (`sockets.py`), because there only clients with the server's key can
send a message.
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

from treetune.serve.zmq.sockets import MOST_BYTES, Frames
from treetune.system import process_limits
from treetune.system.access import bind_tcp, cannot_listen
from treetune.system.process_limits import Holding

MOST_PARTS = 8
SMALL_BYTES = 16 << 10
"""Larger frames are accepted only from clients with the token."""
HANDSHAKE_SECONDS = 30.0
"""The time limit of a handshake."""
MOST_UNREAD_BYTES = 64 << 20
"""Bytes that may wait for a client that does not read; further replies are dropped."""
_MOST_COMMAND_BYTES = 4 << 10
_CLOSE_SECONDS = 1.0
_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING_BYTES = 64
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"

log = logging.getLogger("treetune.serve")


class ZmtpListener:
    def __init__(self, on_batch: Callable[[list[Frames]], None], admits: Callable[[Frames], bool]) -> None:
        """`on_batch` gets the messages of one round of the event loop, each starting with the identity of its
        connection. `admits` decides from the preceding frames whether a large frame is accepted; if not, the frame is
        empty."""
        self.admits = admits
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._peers: dict[bytes, _Peer] = {}
        self._batch: list[Frames] = []
        self._number = 0
        self._closed = False
        self._path = ""
        """The path of its socket file."""

    async def start(self, address: str) -> str:
        """Starts listening; returns the address with the actual port."""
        listening, address = _bind(address)
        if listening.family == socket.AF_UNIX:
            self._path = address.removeprefix("ipc://")
        make = self._loop.create_unix_server if self._path else self._loop.create_server
        self._server = await make(lambda: _Peer(self), sock=listening, backlog=1024)
        return address

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends without blocking: if the client is gone or does not read, the message is dropped."""
        peer = self._peers.get(frames[0])
        if peer is None or peer.transport.get_write_buffer_size() > MOST_UNREAD_BYTES:
            log.debug("a message was dropped: its client is gone, or does not read")
            return
        last = len(frames) - 1
        peer.transport.write(b"".join([_pack(frames[at], at != last) for at in range(1, last + 1)]))

    def take(self, frames: Frames) -> None:
        """Called when a whole message has arrived."""
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
        """Closes connections after a short wait for data that is being sent."""
        self._closed = True
        self._server.close()
        if self._path and not self._path.startswith("@"):
            with contextlib.suppress(OSError):
                os.unlink(self._path)
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
        self._read = self._read_greeting
        """Reads the data that has arrived; returns the offset of the first incomplete part."""
        self._buffer = bytearray()
        """The beginning of a frame."""
        self._needed = 0
        """The size of that frame, if it is known."""
        self._is_ready = False
        self._frames: Frames = []
        """The frames of the arriving message."""
        self._held = Holding()
        """The memory of a large frame that is arriving."""
        self._to_drop = 0
        """Outstanding bytes of a large frame that is not accepted."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._identity = self._listener.add(self)
        connection = transport.get_extra_info("socket")
        if process_limits.count_left(connection.fileno()) <= process_limits.RESERVED:
            process_limits.warn_of_descriptors("new connections of pull clients are closed")
            self.transport.abort()
            return
        if connection.family != socket.AF_UNIX:
            # Detects a lost peer.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
                if (option := getattr(socket, name, None)) is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self.transport.abort)
        self.transport.write(_GREETING)

    def connection_lost(self, error: Exception | None) -> None:
        self._listener.remove(self._identity)
        self._held.release()
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._to_drop:
            dropped = min(self._to_drop, len(data))
            self._to_drop -= dropped
            data = data[dropped:]
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
            self._buffer.clear()
        self._needed = 0
        at = self._read(data)
        if at < len(data):
            self._buffer += data[at:]

    def _read_greeting(self, data: bytes) -> int:
        good = data[:1] in (b"", b"\xff") and (len(data) <= 10 or (data[9] == 0x7F and data[10] >= 3))
        if good and len(data) < _GREETING_BYTES:
            return 0
        if not good or data[12:32].rstrip(b"\0") != b"NULL":
            return self._abort(data)
        self.transport.write(bytes([_COMMAND, len(_READY)]) + _READY)
        self._read = self._read_frames
        return _GREETING_BYTES + self._read_frames(data[_GREETING_BYTES:])

    def _read_frames(self, data: bytes) -> int:
        at, end, frames, is_ready = 0, len(data), self._frames, self._is_ready
        while end - at >= 2:
            flags, size, begin = data[at], data[at + 1], at + 2
            if flags & _LONG:
                if end - at < 9:
                    break
                size, begin = int.from_bytes(data[at + 1 : at + 9], "big"), at + 9
            is_command = flags & _COMMAND or not is_ready
            if flags > 7 or size > (_MOST_COMMAND_BYTES if is_command else MOST_BYTES):
                return self._abort(data)
            arrived = end - begin
            if size > SMALL_BYTES and not self._held.bytes:
                if len(frames) >= MOST_PARTS or not self._listener.admits([self._identity, *frames]):
                    # The frame stays empty and its bytes are dropped.
                    self._to_drop = max(0, size - arrived)
                    begin, size = begin + min(size, arrived), 0
                elif not self._held.add(size):
                    return self._abort(data)
            if arrived < size:
                self._needed = begin - at + size
                break
            at = begin + size
            if is_command:
                is_ready = self._obey(flags, data[begin:at])
                if not is_ready:
                    return self._abort(data)
                continue
            if len(frames) <= MOST_PARTS:
                frames.append(data[begin:at])
            if size > SMALL_BYTES:
                self._held.release()
            if not flags & _MORE:
                # A message with too many parts is not a request: without its frames it is counted as malformed.
                self._listener.take([self._identity, *frames] if len(frames) <= MOST_PARTS else [self._identity])
                frames = self._frames = []
        return at

    def _obey(self, flags: int, command: bytes) -> bool:
        """Executes a command. Returns False if the first one, which ends the handshake, is not READY."""
        if not self._is_ready:
            self._is_ready = flags == _COMMAND and command.startswith(b"\x05READY")
            if self._timer is not None:
                self._timer.cancel()
        elif command.startswith(b"\x04PING"):
            context = command[7:23]
            self.transport.write(bytes([_COMMAND, 5 + len(context)]) + b"\x04PONG" + context)
        return self._is_ready

    def _abort(self, data: bytes) -> int:
        self.transport.abort()
        return len(data)


def _pack(frame: bytes, more: bool) -> bytes:
    size = len(frame)
    if size < 256:
        return bytes((more, size)) + frame
    return struct.pack(">BQ", _LONG | more, size) + frame


def _bind(address: str) -> tuple[socket.socket, str]:
    """Returns a socket that listens there, and the address with its actual port."""
    if address.startswith("ipc://"):
        try:
            return _bind_path(address.removeprefix("ipc://")), address
        except OSError as error:
            raise cannot_listen(address, error) from None
    parts = urlsplit(address)
    host = parts.hostname if parts.hostname not in (None, "*") else "0.0.0.0"
    listening = bind_tcp(host or "", parts.port or 0, address)
    name, port = listening.getsockname()[:2]
    return listening, f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


def _bind_path(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.startswith("@"):
            path = "\0" + path[1:]
        elif os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            os.unlink(path)  # left by a server that was killed
        listening.bind(path)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return listening
