"""A gateway in front of a scripted engine, over real HTTP, and what must hold of the tokens that it recorded."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from scripted_engine import logprob, make_tokenizer

from treetune.chat.call_formats import FORMATS
from treetune.chat.tokens import ChatTokens, TokenSequence
from treetune.gateway import Gateway, GatewayServer, HttpSampler, Session

TOKEN = "the-token-of-the-run"
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        "strict": True,  # openai's helper for streams took no other tools before 3.20
    },
}


def format_of(tokenizer: str) -> str:
    """The format in which a model with this tokenizer writes calls."""
    if tokenizer.startswith("calls:"):
        name = tokenizer.removeprefix("calls:")
        return "hermes" if name == "none" else name
    format = ChatTokens(make_tokenizer(tokenizer)).with_tools([BASH]).call_format
    return next(name for name, known in FORMATS.items() if known is format)


class EngineProcess:
    """The engine, in a process of its own."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.start()

    def start(self) -> None:
        here = Path(__file__).parent
        path = os.pathsep.join([str(here), str(here.parents[1] / "src")])
        self.process = subprocess.Popen(
            [sys.executable, here / "scripted_engine.py", str(self.port)], env={**os.environ, "PYTHONPATH": path}
        )
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                self.memory()
                return
            time.sleep(0.05)
        raise TimeoutError("the engine did not start")

    def script(self, tokenizer: str = "calls:hermes", **script: Any) -> None:
        self._ask("/script", {"tokenizer": tokenizer, "format": format_of(tokenizer), **script})

    def memory(self) -> dict[str, Any]:
        return self._ask("/memory", None)

    def _ask(self, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_engine() -> Iterator[EngineProcess]:
    engine = EngineProcess()
    try:
        yield engine
    finally:
        engine.close()


class Playing(NamedTuple):
    engine: EngineProcess
    gateway: Gateway
    base: str

    def url(self, session: Session) -> str:
        return f"{self.base}/sessions/{session.key}"


@contextlib.asynccontextmanager
async def playing(
    engine: EngineProcess,
    tokenizer: str = "calls:hermes",
    *,
    script: dict[str, Any] | None = None,
    seconds: float = 60,
    **options: Any,
) -> AsyncIterator[Playing]:
    """A gateway over HTTP, in front of the engine with this tokenizer and script."""
    engine.script(tokenizer, **(script or {}))
    sampler = HttpSampler(engine.url, "policy", seconds=seconds)
    if tokenizer.startswith("calls:"):
        options["call_format"] = format_of(tokenizer)  # which a template that is a function does not show
    gateway = Gateway(make_tokenizer(tokenizer), sampler, **options)
    server = GatewayServer(gateway, token=TOKEN)
    base = await server.start()
    try:
        yield Playing(engine, gateway, base)
    finally:
        await server.close()
        sampler.close()


def check_exact(engine: EngineProcess, sequences: list[TokenSequence], count: int | None = None) -> int:
    """Each stretch that is trained on was sampled so, after exactly these tokens, and is trained at most as often as it
    was sampled. Returns how many samples are trained; `count` is how many must be."""
    sampled = Counter((tuple(given), tuple(out)) for given, out in engine.memory()["sampled"])
    seen: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for sequence in sequences:
        begin = None
        for at, flag in enumerate([*sequence.mask, 0]):
            if flag and begin is None:
                begin = at
            if not flag and begin is not None:
                stretch = tuple(sequence.ids[:begin]), tuple(sequence.ids[begin:at])
                seen[stretch] += 1
                assert sampled[stretch], "trained on what was not sampled"
                assert seen[stretch] <= sampled[stretch], "trained twice"
                for token, value in zip(sequence.ids[begin:at], sequence.logprobs[begin:at], strict=False):
                    assert abs(value - logprob(token)) < 1e-9
                begin = None
    if count is not None:
        assert seen.total() == count, f"{seen.total()} samples are trained, {count} were delivered"
    return seen.total()
