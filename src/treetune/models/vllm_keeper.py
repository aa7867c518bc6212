"""Runs a program until its own standard input ends, then stops it and everything it started: `vllm_keeper.py PROGRAM…`.

The parent process holds the other end of the input. Even if the parent is killed, nothing keeps running.
"""

import os
import signal
import subprocess
import sys
import threading

GRACE = 10.0


def main() -> None:
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: None)  # it is sent to the whole group below

    def end() -> None:
        sys.stdin.buffer.read()
        os.killpg(0, signal.SIGTERM)
        threading.Event().wait(GRACE)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    program.wait()
    os.killpg(0, signal.SIGKILL)  # processes that the program started and left


if __name__ == "__main__":
    main()
