"""What a call of an agent costs at the gateway: without tokenizing, streamed, and as a conversation grows; the memory
of sessions.

    python -m benchmarks.gateway            # beside a bare proxy on aiohttp, which records nothing

An engine that costs next to nothing answers; gateway and proxy are processes of their own, asked turn by turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.measure import Cost, cpu_of, show
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.gateway import Gateway, HttpSampler, Sampled, SessionLimits
from treetune.gateway.call import Call

CHUNKS = 64
AT_ONCE = 16
ENGINE = """
import asyncio, json, sys
import uvloop
CHUNKS = int(sys.argv[2])
IDS = list(range(100, 100 + CHUNKS))
def choice(ids, finish):
    logprobs = {"token_logprobs": [-0.5] * len(ids)}
    return {"choices": [{"index": 0, "text": " word" * len(ids), "token_ids": ids, "logprobs": logprobs,
                         "finish_reason": finish}]}
def whole(data):
    body = json.dumps(data).encode()
    head = b"HTTP/1.1 200 OK\\r\\nContent-Type: application/json\\r\\n"
    return b"%bContent-Length: %d\\r\\n\\r\\n%b" % (head, len(body), body)
EVENTS = [b"data: " + json.dumps(choice([one], "stop" if one == IDS[-1] else None)).encode() + b"\\n\\n" for one in IDS]
PARTS = [b"%x\\r\\n%b\\r\\n" % (len(one), one) for one in [*EVENTS, b"data: [DONE]\\n\\n"]]
ANSWER, MODELS = whole(choice(IDS, "stop")), whole({"data": [{"id": "m"}]})
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
class Engine(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport, self.data = transport, b""
    def data_received(self, data):
        self.data += data
        while (end := self.data.find(b"\\r\\n\\r\\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length:")
            size = int(head[at + 15:].split(b"\\r\\n", 1)[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + size:
                return
            body, self.data = self.data[end + 4:end + 4 + size], self.data[end + 4 + size:]
            if head.startswith(b"get"):
                self.transport.write(MODELS)
            elif b'"stream":true' in body.replace(b": ", b":"):
                asyncio.ensure_future(self.stream())
            else:
                self.transport.write(ANSWER)
    async def stream(self):
        self.transport.write(HEAD)
        for part in PARTS:
            self.transport.write(part)
            await asyncio.sleep(0.002)
        self.transport.write(b"0\\r\\n\\r\\n")
async def main():
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
uvloop.run(main())
"""
PROXY = """
import sys
import aiohttp, uvloop
from aiohttp import web
async def proxy(request):
    body = await request.json()
    asked = {"model": "m", "prompt": list(range(100)), "stream": bool(body.get("stream"))}
    async with request.app["client"].post(f"http://127.0.0.1:{sys.argv[1]}/v1/completions", json=asked) as upstream:
        if not body.get("stream"):
            text = (await upstream.json())["choices"][0]["text"]
            message = {"role": "assistant", "content": text}
            return web.json_response({"id": "x", "object": "chat.completion", "model": "m",
                                      "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        async for line in upstream.content:
            await out.write(line)
        await out.write_eof()
        return out
async def start(app):
    app["client"] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    print(f"http://127.0.0.1:{sys.argv[2]}", flush=True)
app = web.Application(client_max_size=1 << 28)
app.router.add_post("/sessions/{number}/v1/chat/completions", proxy)
app.on_startup.append(start)
uvloop.install()
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None, access_log=None)
"""
GATEWAY = """
import asyncio, sys
import uvloop
from benchmarks.gateway import Words
from treetune.gateway import Gateway, GatewayServer, HttpSampler, SessionLimits
async def main():
    gateway = Gateway(Words(), HttpSampler(f"http://127.0.0.1:{sys.argv[1]}/v1", "m"))
    for number in range(64):
        session = gateway.open(SessionLimits(calls=1 << 30, tokens=1 << 60, parallel=64))
        gateway.sessions[str(number)] = session
    print(await GatewayServer(gateway, token="t").start(), flush=True)
    await asyncio.Event().wait()
uvloop.run(main())
"""

POOL = """
import asyncio, sys
from functools import partial
import uvloop
from benchmarks.gateway import make_gateway
from treetune.gateway.workers import GatewayPool
async def main():
    pool = GatewayPool(partial(make_gateway, int(sys.argv[1])), int(sys.argv[2]), "127.0.0.1:0", token="t")
    print(await pool.start(), flush=True)
    await asyncio.Event().wait()
if __name__ == "__main__":
    uvloop.run(main())
"""


def make_gateway(engine_port: int) -> Gateway:
    return Gateway(Words(), HttpSampler(f"http://127.0.0.1:{engine_port}/v1", "m"))


class Words:
    """A tokenizer whose tokens are words: it costs what splitting costs."""

    all_special_tokens, all_special_ids, eos_token_id = ["<s>"], [0], 0

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"<s>": 0}
        self._words = ["<s>"]

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [self._id(word) for word in text.split(" ")]}

    def _id(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = len(self._words)
            self._words.append(word)
        return self._ids[word]

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(self._words[id] if id < len(self._words) else "word" for id in ids)

    def apply_chat_template(self, messages: list[Any], tokenize: bool = True, **_: Any) -> Any:
        text = "".join(f"<{m['role']}> {m['content']} " for m in messages) + "<assistant> "
        return self(text)["input_ids"] if tokenize else text


class Client(asyncio.Protocol):
    """A connection that sends one request at a time, and reads just enough of the answer to know its end."""

    transport: asyncio.Transport

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def ask(self, path: str, body: bytes) -> asyncio.Future[int]:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        self.done, self.data = asyncio.get_running_loop().create_future(), bytearray()
        self.transport.writelines((f"{head}Content-Length: {len(body)}\r\n\r\n".encode(), body))
        return self.done

    def data_received(self, data: bytes) -> None:
        self.data += data
        if (end := self.data.find(b"\r\n\r\n")) < 0:
            return
        head = bytes(self.data[:end]).lower()
        if b"chunked" in head:
            is_whole = self.data.endswith(b"0\r\n\r\n")
        else:
            is_whole = len(self.data) >= end + 4 + int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0])
        if is_whole and not self.done.done():
            self.done.set_result(int(head[9:12]))


async def load(port: int, calls: int, stream: bool, places: Sequence[tuple[int, str]] = ()) -> None:
    """So many equal calls, `AT_ONCE` of them at a time. `places` are the ports and paths of sessions."""
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "the quick brown fox " * 15}]
    body = json.dumps({"model": "m", "messages": messages, "stream": stream}).encode()

    async def client(number: int) -> None:
        at, path = places[number] if places else (port, f"/sessions/{number}")
        _, connection = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", at)
        for _ in range(calls // AT_ONCE):
            assert await connection.ask(f"{path}/v1/chat/completions", body) == 200
        connection.transport.close()

    await asyncio.gather(*(client(number) for number in range(AT_ONCE)))


class Server(NamedTuple):
    pid: int
    port: int

    def cost(self, calls: int, stream: bool) -> Cost:
        asyncio.run(load(self.port, AT_ONCE * 4, stream))
        cpu, wall = cpu_of([self.pid]), time.perf_counter()
        asyncio.run(load(self.port, calls, stream))
        made = calls // AT_ONCE * AT_ONCE
        return Cost((cpu_of([self.pid]) - cpu) / made, (time.perf_counter() - wall) / made)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@contextlib.contextmanager
def running(program: str, *arguments: object, port: int | None = None) -> Iterator[Server]:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Server(process.pid, port or int(process.stdout.readline().rpartition(":")[2]))
        finally:
            process.kill()


def measure_calls(calls: int) -> None:
    engine_port, proxy_port = free_port(), free_port()
    with (
        running(ENGINE, engine_port, CHUNKS, port=engine_port),
        running(GATEWAY, engine_port) as gateway,
        running(PROXY, engine_port, proxy_port) as proxy,
    ):
        for what, stream, number, per in (
            ("gateway: a plain call, without tokenizing", False, calls, 1),
            (f"gateway: a streamed chunk, {CHUNKS} a call", True, calls // 8, CHUNKS),
        ):
            ours, theirs = Cost(1e9, 1e9), Cost(1e9, 1e9)
            for _ in range(6):  # by turns, so that both see the same machine
                ours = min(ours, gateway.cost(number // 2, stream))
                theirs = min(theirs, proxy.cost(number // 2, stream))
            one, other = (Cost(each.cpu / per, each.wall / per) for each in (ours, theirs))
            show(what, one, "a bare proxy on aiohttp", other, target="25 us" if stream else "0.20 ms, 1.33x")


def measure_workers(calls: int) -> None:
    """The time of a call at one process and at two; the load and the engine take their share of the cores."""
    engine_port = free_port()
    for workers in (1, 2):
        with running(ENGINE, engine_port, CHUNKS, port=engine_port), running(POOL, engine_port, workers) as pool:
            places = [open_session(pool.port) for _ in range(AT_ONCE)]
            took = 1e9
            for _ in range(4):
                began = time.perf_counter()
                asyncio.run(load(pool.port, calls, False, places))
                took = min(took, time.perf_counter() - began)
            print(f"gateway: {calls / took:,.0f} plain calls a second with {workers} worker(s), {os.cpu_count()} cores")


def open_session(port: int) -> tuple[int, str]:
    body = json.dumps({"limits": {"calls": 1 << 30, "tokens": 1 << 60}}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/sessions", body, {"Authorization": "Bearer t"})
    with urllib.request.urlopen(request) as answer:
        url = urlsplit(json.load(answer)["url"])
    return url.port or 0, url.path


class Fixed:
    """Samples the same answer to any prompt."""

    context = None

    def __init__(self, tokenizer: Any) -> None:
        self.ids = [*tokenizer(" word" * 63, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    async def __call__(self, prompt: Any, sampling: Any, hear: Any) -> Sampled:
        return Sampled(self.ids, [-0.5] * len(self.ids))


async def measure_continuing(tokenizer: Any, size: int, turns: int = 8) -> tuple[float, int]:
    """CPU seconds of a call that continues a conversation of so many tokens, without HTTP."""
    gateway = Gateway(tokenizer, Fixed(tokenizer))
    words, best, length = "the quick brown fox jumps over the lazy dog and runs away ", 1e9, 0
    for number in range(3):
        session = gateway.open(SessionLimits(calls=1 << 30, tokens=1 << 60))
        messages = [{"role": "system", "content": "be good"}]
        for part in range(10):
            text = f"{number} {part} " + words * (size // 130)
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
        messages.append({"role": "user", "content": "begin"})
        spent = 0.0
        for turn in range(turns):
            began, digest = time.process_time(), b"%d" % turn
            sample = await session.ask(Call(messages=messages), digest)
            reply = session.deliver(sample, digest)
            spent += time.process_time() - began if turn else 0.0
            messages = [*messages, reply.message, {"role": "user", "content": "go on " + words * 3}]
        assert len(session.tokens().sequences) == 1
        best, length = min(best, spent / (turns - 1)), reply.prompt_tokens
    return best, length


async def measure_memory(sessions: int, tokens: int, turns: int = 8) -> float:
    """Bytes of memory for each session that holds so many tokens."""
    gateway = Gateway(Words(), Fixed(Words()))
    page, place = resource.getpagesize(), Path("/proc/self/statm")
    gc.collect()
    before = int(place.read_text().split()[1]) * page
    for number in range(sessions):
        session, messages = gateway.open(), [{"role": "system", "content": "be good"}]
        for turn in range(turns):
            text = f"{number} {turn} " + " ".join(f"w{at % 100}" for at in range(tokens // turns - 70))
            messages.append({"role": "user", "content": text})
            digest = b"%d" % turn
            messages.append(session.deliver(await session.ask(Call(messages=list(messages)), digest), digest).message)
    gc.collect()
    return (int(place.read_text().split()[1]) * page - before) / sessions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--tokenizer", help="a real one for continuing calls: a folder, or a name on the hub")
    asked = parser.parse_args()
    measure_calls(asked.calls)
    measure_workers(asked.calls)
    tokenizer = load_tokenizer(asked.tokenizer) if asked.tokenizer else Words()
    name = asked.tokenizer or "a tokenizer of words"
    for size, target in ((2_000, "0.7 ms"), (10_000, "1.5 ms"), (30_000, "2.5 ms")):
        cpu, length = asyncio.run(measure_continuing(tokenizer, size))
        show(f"gateway: a continuing call, {length:,} tokens", Cost(cpu, cpu), target=target, note=name)
    taken = asyncio.run(measure_memory(1000, 8000))
    print(f"gateway: 1,000 sessions of 8,000 tokens take {taken * 1000 / 1e6:.0f} MB   target 90 MB")


if __name__ == "__main__":
    main()
