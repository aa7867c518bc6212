"""The viewer's server in this process, asked over real HTTP."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import contextmanager
from urllib.parse import urlsplit

from treetune.system.access import Access
from treetune.view import RunList, ViewServer


class Viewing:
    def __init__(self, address, token=None):
        self.address, self.token = address, token
        self.host = urlsplit(address).netloc

    def send(self, method, path, body=None, headers=None, length=None):
        """Status, headers and body of one request, sent as it stands."""
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.putrequest(method, path, skip_host=headers is not None and "Host" in headers)
            for name, value in (headers or {}).items():
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("Content-Length", str(len(body) if length is None else length))
            connection.endheaders(body)
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    def post(self, call, body, headers=None):
        """Status and answer of a call."""
        sent = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, _, answer = self.send("POST", f"/api/{call}", data, sent | (headers or {}))
        return status, answer

    def ask(self, call, **body):
        """The answer of a call that goes well."""
        status, answer = self.post(call, body)
        assert status == 200, answer.decode()
        return json.loads(answer)

    def rows(self, *names):
        """The lines of the list, once all of them are known, or those of these names."""
        until = time.monotonic() + 60
        while True:
            rows = self.ask("runs")["runs"]
            pending = [row for row in rows if row.get("pending") and (not names or row["name"] in names)]
            if not pending or time.monotonic() > until:
                return rows
            time.sleep(0.05)

    def refused(self, call, **body):
        """What is wrong with a call, as the page is told."""
        status, answer = self.post(call, body)
        assert 400 <= status < 500, (status, answer)
        return json.loads(answer)["error"]


@contextmanager
def viewing(*paths, token=None, tokenizer=None):
    """The server of these paths, once it listens."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    runs = RunList(paths)
    server = ViewServer(runs, Access(token=token), tokenizer)
    try:
        opened = Viewing(run(server.start("127.0.0.1:0")), token)
        opened.runs = runs
        yield opened
    finally:
        run(server.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
