"""The servers that `http_steps.py` measures beside ours: each a program that takes the port as its argument.

with other(FASTAPI, python) as (port, pid): ...
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

FASTAPI = '''
"""The five endpoints as a person would write them with FastAPI and pydantic."""
import sys, uuid
import uvicorn
from typing import Any
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
class Observation(BaseModel):
    type: str = "text"
    content: Any = ""
class Start(BaseModel):
    task_index: int | None = None
class Started(BaseModel):
    episode_id: str
    observation: Observation
    info: dict[str, Any] = {}
class Step(BaseModel):
    episode_id: str
    action: str | Observation
    turn: int | None = None
class Stepped(BaseModel):
    observation: Observation
    reward: float
    done: bool
    info: dict[str, Any] = {}
class Cancel(BaseModel):
    episode_id: str
app, episodes = FastAPI(), {}
@app.get("/api/health")
async def health() -> dict[str, str]:
    return {"status": "ok"}
@app.get("/api/task/info")
async def info() -> dict[str, Any]:
    return {"name": "echo", "num_tasks": None}
@app.post("/api/episode/start")
async def start(body: Start) -> Started:
    id = uuid.uuid4().hex
    episodes[id] = 0
    return Started(episode_id=id, observation=Observation(content="say something"))
@app.post("/api/episode/step")
async def step(body: Step) -> Stepped:
    if body.episode_id not in episodes:
        raise HTTPException(404)
    episodes[body.episode_id] += 1
    text = body.action if isinstance(body.action, str) else str(body.action.content)
    return Stepped(observation=Observation(content=text), reward=0.0, done=False)
@app.post("/api/episode/cancel")
async def cancel(body: Cancel) -> dict[str, Any]:
    if episodes.pop(body.episode_id, None) is None:
        raise HTTPException(404)
    return {"episode_id": body.episode_id, "cancelled": True}
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", LOOP)
'''
PLAIN_FASTAPI = FASTAPI.replace("LOOP", 'loop="asyncio", http="h11"')
FASTAPI = FASTAPI.replace("LOOP", 'loop="uvloop", http="httptools", access_log=False')

BARE = '''
"""The least that answers: no routes, no episodes, no errors."""
import sys, msgspec, uvicorn
decode = msgspec.json.Decoder(dict).decode
async def app(scope, receive, send):
    body = decode((await receive())["body"])
    answer = {"episode_id": "e", "observation": {"type": "text", "content": body.get("action")}, "reward": 0.0}
    data = msgspec.json.encode(answer)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(data))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False, lifespan="off")
'''

OPENENV = '''
"""The echo environment of OpenEnv's own template; its episodes are played over a WebSocket."""
import sys
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
class EchoAction(Action):
    message: str
class EchoObservation(Observation):
    echoed_message: str = ""
class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)
    def reset(self, **options):
        return EchoObservation(echoed_message="ready")
    def step(self, action, **options):
        self._state.step_count += 1
        return EchoObservation(echoed_message=action.message, reward=0.0, done=False)
    @property
    def state(self):
        return self._state
app = create_fastapi_app(Echo, EchoAction, EchoObservation, max_concurrent_envs=1000)
uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", access_log=False)
'''


@contextmanager
def other(program: str, python: str) -> Iterator[tuple[int, int]]:
    """One of them, once it listens: its port and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([python, "-c", program, str(port)], stderr=subprocess.DEVNULL)
    try:
        while True:
            time.sleep(0.05)
            assert process.poll() is None, "it could not start"
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                continue
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def has(python: str, package: str) -> bool:
    return subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode == 0
