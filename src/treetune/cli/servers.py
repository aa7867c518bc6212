"""Running servers: `treetune top` shows the live figures of a server, `treetune probe` tests one, and `treetune
register` runs a register of servers, for `treetune serve --register` and `treetune list --register`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from functools import partial
from typing import Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treetune import serve
from treetune.cli.options import Json, JsonWhenReady, OpenAccess, Token, option
from treetune.cli.output import make_table, print_json
from treetune.errors import UsageError, plural
from treetune.evaluation import find_served
from treetune.gateway import is_gateway, list_sessions
from treetune.play.protocol import Info
from treetune.system.access import Access
from treetune.system.screen import Screen
from treetune.tasksets.target import is_server, load_taskset

_MOST_SESSIONS = 20
"""How many sessions of a gateway are shown."""


def top_command(
    address: Annotated[
        str, typer.Argument(help="The address of a running server or gateway: tcp://127.0.0.1:5555, http://...")
    ],
    token: Token = None,
    server_key: Annotated[str | None, option("The key of an encrypted server.", envvar="TREETUNE_SERVER_KEY")] = None,
    once: Annotated[bool, option("Show the figures once and exit.", "--once")] = False,
    every: Annotated[float, option("Seconds between updates.")] = 1.0,
    deadline: Annotated[float, option("Timeout for an answer, in seconds.")] = 10.0,
    json: Json = False,
) -> int:
    """Watch a running server: tasks handed out, work in progress, rewards and errors; or a gateway and its sessions."""
    if is_gateway(address):
        return _watch_gateway(address, token, every, once, json)
    served = find_served(load_taskset(address)) if is_server(address) else None
    if served is None:
        raise UsageError(f"cannot connect to {address!r}", remedy="write tcp://HOST:PORT or http://HOST:PORT")
    served.token, served.server_key, served.deadline = token, server_key, deadline

    async def watch() -> None:
        async with aclosing(served):
            await _watch(served.stats, partial(make_servers_table, address), every, once, json)

    asyncio.run(watch())
    return 0


def _watch_gateway(address: str, token: str | None, every: float, once: bool, json: bool) -> int:
    async def ask() -> dict[str, Any]:
        return {**await asyncio.to_thread(list_sessions, address, token), "uptime": time.monotonic()}

    asyncio.run(_watch(ask, partial(make_gateway_table, address), every, once, json))
    return 0


async def _watch(
    ask: Callable[[], Awaitable[dict[str, Any]]],
    make: Callable[[dict[str, Any], dict[str, Any]], Table],
    every: float,
    once: bool,
    json: bool,
) -> None:
    """Show figures, and update them. `make` takes them and the previous ones."""
    screen, before = Screen(json), await ask()
    if json:
        return print_json(before)
    if once or not screen.is_terminal:
        return screen.print(make(before, before))
    with Live(make(before, before), console=screen, screen=True) as live:
        while True:
            await asyncio.sleep(every)
            now = await ask()
            live.update(make(now, before))
            before = now


def make_gateway_table(address: str, now: dict[str, Any], before: dict[str, Any]) -> Table:
    """The figures of a gateway, and its busiest sessions."""
    seconds, sessions = now["uptime"] - before["uptime"], now["sessions"]
    rows = [("gateway", address), ("under way", f"{now['calls_under_way']:,} calls, {len(sessions):,} sessions open")]
    if now["paused"]:
        rows.append(("weights", "paused: calls wait"))
    for name, count in now["counts"].items():
        rate = f"  {(count - before['counts'].get(name, 0)) / seconds:,.0f}/s" if seconds > 0 else ""
        rows.append((name.replace("_", " "), f"{count:,}{rate}"))
    for one in sorted(sessions, key=lambda one: -one["counts"].get("calls", 0))[:_MOST_SESSIONS]:
        tokens = one["counts"].get("prompt_tokens", 0) + one["counts"].get("completion_tokens", 0)
        over = f", over: {one['over']}" if one["over"] else ""
        rows.append((one["key"][:8], f"{one['counts'].get('calls', 0):,} calls, {tokens:,} tokens{over}"))
    return make_table((Text(name, style="bold"), value) for name, value in rows)


def make_servers_table(address: str, now: dict[str, Any], before: dict[str, Any]) -> Table:
    """The figures of a server, with rates since the previous ones."""
    seconds = now["uptime"] - before["uptime"]
    rows = [
        (now["name"], f"{address}, up {now['uptime']:,.0f} s"),
        ("under way", f"{now['in_flight']:,} of {now['capacity']:,}, {now['episodes']:,} of them episodes"),
    ]
    if "http_episodes" in now:
        rows.append(("HTTP episodes", f"{now['http_episodes']:,} live"))
    if now["workers"]:
        loads = f" (loads {' '.join(map(str, now['loads']))})" if "loads" in now else ""
        workers = f"{now['workers']}{loads}, {now['replaced_workers']} replaced, {now['queue']} waiting"
        rows.append(("workers", workers))
    for method, count in sorted(now["requests"].items()):
        more = count - before["requests"].get(method, 0)
        rate = f"  {more / seconds:,.0f}/s" if seconds > 0 else ""
        mean = now["seconds"].get(method, 0.0) / count if count else 0.0
        rows.append((method, f"{count:,}{rate}" + (f"  {mean:.2f} s each" if mean >= 0.01 else "")))
    for name in sorted(key for key in now if key.startswith("cursor:")):
        rows.append((f"cursor {name.removeprefix('cursor:')}".rstrip(), f"{now[name]:,}"))
    if now["leases"] or now["expired_leases"]:
        again = f"{now['expired_leases']:,} expired and were handed out again"
        rows.append(("on a lease", f"{plural(now['leases'], 'task')}; {again}"))
    if "version" in now or now.get("paused_models"):
        paused = f"; {now['paused_models']:,} models paused" if now.get("paused_models") else ""
        rows.append(("weights", f"version {now.get('version', 'unknown')}{paused}"))
    if now.get("counts"):
        counted = (f"{name.replace('_', ' ')}: {count:,}" for name, count in sorted(now["counts"].items()))
        rows.append(("as asked for", "  ".join(counted)))
    if now["skipped_draws"]:
        rows.append(("skipped", f"{now['skipped_draws']:,} draws whose tasks could not be made; see the log"))
    for source, found in sorted(now["sources"].items()):
        reward = "" if found["mean_reward"] is None else f", mean reward {found['mean_reward']:.3f}"
        ended = "".join(f", {outcome} {count:,}" for outcome, count in sorted(found["outcomes"].items()))
        rows.append((source, f"{plural(found['tasks'], 'task')}, {found['share']:.0%}{ended}{reward}"))
    for name in ("outcomes", "errors"):
        if now[name]:
            rows.append((name, "  ".join(f"{kind}: {count:,}" for kind, count in sorted(now[name].items()))))
    if "traces_kept" in now:
        rows.append(("traces", f"{now['traces_kept']:,} kept, {now['traces_lost']:,} lost"))
    if now["malformed"]:
        rows.append(("malformed", f"{now['malformed']:,}"))
    return make_table((Text(name, style="bold"), value) for name, value in rows)


def probe_command(
    url: Annotated[str, typer.Argument(help="The address of a task server, such as http://127.0.0.1:5000.")],
    token: Token = None,
    task_index: Annotated[
        int, option("The task to play; -1: the next in the server's order, which then advances.")
    ] = 0,
    action: Annotated[str, option("The action to send in each step.")] = "42",
    turns: Annotated[int, option("The maximum number of steps in the episode.", min=1)] = 3,
    timeout: Annotated[float, option("Timeout of each request, in seconds.")] = 30.0,
    json: Json = False,
) -> int:
    """Test a running task server: health, info, one episode, timings, a verdict.

    Exit code 0: good; 1: faults; 3: no answer.
    """
    url = url if "://" in url else f"http://{url}"
    index = task_index if task_index >= 0 else None
    probing = serve.probe(url, token=token or None, task_index=index, action=action, turns=turns, timeout=timeout)
    report = asyncio.run(probing)
    screen = Screen(json)
    colours = {"good": "green", "absent": "yellow", "fault": "red"}
    rows = []
    for check in report.checks:
        spent = f"{1000 * check.seconds:.1f} ms" if check.seconds is not None else ""
        rows.append((check.name, Text(check.state, style=colours[check.state]), spent, check.detail))
    screen.print(make_table(rows))
    screen.say(f"{report.url}: {report.verdict}", style="bold")
    if json:
        print_json({**msgspec.structs.asdict(report), "good": report.good, "verdict": report.verdict})
    return 0 if report.good else 1


# The register


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
    server = serve.RegisterServer(http, Access(token=token or None, open=open_access))

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
        raise UsageError(
            f"{advertise!r} is not an address", remedy="write http://HOST:PORT, without a password"
        ) from None
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
