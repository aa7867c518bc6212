"""An OpenAI-compatible endpoint, as vendors and servers have them.

    with vendor(tmp_path, models=["a", "b"], key="secret") as server:
        server.url, server.asked("/chat/completions")

It is told: `models` (absent: no route that lists them), `listed` (other names in the list than those that
it answers to), `key` (absent: none is wanted), `list_header` (the header that holds the key when models are listed),
`prefix` of its routes (/v1), `guarded` (403 for all other routes), `silent` (accepts connections and says nothing),
`answer`.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class Vendor:
    def __init__(self, url: str, record: Path) -> None:
        self.url, self._record = url, record

    def asked(self, path: str = "") -> list[dict[str, Any]]:
        """The requests whose paths end so: method, path, headers, body."""
        lines = self._record.read_text().splitlines() if self._record.exists() else []
        return [request for request in map(json.loads, lines) if request["path"].endswith(path)]


@contextmanager
def vendor(tmp_path: Path, **about: Any) -> Iterator[Vendor]:
    record = tmp_path / "requests.jsonl"
    server = open_server(record, about)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield Vendor(f"http://127.0.0.1:{server.server_port}", record)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    record: Path
    about: dict[str, Any]

    def do_GET(self) -> None:
        self.keep(None)
        header = self.about.get("list_header", "Authorization")
        if self.about.get("silent"):
            time.sleep(60)
        if self.path == "/health":
            return self.say(200, {})
        if self.about.get("guarded") and not self.path.startswith(self.about.get("prefix", "/v1")):
            return self.say(403, {"detail": "Forbidden"})
        if self.path != f"{self.about.get('prefix', '/v1')}/models" or "models" not in self.about:
            return self.say(404, {"detail": "Not Found"})
        if not self.allowed(header):
            return self.say(401, {"error": {"message": "invalid key"}})
        names = self.about.get("listed", self.about["models"])
        return self.say(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.keep(body)
        if self.path != f"{self.about.get('prefix', '/v1')}/chat/completions":
            return self.say(404, {"detail": "Not Found"})
        if not self.allowed("Authorization"):
            return self.say(401, {"error": {"message": "invalid key"}})
        if body["model"] not in self.about.get("models", [body["model"]]):
            return self.say(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        message = {"role": "assistant", "content": self.about.get("answer", "42")}
        return self.say(200, {"choices": [{"message": message, "finish_reason": "stop"}], "usage": {}})

    def allowed(self, header: str) -> bool:
        return "key" not in self.about or self.headers.get(header, "").removeprefix("Bearer ") == self.about["key"]

    def keep(self, body: Any) -> None:
        request = {"method": self.command, "path": self.path, "headers": dict(self.headers), "body": body}
        with self.record.open("a") as file:
            file.write(json.dumps(request) + "\n")

    def say(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


def vllm_program(folder: Path, body: str = "") -> Path:
    """A program `vllm` that serves its model as the real one does: `vllm serve MODEL --port N`. It runs the `body`
    first, and writes its process id into the folder."""
    program = folder / "vllm"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys, time\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        f"open({str(folder / 'pid')!r}, 'w').write(str(os.getpid()))\n{body}\n"
        "from pathlib import Path\nfrom vendor_endpoint import open_server\n"
        "assert sys.argv[1] == 'serve' and sys.argv[3] == '--port', sys.argv\n"
        f"record = Path({str(folder / 'requests.jsonl')!r})\n"
        "open_server(record, dict(models=[sys.argv[2]]), int(sys.argv[4])).serve_forever()\n"
    )
    program.chmod(0o755)
    return program


def open_server(record: Path, about: dict[str, Any], port: int = 0) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", port), type("Told", (Handler,), {"record": record, "about": about}))
    server.handle_error = lambda *_: None  # type: ignore[method-assign] - clients may go away
    return server
