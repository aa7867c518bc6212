"""`treetune serve`: a taskset behind an address, for trainers to pull from or to play episodes over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treetune.cli.options import TasksTarget, Trust
from treetune.serve.http import HttpConfig

if TYPE_CHECKING:
    from treetune.cli.register import Registration
    from treetune.serve.server import EnvServer

_REPORT_SECONDS = 10.0
_HTTP = HttpConfig()


def serve_command(
    context: typer.Context,
    target: TasksTarget,
    zmq: Annotated[
        str | None,
        typer.Option(
            "--zmq",
            help="Where the pull server listens; port 0 takes a free one. Default: tcp://127.0.0.1:5555, or nowhere "
            "where --http is given.",
        ),
    ] = None,
    http: Annotated[
        str | None, typer.Option("--http", help="Where the HTTP episode server listens: HOST:PORT, or :PORT.")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", min=0, max=65535, help="Short for --http :PORT.")] = None,
    max_episodes: Annotated[
        int, typer.Option(help="HTTP episodes that live at once; beyond it: 429.")
    ] = _HTTP.max_episodes,
    episode_idle: Annotated[
        float, typer.Option(help="Seconds until an HTTP episode nobody steps is closed.")
    ] = _HTTP.idle_seconds,
    episode_deadline: Annotated[
        float, typer.Option(help="The most seconds of an HTTP episode.")
    ] = _HTTP.deadline_seconds,
    model: Annotated[
        list[str] | None,
        typer.Option("-m", "--model", help="Who answers; the first where a request names none. May be repeated."),
    ] = None,
    allow_endpoint: Annotated[
        list[str] | None, typer.Option(help="An address that requests may name, such as a trainer's inference server.")
    ] = None,
    workers: Annotated[
        int, typer.Option("-w", "--workers", min=0, help="Worker processes; 0: all in one process.")
    ] = 0,
    max_workers: Annotated[int | None, typer.Option(help="Up to how many when there is much to do.")] = None,
    engine: Annotated[str, typer.Option(help="Where workers run: processes, or ray.")] = "processes",
    capacity: Annotated[
        int | None,
        typer.Option(
            help="Rollouts and episodes under way at once; beyond it the answer is `busy`. Absent: 512, or "
            "--max-episodes where that is more."
        ),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="A folder that keeps cursors and the key: the server goes on after a crash.")
    ] = None,
    accept_changes: Annotated[bool, typer.Option(help="Go on with a --state of other tasks.")] = False,
    key_file: Annotated[Path | None, typer.Option(help="The key of the tasks' seals; made if absent.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="TREETUNE_TOKEN", help="Without it only `health` is answered.")
    ] = None,
    curve_key: Annotated[
        Path | None, typer.Option(help="Encrypt connections with the key in this file, made where there is none.")
    ] = None,
    open_access: Annotated[
        bool, typer.Option("--open", help="Allow an address that other machines can reach without a token.")
    ] = False,
    metrics: Annotated[str | None, typer.Option(help="Show figures to Prometheus at HOST:PORT.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that work under way may take to end on SIGTERM.")] = 30.0,
    register: Annotated[
        str | None,
        typer.Option(envvar="TREETUNE_SERVERS", help="Where `treetune list --servers` finds it: a folder, or a URL."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            envvar="TREETUNE_ADVERTISE", help="The http address to register, where others see it under another one."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Of a config with train_tasks and val_tasks: which list (train, or the only one)."),
    ] = None,
    trust: Trust = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output when it is ready.")] = False,
) -> int:
    """Serve a taskset: clients pull tasks in its order, and have rollouts run here; or play its episodes over HTTP.

    Keys of the config are set with dots: --taskset.shuffle.seed 0, --limits.timeout 600,
    --endpoint.base_url http://127.0.0.1:8000/v1
    """
    import logging

    import uvloop

    from treetune.cli.hosts import refuse_unservable
    from treetune.cli.options import TASKS, read_overrides
    from treetune.cli.register import open_registration
    from treetune.config import convert
    from treetune.episode import Limits
    from treetune.errors import UsageError
    from treetune.policies import EndpointConfig
    from treetune.serve.access import Access
    from treetune.serve.host import ModelsConfig
    from treetune.serve.http.door import HttpDoor, MetricsDoor
    from treetune.serve.server import Door, EnvServer, ServerConfig
    from treetune.serve.zmq.door import ZmqDoor
    from treetune.target import build_taskset, read_target, refuse_server

    refuse_server(target, "serve")
    overrides = read_overrides(context, (*TASKS, "limits", "endpoint"), trust=trust)
    data = read_target(target, overrides, split, "train")
    endpoint = convert(data.get("endpoint"), EndpointConfig, path="endpoint", raw=overrides, source=target)
    limits = convert(data.get("limits"), Limits, path="limits", raw=overrides, source=target)
    names = model or ([str(data["model"])] if data.get("model") else [])
    models = ModelsConfig(
        model=names[0] if names else None,
        endpoint=endpoint,
        models={name: endpoint for name in names[1:]},
        allowed_endpoints=[
            convert({"base_url": url}, EndpointConfig, path="--allow-endpoint") for url in allow_endpoint or []
        ],
    )
    if http is None and port is not None:
        http = f"127.0.0.1:{port}"
    elif port is not None:
        raise UsageError("--http and --port are the same", remedy="pass one of them")
    doors: list[Door] = [MetricsDoor(metrics)] if metrics is not None else []  # shows figures to the very end
    if zmq is not None or http is None:
        doors.append(ZmqDoor() if zmq is None else ZmqDoor(zmq))
    if http is not None:
        episodes = {
            "address": http,
            "max_episodes": max_episodes,
            "idle_seconds": episode_idle,
            "deadline_seconds": episode_deadline,
        }
        doors.append(HttpDoor(convert(episodes, HttpConfig, source="the options")))
    registration = open_registration(register, advertise)
    settings: dict[str, Any] = {
        "capacity": capacity,
        "drain_seconds": drain,
        "state": state,
        "key_file": key_file,
        "accept_changes": accept_changes,
    }
    config = convert(settings, ServerConfig, source="the options")
    access = Access(token=token or None, curve_key=curve_key, open=open_access)
    config = _with(config, access=access, limits=limits)
    taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    refuse_unservable(taskset)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    if workers or max_workers or engine != "processes":
        server = _pool(taskset, config, models, max(1, workers), max_workers, engine, doors)
    else:
        server = EnvServer(taskset, config, models, doors=doors)
    uvloop.run(_serve(server, json, registration))
    return 0


def _with(config: Any, **changes: Any) -> Any:
    import msgspec

    return msgspec.structs.replace(config, **changes)


def _pool(
    taskset: Any, config: Any, models: Any, workers: int, max_workers: int | None, engine: str, doors: Any
) -> EnvServer:
    from treetune.config import convert
    from treetune.errors import UsageError
    from treetune.serve.pool.broker import EnvServerPool
    from treetune.serve.pool.worker import load_engine
    from treetune.serve.pool.workers import PoolConfig

    if max_workers is not None and max_workers < workers:
        raise UsageError(f"--max-workers {max_workers} is less than --workers {workers}")
    pool = convert({"workers": workers, "max_workers": max_workers}, PoolConfig, source="the options")
    return EnvServerPool(taskset, config, models, pool, load_engine(engine), doors=doors)


async def _serve(server: EnvServer, json: bool, registration: Registration | None = None) -> None:
    import asyncio
    import contextlib
    import logging
    import os
    import signal

    from treetune.cli.output import print_json
    from treetune.cli.register import register_server

    log = logging.getLogger("treetune.serve")
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def stop() -> None:
        if asked.is_set():
            os._exit(130)  # asked twice: at once
        log.info("stopping: no new work; what is under way may end (%g s)", server.config.drain_seconds)
        asked.set()

    starting = asyncio.ensure_future(server.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stop() if starting.done() else starting.cancel())
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    if starting.cancelled():
        return
    info = server.info()
    size = "endless" if info.num_tasks is None else f"{info.num_tasks:,} tasks"
    at = server.addresses
    doors = " and ".join(at[kind] for kind in ("zmq", "http") if kind in at)
    log.info("serving %s (%s) at %s, cursor %d", info.name, size, doors, info.cursor)
    key = server.public_key.decode() if server.public_key is not None else None
    if key is not None:
        log.info("encrypted; the key that clients need: %s", key)
    if server.config.state is None:
        log.info("without --state the cursor is lost when this server ends")
    if json:
        found = {"address": at.get("zmq", ""), "http": at.get("http"), "pid": os.getpid(), "server_key": key}
        print_json({**found, "metrics": at.get("metrics")})
    reporter = asyncio.create_task(_report(server, log))
    async with register_server(registration, server, info):
        await asked.wait()
        reporter.cancel()
        await server.stop()
    log.info("stopped; the next index is %d", server.streams.cursor())


async def _report(server: EnvServer, log: Any) -> None:
    """A line now and then while something happens."""
    import asyncio

    before: Any = None
    while True:
        await asyncio.sleep(_REPORT_SECONDS)
        stats = server.metrics.stats()
        now = (stats["requests"], stats["in_flight"], stats.get("http_episodes", 0))
        if now != before:
            before = now
            log.info("%s", summary(stats))


def summary(stats: dict[str, Any]) -> str:
    """A server in one line: both doors together."""
    requests = stats["requests"]
    parts = [
        f"{sum(source['tasks'] for source in stats['sources'].values())} tasks given",
        f"{sum(stats['outcomes'].values())} rollouts ended",
        f"{stats['in_flight']} under way",
    ]
    if "http_episodes" in stats:
        parts.append(f"{stats['http_episodes']} HTTP episodes live")
        parts.append(f"{requests.get('http.step', 0) + requests.get('http.step_stream', 0)} HTTP steps")
    return ", ".join([*parts, f"{sum(stats['errors'].values())} errors"])
