"""Mail between a broker and a worker: what is said in one round of the event loop goes as one message.

    mail = Mail(socket, identity)            # the broker's; a worker has nobody to name
    mail.put(b"do", id, b"step", payload)
    for said in opened(frames[-1]):          # on the other side
        ...

A message of ZMQ costs more than what is in it, and under load there are many at once.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from treetune.serve.sockets import LoopSocket

log = logging.getLogger("treetune.serve")
Said = list[bytes]

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
    try:
        return [said for said in _decode(message) if said]
    except msgspec.MsgspecError:
        log.error("a message between broker and worker could not be read, and is left out")
        return []
