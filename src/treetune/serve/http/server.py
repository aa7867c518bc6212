"""HttpServer: the second door of an `EnvServer`, for all that speak HTTP. The same taskset, cursor and workers.

    http = HttpServer(server, HttpConfig(address=":5000"))
    await server.start()
    await http.start()
    print(http.url)

It runs on the event loop of the server. `stop` lets the live episodes end first.
"""

from __future__ import annotations

from treetune.serve.access import parse_http_address
from treetune.serve.http.app import EpisodeApp
from treetune.serve.http.asgi import Listener
from treetune.serve.http.episodes import Episodes, HttpConfig
from treetune.serve.server import EnvServer


class HttpServer:
    def __init__(self, server: EnvServer, config: HttpConfig | None = None) -> None:
        self.config = config or HttpConfig()
        self._server = server
        self._listener: Listener | None = None
        self.url = ""
        # A wrong address is refused before anything is loaded.
        self._host, self._port = parse_http_address(self.config.address, server.config.access)
        if server.config.capacity is None:
            server.capacity = max(server.capacity, self.config.max_episodes)

    async def start(self) -> None:
        """Listens. The server behind it has been started."""
        self.episodes = Episodes(self._server, self.config)
        app = EpisodeApp(self._server, self.episodes)
        listener = Listener(app, self._host, self._port, websocket_bytes=self.config.max_bytes)
        await listener.start()
        self.url, self._listener = listener.url, listener
        gauges = self._server.metrics.gauges
        self._server.metrics.gauges = lambda: {**gauges(), "http_episodes": self.episodes.count}

    async def stop(self) -> None:
        """Starts no more episodes, lets those that live end, and closes. Before the server behind it stops."""
        await self.drain()
        await self.close()

    async def drain(self) -> None:
        """Starts no more episodes, and lets those that live end."""
        if self._listener is not None:
            await self.episodes.drain(self._server.config.drain_seconds)

    async def close(self) -> None:
        if self._listener is not None:
            await self.episodes.close()
            await self._listener.close()
            self._listener = None
