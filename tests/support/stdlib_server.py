"""A task server written from docs/task_server_api.md alone, with nothing but Python's own library: it counts to three.

python stdlib_server.py PORT
"""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOCK = threading.Lock()
EPISODES: dict[str, dict] = {}
NAMES: dict[str, str] = {}


class Refused(Exception):
    def __init__(self, status: int, kind: str, error: str, path: str | None = None) -> None:
        self.status = status
        self.body = {"error": error, "kind": kind, "status": status, **({"path": path} if path else {})}


def start(body: dict) -> dict:
    name = body.get("request_id")
    id = NAMES.get(name) if name else None
    if id is None:
        id = f"episode-{len(EPISODES)}"
        EPISODES[id] = {"turn": 0, "answers": {}, "over": None, "index": body.get("task_index") or 0}
        if name:
            NAMES[name] = id
    observation = {"type": "text", "content": "Count to three."}
    return {"episode_id": id, "observation": observation, "info": {"task_index": EPISODES[id]["index"]}}


def step(body: dict) -> dict:
    if "action" not in body:
        raise Refused(422, "bad_request", "an action is needed", "$.action")
    episode, turn = find(body), body.get("turn")
    if turn is not None and turn in episode["answers"]:
        return episode["answers"][turn]
    if episode["over"]:
        raise Refused(410, episode["over"], "the episode is over")
    if turn is not None and turn != episode["turn"]:
        raise Refused(409, "usage", f"the next turn is {episode['turn']}", "$.turn")
    done = episode["turn"] == 2
    answer = {
        "observation": {"type": "text", "content": str(episode["turn"] + 1)},
        "reward": float(done),
        "done": done,
        "info": {"success": True} if done else {},
    }
    episode["answers"][episode["turn"]] = answer
    episode["turn"] += 1
    episode["over"] = "finished" if done else None
    return answer


def cancel(body: dict) -> dict:
    episode = find(body)
    if episode["over"]:
        raise Refused(410, episode["over"], "the episode is over")
    episode["over"] = "cancelled"
    return {"episode_id": body["episode_id"], "cancelled": True}


def find(body: dict) -> dict:
    if body.get("episode_id") not in EPISODES:
        raise Refused(404, "unknown_episode", "there is no such episode", "$.episode_id")
    return EPISODES[body["episode_id"]]


def info(body: dict) -> dict:
    return {"name": "counting", "num_tasks": 10, "by_index": True, "features": ["turn", "request_id"], "api_version": 2}


PATHS = {
    ("POST", "/api/episode/start"): start,
    ("POST", "/api/episode/step"): step,
    ("POST", "/api/episode/cancel"): cancel,
    ("GET", "/api/task/info"): info,
    ("GET", "/api/health"): lambda body: {"status": "ok"},
}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status = 200
        try:
            try:
                body = json.loads(data or b"{}")
            except ValueError:
                raise Refused(422, "bad_request", "the body is not a JSON", "$") from None
            handler = PATHS.get((self.command, self.path))
            if handler is None:
                raise Refused(404, "unknown_path", "there is nothing there")
            with LOCK:
                answer = handler(body)
        except Refused as refused:
            status, answer = refused.status, refused.body
        encoded = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    do_GET = do_POST = answer

    def log_message(self, *arguments: object) -> None:
        pass


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
