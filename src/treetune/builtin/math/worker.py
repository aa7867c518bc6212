"""Compares answers with math-verify, one a line: a program of its own, so that it can be given a deadline.

    echo '["\\\\frac12", "0.5", 5]' | python worker.py     # ready, then true

Each has so many seconds of processor time; then the kernel ends this process. math-verify's own timeout is an exception
that it may catch itself, so it is off. An expression that explodes meets the memory limit first.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from typing import Any

MEMORY = 1 << 30


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever the libraries print is no reply
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    from math_verify import parse, verify

    logging.disable()

    def parse_answer(text: str) -> Any:
        marked = "$" in text or "\\boxed" in text
        return parse(text if marked else f"${text}$", parsing_timeout=None)

    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        truth, answer, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            same = bool(verify(parse_answer(truth), parse_answer(answer), timeout_seconds=None))
        except Exception:
            same = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(same), file=replies, flush=True)


if __name__ == "__main__":
    main()
