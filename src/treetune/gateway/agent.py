"""An `AgentPolicy` has a program answer tasks: an agent that was not written for Treetune, behind a gateway.

    policy = AgentPolicy("python my_agent.py", load_policy("local:model", taskset))

The program runs on this machine, in a folder of its own. `TREETUNE_TASK` names a file with the problem; the variables
of the SDKs (`OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL`, ...) lead to its session. What it prints is the
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from treetune.chat.message import text_of
from treetune.core.policy import Completion, Policy, Request, Sampling, Usage
from treetune.errors import PolicyError, UsageError
from treetune.gateway.call import Call
from treetune.gateway.gateway import Gateway
from treetune.gateway.server import GatewayServer, list_variables
from treetune.gateway.session import Session

MOST_BYTES = 1 << 20
"""The maximum size of an answer; what a program prints after that is ignored."""
_SHOWN = 1500
"""How many characters of a program's errors a warning shows."""
_SECRETS = ("API_KEY", "_TOKEN", "_SECRET")
"""Variables with these endings are not passed on to agents."""


def read_command(agent: str) -> list[str]:
    """The command of an agent: a Python file, or a command line. Raises UsageError if it cannot be started."""
    try:
        words = shlex.split(agent)
    except ValueError as error:
        raise UsageError(f"the agent {agent!r} is not a command: {error}") from None
    if not words:
        raise UsageError("no agent given", remedy="--agent my_agent.py, or --agent 'COMMAND ARGUMENTS'")
    if words[0].endswith(".py"):
        if not Path(words[0]).is_file():
            raise UsageError(f"there is no file {words[0]}")
        words = [sys.executable, *words]
    if shutil.which(words[0]) is None:
        raise UsageError(f"there is no program {words[0]!r}", remedy="name a Python file, or a program on the PATH")
    return [str(Path(word).absolute()) if Path(word).is_file() else word for word in words]


class AgentPolicy(Policy):
    def __init__(self, agent: str, policy: Policy) -> None:
        """The `policy` answers the calls of the agent. Tokens are recorded if it is a local model."""
        self.name = policy.name
        self._command, self._policy = read_command(agent), policy
        self._server: GatewayServer | None = None
        self._starting = asyncio.Lock()
        self._url = ""

    async def complete(self, request: Request) -> Completion:
        gateway = await self._start()
        session = gateway.open(sampling=request.sampling, answerer=_Answers(self._policy, request))
        try:
            ended = await self._run(request, session)
        finally:
            gateway.drop(session)
        if session.failed:
            raise PolicyError(f"the model failed to answer the agent: {', '.join(sorted(session.failures))}")
        warnings = []
        if ended.code:
            warnings.append(": ".join(filter(None, [f"the agent ended with exit code {ended.code}", ended.errors])))
        if not session.counts["calls"]:
            warnings.append("the agent did not call the model")
        usage = Usage(session.counts["prompt_tokens"], session.counts["completion_tokens"])
        tokens = session.tokens()
        return Completion(
            text=ended.output, usage=usage, tokens=tokens if tokens.sequences else None, warnings=warnings
        )

    async def _start(self) -> Gateway:
        async with self._starting:
            if self._server is None:
                from treetune.models.local import LocalPolicy

                if isinstance(self._policy, LocalPolicy):
                    from treetune.gateway.local_model import LocalSampler

                    gateway = Gateway(self._policy.tokenizer, LocalSampler(self._policy), name=self.name)
                else:
                    gateway = Gateway(None, None, name=self.name)
                self._server = GatewayServer(gateway, token=secrets.token_urlsafe(24))
                self._url = await self._server.start()
        return self._server.gateway

    async def _run(self, request: Request, session: Session) -> _Ended:
        with tempfile.TemporaryDirectory(prefix="treetune-agent-") as folder:
            task = Path(folder) / "task.md"
            task.write_text("\n\n".join(text_of(message.get("content")) or "" for message in request.messages))
            work = Path(folder) / "work"
            work.mkdir()
            environment = {name: value for name, value in os.environ.items() if not name.endswith(_SECRETS)}
            environment |= {**list_variables(self._url, session.key), "TREETUNE_TASK": str(task)}
            return await _run_program(self._command, work, environment)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
        await self._policy.close()


class _Ended(NamedTuple):
    code: int
    output: str
    errors: str
    """The end of what it wrote to standard error."""


async def _run_program(command: list[str], folder: Path, environment: Mapping[str, str]) -> _Ended:
    """Run a program to its end. All of its processes are killed then, and if this call is cancelled."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    reading = [asyncio.ensure_future(_read(stream)) for stream in (process.stdout, process.stderr)]
    try:
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = await asyncio.gather(*reading)
    return _Ended(code, output.strip(), errors[-_SHOWN:].strip())


async def _read(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end, so that its program is never blocked; keep its beginning."""
    kept = bytearray()
    while part := await stream.read(1 << 16):
        kept += part[: max(0, MOST_BYTES - len(kept))]
    return kept.decode(errors="replace")


class _Answers:
    """Answers the calls of one rollout's agent with a policy that works on messages. Their tokens are unknown."""

    def __init__(self, policy: Policy, request: Request) -> None:
        self._policy, self._request = policy, request

    async def __call__(self, call: Call, sampling: Sampling, number: int) -> Completion:
        asked = self._request
        return await self._policy.complete(
            Request(
                messages=call.messages, sampling=sampling, task=asked.task, turn=number, key=asked.key, tools=call.tools
            )
        )
