"""`treetune register`: where running servers announce themselves, over HTTP; and how `treetune serve` does so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from treetune.host import Info
    from treetune.serve.register import Register
    from treetune.serve.zmq.server import EnvServer


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
    from treetune.serve.register_http import RegisterServer

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


class Place(NamedTuple):
    """Where a server is to be found."""

    register: Register
    advertise: str | None
    """The http address to be there under, where it is not the one that it listens on."""


def open_place(place: str | None, advertise: str | None) -> Place | None:
    """What `serve --register` and `--advertise` ask for."""
    import os

    import msgspec

    from treetune.errors import UsageError
    from treetune.serve.register import Entry, open_register

    if not place:
        if advertise is not None:
            raise UsageError("--advertise is for a register", remedy="pass --register too, or set TREETUNE_SERVERS")
        return None
    try:
        msgspec.convert({"id": "a", "name": "", "url": advertise}, Entry)
    except msgspec.ValidationError:
        raise UsageError(f"{advertise!r} is no address", remedy="write http://HOST:PORT, without a password") from None
    return Place(open_register(place, os.environ.get("TREETUNE_REGISTER_TOKEN") or None), advertise)


def listed(place: Place | None, server: EnvServer, url: str | None, info: Info) -> AbstractAsyncContextManager[None]:
    """The server stands in the register while it runs."""
    import contextlib
    import os
    import socket
    import time

    from treetune.serve.register import Entry, new_id, reachable, registered

    if place is None:
        return contextlib.nullcontext()
    entry = Entry(
        id=new_id(),
        name=info.name[:300],
        url=place.advertise or (reachable(url) if url is not None else None),
        zmq=reachable(server.address) if server.address else None,
        server_key=server.public_key.decode() if server.public_key is not None else None,
        num_tasks=info.num_tasks,
        needs_token=server.config.access.token is not None,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=time.time(),
    )
    return registered(place.register, entry)
