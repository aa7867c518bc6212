"""HttpServer: the second door of an `EnvServer`, for all that speak HTTP. The same taskset, cursor and workers.

    http = HttpServer(server, HttpConfig(address=":5000"))
    await server.start()
    await http.start()
    print(http.url)

It runs on the event loop of the server. `stop` lets the live episodes end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import uvicorn

from treetune.errors import UsageError
from treetune.serve.access import Access, is_loopback
from treetune.serve.http.app import App
from treetune.serve.http.episodes import Episodes, HttpConfig
from treetune.serve.http.guard import GuardedHttp, close_slow
from treetune.serve.zmq.server import EnvServer

_LAST_SECONDS = 2
"""For answers that are being sent when the server closes."""
_KEEP_ALIVE_SECONDS = 75
_GUARD_SECONDS = 5.0


class HttpServer:
    def __init__(self, server: EnvServer, config: HttpConfig | None = None) -> None:
        self.config = config or HttpConfig()
        self._server = server
        self._running: asyncio.Task[None] | None = None
        self.url = ""
        parse_address(self.config.address, server.config.access)  # a wrong one is told before anything is loaded

    async def start(self) -> None:
        """Listens. The server behind it has been started."""
        host, port = parse_address(self.config.address, self._server.config.access)
        listening = _bound(host, port)
        real = listening.getsockname()[1]
        self.url = f"http://[{host}]:{real}" if ":" in host else f"http://{host}:{real}"
        self.episodes = Episodes(self._server, self.config)
        self.episodes.open()
        gauges = self._server.metrics.gauges
        self._server.metrics.gauges = lambda: {**gauges(), "http_episodes": len(self.episodes.live)}
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                App(self._server, self.episodes),
                http=GuardedHttp,
                ws="websockets-sansio",
                ws_max_size=self.config.max_bytes,
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
        )
        self._running = asyncio.create_task(self._uvicorn.serve(sockets=[listening]))
        while not self._uvicorn.started and not self._running.done():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        self._guard = asyncio.create_task(self._close_slow())

    async def _close_slow(self) -> None:
        while True:
            await asyncio.sleep(_GUARD_SECONDS)
            close_slow(self._uvicorn.server_state.connections)

    async def stop(self) -> None:
        """Starts no more episodes, lets those that live end, and closes. Before the server behind it stops."""
        await self.drain()
        await self.close()

    async def drain(self) -> None:
        """Starts no more episodes, and lets those that live end."""
        if self._running is not None:
            await self.episodes.drain(self._server.config.drain_seconds)

    async def close(self) -> None:
        if self._running is None:
            return
        self._guard.cancel()
        await self.episodes.close()
        self._uvicorn.should_exit = True
        await self._running
        self._running = None


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signals are the command line's to answer


def parse_address(address: str, access: Access) -> tuple[str, int]:
    """Host and port. Refuses what is no address, and one that is open to everybody without a token."""
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        host, port = parts.hostname or "127.0.0.1", parts.port
    except ValueError:
        host, port = "", None
    if port is None or parts.scheme != "http" or parts.path.strip("/"):
        raise UsageError(f"{address!r} is no address", remedy="write HOST:PORT, or :PORT for this machine only")
    if not is_loopback(host) and not access.token and not access.open:
        raise UsageError(
            f"{address} can be reached by other machines, and there is no token",
            remedy="pass --token (or set TREETUNE_TOKEN); --open allows it without one",
        )
    return host, port


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, number, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, number)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(where)
        except BaseException:
            listening.close()
            raise
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}", remedy="is another server there?") from None
    listening.setblocking(False)
    return listening
