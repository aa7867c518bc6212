"""A ZMQ socket on the event loop, which watches the socket's file descriptor and drains it without blocking.

    socket = LoopSocket(zmq_socket, on_batch)
    socket.send([identity, id, data])

It costs half as much as `zmq.asyncio`. The descriptor is edge-triggered: it signals only changes, and a send can
consume a signal, so the socket is drained again after every send.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

import zmq

from treetune.errors import UsageError
from treetune.system.access import cannot_listen

MOST_BYTES = 64 << 20
"""The maximum size of a frame that a server accepts. It disconnects a client that sends a larger one."""
_BATCH = 256
_MORE = zmq.NOBLOCK | zmq.SNDMORE

log = logging.getLogger(__name__)
Frames = list[bytes]


class LoopSocket:
    def __init__(self, socket: zmq.Socket[bytes], on_batch: Callable[[list[Frames]], None]) -> None:
        self._socket, self._on_batch = socket, on_batch
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._due = False
        self._draining = False
        self._loop.add_reader(self._fd, self._drain)
        self._drain_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Sends without blocking: if the peer is gone or too slow, the message is dropped."""
        try:
            # Sending part by part costs half as much as `send_multipart`.
            last = len(frames) - 1
            for number, frame in enumerate(frames):
                self._socket.send(frame, zmq.NOBLOCK if number == last else _MORE)
        except zmq.ZMQError as error:
            log.debug("a message was dropped: %s", error)
        if not self._draining:
            self._drain_soon()

    def close(self, linger: int = 1000) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger)

    def _drain_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._due = False
        if self._socket.closed or self._draining or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return
        batch: list[Frames] = []
        with contextlib.suppress(zmq.ZMQError):  # usually `Again`: there is no further message
            for _ in range(_BATCH):
                batch.append(self._receive())
        if self._socket.closed or not batch:
            return
        self._draining = True
        try:
            self._on_batch(batch)
        except Exception:
            log.exception("a batch of messages failed")
        finally:
            self._draining = False
            # Other callbacks of the loop run first, then the messages that have arrived since.
            self._drain_soon()

    def _receive(self) -> Frames:
        # Receiving frame by frame costs two thirds of `recv_multipart`.
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames


def new_socket(kind: int, *, identity: bytes | None = None, most_bytes: int = -1) -> zmq.Socket[bytes]:
    """Creates a socket with our settings; `most_bytes` limits a frame."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, most_bytes)
    socket.setsockopt(zmq.SNDHWM, 100_000)
    socket.setsockopt(zmq.RCVHWM, 1000)
    # Detects a lost peer and restores the connection.
    socket.setsockopt(zmq.HEARTBEAT_IVL, 5000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
    socket.setsockopt(zmq.RECONNECT_IVL, 100)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    return socket


def bind_address(socket: zmq.Socket[bytes], address: str) -> str:
    """Binds the socket; returns the address with its actual port."""
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(0)
        raise cannot_listen(address, error) from None
    return str(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\x00"))  # type: ignore[union-attr]


def encrypt_server(socket: zmq.Socket[bytes], secret: bytes) -> bytes:
    """Admits only clients with the public key, which it returns."""
    socket.curve_server = True
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)
    return zmq.curve_public(secret)


def connect(socket: zmq.Socket[bytes], address: str, server_key: bytes | None = None) -> None:
    """Connects, with encryption if the server's key is given. The server need not run yet."""
    try:
        if server_key is not None:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = server_key
        socket.connect(address)
    except (zmq.ZMQError, ValueError) as error:
        socket.close(0)
        raise UsageError(
            f"cannot connect to {address!r}: {error}",
            remedy="an address must be tcp://HOST:PORT, and a key must have 40 characters",
        ) from None
