"""What a step would cost on Starlette: the same server, with its ASGI application replaced by a Starlette one.

    python benchmarks/http_starlette.py

Starlette has to be installed. Both servers run at once and are measured turn by turn. The Starlette application does
what ours does for a step: it finds the route, reads the headers and the body, counts the request and answers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from http_steps import ECHO, ROUNDS, Contestant, treetune
from serve import told

STARLETTE = """
import sys, time
import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from treetune.serve.http import server
from treetune.serve.http.wire import HttpError, StartBody, StepBody, read_body

start_body, step_body = msgspec.json.Decoder(StartBody), msgspec.json.Decoder(StepBody)

def make_app(env_server, episodes):
    def endpoint(name, act):
        async def answer(request: Request) -> Response:
            began = time.perf_counter()
            request.headers.get("authorization"), request.headers.get("origin"), request.headers.get("accept")
            try:
                response = Response(await act(await request.body()), media_type="application/json")
            except HttpError as error:
                response = Response(error.body, error.status, media_type="application/json")
            env_server.metrics.request(name, time.perf_counter() - began)
            return response
        return answer
    step = endpoint("http.step", lambda data: episodes.step(read_body(step_body, data)))
    start = endpoint("http.start", lambda data: episodes.start(read_body(start_body, data)))
    paths = {"/api/episode/step": step, "/api/episode/start": start}
    return Starlette(routes=[Route(path, found, methods=["POST"]) for path, found in paths.items()])

server.EpisodeApp = make_app
from treetune.cli import main
sys.exit(main())
"""


@contextmanager
def on_starlette() -> Iterator[tuple[int, int]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "echo.py").write_text(ECHO)
        command = [sys.executable, "-c", STARLETTE, "serve", "echo.py:Echoes", "--http", ":0", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder)
        try:
            yield int(told(process)["http"].rpartition(":")[2]), process.pid
        finally:
            process.terminate()
            time.sleep(0.2)
            process.kill()
            process.wait()


def main() -> None:
    with treetune() as own, on_starlette() as other:
        ours, theirs = Contestant("treetune serve --http", *own), Contestant("the same on Starlette", *other)
        for _ in range(3 * ROUNDS):
            ours.measure()
            theirs.measure()
        ours.show(ours.best)
        theirs.show(ours.best, "taken at 1.25x or less")


if __name__ == "__main__":
    main()
