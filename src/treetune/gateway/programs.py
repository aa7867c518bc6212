"""Runs the program of an agent, here or on a machine that reaches nothing but the gateway.

ended = await run_here(agent, problem, lambda: list_variables(url, session.key), seconds=600)
ended.answer, ended.code
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from treetune.core.agent import AgentMachine
from treetune.errors import EnvironmentFault, UsageError
from treetune.gateway.agent import AgentConfig
from treetune.sandbox.limits import Ended
from treetune.sandbox.runtime import ENVIRONMENT

MOST_BYTES = 1 << 20
"""The maximum size of an answer; what a program prints after that is ignored."""
SOCKETS = "/run/treetune"
"""Where a machine shows the folder with the gateway's socket."""
SOCKET = "gateway.sock"
_TASK = "/run/task.md"
_SHOWN = 1500
"""How many characters of a program's errors a warning shows."""
_SECRETS = ("API_KEY", "_TOKEN", "_SECRET")
"""Variables with these endings are not passed on to agents."""
_FORWARDER = Path(__file__).with_name("forwarder.py")
Variables = Callable[[str], Mapping[str, str]]
"""The environment variables that lead to a session, for a gateway at this address."""


class ProgramEnded(NamedTuple):
    answer: str
    code: int
    errors: str = ""
    """The end of what it wrote to standard error."""
    timed_out: bool = False
    out_of_memory: bool = False
    """Whether it has brought down its machine."""


async def run_here(agent: AgentConfig, problem: str, url: str, variables: Variables, seconds: float) -> ProgramEnded:
    """Run it on this machine, in a folder and with a home of its own."""
    with tempfile.TemporaryDirectory(prefix="treetune-agent-", ignore_cleanup_errors=True) as place:
        task, home, work = (Path(place) / name for name in ("task.md", "home", "work"))
        task.write_text(problem)
        home.mkdir()
        work.mkdir()
        environment = {name: value for name, value in os.environ.items() if not name.endswith(_SECRETS)}
        environment |= {**variables(url), "TREETUNE_TASK": str(task), "HOME": str(home), **agent.env}
        ended = await _run(agent.command, work, environment, seconds)
        if agent.answer.startswith("file:"):
            file = work / agent.answer.removeprefix("file:")
            with contextlib.suppress(OSError), file.open("rb") as found:
                return ended._replace(answer=found.read(MOST_BYTES).decode(errors="replace").strip())
        return ended if agent.answer == "stdout" else ended._replace(answer="")


async def _run(command: list[str], folder: Path, environment: Mapping[str, str], seconds: float) -> ProgramEnded:
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
    timed_out = False
    try:
        async with asyncio.timeout(seconds):
            await process.wait()
    except TimeoutError:
        timed_out = True
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, errors = await asyncio.gather(*reading)
    return ProgramEnded(output.strip(), await process.wait(), errors[-_SHOWN:].strip(), timed_out)


async def _read(stream: asyncio.StreamReader) -> str:
    """Read a stream to its end, so that its program is never blocked; keep its beginning."""
    kept = bytearray()
    while part := await stream.read(1 << 16):
        kept += part[: max(0, MOST_BYTES - len(kept))]
    return kept.decode(errors="replace")


async def run_on_machine(
    agent: AgentConfig, problem: str, machine: AgentMachine, variables: Variables, seconds: float
) -> ProgramEnded:
    """Run it on a machine, whose loopback leads to the gateway."""
    shell = machine.shell
    await shell.put(_TASK, problem.encode())
    forwarder = [machine.python, "-I", "-S", "-c", _FORWARDER.read_text(), f"{SOCKETS}/{SOCKET}"]
    begun = await shell.run(["sh", "-c", 'mkdir -p "$0" && exec "$@"', machine.folder, *forwarder])
    if not begun.ok:
        raise EnvironmentFault(f"the machine cannot reach the gateway: {begun.error_text[-_SHOWN:]}")
    environment = {**ENVIRONMENT, **machine.env, **variables(f"http://127.0.0.1:{begun.text.strip()}")}
    environment |= {"TREETUNE_TASK": _TASK, "PATH": agent.search_path(ENVIRONMENT["PATH"]), **agent.env}
    ended = await shell.run(agent.command, env=environment, cwd=machine.folder, seconds=seconds)
    if ended.ended is Ended.KILLED:
        raise EnvironmentFault("the machine was ended from outside while the agent ran", remedy="run it again")
    out_of_memory = ended.ended is Ended.MEMORY
    answer = ended.text.strip() if agent.answer == "stdout" else ""
    if agent.answer.startswith("file:") and not out_of_memory:
        with contextlib.suppress(UsageError):  # there is none
            path = os.path.join(machine.folder, agent.answer.removeprefix("file:"))
            answer = (await shell.get(path))[:MOST_BYTES].decode(errors="replace").strip()
    timed_out = ended.ended is Ended.TIMEOUT
    return ProgramEnded(answer, ended.exit_code, ended.error_text[-_SHOWN:].strip(), timed_out, out_of_memory)
