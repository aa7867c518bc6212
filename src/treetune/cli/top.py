"""`treetune top`: a running server, live."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from treetune.serve.http.transport import HttpTransport


def top_command(
    address: Annotated[
        str, typer.Argument(help="The address of a `treetune serve`: tcp://127.0.0.1:5555, http://127.0.0.1:5000.")
    ],
    token: Annotated[str | None, typer.Option(envvar="TREETUNE_TOKEN", help="The server's token.")] = None,
    server_key: Annotated[
        str | None, typer.Option(envvar="TREETUNE_SERVER_KEY", help="The public key of an encrypted server.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Look at a running server: what it gave out, what is under way, rewards and errors."""
    import asyncio

    from treetune.cli.output import console_for, print_json

    console = console_for(json)

    async def watch() -> None:
        async with _open_stats(address, token, server_key, deadline) as look:
            before = await look()
            if json:
                print_json(before)
                return
            if once or not console.is_terminal:
                console.print(_make_table(address, before, before))
                return
            from rich.live import Live

            with Live(_make_table(address, before, before), console=console, screen=True) as live:
                while True:
                    await asyncio.sleep(every)
                    now = await look()
                    live.update(_make_table(address, now, before))
                    before = now

    asyncio.run(watch())
    return 0


@asynccontextmanager
async def _open_stats(
    address: str, token: str | None, server_key: str | None, deadline: float
) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
    """What gives the figures of the server at an address, whichever door it is."""
    if address.startswith(("http://", "https://")):
        from treetune.serve.http.transport import HttpTransport

        async with HttpTransport(address, token) as transport:
            yield lambda: _read_stats(transport, deadline)
        return
    from treetune.serve.zmq.client import EnvClient

    async with EnvClient(address, token=token, server_key=server_key, deadline=deadline) as client:
        yield client.stats


async def _read_stats(transport: HttpTransport, deadline: float) -> dict[str, Any]:
    from treetune.serve.errors import ServeError

    reply = await transport.ask("GET", "/metrics", None, deadline)
    if reply.status == 404:
        raise ServeError(f"{transport.url} shows no /metrics", remedy="`treetune serve TARGET --http :PORT` does")
    return reply.read(dict[str, Any])


def _make_table(address: str, now: dict[str, Any], before: dict[str, Any]) -> Table:
    """One look at a server, with rates since the look before."""
    from rich.table import Table
    from rich.text import Text

    seconds = now["uptime"] - before["uptime"]

    def rate(method: str) -> str:
        if seconds <= 0:
            return ""
        more = now["requests"].get(method, 0) - before["requests"].get(method, 0)
        return f"  {more / seconds:,.0f}/s"

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))

    def row(name: str, value: str) -> None:
        table.add_row(Text(name, style="bold"), Text(value))

    row(now["name"], f"{address}, up {now['uptime']:,.0f} s")
    row("under way", f"{now['in_flight']:,} of {now['capacity']:,}, {now['episodes']:,} of them episodes")
    if "http_episodes" in now:
        row("HTTP episodes", f"{now['http_episodes']:,} live")
    if now["workers"]:
        loads = f" (loads {' '.join(map(str, now['loads']))})" if "loads" in now else ""
        row("workers", f"{now['workers']}{loads}, {now['replaced_workers']} replaced, {now['queue']} waiting")
    for method, count in sorted(now["requests"].items()):
        mean = now["seconds"].get(method, 0.0) / count if count else 0.0
        row(method, f"{count:,}{rate(method)}" + (f"  {mean:.2f} s each" if mean >= 0.01 else ""))
    for name in sorted(key for key in now if key.startswith("cursor:")):
        row(f"cursor {name.removeprefix('cursor:')}".rstrip(), f"{now[name]:,}")
    for source, found in sorted(now["sources"].items()):
        reward = "" if found["mean_reward"] is None else f", mean reward {found['mean_reward']:.3f}"
        row(source, f"{found['tasks']:,} tasks, {found['share']:.0%}{reward}")
    for name in ("outcomes", "errors"):
        if now[name]:
            row(name, "  ".join(f"{kind}: {count:,}" for kind, count in sorted(now[name].items())))
    if now["malformed"]:
        row("malformed", f"{now['malformed']:,}")
    return table
