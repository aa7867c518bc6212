"""A model that sees colours: an endpoint in a process of its own, which decodes the PNG that it is sent.

    python colour_endpoint.py PORT RECORD

It answers the colour, or what is wrong with the request, and appends what it got to RECORD.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pictures import colour_of

PREFIX = "data:image/png;base64,"


def answer(messages: list[dict[str, Any]]) -> str:
    images = [part for part in messages[-1]["content"] if part["type"] == "image_url"]
    if len(images) != 1:
        return f"{len(images)} images"
    url = images[0]["image_url"]["url"]
    return colour_of(b64decode(url.removeprefix(PREFIX))) if url.startswith(PREFIX) else f"no PNG: {url[:40]}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self._say({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with Path(sys.argv[2]).open("a") as record:
            record.write(json.dumps(body) + "\n")
        message = {"role": "assistant", "content": answer(body["messages"])}
        self._say({"choices": [{"message": message, "finish_reason": "stop"}]})

    def _say(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
