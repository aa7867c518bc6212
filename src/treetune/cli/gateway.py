"""`treetune gateway`: a model server for agents that records every token."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import sys
from typing import Annotated, Any

import typer
import uvloop

from treetune.cli.gateway_verify import verify_command
from treetune.cli.options import JsonWhenReady, option, read_overrides
from treetune.cli.output import print_json
from treetune.config.interpolation import with_overrides
from treetune.config.structs import convert
from treetune.core.policy import Sampling
from treetune.data.rows.prompt_lengths import load_tokenizer
from treetune.errors import PolicyError, UsageError
from treetune.gateway import Gateway, GatewayServer, HttpSampler, Sampler, SessionLimits

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
    sampler: Sampler
    if upstream is not None:
        sampler = HttpSampler(upstream, served_name, api_key=key, seconds=timeout)
        tokenizer = load_tokenizer(model)
    else:
        from treetune.gateway.local_model import LocalSampler
        from treetune.models.local import LocalPolicy

        policy = LocalPolicy(model)
        sampler, tokenizer = LocalSampler(policy), policy.tokenizer
    gateway = Gateway(
        tokenizer,
        sampler,
        name=served_name or model,
        rewrites="keep" if rewrites == "keep" else "split",
        call_format=call_format,
        arguments=data.get("template"),
        limits=limits,
        sampling=sampling,
    )
    chosen = token or secrets.token_urlsafe(24)
    server = GatewayServer(gateway, http, token=chosen)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    shown = None if token else chosen
    uvloop.run(_serve(server, sampler, shown, json))
    return 0


async def _serve(server: GatewayServer, sampler: Sampler, token: str | None, json: bool) -> None:
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    if isinstance(sampler, HttpSampler):
        try:
            await sampler.connect()
        except PolicyError as error:
            log.warning("%s; until it answers, calls fail", error.message)
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
    if isinstance(sampler, HttpSampler):
        sampler.close()
