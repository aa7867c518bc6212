"""The register of running servers: `treetune register`, `treetune list --servers`, `treetune serve --register`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from treetune.host import Info
    from treetune.serve.register import Register, RegisteredServer, ServerHealth
    from treetune.serve.server import EnvServer

_COLOURS = {"ok": "green", "stopping": "yellow", "elsewhere": "yellow", "no answer": "red", "gone": "dim"}


def register_command(
    http: Annotated[str, typer.Option("--http", help="Where it listens: HOST:PORT, or :PORT.")] = ":5050",
    token: Annotated[
        str | None, typer.Option(envvar="TREETUNE_REGISTER_TOKEN", help="Without it nothing is told or taken.")
    ] = None,
    open_access: Annotated[
        bool, typer.Option("--open", help="Allow an address that other machines can reach without a token.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output when it is ready.")] = False,
) -> int:
    """Run a register of servers, for machines that share no folder.

    Then: treetune serve TARGET --http :5000 --register http://HOST:5050, and treetune list --servers http://HOST:5050
    """
    import asyncio
    import os
    import signal
    import sys

    from treetune.cli.output import print_json
    from treetune.serve.access import Access
    from treetune.serve.register import RegisterServer

    server = RegisterServer(http, Access(token=token or None, open=open_access))

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
    import asyncio
    import os

    from treetune.cli.output import Screen, print_json
    from treetune.errors import UsageError
    from treetune.serve.register import check_health, open_register

    place = place or os.environ.get("TREETUNE_SERVERS")
    if not place:
        raise UsageError("which register?", remedy="treetune list --servers FOLDER_OR_URL, or set TREETUNE_SERVERS")
    register = open_register(place, os.environ.get("TREETUNE_REGISTER_TOKEN") or None, make=False)

    async def look() -> list[tuple[RegisteredServer, ServerHealth]]:
        servers = await register.entries()
        return list(zip(servers, await check_health(servers, timeout), strict=True))

    found = asyncio.run(look())
    if json:
        print_json({"register": place, "servers": [_to_json(*one) for one in found]})
        return
    from rich.table import Table
    from rich.text import Text

    console = Screen()
    if not found:
        console.print(Text(f"no servers in {place}; one joins with treetune serve ... --register {place}"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "address", "tasks", "episodes", "health", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "address")  # one that is cut is none
    for server, health in found:
        entry = server.entry
        table.add_row(
            Text(_clean(entry.name)),
            Text(_clean(" ".join(filter(None, [entry.url, entry.zmq])))),
            Text("endless" if entry.num_tasks is None else f"{entry.num_tasks:,}"),
            Text("" if health.episodes is None else f"{health.episodes:,}"),
            Text(health.state, style=_COLOURS[health.state]),
            Text(_clean(", ".join(filter(None, ["needs a token" if entry.needs_token else "", health.detail])))),
        )
    console.print(table)


def _to_json(server: RegisteredServer, health: ServerHealth) -> dict[str, Any]:
    import msgspec

    return {
        **msgspec.to_builtins(server.entry),
        "health": health.state,
        "episodes": health.episodes,
        "detail": health.detail,
        "seconds_since_heard": round(server.age, 1),
    }


def _clean(text: str) -> str:
    """What others wrote into the register may not steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


class Registration(NamedTuple):
    """Where a server registers, and as what."""

    register: Register
    advertise: str | None
    """The http address to be there under, where it is not the one that it listens on."""


def open_registration(place: str | None, advertise: str | None) -> Registration | None:
    """What `serve --register` and `--advertise` ask for."""
    import os

    import msgspec

    from treetune.errors import UsageError
    from treetune.serve.register import ServerEntry, open_register

    if not place:
        if advertise is not None:
            raise UsageError("--advertise is for a register", remedy="pass --register too, or set TREETUNE_SERVERS")
        return None
    try:
        msgspec.convert({"id": "a", "name": "", "url": advertise}, ServerEntry)
    except msgspec.ValidationError:
        raise UsageError(f"{advertise!r} is no address", remedy="write http://HOST:PORT, without a password") from None
    return Registration(open_register(place, os.environ.get("TREETUNE_REGISTER_TOKEN") or None), advertise)


def register_server(
    registration: Registration | None, server: EnvServer, info: Info
) -> AbstractAsyncContextManager[None]:
    """Keeps the server in the register while it runs."""
    import contextlib
    import os
    import socket
    import time

    from treetune.serve.register import ServerEntry, make_id, name_public_address, stay_registered

    if registration is None:
        return contextlib.nullcontext()
    addresses = {name: name_public_address(address) for name, address in server.addresses.items()}
    entry = ServerEntry(
        id=make_id(),
        name=info.name[:300],
        url=registration.advertise or addresses.get("http"),
        zmq=addresses.get("zmq"),
        server_key=server.public_key.decode() if server.public_key is not None else None,
        num_tasks=info.num_tasks,
        needs_token=server.config.access.token is not None,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.time(),
    )
    return stay_registered(registration.register, entry)
