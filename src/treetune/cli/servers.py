"""`treetune list --servers`: the servers of a register, each asked how it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.serve.health import Found
    from treetune.serve.register import Seen

_COLOURS = {"ok": "green", "stopping": "yellow", "elsewhere": "yellow", "no answer": "red", "gone": "dim"}


def list_servers(place: str | None, timeout: float, json: bool) -> None:
    import asyncio
    import os

    from treetune.cli.output import console_for, print_json
    from treetune.errors import UsageError
    from treetune.serve.health import ask_all
    from treetune.serve.register import open_register

    place = place or os.environ.get("TREETUNE_SERVERS")
    if not place:
        raise UsageError("which register?", remedy="treetune list --servers FOLDER_OR_URL, or set TREETUNE_SERVERS")
    register = open_register(place, os.environ.get("TREETUNE_REGISTER_TOKEN") or None, make=False)

    async def look() -> list[tuple[Seen, Found]]:
        seen = await register.entries()
        return list(zip(seen, await ask_all(seen, timeout), strict=True))

    found = asyncio.run(look())
    if json:
        print_json({"register": place, "servers": [_as_json(*one) for one in found]})
        return
    from rich.table import Table
    from rich.text import Text

    console = console_for(False)
    if not found:
        console.print(Text(f"no servers in {place}; one joins with treetune serve ... --register {place}"))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("name", "address", "tasks", "episodes", "health", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "address")  # one that is cut is none
    for seen, health in found:
        entry = seen.entry
        table.add_row(
            Text(_printable(entry.name)),
            Text(_printable(" ".join(filter(None, [entry.url, entry.zmq])))),
            Text("endless" if entry.num_tasks is None else f"{entry.num_tasks:,}"),
            Text("" if health.episodes is None else f"{health.episodes:,}"),
            Text(health.state, style=_COLOURS[health.state]),
            Text(_printable(", ".join(filter(None, ["needs a token" if entry.needs_token else "", health.detail])))),
        )
    console.print(table)


def _as_json(seen: Seen, health: Found) -> dict[str, Any]:
    import msgspec

    return {
        **msgspec.to_builtins(seen.entry),
        "health": health.state,
        "episodes": health.episodes,
        "detail": health.detail,
        "seconds_since_heard": round(seen.age, 1),
    }


def _printable(text: str) -> str:
    """What others wrote into the register may not steer the terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
