"""A gateway in a process of its own, which tests may kill: python gateway_process.py ENGINE_URL TOKENIZER ADDRESS

It prints its address and the keys of its sessions, a line each."""

from __future__ import annotations

import asyncio
import sys

from gateway_playing import TOKEN
from scripted_engine import make_tokenizer

from treetune.gateway import Gateway, GatewayServer, HttpSampler

SESSIONS = 100


async def main(engine: str, tokenizer: str, address: str) -> None:
    gateway = Gateway(make_tokenizer(tokenizer), HttpSampler(engine, "policy"))
    print(await GatewayServer(gateway, address, token=TOKEN).start(), flush=True)
    for _ in range(SESSIONS):
        print(gateway.open().key, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
