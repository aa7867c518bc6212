"""`HttpListener` uses names of uvicorn that are not documented. Where a release changes one, this says which and why it
matters; `pyproject.toml` keeps such a release out until then."""

from __future__ import annotations

import asyncio
import inspect
import signal
import tomllib
from pathlib import Path

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from treetune.system.access import Access
from treetune.system.http_listener import HttpListener

USED = [
    (HttpToolsProtocol, "connection_made", "writes are joined into one packet"),
    (HttpToolsProtocol, "data_received", "the bytes of a head are counted"),
    (HttpToolsProtocol, "on_message_begin", "a slow request is timed from here"),
    (HttpToolsProtocol, "on_headers_complete", "the head ends here"),
    (HttpToolsProtocol, "on_body", "what is not a content of a body is counted"),
    (HttpToolsProtocol, "on_message_complete", "a slow request is timed until here"),
    (HttpToolsProtocol, "on_response_complete", "a request that was answered early is not read on"),
    (HttpToolsProtocol, "send_400_response", "what is refused is told why"),
    (HttpToolsProtocol, "pause_writing", "an answer that nobody reads is timed from here"),
    (WebSocketsSansIOProtocol, "handle_cont", "the fragments of a message are counted"),
    (WebSocketsSansIOProtocol, "handle_ping", "pings of a peer that reads nothing are not answered"),
    (uvicorn.Server, "capture_signals", "the command line handles signals"),
]


@pytest.mark.parametrize(("owner", "name", "purpose"), USED, ids=[name for _, name, _ in USED])
def test_a_method_that_is_overridden_is_there(owner, name, purpose):
    assert callable(getattr(owner, name, None)), f"uvicorn has no {owner.__name__}.{name} any more: {purpose}"


def test_the_methods_are_still_called_by_uvicorn():
    assert "self.capture_signals()" in inspect.getsource(uvicorn.Server.serve)
    assert "transport" in inspect.signature(HttpToolsProtocol.connection_made).parameters
    assert list(ServerState().connections) == [], "slow connections are found here"
    source = inspect.getsource(HttpToolsProtocol)
    assert "self.pipeline.appendleft(" in source, "requests that wait are counted here"
    assert "self.headers.append(" in source, "headers are counted here"
    source = inspect.getsource(WebSocketsSansIOProtocol)
    assert "self.frames.append(" in source, "fragments are counted here"
    assert "self.writable.clear()" in source, "a peer that reads nothing is known by it"


def test_a_listener_leaves_signals_alone_and_knows_its_connections():
    async def play():
        async def app(scope, receive, send):
            await asyncio.sleep(60)

        before = signal.getsignal(signal.SIGINT)
        listener = HttpListener("127.0.0.1:0", Access())
        url = await listener.start(app)
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        await asyncio.sleep(0.2)
        (connection,) = listener._uvicorn.server_state.connections
        found = connection.arriving_since is not None, signal.getsignal(signal.SIGINT) is before
        writer.close()
        await listener.close()
        return found

    assert asyncio.run(asyncio.wait_for(play(), 30)) == (True, True)


def test_the_version_of_uvicorn_is_bounded():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (bound,) = [one for one in project["dependencies"] if one.startswith("uvicorn")]
    assert "<" in bound
