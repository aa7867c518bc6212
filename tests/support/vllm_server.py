"""A real vLLM on a CPU with a tiny model, for as long as a test needs it.

    with vllm_server(python, model) as url:

It may be told of new weights (`VLLM_SERVER_DEV_MODE`) and of adapters. Nothing is compiled: a start takes about a
minute, most of which are imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import task_servers

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What makes vLLM small and quick to start on a CPU; verl's own engines need it too."""


@contextlib.contextmanager
def vllm_server(python: Path, model: Path, log: Path, context: int = 1024) -> Iterator[str]:
    """Its address, without `/v1`; the model's name there is its folder. What it prints goes to `log`."""
    port = task_servers.free_port()
    url = f"http://127.0.0.1:{port}"
    options = f"--dtype float32 --max-model-len {context} --max-num-seqs 32 --enforce-eager --enable-lora"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host", "127.0.0.1"]
    command += ["--port", str(port)]
    more = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    with log.open("w") as output:
        running = subprocess.Popen(
            [*command, *options.split()],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **more},
            start_new_session=True,  # its engine is a process of its own, and has to end with it
        )
        try:
            wait_for(f"{url}/health", running, log)
            yield url
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()


def wait_for(url: str, running: subprocess.Popen[bytes], log: Path) -> None:
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert running.poll() is None, f"vLLM ended with {running.returncode}:\n{log.read_text()[-3000:]}"
            time.sleep(0.5)


def load_again(url: str) -> None:
    """Has it take the weights that are in its folder now. What it remembers of prompts was computed with others."""
    post(f"{url}/collective_rpc", {"method": "reload_weights"})
    post(f"{url}/reset_prefix_cache?reset_running_requests=true", {})


def post(url: str, body: dict[str, str]) -> None:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=120).close()
