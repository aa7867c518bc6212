"""Runs a program until its own standard input ends, then ends it and all that it started: `vllm_keeper.py PROGRAM…`.

Whoever started it holds the other end of its input, so that even one that is killed leaves nothing running behind.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE = 10.0


def main() -> None:
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: None)  # which the whole group is sent below

    def end() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGTERM)
        threading.Event().wait(GRACE)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    program.wait()
    os.killpg(0, signal.SIGKILL)  # what it started, and has left behind


if __name__ == "__main__":
    main()
