"""The server of the viewer: it serves the static pages and answers their calls, on the shared HTTP stack.

    server = ViewServer(RunList([Path("runs")]))
    print(await server.start("127.0.0.1:0"))

The pages may run only their own scripts and call only this server; model text is never executed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from treetune.errors import TreetuneError
from treetune.runs.export import RunExport
from treetune.system.access import Access
from treetune.system.http_app import HttpRequest, JsonApp, Parts, Route
from treetune.system.http_error import HttpError
from treetune.system.http_listener import HttpListener
from treetune.system.threads import call
from treetune.view.calls import Calls
from treetune.view.report import TYPES, read_page
from treetune.view.run_list import GONE, RunList

log = logging.getLogger("treetune.view")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = [
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
]
_MOST_BYTES = 1 << 20
"""The maximum size in bytes of the body of a call."""


class ViewServer:
    def __init__(self, runs: RunList, access: Access | None = None, tokenizer: str | None = None) -> None:
        """`tokenizer` is a folder or a name, for runs that do not record theirs."""
        self._access = access if access is not None else Access()
        self._calls = Calls(runs, tokenizer)
        self._listener: HttpListener | None = None

    async def start(self, address: str) -> str:
        """Starts listening; returns the address."""
        self._listener = HttpListener(address, self._access)
        return await self._listener.start(self.make_app())

    async def close(self) -> None:
        self._calls.close()
        if self._listener is not None:
            await self._listener.close()

    def make_app(self) -> Any:
        routes = [
            Route("GET", "/", self._page, needs_token=False),
            Route("GET", "/page/*", self._page, needs_token=False),
            Route("GET", "/page/vendor/*", self._page, needs_token=False),
            *(Route("POST", f"/api/{name}", self._call) for name in self._calls.by_name),
            Route("POST", "/api/export", self._export),
        ]
        return JsonApp(
            routes,
            self._access,
            max_bytes=_MOST_BYTES,
            token_remedy="open the address that `treetune view` printed, with its token",
            headers=_HEADERS,
        )

    async def _page(self, request: HttpRequest) -> bytes:
        name = request.path.removeprefix("/page/") if request.path != "/" else "index.html"
        try:
            content = read_page(name)
        except KeyError:
            raise HttpError(404, "unknown_path", f"there is no page {name:.80}") from None
        request.content_type = TYPES[name.rpartition(".")[2]]
        return content

    async def _call(self, request: HttpRequest) -> bytes:
        gone = threading.Event()
        GONE.set(gone)
        end = asyncio.ensure_future(request.receive())  # resolves when the client disconnects
        end.add_done_callback(lambda end: None if end.cancelled() else gone.set())
        try:
            with _errors_as_answers():
                answer: bytes = await call(self._calls.answer, request.path.removeprefix("/api/"), request.body)
            return answer
        finally:
            end.cancel()

    async def _export(self, request: HttpRequest) -> Parts:
        with _errors_as_answers():
            selection = await call(self._calls.select, request.body)
        return Parts(_in_threads(selection), b"application/octet-stream")


@contextmanager
def _errors_as_answers() -> Iterator[None]:
    """Converts an error to an answer that a page shows, with its remedy."""
    try:
        yield
    except TreetuneError as error:
        raise HttpError(422, "usage", error.message, remedy=error.remedy) from None


async def _in_threads(selection: RunExport) -> AsyncGenerator[bytes]:
    parts = selection.parts()
    try:
        while (part := await call(next, parts, None)) is not None:
            yield part
    finally:
        await call(parts.close)
        selection.close()
