"""Floods from peers without a token against a real `treetune serve`: megabytes more, and how long others waited.

    python -m benchmarks.floods [--seconds 7] [NAME ...]

While a flood lasts, others ask for `health` at both doors over and over. Nothing here is asserted: it shows figures.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import zmq

from benchmarks.measure import children_of, cpu_of, memory_of, read_ready
from treetune.serve.messages import pack_head

TARGET_MEGABYTES = 100
_CONNECTIONS = 4


class Server(NamedTuple):
    pid: int
    http: int
    """Its port."""
    zmq: str


@contextmanager
def served() -> Iterator[Server]:
    command = [sys.executable, "-m", "treetune", "serve", "arithmetic", "--json"]
    command += ["--zmq", "tcp://127.0.0.1:0", "--http", ":0"]
    environment = {**os.environ, "TREETUNE_TOKEN": "nobody knows"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    try:
        ready = read_ready(process)
        yield Server(process.pid, int(ready["http"].rpartition(":")[2]), ready["address"])
    finally:
        process.kill()
        process.wait()


# Floods: each sends for some seconds, and gives the bytes that it got rid of


def _send(server: Server, seconds: float, first: bytes, piece: bytes) -> int:
    """First, then a piece over and over; again where the server closes."""
    many, sent, until = piece * (65536 // len(piece) + 1), 0, time.monotonic() + seconds
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(("127.0.0.1", server.http), timeout=2) as connection:
            connection.sendall(first)
            while time.monotonic() < until:
                connection.sendall(many)
                sent += len(many)
    return sent


_POST = b"POST /api/episode/start HTTP/1.1\r\nHost: localhost\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


def send_trailers(server: Server, seconds: float) -> int:
    return _send(server, seconds, _POST + _CHUNKED + b"0\r\n", b"a: b\r\n")


def send_body(server: Server, seconds: float) -> int:
    return _send(server, seconds, _POST + b"Content-Length: 100000000000\r\n\r\n", b"[" * 64)


def send_chunks(server: Server, seconds: float) -> int:
    return _send(server, seconds, _POST + _CHUNKED, b"1;extension\r\n[\r\n")


def send_headers(server: Server, seconds: float) -> int:
    return _send(server, seconds, _POST, b"a: b\r\n")


def send_requests(server: Server, seconds: float) -> int:
    return _send(server, seconds, b"", b"GET /api/task/info HTTP/1.1\r\nHost: localhost\r\n\r\n")


def send_arrays(server: Server, seconds: float, count: int = 20_000_000) -> int:
    """Frames whose `action` is a list of empty lists: a byte each, 56 once they are decoded."""
    payload = b"\x83\xa7episode\xa1x\xa8protocol\x02\xa6action\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    sent, until = 0, time.monotonic() + seconds
    with zmq.Context() as context:
        while time.monotonic() < until:
            with context.socket(zmq.DEALER) as peer:
                peer.linger, peer.sndtimeo, peer.rcvtimeo = 0, 2000, 2000
                peer.connect(server.zmq)
                with suppress(zmq.Again):
                    peer.send_multipart([os.urandom(8), b"step", pack_head(os.urandom(16)), payload])
                    sent += len(payload)
                    peer.recv_multipart()
    return sent


FLOODS: dict[str, Callable[[Server, float], int]] = {
    "trailers": send_trailers,
    "body": send_body,
    "chunks": send_chunks,
    "headers": send_headers,
    "requests": send_requests,
    "zmq_arrays": send_arrays,
}


# Watching


class Watcher:
    """Samples the memory of a server, and asks it for its health meanwhile."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._ended = threading.Event()
        self.most = 0.0
        self.waits: dict[str, list[float]] = {"HTTP": [], "ZMQ": []}
        self._threads = [threading.Thread(target=work) for work in (self._weigh, self._ask_http, self._ask_zmq)]

    def __enter__(self) -> Watcher:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _weigh(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, memory(self._server))

    def _ask_http(self) -> None:
        while not self._ended.wait(0.02):
            began = time.perf_counter()
            with suppress(OSError, http.client.HTTPException):
                connection = http.client.HTTPConnection("127.0.0.1", self._server.http, timeout=60)
                connection.request("GET", "/api/health")
                connection.getresponse().read()
                connection.close()
            self.waits["HTTP"].append(time.perf_counter() - began)

    def _ask_zmq(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger, client.rcvtimeo = 0, 60_000
            client.connect(self._server.zmq)
            head = pack_head(os.urandom(16))
            while not self._ended.wait(0.02):
                began = time.perf_counter()
                client.send_multipart([os.urandom(8), b"health", head, b"\x80"])
                with suppress(zmq.Again):
                    client.recv_multipart()
                self.waits["ZMQ"].append(time.perf_counter() - began)


def memory(server: Server) -> float:
    return sum(map(memory_of, [server.pid, *children_of(server.pid)]))


def _flood(name: str, server: Server, seconds: float, sent: multiprocessing.Queue[int]) -> None:
    sent.put(FLOODS[name](server, seconds))


def measure(name: str, seconds: float) -> None:
    with served() as server:
        time.sleep(0.5)
        before, cpu = memory(server), cpu_of([server.pid])
        context = multiprocessing.get_context("fork")
        sent: multiprocessing.Queue[int] = context.Queue()
        peers = 1 if name.startswith("zmq") else _CONNECTIONS
        flooding = [context.Process(target=_flood, args=(name, server, seconds, sent)) for _ in range(peers)]
        for process in flooding:
            process.start()
        with Watcher(server) as watcher:
            megabytes = sum(sent.get() for _ in flooding) / 1e6
            for process in flooding:
                process.join()
        spent = cpu_of([server.pid]) - cpu
    more = watcher.most - before
    waits = ", ".join(f"{door} {max(found, default=0):.2f} s" for door, found in watcher.waits.items())
    note = "" if more < TARGET_MEGABYTES else f"   above the target of {TARGET_MEGABYTES} MB"
    print(
        f"{name:<12} {megabytes:>8,.0f} MB sent  {more:>7.1f} MB more  longest wait: {waits}  {spent:.1f} s CPU{note}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(FLOODS)}")
    parser.add_argument("--seconds", type=float, default=7.0, help="how long each lasts (7)")
    asked = parser.parse_args()
    if unknown := set(asked.names).difference(FLOODS):
        parser.error(f"no flood {', '.join(sorted(unknown))}; there are: {', '.join(FLOODS)}")
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{os.cpu_count()} cores, load {load}, {asked.seconds:g} s each, no token, target {TARGET_MEGABYTES} MB more")
    for name in asked.names or FLOODS:
        measure(name, asked.seconds)


if __name__ == "__main__":
    main()
