"""What a step costs the client of task servers, beside a bare loop over aiohttp. Run: python -m benchmarks.http_client

One process plays 256 episodes at a time against a server in another process, which answers with a constant.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from typing import Any

import uvloop

from benchmarks.measure import cost, show
from treetune.serve.http.client import TaskServerClient

CONCURRENT, STEPS = 256, 5120
STEP = {"observation": {"type": "text", "content": "and now?"}, "reward": 0.0, "done": False, "info": {}}


def serve(listening: socket.socket) -> None:
    """Answers every request as cheaply as Python can."""
    import msgspec

    bodies = {
        b"/api/episode/step": STEP,
        b"/api/episode/start": {"episode_id": "e-1", "observation": "go"},
        b"/api/task/info": {"name": "constant", "features": ["turn", "request_id"]},
    }
    answers = {
        path: b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (len(encoded := msgspec.json.encode(body)), encoded)
        for path, body in bodies.items()
    }

    class Constant(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport, self.rest = transport, b""

        def data_received(self, data: bytes) -> None:
            self.rest += data
            while (end := self.rest.find(b"\r\n\r\n")) >= 0:
                head = self.rest[:end].lower()
                at = head.find(b"content-length: ")
                length = int(head[at + 16 :].split(b"\r\n")[0]) if at >= 0 else 0
                if len(self.rest) < end + 4 + length:
                    return
                self.rest = self.rest[end + 4 + length :]
                self.transport.write(answers[head.split(b" ")[1]])

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(Constant, sock=listening)
        await server.serve_forever()

    uvloop.run(main())


async def ours(url: str) -> None:
    async with TaskServerClient(url) as client:
        episodes = await client.start_many([None] * CONCURRENT)

        async def play(episode: Any) -> None:
            for _ in range(STEPS // CONCURRENT):
                await episode.step("an answer")

        await asyncio.gather(*map(play, episodes))


async def bare(url: str) -> None:
    import aiohttp

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONCURRENT)) as session:

        async def play() -> None:
            for _ in range(STEPS // CONCURRENT):
                async with session.post(url + "/api/episode/step", json={"episode_id": "e", "action": "a"}) as response:
                    await response.json()

        await asyncio.gather(*(play() for _ in range(CONCURRENT)))


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    server = multiprocessing.get_context("fork").Process(target=serve, args=(listening,), daemon=True)
    server.start()
    try:
        mine = cost(lambda: uvloop.run(ours(url)), per=STEPS)
        theirs = cost(lambda: uvloop.run(bare(url)), per=STEPS)
    finally:
        server.kill()
    show(f"client: one step, {CONCURRENT} at a time", mine, "a bare loop over aiohttp", theirs, "500 us wall")
    print(f"  {1 / mine.wall:,.0f} steps/s")


if __name__ == "__main__":
    main()
