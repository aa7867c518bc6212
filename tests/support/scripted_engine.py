"""An engine that speaks tokens, as vLLM's `/v1/completions`, without a model. It remembers every token that it sampled,
in a process of its own:

    python scripted_engine.py PORT

`POST /script` says which tokenizer it has and how it answers, and forgets what was before; `GET /memory` gives what it
sampled. It samples tokens that no rendering of the same text has: letters one by one, JSON without spaces.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from functools import lru_cache
from typing import Any

import shell_model
from aiohttp import web
from call_chats import Answer, tokens_of
from chat_templates import CALL_TEMPLATES, TEMPLATES, CallLetters, Letters

from treetune.chat.call_formats import FORMATS

WORDS = ["look", "  ", "é", "漢", "\n", "the", "end", "{}", "<b>", "'quoted'", "<tool_cal", "🙂", "<|im_end|>", "ye no"]


@lru_cache
def make_tokenizer(name: str) -> Any:
    """`plain`, ...: a template of letters; `calls:hermes`, ...: one with tools; any other is a real one."""
    by_name = {template.__name__: template for template in TEMPLATES}
    if name in by_name:
        return Letters(by_name[name])
    if name.startswith("calls:"):
        return CallLetters(*CALL_TEMPLATES[name.removeprefix("calls:")])
    import real_tokenizers

    return real_tokenizers.load(name)


class Engine:
    def __init__(self) -> None:
        self.tokenizer: Any = None
        self.set({"tokenizer": "plain"})

    def set(self, script: dict[str, Any]) -> None:
        self.script = {
            "answer": None,
            "format": "hermes",
            "delay": 0.0,
            "pause": 0.0,
            "fault": None,
            "ids": True,
            **script,
        }
        self.tokenizer = make_tokenizer(self.script["tokenizer"])
        self.begun: list[dict[str, Any]] = []
        self.sampled: list[tuple[list[int], list[int]]] = []
        self.cancelled = 0
        self.plans: list[tuple[list[int], list[int]]] = []
        """What it meant to sample after a prompt: a call that was aborted goes on as it had begun."""

    def answer(self, text: str, number: int) -> list[int]:
        rng = random.Random(f"{self.script.get('seed')}/{number}")
        said = self.script["answer"]
        if commands := self.script.get("commands"):
            said = shell_model.answer(text, commands)
        elif isinstance(said, list):
            said = said[min(number, len(said) - 1)]
        if said is None:
            said = self.random_answer(text, number, rng)
        cuts = list(range(min(7, len(said)))) if rng.random() < 0.8 else []
        return tokens_of(self.tokenizer, said, Answer(said, [], cuts, False, ends=rng.random() < 0.9))

    def random_answer(self, text: str, number: int, rng: random.Random) -> str:
        thought = f"<think>\nhm {number}\n</think>\n\n" if rng.random() < 0.3 else ""
        if text.rstrip().endswith("<think>"):
            thought = f"hm {number}\n</think>\n\n" if rng.random() < 0.8 else ""
        if "bash" in text and rng.random() < 0.5:
            made = [
                ("bash", json.dumps({"command": f'echo {number} {at} "x" é'}, separators=(",", ":")))
                for at in range(rng.choice([1, 1, 2]))
            ]
            calls = FORMATS[self.script["format"]].write(made)
            beside = "" if rng.random() < 0.4 or self.script["format"] == "llama" else f"I run {number}.\n"
            return thought + beside + calls
        return thought + f"Answer {number}: " + " ".join(rng.choices(WORDS, k=rng.randrange(1, 20)))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        given, number = body["prompt"], len(self.begun)
        self.begun.append(body)
        text = self.tokenizer.decode(given)
        begun, out = self.go_on(given)
        if not begun:
            out = self.answer(text, number)
            self.plans.append((given, out))
        finish = "stop"
        if len(out) > body["max_tokens"]:
            out, finish = out[: body["max_tokens"]], "length"
        try:
            if (most := self.script.get("aborts", {}).get(str(number))) is not None:
                out, finish = out[:most], "abort"
            return await self.send(request, given, out, finish, bool(body.get("stream")), "[hang]" in text, begun)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise

    def go_on(self, given: list[int]) -> tuple[int, list[int]]:
        """How many tokens of this prompt are the beginning of an answer, and the rest of it."""
        for prompt, out in self.plans:
            begun = len(given) - len(prompt)
            if 0 < begun < len(out) and given == prompt + out[:begun]:
                return begun, out[begun:]
        return 0, []

    async def send(
        self,
        request: web.Request,
        given: list[int],
        out: list[int],
        finish: str,
        stream: bool,
        hangs: bool,
        begun: int,
    ) -> web.StreamResponse:
        fault = self.script["fault"]
        await asyncio.sleep(self.script["delay"])
        if fault == "hang" or (hangs and not stream):
            await asyncio.sleep(3600)
        if fault == "500":
            return web.json_response({"error": "broken"}, status=500)
        if fault == "full":
            return web.json_response({"error": "This model's maximum context length is 10 tokens."}, status=400)
        if fault == "garbage":
            return web.Response(text="{what")
        if fault == "no HTTP":
            assert request.transport is not None
            request.transport.write(b"\0\0not HTTP\r\n\r\n")
            request.transport.close()
            await asyncio.sleep(1)
        if fault == "NaN":
            return web.Response(
                text='{"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [0.5]}, '
                '"text": "x", "finish_reason": "stop"}]}'
            )
        whole = (given[: len(given) - begun], given[len(given) - begun :] + out)
        versions = self.script.get("versions", [7])
        metadata = {"weight_version": str(versions[min(len(self.begun), len(versions)) - 1])}
        if not stream:
            if finish != "abort":
                self.sampled.append(whole)
            return web.json_response({"choices": [self.choice(out, 0, len(out), finish)], "metadata": metadata})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        step = random.Random(len(out)).choice([1, 3, 8])
        for at in range(0, max(1, len(out)), step):
            if (fault == "half" or hangs) and at > 4:
                if hangs:
                    await asyncio.sleep(3600)
                assert request.transport is not None
                request.transport.abort()
                return answer
            why = finish if at + step >= len(out) else None
            part = {"choices": [self.choice(out, at, at + step, why)], "metadata": metadata}
            if fault == "error event" and at:
                part = {"error": {"message": "the engine is out of memory"}}
            await answer.write(f"data: {json.dumps(part)}\n\n".encode())
            await asyncio.sleep(self.script["pause"])
        if finish != "abort":
            self.sampled.append(whole)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def choice(self, out: list[int], begin: int, end: int, finish: str | None) -> dict[str, Any]:
        part = out[begin:end]
        said, before = self.tokenizer.decode(out[:end]), self.tokenizer.decode(out[:begin]) if begin else ""
        found = {"text": said.removeprefix(before) if said.startswith(before) else "", "finish_reason": finish}
        if not self.script["ids"]:
            return found
        if self.script.get("texts") is False:
            found["text"] = ""
        return {**found, "token_ids": part, "logprobs": {"token_logprobs": [logprob(token) for token in part]}}

    async def take_script(self, request: web.Request) -> web.Response:
        self.set(await request.json())
        return web.json_response({})

    async def give_memory(self, request: web.Request) -> web.Response:
        return web.json_response({"begun": self.begun, "sampled": self.sampled, "cancelled": self.cancelled})

    async def models(self, request: web.Request) -> web.Response:
        if self.script["fault"] == "no models":
            return web.json_response({}, status=404)
        return web.json_response({"data": [{"id": "policy", "max_model_len": self.script.get("context", 100_000)}]})


def logprob(token: int) -> float:
    return -0.25 - token % 97 / 100


def make_app() -> web.Application:
    engine = Engine()
    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/completions", engine.complete)
    app.router.add_get("/v1/models", engine.models)
    app.router.add_post("/script", engine.take_script)
    app.router.add_get("/memory", engine.give_memory)
    return app


if __name__ == "__main__":
    web.run_app(make_app(), host="127.0.0.1", port=int(sys.argv[1]), print=None, handler_cancellation=True)
