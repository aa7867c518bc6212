"""A model that is being trained, behind an endpoint in a process of its own: it answers when it is told to.

    with trained_model() as model:
        model.control(NAME, permits=1, version=7)       # one more call of the model NAME is answered, by version 7
        model.seen(NAME)                                 # what it was asked

Each name is a model of its own. Its tokens are characters, so that what was sampled can be read off a trace. It speaks
as vLLM (`token_ids`) and SGLang (`metadata`) do; no real server of either can abort a call on request here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from contextlib import contextmanager

from aiohttp import web

BEGIN, END = "\x01", "\x02"
"""Of a message."""


def render(messages) -> str:
    """The prompt as the model sees it."""
    return "".join(f"{BEGIN}{one['role'][0]}{one['content']}{END}" for one in messages) + f"{BEGIN}a"


class Model:
    def __init__(self):
        self.permits: int | None = None
        """Calls that are answered; None: all."""
        self.version: int | None = None
        self.tells = "metadata"
        self.answer = "answer"
        self.answers: list[str] = []
        """The next ones, before `answer`."""
        self.status = 200
        self.gives_ids = True
        self.aborts: asyncio.Event = asyncio.Event()
        self.changed = asyncio.Condition()
        self.bodies: list[dict] = []
        self.open = self.dropped = self.answered = 0


models: defaultdict[str, Model] = defaultdict(Model)


async def complete(request):
    body = await request.json()
    model = models[body["model"]]
    chat = request.path.endswith("chat/completions")
    model.bodies.append({"path": request.path, **body})
    prompt = render(body["messages"]) if chat else "".join(map(chr, body["prompt"]))
    begun = "" if chat else prompt.rpartition(f"{BEGIN}a")[2]
    answer = model.answers.pop(0) if chat and model.answers else model.answer
    version, aborts = model.version, model.aborts
    model.open += 1
    try:
        async with model.changed:
            await model.changed.wait_for(lambda: model.permits is None or model.permits > 0 or aborts.is_set())
            aborted = aborts.is_set()
            if not aborted and model.permits is not None:
                model.permits -= 1
        model.answered += 1
    except asyncio.CancelledError:
        model.dropped += 1
        raise
    finally:
        model.open -= 1
    if model.status != 200:
        return web.Response(status=model.status, text="no")
    rest = answer[len(begun) :]
    text = rest[: len(rest) // 2] if aborted else rest
    sampled = text if aborted else text + END
    choice: dict = {"finish_reason": "abort" if aborted else "stop"}
    choice |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    logprobs = [-0.5 - 0.001 * ord(one) for one in sampled]
    if body.get("logprobs"):
        entries = [{"token": one, "logprob": value} for one, value in zip(sampled, logprobs, strict=True)]
        choice["logprobs"] = {"content": entries} if chat else {"token_logprobs": logprobs}
    reply: dict = {"choices": [choice]}
    if model.gives_ids:
        choice["token_ids"] = list(map(ord, sampled))
        reply["prompt_token_ids"] = list(map(ord, prompt))
    headers = {}
    if version is not None:
        told = {"metadata": str(version), "meta_info": version}
        reply |= {model.tells: {"weight_version": told[model.tells]}} if model.tells in told else {}
        headers = {"X-Weights": str(version)} if model.tells == "header" else {}
    return web.json_response(reply, headers=headers)


async def control(request):
    body = await request.json()
    model = models[body.pop("model")]
    abort = body.pop("abort", False)
    for name, value in body.items():
        setattr(model, name, value)
    async with model.changed:
        if abort:
            model.aborts.set()
            model.aborts = asyncio.Event()
        model.changed.notify_all()
    return web.json_response({})


async def seen(request):
    model = models[request.query["model"]]
    names = ("bodies", "open", "dropped", "answered")
    return web.json_response({name: getattr(model, name) for name in names})


async def serve():
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/control", control)
    app.router.add_get("/seen", seen)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


class Endpoint:
    def __init__(self, port):
        self.base = f"http://127.0.0.1:{port}"
        self.url = f"{self.base}/v1"

    def control(self, name, **change):
        request = urllib.request.Request(f"{self.base}/control", json.dumps({"model": name, **change}).encode())
        urllib.request.urlopen(request, timeout=30).close()

    def seen(self, name):
        with urllib.request.urlopen(f"{self.base}/seen?model={name}", timeout=30) as reply:
            return json.load(reply)

    def wait(self, name, **wanted):
        """Until the model has seen as much; nothing is said of how soon."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            now = self.seen(name)
            now["asked"] = len(now["bodies"])
            if all(now[key] == value for key, value in wanted.items()):
                return now
            time.sleep(0.02)
        raise AssertionError(f"waited for {wanted}, have { {key: now[key] for key in wanted} }")


@contextmanager
def trained_model():
    process = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
    try:
        yield Endpoint(int(process.stdout.readline()))
    finally:
        process.kill()
        process.communicate()


if __name__ == "__main__":
    asyncio.run(serve())
