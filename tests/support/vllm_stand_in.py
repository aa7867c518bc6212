"""A stand-in for a vLLM server, in a process of its own: the few routes that TRL's asynchronous trainer and ours ask.

    python vllm_stand_in.py PORT ANSWERS.json RECORD.jsonl

`ANSWERS.json` is a list of answers in tokens: an episode gets the first, then the next, however many are played at
once. If it is the folder of a tokenizer, `agent_session.sample` answers. It samples nothing and holds no weights; what
was asked and answered is recorded. `POST /tell` says what happens
to the next requests: `{"completions": ["hang", "500", "404", "die"]}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from task_servers import free_port, process

CONTEXT = 4096


def app_of(answers: list[list[int]] | str, record: Path) -> web.Application:
    told: list[str] = []
    adapters: list[str] = []

    def note(**entry: Any) -> None:
        with record.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    if isinstance(answers, str):
        import agent_session
        from transformers import AutoTokenizer

        answer = partial(agent_session.sample, AutoTokenizer.from_pretrained(answers))
    else:
        answer = partial(next_of, answers)

    async def tell(request: web.Request) -> web.Response:
        body = await request.json()
        told.extend(body.get("completions", ()))
        adapters.extend(body.get("adapters", ()))
        for name in body.get("unload", ()):
            adapters.remove(name)
        return web.json_response({})

    async def models(_: web.Request) -> web.Response:
        base = {"id": "stand-in", "object": "model", "max_model_len": CONTEXT, "parent": None}
        return web.json_response({"data": [base, *({"id": name, "parent": "stand-in"} for name in adapters)]})

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        fault = told.pop(0) if told else None
        if fault == "hang":
            await asyncio.sleep(3600)
        if fault == "die":
            os.kill(os.getpid(), 9)
        if fault is not None:
            return web.json_response({"error": {"message": fault}}, status=int(fault))
        if adapters and body["model"] not in adapters:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        assert (body["return_token_ids"], body["logprobs"], body["n"]) == (True, 0, 1), body
        ids, logprobs = answer(body["prompt"])
        ids, logprobs = ids[: body["max_tokens"]], logprobs[: body["max_tokens"]]
        note(model=body["model"], prompt=body["prompt"], seed=body["seed"], ids=ids, logprobs=logprobs)
        choice = {"index": 0, "text": "", "token_ids": ids, "finish_reason": "stop"}
        return web.json_response({"choices": [{**choice, "logprobs": {"token_logprobs": logprobs}}]})

    async def fine(request: web.Request) -> web.Response:
        note(path=request.path)
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/tell", tell)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/completions", completions)
    app.router.add_get("/health", fine)
    for path in ("/pause", "/resume"):
        app.router.add_post(path, fine)
    return app


def next_of(answers: list[list[int]], prompt: list[int]) -> tuple[list[int], list[float]]:
    ids = answers[turn_of(answers, prompt)]
    return ids, [-0.5 - at / 100 for at in range(len(ids))]


def turn_of(answers: list[list[int]], prompt: list[int]) -> int:
    """How many of the answers a prompt holds already, one after the other."""
    at = turn = 0
    for answer in answers:
        found = (start for start in range(at, len(prompt)) if prompt[start : start + len(answer)] == answer)
        if (start := next(found, None)) is None:
            break
        at, turn = start + len(answer), turn + 1
    return min(turn, len(answers) - 1)


class StandIn:
    def __init__(self, url: str, record: Path) -> None:
        self.url, self._record = url, record

    @property
    def asked(self) -> list[dict[str, Any]]:
        """The completions that were given."""
        if not self._record.exists():
            return []
        entries = [json.loads(line) for line in self._record.read_text().splitlines()]
        return [entry for entry in entries if "ids" in entry]

    def tell(self, **what: Any) -> None:
        data = json.dumps(what).encode()
        headers = {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/tell", data, headers), timeout=10).close()


@contextlib.contextmanager
def running(folder: Path, answers: list[list[int]] | str) -> Any:
    port = free_port()
    (folder / "answers.json").write_text(json.dumps(answers))
    record = folder / "asked.jsonl"
    url = f"http://127.0.0.1:{port}"
    with process(__file__, str(port), str(folder / "answers.json"), str(record), url=url, path="/health"):
        yield StandIn(url, record)


if __name__ == "__main__":
    port, file, to = sys.argv[1:]
    web.run_app(app_of(json.loads(Path(file).read_text()), Path(to)), host="127.0.0.1", port=int(port), print=None)
