"""Tests written in Python on the functions of an answer, in a sandbox: HumanEval's `check(candidate)`, MBPP's asserts.

    report = await run_tests("def add(a, b): return a + b", ["assert add(2, 3) == 5"])
    report.passed, report.why       # 1, ""

The answer never sees the tests, and cannot say of itself that it passed: `test_runner.py` tells how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

import msgspec

from treetune.sandbox import Ended, SandboxLimits
from treetune.tasksets.code import run_python

TEST_RUNNER = Path(__file__).with_name("test_runner.py").read_bytes()
CPU_SECONDS, CLOCK_SECONDS = 10, 25.0
"""Of all tests together: processor time of the answer, and the seconds that sandboxes count, in which it may also
wait."""
LIMITS = SandboxLimits(seconds=CLOCK_SECONDS, memory_mb=1024, processes=64, disk_mb=64, output_kb=64)

_ENDED = {Ended.TIMEOUT: "no end in time", Ended.MEMORY: f"over {LIMITS.memory_mb} MB of memory"}


class Tested(msgspec.Struct, frozen=True):
    """What became of the tests, in order: how many held before the first that did not, and why it did not."""

    passed: int
    why: str = ""


async def run_tests(code: str, tests: Sequence[str], *, setup: str = "", entry_point: str | None = None) -> Tested:
    """Run the tests one after the other, as far as they hold. `setup` is code that they need. With `entry_point` each
    defines `check`, which is called with that function of the answer's; else they call its functions by name."""
    request = {
        "code": code,
        "setup": setup,
        "tests": list(tests),
        "entry_point": entry_point,
        "cpu_seconds": CPU_SECONDS,
    }
    result = await run_python(TEST_RUNNER, stdin=json.dumps(request).encode(), limits=LIMITS)
    try:
        report = msgspec.json.decode(result.stdout, type=Tested)
    except ValueError:
        return Tested(0, _ENDED.get(result.ended, "the tests were broken off"))
    return report if 0 <= report.passed <= len(tests) else Tested(0, "the tests were broken off")


def complete_code(code: str, beginning: str, entry_point: str) -> str:
    """A program of an answer and the beginning that it was to go on from: the whole function after it, which may rely
    on its imports, or only the body."""
    if re.search(rf"^(?:async\s+)?def\s+{re.escape(entry_point)}\b", code, re.MULTILINE):
        return f"{beginning}\n    pass\n\n{code}\n"
    return f"{beginning}{code if code[0].isspace() else indent(code, '    ')}\n"
