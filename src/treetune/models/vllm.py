"""`vllm:MODEL`: a model served by vLLM on this machine; uses a running server, or starts one for as long as needed.

    with VllmServer("Qwen/Qwen3-4B", EndpointConfig()) as server:
        server.url                       # http://127.0.0.1:8000/v1

Servers are looked up at the usual port, or at `endpoint.base_url`. `endpoint.vllm_args` are extra `vllm serve`
arguments.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from treetune.errors import NetworkError, UsageError
from treetune.models import EndpointConfig
from treetune.models.openai import OpenAIPolicy
from treetune.system.http_body import BodyTooLarge, read_blocking

PORT = 8000
PREFIX = "vllm:"
_LIST_SECONDS = 10.0
_LINES = 12
_ERROR = re.compile(r"\b(?!EngineDeadError)\w+(?:Error|Exception): \S.*")
_WORDS_EVERY = 30.0
"""Seconds between two lines of progress if there is no terminal."""


def check_vllm(model: str, endpoint: EndpointConfig) -> None:
    """Raise if no such server runs and none can be started. Does not start one."""
    if find_server(model, endpoint) is None:
        _command(model, endpoint, PORT)


def find_server(model: str, endpoint: EndpointConfig) -> tuple[str, str] | None:
    """Return the address of a server with the model, and the model's name there; None if there is none."""
    url = f"http://127.0.0.1:{PORT}/v1" if endpoint.is_default else endpoint.base_url.rstrip("/")
    for entry in _ask(f"{url}/models").get("data") or []:
        if isinstance(entry, dict) and model in (entry.get("id"), entry.get("root")):
            return url, str(entry["id"])
    return None


def _ask(address: str) -> dict[str, Any]:
    bad = (OSError, ValueError, RecursionError, BodyTooLarge)
    with suppress(*bad), urllib.request.urlopen(address, timeout=2) as response:
        answer = json.loads(read_blocking(response, _LIST_SECONDS) or b"{}")
        return answer if isinstance(answer, dict) else {}
    return {}


def _command(model: str, endpoint: EndpointConfig, port: int) -> list[str]:
    beside = Path(sys.executable).with_name("vllm")
    program = str(beside) if beside.exists() else shutil.which("vllm")
    if not endpoint.is_default:
        raise NetworkError(
            f"no server at {endpoint.base_url} has the model {model!r}",
            remedy="start it there, or leave out --endpoint.base_url: then one is started here",
        )
    words = ["serve", model, "--port", str(port), *shlex.split(endpoint.vllm_args)]
    if program is None:
        raise UsageError(
            f"no vLLM with the model {model!r} runs at port {PORT}, and vLLM is not installed here",
            remedy="pip install vllm; or start it where it is installed: "
            f"{shlex.join(['vllm', *words])}, and pass --endpoint.base_url http://127.0.0.1:{port}/v1 here",
        )
    return [program, *words, "--host", "127.0.0.1"]


class VllmServer:
    """A server that was already running, or one that runs until it is stopped."""

    def __init__(self, model: str, endpoint: EndpointConfig) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        found = find_server(model, endpoint)
        self.url, self.name = found if found is not None else self._start(model, endpoint)

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop the server if it was started here."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()  # its keeper then stops it
            self._process.wait()
            self._process = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, model: str, endpoint: EndpointConfig) -> tuple[str, str]:
        port = _choose_port()
        command = _command(model, endpoint, port)
        self._folder = Path(tempfile.mkdtemp(prefix="treetune-vllm-"))
        log = self._folder / "vllm.log"
        _say(f"starting vLLM: {shlex.join(command)} (its log: {log})")
        with log.open("wb") as output:
            # The keeper stops vLLM when its input closes, which we do on purpose and the system does if we die.
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("vllm_keeper.py")), *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait(f"http://127.0.0.1:{port}", log)
            found = find_server(model, msgspec.structs.replace(endpoint, base_url=f"http://127.0.0.1:{port}/v1"))
        except BaseException:
            self.stop()
            raise
        return found or (f"http://127.0.0.1:{port}/v1", model)

    def _wait(self, url: str, log: Path) -> None:
        assert self._process is not None
        began = said = time.monotonic()
        on_terminal = sys.stderr.isatty()
        while not _is_healthy(f"{url}/health"):
            if self._process.poll() is not None:
                self._process = None
                last = "\n".join(_last_lines(log))
                first = f": {cause}" if (cause := _first_error(log)) else ""
                raise NetworkError(f"vLLM ended before it served anything{first}\nThe end of {log}:\n{last}")
            now = time.monotonic()
            if on_terminal:
                line = (_last_lines(log, 1) or [""])[0]
                sys.stderr.write(f"\r\033[Kwaiting for vLLM, {now - began:.0f} s: {line[:60]}")
                sys.stderr.flush()
            elif now - said >= _WORDS_EVERY:
                said = now
                _say(f"waiting for vLLM, {now - began:.0f} s")
            time.sleep(0.5)
        sys.stderr.write("\r\033[K" if on_terminal else "")
        _say(f"vLLM serves after {time.monotonic() - began:.0f} s")


def _is_healthy(address: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(address, timeout=2) as response:
        return bool(response.status == 200)
    return False


def _choose_port() -> int:
    """Return the usual port, or a free one if that is taken."""
    for port in (PORT, 0):
        with suppress(OSError), socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", port))
            return int(taken.getsockname()[1])
    raise NetworkError("no port is free")


def _last_lines(log: Path, count: int = _LINES) -> list[str]:
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-count:]


def _first_error(log: Path) -> str:
    """Return the line of the first exception, which caused the later ones."""
    lines = log.read_text(errors="replace").splitlines()
    return next((found[0] for line in lines if (found := _ERROR.search(line))), "")[:300]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class VllmPolicy(OpenAIPolicy):
    """A policy that keeps its server running until `close`."""

    def __init__(self, model: str, endpoint: EndpointConfig) -> None:
        self._vllm = VllmServer(model, endpoint)
        try:
            super().__init__(
                f"{PREFIX}{model}", msgspec.structs.replace(endpoint, base_url=self._vllm.url), self._vllm.name
            )
        except BaseException:
            self._vllm.stop()
            raise

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._vllm.stop)


@contextmanager
def running(model: str, endpoint: EndpointConfig) -> Iterator[EndpointConfig]:
    """Yield an endpoint that several processes can use: for `vllm:MODEL` a server that runs inside the block, for any
    other model the unchanged endpoint."""
    if not model.startswith(PREFIX):
        yield endpoint
        return
    with VllmServer(model.removeprefix(PREFIX), endpoint) as server:
        yield msgspec.structs.replace(endpoint, base_url=server.url)
