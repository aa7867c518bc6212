"""Mail between a broker and a worker: what is said in one round of the event loop goes as one message.

    mail = Mail(socket, identity)            # the broker's; a worker has nobody to name
    mail.put(b"do", id, b"step", payload)
    for said in opened(frames[-1]):          # on the other side
        ...

A message of ZMQ costs more than what is in it, and under load there are many at once.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec

from treetune.serve.zmq.sockets import LoopSocket

Said = Annotated[list[bytes], msgspec.Meta(min_length=1)]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Said]).decode


class Mail:
    def __init__(self, socket: LoopSocket, *to: bytes) -> None:
        self._socket, self._to = socket, to
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[bytes, ...]] = []

    def put(self, *said: bytes) -> None:
        if not self._waiting:
            self._loop.call_soon(self.send)
        self._waiting.append(said)

    def send(self) -> None:
        """Now, where there is anything."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._socket.send([*self._to, _encode(waiting)])


def opened(message: bytes) -> list[Said]:
    """`msgspec.MsgspecError` where the other side speaks another language, as a Treetune of another version may."""
    return _decode(message)
