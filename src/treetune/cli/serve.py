"""`treetune serve`: serves a taskset, so that trainers pull tasks or play episodes over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
import uvloop

from treetune import evaluation, serve
from treetune.cli import options
from treetune.cli.options import option, read_overrides
from treetune.cli.output import print_json
from treetune.cli.servers import open_registration
from treetune.cli.supervise import Heartbeat
from treetune.cli.supervise import supervise as run_supervised
from treetune.config.structs import convert, without_none
from treetune.core.contract import Limits
from treetune.core.from_config import build_taskset
from treetune.core.policy import Sampling
from treetune.core.taskset import Taskset
from treetune.errors import ConfigError, MissingExtraError, TreetuneError, UsageError, plural
from treetune.gateway import read_agent
from treetune.loggers import About, RewardCurve, open_loggers
from treetune.models import EndpointConfig, check_reachable
from treetune.runs.rolling import RollingRun
from treetune.system.access import Access
from treetune.tasksets.target import read_target, refuse_server

log = logging.getLogger("treetune.serve")
T = TypeVar("T")
_LOG_FORMAT = "%(asctime)s %(message)s"


def serve_command(
    context: typer.Context,
    target: options.TasksTarget,
    zmq: Annotated[
        str | None, option("The address of the pull server. Default: tcp://127.0.0.1:5555, unless --http is given.")
    ] = None,
    http: Annotated[str | None, option("The address of the HTTP episode server: HOST:PORT, or :PORT.")] = None,
    port: Annotated[int | None, option("Short for --http 127.0.0.1:PORT.", min=0, max=65535)] = None,
    mcp: Annotated[
        bool, option("Serve MCP: over standard input and output or, with --http, at its address under /mcp.")
    ] = False,
    openenv: Annotated[
        str | None, option("The address for clients of OpenEnv and ORS: HOST:PORT, or :PORT; 8000 is usual.")
    ] = None,
    max_episodes: Annotated[
        int | None, option("The maximum number of live HTTP episodes (1024); requests for more get status 429.")
    ] = None,
    episode_idle: Annotated[float | None, option("Seconds after which an idle HTTP episode is closed (300).")] = None,
    episode_deadline: Annotated[
        float | None, option("The maximum duration of an HTTP episode, in seconds (3600).")
    ] = None,
    model: Annotated[
        list[str] | None,
        option("The model that plays rollouts. Repeatable; the first is the default.", "-m", "--model"),
    ] = None,
    agent: options.Agent = None,
    allow_endpoint: Annotated[
        list[str] | None, option("The address of a model server that requests may use. Repeatable.")
    ] = None,
    workers: Annotated[
        int, option("The number of worker processes; 0: serve in one process.", "-w", "--workers", min=0)
    ] = 0,
    max_workers: Annotated[int | None, option("The maximum number of worker processes under load.")] = None,
    engine: Annotated[str, option("Where workers run: processes, or ray.")] = "processes",
    capacity: Annotated[
        int | None, option("The maximum number of concurrent rollouts and episodes (512, or --max-episodes).")
    ] = None,
    state: Annotated[Path | None, option("A folder for cursors and the key, from which the server resumes.")] = None,
    supervise: Annotated[
        bool, option("Restart the server if it crashes or hangs, with the same ports and state.")
    ] = False,
    max_crashes: Annotated[int, option("With --supervise: stop after this many crashes in 10 minutes.", min=1)] = 5,
    accept_changes: Annotated[
        bool, option("Accept a --state folder that is incomplete or belongs to other tasks.")
    ] = False,
    draw_tries: Annotated[int | None, option("The number of attempts to make a task before it is skipped (3).")] = None,
    lease: Annotated[
        float | None, option("Seconds after which an unfinished task is handed out again, unless its lease is renewed.")
    ] = None,
    key_file: Annotated[Path | None, option("The file with the key that signs tasks; created if missing.")] = None,
    token: Annotated[
        str | None, option("The token that clients must send, except for `health`.", envvar="TREETUNE_TOKEN")
    ] = None,
    curve_key: Annotated[
        Path | None, option("Encrypt connections with the key in this file; created if missing.")
    ] = None,
    open_access: options.OpenAccess = False,
    metrics: Annotated[str | None, option("Serve figures for Prometheus at HOST:PORT.")] = None,
    traces: Annotated[Path | None, option("Save every rollout and episode in this run folder.")] = None,
    traces_size: Annotated[
        int, option("The maximum size of --traces in megabytes; the oldest traces are removed.", min=1)
    ] = 4096,
    log_to: options.Log = None,
    drain: Annotated[float | None, option("Seconds that running work may take to finish after SIGTERM (30).")] = None,
    register: Annotated[
        str | None, option("Register the server here: a folder or a URL.", envvar="TREETUNE_SERVERS")
    ] = None,
    advertise: Annotated[
        str | None, option("The http address under which other machines reach it.", envvar="TREETUNE_ADVERTISE")
    ] = None,
    split: options.Split = None,
    trust: options.Trust = False,
    json: options.JsonWhenReady = False,
) -> int:
    """Serve a taskset: clients pull tasks in its order and request rollouts, or play its episodes over HTTP.

    `treetune list --register` shows it in the --register, under the address of --advertise if there is one. Set keys of
    the config with dots: --taskset.shuffle.seed 0, --limits.timeout 600, --sampling.temperature 0.7,
    --endpoint.base_url http://127.0.0.1:8000/v1
    """
    refuse_server(target, "serve")
    if supervise and mcp and http is None and port is None:
        raise UsageError(
            "--supervise does not work with --mcp: the client starts that server", remedy="pass --http too"
        )
    if supervise:
        return _supervise([zmq, http, openenv, metrics, None if port is None else f":{port}"], state, max_crashes, json)
    overrides = read_overrides(context, trust=trust)
    data = read_target(target, overrides, split, "train")
    if faults := evaluation.unknown_keys(data):
        raise ConfigError(faults, source=target)
    endpoint = convert(data.get("endpoint"), EndpointConfig, path="endpoint", raw=overrides, source=target)
    sampling = convert(data.get("sampling"), Sampling, path="sampling", raw=overrides, source=target)
    limits = convert(data.get("limits"), Limits, path="limits", raw=overrides, source=target)
    asked = {key: value for key, value in (data.get("endpoint") or {}).items() if key != "api_key_env"}
    data = options.with_agent(data, agent)
    if data.get("agent") is not None:
        read_agent(data["agent"])
    names = model or ([str(data["model"])] if data.get("model") else [])
    models = serve.ModelsConfig(
        model=names[0] if names else None,
        endpoint=endpoint,
        models={name: endpoint for name in names[1:]},
        sampling=sampling,
        agent=data.get("agent"),
        allowed_endpoints=[
            convert({**asked, "base_url": url}, EndpointConfig, path="--allow-endpoint") for url in allow_endpoint or []
        ],
    )
    if http is not None and port is not None:
        raise UsageError("--http and --port exclude each other", remedy="pass one of them")
    http = f"127.0.0.1:{port}" if port is not None else http
    streams = _take_standard_streams(zmq, json) if mcp and http is None else None
    doors: list[serve.Door] = [serve.MetricsDoor(metrics)] if metrics is not None else []  # runs until the end
    if zmq is not None or (http is None and openenv is None and not mcp):
        doors.append(serve.ZmqDoor() if zmq is None else serve.ZmqDoor(zmq))
    times = {"idle_seconds": episode_idle, "deadline_seconds": episode_deadline}
    if openenv is not None:
        config_openenv = _config(serve.HttpConfig, address=openenv, max_episodes=max_episodes, **times)
        doors.append(serve.OpenEnvDoor(config_openenv, split or "train"))
    if http is not None:
        config_http = _config(serve.HttpConfig, address=http, max_episodes=max_episodes, **times)
        idle, most = config_http.idle_seconds, config_http.max_episodes
        mcp_door = serve.McpDoor(idle_seconds=idle, max_sessions=most) if mcp else None
        doors.append(serve.HttpDoor(config_http, {"/mcp": mcp_door} if mcp_door is not None else {}))
        doors += [mcp_door] if mcp_door is not None else []
    elif streams is not None:
        doors.append(serve.McpDoor(streams, idle_seconds=episode_idle or 3600.0))
    keep_registered = open_registration(register, advertise)
    kept = {"state": state, "key_file": key_file, "accept_changes": accept_changes}
    draws = {"draw_tries": draw_tries, "lease": lease}
    config = _config(serve.ServerConfig, capacity=capacity, drain_seconds=drain, **kept, **draws)
    access = Access(token=token or None, curve_key=curve_key, open=open_access)
    config = msgspec.structs.replace(config, access=access, limits=limits)
    taskset = build_taskset(data["taskset"], raw=overrides, source=target)
    evaluation.refuse_unservable(taskset)
    _warn_of_silent(names, endpoint, taskset)
    kept_traces = None
    if log_to and traces is None:
        raise UsageError("--log requires --traces", remedy="pass --traces DIR too")
    loggers = open_loggers(log_to or ())
    if traces is not None:
        played = evaluation.EvalConfig(
            taskset=data["taskset"], model=models.model or "", sampling=sampling, limits=limits
        )
        served = evaluation.Evaluation(played, taskset)
        kept_traces = RollingRun(traces, served, traces_size << 20)
        evaluation.remember(traces)
        if loggers:
            kept_traces.listener = RewardCurve(loggers, About(traces.name, served.resolved(), traces))
    opened = contextlib.ExitStack()
    if any(name.startswith("vllm:") for name in names):
        from treetune.models.vllm import running

        places = {name: opened.enter_context(running(name, endpoint)) for name in names}
        others = {name: places[name] for name in names[1:]}
        models = msgspec.structs.replace(models, endpoint=places[names[0]], models=others)
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, datefmt="%H:%M:%S")
    parts: dict[str, Any] = {"doors": doors, "traces": kept_traces}
    if workers or max_workers or engine != "processes":
        workers = max(1, workers)
        if max_workers is not None and max_workers < workers:
            raise UsageError(f"--max-workers {max_workers} is less than --workers {workers}")
        pool = _config(serve.PoolConfig, workers=workers, max_workers=max_workers)
        loaded = serve.load_engine(engine)
        server: serve.EnvServer = serve.EnvServerPool(taskset, config, models, pool, loaded, **parts)
    else:
        server = serve.EnvServer(taskset, config, models, **parts)
    with opened:
        uvloop.run(_serve(server, json, keep_registered))
    return 0


def _warn_of_silent(models: list[str], endpoint: EndpointConfig, taskset: Taskset[Any, Any]) -> None:
    """Warns about models and judges that do not answer: a server may be started before they are."""
    checks = [partial(check_reachable, name, endpoint) for name in models]
    for check in [*checks, partial(evaluation.check_judges, taskset)]:
        try:
            check()
        except TreetuneError as error:
            remedy = f" ({error.remedy})" if error.remedy else ""
            warnings.warn(f"{error.message}{remedy}; until it answers, its rollouts fail", stacklevel=2)


def _take_standard_streams(zmq: str | None, json: bool) -> tuple[int, int]:
    """Standard output carries the protocol, so nothing else may be written there."""
    try:
        take = serve.keep_standard_streams
    except ImportError:
        raise MissingExtraError.of("the MCP SDK", "mcp") from None
    if json or zmq is not None:
        problem = f"{'--json' if json else '--zmq'} does not work with --mcp: the MCP client reads standard output"
        raise UsageError(problem, remedy="pass --http too; MCP is then at its address, under /mcp")
    return take()


def _supervise(addresses: list[str | None], state: Path | None, max_crashes: int, json: bool) -> int:
    if any(address is not None and address.endswith(":0") for address in addresses):
        raise UsageError(
            "--supervise does not work with port 0: each start would get another port", remedy="name a port"
        )
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, datefmt="%H:%M:%S")
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--supervise", "--json")]
    show = print_json if json else lambda found: None
    return run_supervised(arguments, state=state, max_crashes=max_crashes, on_ready=show)


def _config(struct: type[T], **settings: Any) -> T:
    """Builds a config from the options that were given."""
    return convert(without_none(settings), struct, source="the options")


async def _serve(server: serve.EnvServer, json: bool, keep_registered: Any) -> None:
    asked, report = asyncio.Event(), Heartbeat.open()

    def stop() -> None:
        if asked.is_set():
            os._exit(130)  # a second signal exits at once
        log.info("stopping: no new work; running work may finish (%g s)", server.config.drain_seconds)
        asked.set()

    loop = asyncio.get_running_loop()
    starting = asyncio.ensure_future(server.start())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: stop() if starting.done() else starting.cancel())
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    if starting.cancelled():
        return
    info = server.info()
    size = "endless" if info.num_tasks is None else plural(info.num_tasks, "task")
    at = server.addresses
    doors = " and ".join(at[kind] for kind in ("zmq", "http", "openenv", "mcp") if kind in at)
    log.info("serving %s (%s) at %s, cursor %d", info.name, size, doors, info.cursor)
    key = server.public_key.decode() if server.public_key is not None else None
    if key is not None:
        log.info("encrypted; the key that clients need: %s", key)
    if server.config.state is None:
        log.info("without --state the cursor is lost when this server ends")
    found = {"address": at.get("zmq", ""), "http": at.get("http"), "pid": os.getpid(), "server_key": key}
    found["metrics"], found["openenv"] = at.get("metrics"), at.get("openenv")
    if json:
        print_json(found)
    async with keep_registered(server, info):
        reporting = asyncio.ensure_future(report.keep_up(found, asked.set)) if report is not None else None
        ended = [door.ended for door in server.doors if door.ended is not None]
        waits = [asyncio.ensure_future(event.wait()) for event in (asked, *ended)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        await server.stop()
        if reporting is not None:
            reporting.cancel()
    log.info("stopped; the next index is %d", server.streams.cursor())
