"""The register of running servers: `treetune register`, `treetune serve --register`, `treetune list --register`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Annotated

import msgspec
from rich.text import Text

from treetune import serve
from treetune.cli.options import JsonWhenReady, OpenAccess, option
from treetune.cli.output import make_table, print_json
from treetune.errors import UsageError
from treetune.play.protocol import Info
from treetune.system.screen import Screen

_COLOURS = {"ok": "green", "stopping": "yellow", "elsewhere": "yellow", "no answer": "red", "gone": "dim"}


def register_command(
    http: Annotated[str, option("The address to listen on: HOST:PORT, or :PORT.")] = ":5050",
    token: Annotated[str | None, option("The token that clients must send.", envvar="TREETUNE_REGISTER_TOKEN")] = None,
    open_access: OpenAccess = False,
    json: JsonWhenReady = False,
) -> int:
    """Run a register of servers, for machines without a shared folder.

    Then run: treetune serve TARGET --http :5000 --register http://HOST:5050, and treetune list --register http://HOST:5050
    """
    server = serve.RegisterServer(http, serve.Access(token=token or None, open=open_access))

    async def run() -> None:
        asked = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, asked.set)
        await server.start()
        if json:
            print_json({"url": server.url, "pid": os.getpid()})
        else:
            sys.stderr.write(f"register of servers at {server.url}\n")
        await asked.wait()
        await server.stop()

    asyncio.run(run())
    return 0


def list_servers(place: str | None, timeout: float, json: bool) -> None:
    place = place or os.environ.get("TREETUNE_SERVERS")
    if not place:
        raise UsageError("no register given", remedy="treetune list --register FOLDER_OR_URL, or set TREETUNE_SERVERS")
    register = _open_register(place, make=False)

    async def look() -> list[tuple[serve.RegisteredServer, serve.ServerHealth]]:
        servers = await register.entries()
        return list(zip(servers, await serve.check_health(servers, timeout), strict=True))

    found = asyncio.run(look())
    if json:
        shown = []
        for server, health in found:
            asked = {"health": health.state, "episodes": health.episodes, "detail": health.detail}
            shown.append({**msgspec.to_builtins(server.entry), **asked, "seconds_since_heard": round(server.age, 1)})
        return print_json({"register": place, "servers": shown})
    screen = Screen()
    if not found:
        return screen.say(f"no servers in {place}; one joins with treetune serve ... --register {place}")
    rows = []
    for server, health in found:
        entry = server.entry
        addresses = " ".join(filter(None, [entry.url, entry.zmq]))
        tasks = "endless" if entry.num_tasks is None else f"{entry.num_tasks:,}"
        episodes = "" if health.episodes is None else f"{health.episodes:,}"
        state = Text(health.state, style=_COLOURS[health.state])
        detail = ", ".join(filter(None, ["needs a token" if entry.needs_token else "", health.detail]))
        rows.append((_clean(entry.name), _clean(addresses), tasks, episodes, state, _clean(detail)))
    headings = ("name", "address", "tasks", "episodes", "health", "")
    return screen.print(make_table(rows, headings, whole=("address",)))  # an address must not be broken across lines


def _clean(text: str) -> str:
    """Replaces control characters: entries of the register are untrusted input."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _open_register(place: str, *, make: bool = True) -> serve.Register:
    return serve.open_register(place, os.environ.get("TREETUNE_REGISTER_TOKEN") or None, make=make)


def open_registration(
    place: str | None, advertise: str | None
) -> Callable[[serve.EnvServer, Info], AbstractAsyncContextManager[None]]:
    """Returns the context that keeps a server in a register while it runs, for `serve --register` and `--advertise`."""
    if not place:
        if advertise is not None:
            raise UsageError("--advertise requires a register", remedy="pass --register too, or set TREETUNE_SERVERS")
        return lambda server, info: nullcontext()
    try:
        msgspec.convert({"id": "a", "name": "", "url": advertise}, serve.ServerEntry)
    except msgspec.ValidationError:
        raise UsageError(f"{advertise!r} is no address", remedy="write http://HOST:PORT, without a password") from None
    register = _open_register(place)

    def keep(server: serve.EnvServer, info: Info) -> AbstractAsyncContextManager[None]:
        addresses = {name: serve.name_public_address(address) for name, address in server.addresses.items()}
        entry = serve.ServerEntry(
            id=serve.make_id(),
            name=info.name[:300],
            url=advertise or addresses.get("http"),
            zmq=addresses.get("zmq"),
            server_key=server.public_key.decode() if server.public_key is not None else None,
            num_tasks=info.num_tasks,
            needs_token=server.config.access.token is not None,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=time.time(),
        )
        return serve.stay_registered(register, entry)

    return keep
