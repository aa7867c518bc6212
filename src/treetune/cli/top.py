"""Inspects a running server: `treetune top` shows its live figures; `treetune probe` tests it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Annotated, Any

import msgspec
import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from treetune import serve
from treetune.cli.options import Json, Token, option
from treetune.cli.output import make_table, print_json
from treetune.errors import UsageError, plural
from treetune.evaluation import find_served
from treetune.system.screen import Screen
from treetune.tasksets.target import is_server, load_taskset


def top_command(
    address: Annotated[
        str, typer.Argument(help="The address of a running server: tcp://127.0.0.1:5555, http://127.0.0.1:5000.")
    ],
    token: Token = None,
    server_key: Annotated[str | None, option("The key of an encrypted server.", envvar="TREETUNE_SERVER_KEY")] = None,
    once: Annotated[bool, option("Show the figures once and exit.", "--once")] = False,
    every: Annotated[float, option("Seconds between updates.")] = 1.0,
    deadline: Annotated[float, option("Timeout for an answer, in seconds.")] = 10.0,
    json: Json = False,
) -> int:
    """Watch a running server: tasks handed out, work in progress, rewards and errors."""
    served = find_served(load_taskset(address)) if is_server(address) else None
    if served is None:
        raise UsageError(f"cannot connect to {address!r}", remedy="write tcp://HOST:PORT or http://HOST:PORT")
    served.token, served.server_key, served.deadline = token, server_key, deadline
    screen = Screen(json)

    async def watch() -> None:
        async with aclosing(served):
            before = await served.stats()
            if json:
                return print_json(before)
            if once or not screen.is_terminal:
                return screen.print(_make_table(address, before, before))
            with Live(_make_table(address, before, before), console=screen, screen=True) as live:
                while True:
                    await asyncio.sleep(every)
                    now = await served.stats()
                    live.update(_make_table(address, now, before))
                    before = now

    asyncio.run(watch())
    return 0


def _make_table(address: str, now: dict[str, Any], before: dict[str, Any]) -> Table:
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
        int, option("The task to play; -1: the next in the server's order, which then moves on.")
    ] = 0,
    action: Annotated[str, option("The answer in each step.")] = "42",
    turns: Annotated[int, option("The most steps of the episode.", min=1)] = 3,
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
