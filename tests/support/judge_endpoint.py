"""A judge behind an endpoint, in a process of its own: an OpenAI-compatible server that a scripted judge answers.

    with serving("Fair", folder) as judge:
        judge.url, judge.answered()

It answers at most as many requests as the file `most` in its folder says; others wait until that changes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class JudgeEndpoint:
    def __init__(self, port: int, folder: Path) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"
        self.folder = folder

    def answered(self) -> list[dict]:
        """What it was asked and has answered."""
        log = self.folder / "answered.jsonl"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def prompts(self) -> list[str]:
        return [request["body"]["messages"][-1]["content"] for request in self.answered()]

    def answer_at_most(self, number: int) -> None:
        (self.folder / "most").write_text(str(number))


@contextmanager
def serving(judge: str, folder: Path, most: int = 1_000_000) -> Iterator[JudgeEndpoint]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "most").write_text(str(most))
    process = subprocess.Popen([sys.executable, __file__, judge, str(folder)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield JudgeEndpoint(int(process.stdout.readline()), folder)
    finally:
        process.kill()
        process.wait()


def note(folder: Path, request: dict) -> None:
    with open(folder / "answered.jsonl", "a") as log:
        log.write(json.dumps(request) + "\n")


async def serve(name: str, folder: Path) -> None:
    import scripted_judges
    from aiohttp import web

    from treetune import Task
    from treetune.core.policy import Request, Sampling

    judge = getattr(scripted_judges, name)()
    turns = asyncio.Lock()
    answered = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal answered
        body = await request.json()
        async with turns:
            while answered >= int((folder / "most").read_text() or 0):  # noqa: ASYNC110 - told by another process
                await asyncio.sleep(0.02)
            answered += 1
            messages = body["messages"]
            said = judge.complete(Request(messages, Sampling(), Task(prompt=messages), 0, ""))
            note(folder, {"headers": dict(request.headers), "body": body})
        usage = {"prompt_tokens": said.usage.prompt_tokens, "completion_tokens": said.usage.completion_tokens}
        message = {"role": "assistant", "content": said.text}
        return web.json_response(
            {"choices": [{"message": message, "finish_reason": said.finish_reason}], "usage": usage}
        )

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
