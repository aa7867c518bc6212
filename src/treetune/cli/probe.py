"""`treetune probe`: test a running task server."""

from __future__ import annotations

from typing import Annotated

import typer


def probe_command(
    url: Annotated[str, typer.Argument(help="The address of a task server, such as http://127.0.0.1:5000.")],
    token: Annotated[str | None, typer.Option(envvar="TREETUNE_TOKEN", help="The server's token.")] = None,
    task_index: Annotated[
        int, typer.Option(help="The task to try; -1: the next in the server's order, which then moves on.")
    ] = 0,
    action: Annotated[str, typer.Option(help="What to answer in each step.")] = "42",
    turns: Annotated[int, typer.Option(min=1, help="How many steps, unless the episode ends before.")] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds for each request.")] = 30.0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> int:
    """Test a running task server: health, info, one episode, timings, a verdict.

    Exit code 0: good; 1: it answers, with faults; 3: nobody answers.
    """
    import asyncio

    import msgspec
    from rich.table import Table
    from rich.text import Text

    from treetune.cli.output import console_for, print_json
    from treetune.serve.http.probe import probe

    url = url if "://" in url else f"http://{url}"
    index = task_index if task_index >= 0 else None
    report = asyncio.run(probe(url, token=token or None, task_index=index, action=action, turns=turns, timeout=timeout))
    console = console_for(json)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    colours = {"good": "green", "absent": "yellow", "fault": "red"}
    for check in report.checks:
        spent = f"{1000 * check.seconds:.1f} ms" if check.seconds is not None else ""
        table.add_row(check.name, Text(check.state, style=colours[check.state]), Text(spent), Text(check.detail))
    console.print(table)
    console.print(Text(f"{report.url}: {report.verdict}", style="bold"))
    if json:
        print_json({**msgspec.structs.asdict(report), "good": report.good, "verdict": report.verdict})
    return 0 if report.good else 1
