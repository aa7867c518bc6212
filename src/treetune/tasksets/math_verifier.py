r"""Compares two mathematical expressions with math-verify in a separate process, within a time limit.

    require_math_verify()
    await call(compare, r"\frac{1}{2}", "0.5")   # True

`compare` blocks, so call it in a thread. A worker is this file run as a program. After its time limit, the two
expressions count as different. math-verify's own timeout is off, because it is an exception that math-verify itself may
catch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from treetune.system.processes import ProgramPool

SECONDS = 5.0
"""Processor time limit of one comparison, in seconds."""
MEMORY = 1 << 30
"""Memory limit of a worker, in bytes."""
_SEVERAL_MEANINGS = re.compile(r"\\(?:pm|mp|lor|vee|cup|quad|qquad|newline|\\)(?![a-z])|[;\n]|±")
"""Lets math-verify read several answers from one expression."""


def require_math_verify() -> None:
    from treetune.errors import MissingExtraError  # here, because a worker needs nothing of Treetune

    if find_spec("math_verify") is None:
        raise MissingExtraError.of("math-verify", "math")


def is_single(answer: str, truth: str) -> bool:
    """Whether math-verify could find only one answer in it, or no more than in the ground truth."""
    from treetune.scorers.reading.numerals import read_number  # here, because a worker needs nothing of Treetune
    from treetune.scorers.reading.words import denied, hedged

    lists = answer.count(",") > truth.count(",") and read_number(answer) is None
    several = _SEVERAL_MEANINGS.search(answer) and not _SEVERAL_MEANINGS.search(truth)
    return not (hedged(answer) or denied(answer) or lists or several)


def compare(truth: str, answer: str) -> bool:
    """Whether the answer means what the ground truth says."""
    from treetune.system.time_limit import CLOCK_FACTOR

    require_math_verify()
    return workers().ask([truth, answer, SECONDS, CLOCK_FACTOR * SECONDS], 1) == [True]


@cache
def workers() -> ProgramPool:
    from treetune.system.processes import ProgramPool  # here, because a worker needs nothing of Treetune

    return ProgramPool(__file__, "math-verify", "pip install --force-reinstall math-verify")


def _serve() -> None:
    """Serve as a worker: read `[truth, answer, seconds, clock seconds]` per line and write `true` or `false`."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # printed text of the libraries is not a reply
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    from math_verify import parse, verify

    logging.disable()

    def read(text: str) -> Any:
        marked = "$" in text or "\\boxed" in text
        return parse(text if marked else f"${text}$", parsing_timeout=None)

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        truth, answer, seconds, clock_seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, clock_seconds)
        try:
            same = bool(verify(read(truth), read(answer), timeout_seconds=None))
        except Exception:
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(same), file=replies, flush=True)


if __name__ == "__main__":
    _serve()
