"""What a step would cost on Starlette: the same server, with its ASGI application replaced by a Starlette one.

    python -m benchmarks.http_starlette

Starlette has to be installed. Both servers run at once and are measured turn by turn. The Starlette application does
what ours does for a step: it finds the route, checks who asks, reads a bounded body, counts the request and answers.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.http_steps import ECHO, ROUNDS, Contestant, treetune
from benchmarks.measure import read_ready

STARLETTE = """
import sys, time
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from treetune.serve.http.routes import HttpDoor
from treetune.serve.http.wire import StartBody, StepBody, read_body
from treetune.system.http_error import HttpError

def make_app(episodes, ours=HttpDoor.make_app):
    env_server = episodes.server
    app, most = ours(episodes), episodes.config.max_bytes
    async def read(request: Request) -> bytes:
        body = b""
        async for piece in request.stream():
            body += piece
            if len(body) > most:
                raise HttpError(413, "too_large", "too large")
        return body
    def endpoint(name, act):
        async def answer(request: Request) -> Response:
            began, kind = time.perf_counter(), None
            try:
                ADMIT
                response = Response(await act(await READ), media_type="application/json")
            except HttpError as error:
                kind = error.kind
                response = Response(error.body, error.status, media_type="application/json")
            env_server.metrics.count_request(name, time.perf_counter() - began, kind)
            return response
        return answer
    step = endpoint("http.step", lambda data: episodes.step(read_body(StepBody, data)))
    start = endpoint("http.start", lambda data: episodes.start(read_body(StartBody, data)))
    paths = {"/api/episode/step": step, "/api/episode/start": start}
    return Starlette(routes=[Route(path, found, methods=["POST"]) for path, found in paths.items()])

HttpDoor.make_app = make_app
from treetune.cli import main
sys.exit(main())
"""


IDIOMATIC = STARLETTE.replace("ADMIT", 'request.headers.get("authorization"), request.headers.get("origin")')
IDIOMATIC = IDIOMATIC.replace("READ", "request.body()")
SPARING = STARLETTE.replace("ADMIT", 'app.admit(request.scope["headers"])').replace("READ", "read(request)")


@contextmanager
def run(program: str) -> Iterator[tuple[int, int]]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "echo.py").write_text(ECHO)
        command = [sys.executable, "-c", program, "serve", "echo.py:Echoes", "--http", ":0", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=folder)
        try:
            yield int(read_ready(process)["http"].rpartition(":")[2]), process.pid
        finally:
            process.terminate()
            time.sleep(0.2)
            process.kill()
            process.wait()


def main() -> None:
    with treetune() as own, run(IDIOMATIC) as idiomatic, run(SPARING) as sparing:
        ours = Contestant("treetune serve --http", *own)
        beside = [Contestant("the same on Starlette, as its docs do", *idiomatic)]
        beside.append(Contestant("the same on Starlette, headers and body raw", *sparing))
        for _ in range(3 * ROUNDS):
            for contestant in (ours, *beside):
                contestant.measure()
        for contestant in beside:
            ours.show(contestant, "taken at 1.25x or less")


if __name__ == "__main__":
    main()
