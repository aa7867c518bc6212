"""SGLang's `/generate`, without a model: it stands in for a GPU. A program of its own:

    python fake_sglang.py PORT

`POST /script` says what each turn of a session is answered with: tokens, an abort after some of them, a status, or
nothing at all. `GET /asked` gives the requests. Sessions are told apart by the header that slime routes them by.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from typing import Any

from aiohttp import web


def make_app() -> web.Application:
    script: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    turns: Counter[str] = Counter()
    stopped = asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        session = request.headers.get("X-SMG-Routing-Key", "")
        asked.append({"session": session, **body})
        turn = min(turns[session], len(script) - 1)
        turns[session] += 1
        said = script[turn]
        if said.get("hang"):
            await asyncio.sleep(3600)
        if "status" in said:
            return web.json_response({"error": "broken"}, status=said["status"])
        ids, finish = said["ids"], said.get("finish", "stop")
        if said.get("wait"):
            await stopped.wait()
        most = body["sampling_params"].get("max_new_tokens")
        if most is not None and len(ids) > most:
            ids, finish = ids[:most], "length"
        logprobs = said.get("logprobs", [said.get("logprob", -0.5 - at) for at in range(len(ids))])
        meta = {
            "finish_reason": {"type": finish},
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)],
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": str(said.get("version", 0)),
        }
        return web.json_response({"text": said.get("text", ""), "output_ids": ids, "meta_info": meta})

    async def set_script(request: web.Request) -> web.Response:
        script[:] = await request.json()
        asked.clear()
        turns.clear()
        stopped.clear()
        return web.json_response({})

    async def get_asked(request: web.Request) -> web.Response:
        return web.json_response(asked)

    async def workers(request: web.Request) -> web.Response:
        stopped.set()
        return web.json_response({"workers": []})

    app = web.Application()
    app.router.add_post("/generate", generate)
    app.router.add_post("/script", set_script)
    app.router.add_get("/asked", get_asked)
    app.router.add_get("/workers", workers)
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", port=int(sys.argv[1]), print=None)
