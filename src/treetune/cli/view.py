"""`treetune view`: runs in the browser."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from treetune.cli.options import JsonWhenReady, option
from treetune.cli.output import Screen, print_json
from treetune.errors import UsageError
from treetune.serve import Access, is_loopback
from treetune.view import RunList, ViewServer


def view_command(
    paths: Annotated[
        list[Path] | None, typer.Argument(help="Run folders, or folders of runs (runs).", metavar="[RUN | DIR] …")
    ] = None,
    port: Annotated[int, option("The port; 0: a free one.", min=0, max=65535)] = 7800,
    host: Annotated[str, option("Where to listen. Beyond this machine the address has a token.")] = "127.0.0.1",
    no_browser: Annotated[bool, option("Open no browser; print the address.")] = False,
    json: JsonWhenReady = False,
) -> int:
    """Look at runs in the browser: groups, rollouts, tokens, what changed between two of them.

    Runs that are still being written are followed.
    """
    named = paths or [Path("runs")]
    if not paths and not named[0].is_dir():
        raise UsageError("there is no folder runs here", remedy="name a run: treetune view runs/x")
    runs = RunList(named)
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    uvloop.run(_serve(ViewServer(runs, Access(token=token)), f"{host}:{port}", token, no_browser, json))
    return 0


async def _serve(server: ViewServer, address: str, token: str | None, no_browser: bool, json: bool) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    url = f"{await server.start(address)}/" + (f"#token={token}" if token is not None else "")
    if json:
        print_json({"address": url})
    else:
        Screen().say(f"{url}   (Ctrl-C ends it)")
    if not no_browser:
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(url)
    await stopped.wait()
    await server.close()
