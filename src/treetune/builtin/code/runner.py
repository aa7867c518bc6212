"""Python code of a policy, in a sandbox or not at all.

    await require_sandbox()
    result = await run_python({"main.py": b"print(6 * 7)"})
    result.text   # "42\\n"

No more run at a time than this process has cores: code that waits for a core would lose against its clock.

Test cases are run by `case_runner.py` inside the sandbox: `encode_request` writes what it reads, `read_reports` reads
what it writes.
"""

from __future__ import annotations

import asyncio
import json
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from treetune.errors import EnvironmentFault
from treetune.sandbox import Bubblewrap, Ended, Result, SandboxLimits, require
from treetune.threads import call

MAIN = "main.py"
CPU_SECONDS = 6
"""Processor time of one case."""
CLOCK_SECONDS = 12.0
"""The most seconds of one case by the clock, on a busy machine."""
CASE_RUNNER = Path(__file__).with_name("case_runner.py").read_bytes()

_LONGEST_HEAD = 100
_slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def require_sandbox() -> None:
    """`SandboxUnavailable`, with cause and remedy, where code cannot run."""
    async with _slot():
        await call(require)


async def run_python(files: Mapping[str, bytes], *, stdin: bytes = b"", limits: SandboxLimits | None = None) -> Result:
    """Run `main.py` in a fresh sandbox, without the user's packages and settings."""
    sandbox = Bubblewrap()
    async with _slot():
        result = await sandbox.run(
            [sandbox.python, "-I", MAIN], stdin=stdin, files=files, limits=limits or SandboxLimits()
        )
    if result.ended is Ended.KILLED:
        raise EnvironmentFault("a sandbox was ended from outside", remedy="run the episode again")
    return result


def _slot() -> asyncio.Semaphore:
    loop = asyncio.get_running_loop()
    if loop not in _slots:
        _slots[loop] = asyncio.Semaphore(len(os.sched_getaffinity(0)))
    return _slots[loop]


class Head(msgspec.Struct, frozen=True):
    """What the case runner says of a case; as untrusted as the answer itself."""

    ended: Literal["done", "error", "timeout"]
    kind: Literal["text", "value"]
    size: Annotated[int, msgspec.Meta(ge=0)]


def encode_request(answer: dict[str, Any], cases: list[dict[str, Any]]) -> bytes:
    """An answer (`code`, `function`, `program`) and its cases (`stdin`, `arguments`) for the case runner."""
    first = {**answer, "cpu_seconds": CPU_SECONDS, "seconds": CLOCK_SECONDS}
    return "".join(json.dumps(line) + "\n" for line in [first, *cases]).encode()


def read_reports(output: bytes) -> Iterator[tuple[Head, bytes]]:
    """What the case runner wrote, case by case, as far as it is well-formed."""
    at = 0
    while (end := output.find(b"\n", at, at + _LONGEST_HEAD)) >= 0:
        try:
            head = msgspec.json.decode(output[at:end], type=Head)
        except msgspec.DecodeError:
            return
        at = end + 1 + head.size
        if at > len(output):
            return
        yield head, output[end + 1 : at]
