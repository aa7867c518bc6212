"""A server whose reply never ends, whatever it is asked.

with endless_server(b"0, ") as server:
    server.url, server.sent
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class EndlessServer:
    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.sent = 0
        """Bytes of bodies, over all connections."""


@contextmanager
def endless_server(first: bytes = b"[", then: bytes = b"0,", kind: str = "application/json") -> Iterator[EndlessServer]:
    """The body is `first`, then `then` for as long as the client reads."""
    listener = socket.create_server(("127.0.0.1", 0))
    server, stopped = EndlessServer(listener.getsockname()[1]), threading.Event()
    piece = then * (1 + (1 << 16) // len(then))
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()

    def answer(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.settimeout(30)
            asked = b""
            while b"\r\n\r\n" not in asked:
                asked += connection.recv(1 << 16)
            connection.sendall(head + b"%x\r\n%s\r\n" % (len(first), first))
            while not stopped.is_set():
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
                server.sent += len(piece)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        stopped.set()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
