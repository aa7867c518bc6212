"""`treetune view`: shows runs in the browser, or as one page in a file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from treetune.cli.options import option
from treetune.cli.output import print_json
from treetune.config.structs import to_plain
from treetune.errors import UsageError
from treetune.serve import name_public_address
from treetune.system.access import Access, is_loopback
from treetune.system.screen import Screen
from treetune.view import Calls, RunList, ViewServer, write_report

_HERE = Path("runs")
_PORT = 7800


def view_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(help="Runs, or folders that contain runs. Default: ./runs.", metavar="RUN|DIR"),
    ] = None,
    port: Annotated[int | None, option("The port. Default: 7800, or a free one.", min=0, max=65535)] = None,
    host: Annotated[
        str, option("The host to listen on. If other machines can reach it, the printed address contains a token.")
    ] = "127.0.0.1",
    no_browser: Annotated[bool, option("Print the address without opening a browser.", "--no-browser")] = False,
    export: Annotated[
        Path | None, option("Instead, write one self-contained page of up to 20 MB: --export report.html.")
    ] = None,
    where: Annotated[
        str | None, option("With --export: only rollouts that match a query, such as 'reward<0.5 & source=gsm8k'.")
    ] = None,
    tokenizer: Annotated[
        str | None, option("A tokenizer, by folder or name, for the texts of tokens (extra `local`).")
    ] = None,
    json: Annotated[
        bool, option("Print one JSON object on standard output: the address, or what was exported.", "--json")
    ] = False,
) -> int:
    """View runs in the browser: groups of rollouts, messages and rewards, tokens, changes between two runs.

    treetune view                      # all runs below ./runs
    treetune view runs/a runs/b        # two of them, to compare
    treetune view runs/a --export report.html --where failed

    Runs that are still being written are followed. Nothing leaves this machine, and model text is never executed. Marks
    and comments are stored in marks.jsonl, next to the run. From another machine: ssh -L 7800:127.0.0.1:7800 HOST.
    """
    if not paths and not _HERE.is_dir():
        raise UsageError("no folder `runs` here", remedy="name a run: treetune view PATH")
    if where is not None and export is None:
        raise UsageError("--where requires --export", remedy="in the browser, write the query at the top of the page")
    runs = RunList(paths or [_HERE])
    if export is not None:
        return _export(Calls(runs, tokenizer), export, where or "", json)
    token = None if is_loopback(host) else os.environ.get("TREETUNE_TOKEN") or secrets.token_urlsafe(24)
    server = ViewServer(runs, Access(token=token), tokenizer)
    uvloop.run(_serve(server, host, port, token, no_browser, json))
    return 0


def _export(calls: Calls, path: Path, where: str, json: bool) -> int:
    made = write_report(calls, path, where)
    if json:
        print_json(to_plain(made))
    else:
        Screen().say(f"{path}: {made.rollouts:,} rollouts, {made.size / 1e6:.1f} MB")
        if made.note is not None:
            Screen().say(made.note, style="yellow")
    return 0


async def _serve(
    server: ViewServer, host: str, port: int | None, token: str | None, no_browser: bool, json: bool
) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = name_public_address(await _start(server, f"[{host}]" if ":" in host else host, port))
    url = f"{address}/" + (f"#token={token}" if token is not None else "")
    if json:
        print_json({"address": url})
    else:
        Screen().say(f"{url}   (Ctrl-C to quit)")
    if not no_browser and _has_screen():
        with contextlib.suppress(webbrowser.Error):
            await asyncio.to_thread(webbrowser.open, url)
    await stopped.wait()
    await server.close()


async def _start(server: ViewServer, host: str, port: int | None) -> str:
    try:
        return await server.start(f"{host}:{_PORT if port is None else port}")
    except UsageError:
        if port is not None:
            raise
        return await server.start(f"{host}:0")  # another viewer uses the default port


def _has_screen() -> bool:
    """Whether a browser can open a window; without a display, a text browser may take over the terminal."""
    return sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
