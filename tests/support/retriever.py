"""A search server that answers as SkyRL's retriever does."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any


class Retriever(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        documents = [{"document": {"contents": text}, "score": 1.0} for text in ("Paris is a city. ", "Rome is one.")]
        body = json.dumps({"result": [documents]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
