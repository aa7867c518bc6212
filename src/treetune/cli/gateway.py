"""`treetune gateway`: a model server for agents that records every token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
import uvloop

from treetune.cli.gateway_verify import verify_command
from treetune.cli.options import JsonWhenReady, option, read_overrides
from treetune.cli.output import print_json
from treetune.config.interpolation import with_overrides
from treetune.config.structs import convert
from treetune.core.policy import Sampling
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import UsageError
from treetune.gateway import Gateway, GatewayServer, HttpSampler, SessionLimits

if TYPE_CHECKING:
    from treetune.gateway.workers import GatewayPool

log = logging.getLogger("treetune.gateway")
gateway_app = typer.Typer()
gateway_app.command("verify")(verify_command)


@gateway_app.callback(invoke_without_command=True)
def gateway_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        option(
            "Required: the model's folder or name on the hub, with its tokenizer and chat template.", "-m", "--model"
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        option("The engine that samples: http://HOST:PORT/v1. Default: this process (extra `local`)."),
    ] = None,
    served_name: Annotated[
        str | None, option("The model's name at the engine. Default: the first that the engine lists.")
    ] = None,
    api_key_env: Annotated[str | None, option("The environment variable with the engine's key.")] = None,
    timeout: Annotated[float, option("Seconds that the engine may take for one call.", min=0.001)] = 600.0,
    http: Annotated[
        str, option("The address to listen on: HOST:PORT, or :PORT for this machine only; port 0 is a free one.")
    ] = "127.0.0.1:8600",
    token: Annotated[
        str | None,
        option(
            "The token that opens and reads sessions. Default: a new one, which is printed.",
            envvar="TREETUNE_TOKEN",
        ),
    ] = None,
    rewrites: Annotated[
        str,
        option("If the template drops reasoning from earlier answers: `keep` their tokens, or `split` the sequence."),
    ] = "keep",
    call_format: Annotated[
        str | None, option("How the model writes tool calls, if its chat template does not show it: hermes, ...")
    ] = None,
    workers: Annotated[
        int, option("The number of processes. Each has a port after that of --http.", "-w", "--workers", min=1)
    ] = 1,
    engine: Annotated[str, option("Where -w processes run: processes, or ray.")] = "processes",
    json: JsonWhenReady = False,
) -> int | None:
    """Serve a model to agents, and record exactly which tokens each was given and which were sampled.

    The gateway speaks OpenAI's chat completions, responses and completions, Anthropic's messages and Google's
    generateContent, so that any agent can use it. To open a session for one rollout of an agent:

    curl -X POST http://127.0.0.1:8600/sessions -H "Authorization: Bearer TOKEN"

    The answer has its `key`, and the `environment` of the agent: OPENAI_BASE_URL, ANTHROPIC_BASE_URL, ... Then GET
    /sessions/KEY returns the trace: sequences of tokens with masks and logprobs, ready to train on. DELETE also ends
    the session. Settings of all sessions are written with dots: --limits.calls 50, --sampling.temperature 1.0 (it
    overrides what the agent asks for), --template.enable_thinking false (an argument of the chat template).

    `treetune gateway verify RUN` checks the tokens of a run.
    """
    if context.invoked_subcommand is not None:
        return None
    if model is None:
        raise UsageError("no model given", remedy="pass -m PATH: a folder, or a name on the hub")
    data = with_overrides({}, read_overrides(context))
    limits = convert(data.get("limits"), SessionLimits, path="limits", source="the options")
    sampling = convert(data.get("sampling"), Sampling, path="sampling", source="the options")
    if rewrites not in ("keep", "split"):
        raise UsageError(f"--rewrites is `keep` or `split`, not {rewrites!r}")
    key = os.environ.get(api_key_env) if api_key_env is not None else None
    if api_key_env is not None and not key:
        raise UsageError(f"the environment variable {api_key_env} is not set")
    if (workers > 1 or engine != "processes") and upstream is None:
        raise UsageError("-w needs an engine for all processes", remedy="add --upstream http://HOST:PORT/v1")
    make = partial(
        _make_gateway,
        model,
        None if upstream is None else partial(HttpSampler, upstream, served_name, api_key=key, seconds=timeout),
        name=served_name or model,
        rewrites=rewrites,
        call_format=call_format,
        arguments=data.get("template"),
        limits=limits,
        sampling=sampling,
    )
    chosen = token or secrets.token_urlsafe(24)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    gateway = make()
    server: GatewayServer | GatewayPool = GatewayServer(gateway, http, token=chosen)
    if workers > 1 or engine != "processes":
        from treetune.gateway.workers import GatewayPool

        server = GatewayPool(make, workers, http, token=chosen, engine=engine)
    uvloop.run(_serve(server, None if token else chosen, json))
    return 0


def _make_gateway(model: str, make_sampler: Callable[[], HttpSampler] | None, **options: Any) -> Gateway:
    if make_sampler is not None:
        sampler = make_sampler()  # its faults are cheaper to find
        return Gateway(load_tokenizer(model), sampler, **options)
    from treetune.gateway.local_model import LocalSampler
    from treetune.models.local import LocalPolicy

    policy = LocalPolicy(model)
    return Gateway(policy.tokenizer, LocalSampler(policy), **options)


async def _serve(server: GatewayServer | GatewayPool, token: str | None, json: bool) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    if isinstance(server, GatewayServer):
        await server.gateway.connect()
    url = await server.start()
    found: dict[str, Any] = {"url": url, "pid": os.getpid()}
    if json:
        print_json({**found, "token": token} if token is not None else found)
    else:
        sys.stderr.write(f"gateway at {url}\n")
        if token is not None:
            sys.stderr.write(f"the token that opens sessions: {token}\n")
    await asked.wait()
    log.info("stopping: calls under way are cancelled")
    with contextlib.suppress(asyncio.CancelledError):
        await server.close()
