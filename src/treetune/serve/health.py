"""How the servers of a register are: each is asked, all at once, with little patience.

    for seen, found in zip(entries, await ask_all(entries, timeout=2.0)):
        print(seen.entry.name, found.state, found.episodes)

No token is sent: health is answered without one.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from treetune.errors import TreetuneError
from treetune.serve.access import is_loopback
from treetune.serve.http.transport import HttpTransport
from treetune.serve.register import STALE_SECONDS, Entry, Seen
from treetune.serve.zmq.client import EnvClient

_MOST_AT_ONCE = 250


class Found(NamedTuple):
    state: str
    """`ok`, `stopping`, `no answer`, `gone` (no answer, and not heard of for long), or `elsewhere`: its address is
    for its own machine only, and that is not this one."""
    episodes: int | None = None
    detail: str = ""


class _Health(msgspec.Struct):
    status: str = ""
    episodes: int | None = None


async def ask_all(entries: list[Seen], timeout: float) -> list[Found]:
    free = asyncio.Semaphore(_MOST_AT_ONCE)

    async def ask(seen: Seen) -> Found:
        async with free:
            return await _found(seen, timeout)

    return list(await asyncio.gather(*(ask(seen) for seen in entries)))


async def _found(seen: Seen, timeout: float) -> Found:
    stale = seen.age > STALE_SECONDS
    heard = f"last heard of {seen.age:,.0f} s ago" if stale else ""
    try:
        if _is_elsewhere(seen.entry):
            return Found("gone" if stale else "elsewhere", detail=heard or f"only for {seen.entry.host}")
        found = await _asked(seen.entry, timeout)
    except (TreetuneError, ValueError) as error:  # urllib's own word for an address that is none
        reason = error.message if isinstance(error, TreetuneError) else str(error)
        return Found("gone", detail=heard) if stale else Found("no answer", detail=reason)
    return found._replace(detail=heard) if stale and not found.detail else found


async def _asked(entry: Entry, timeout: float) -> Found:
    if entry.url is None:
        if entry.zmq is None:
            return Found("no answer", detail="it has no address")
        async with EnvClient(entry.zmq, server_key=entry.server_key, deadline=timeout) as client:
            await client.health(timeout)
        return Found("ok")
    async with HttpTransport(entry.url) as transport:
        answer = await transport.ask("GET", "/api/health", None, timeout)
    if answer.status == 503:
        return Found("stopping")
    try:
        health = msgspec.json.decode(answer.body, type=_Health) if answer.good else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        health = None
    if health is None:
        return Found("no answer", detail=f"something else is there: it answered {answer.status}")
    return Found("ok", health.episodes)


def _is_elsewhere(entry: Entry) -> bool:
    address = entry.url or entry.zmq or ""
    local = address.startswith("ipc:") or is_loopback(urlsplit(address).hostname or "")
    return local and bool(entry.host) and entry.host != socket.gethostname()
