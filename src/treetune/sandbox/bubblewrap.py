"""One-shot commands in bubblewrap: namespaces and limits of the kernel, without a container engine.

    sandbox = Bubblewrap()
    result = sandbox.run_blocking([sandbox.python, "main.py"], files={"main.py": b"print(input())"}, stdin=b"hi")
    result.text   # "hi\\n"

A start takes about ten milliseconds. Runs may be made from any number of tasks and threads at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from treetune.sandbox.diagnose import explained
from treetune.sandbox.execution import Stop
from treetune.sandbox.interpreter import Interpreter
from treetune.sandbox.probe import probe_with, required
from treetune.sandbox.protocol import DEFAULT_LIMITS, NO_FILES, Result, SandboxLimits, SandboxUnavailable


class Bubblewrap:
    """A `Sandbox`."""

    def __init__(self, interpreter: Interpreter | None = None) -> None:
        self._interpreter = interpreter or Interpreter.find()

    @property
    def python(self) -> str:
        return self._interpreter.path

    async def run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = NO_FILES,
        limits: SandboxLimits = DEFAULT_LIMITS,
        writable_root: bool = False,
    ) -> Result:
        try:
            stop = Stop()
        except OSError as error:
            raise explained(SandboxUnavailable(f"a sandbox could not be set up: {error}")) from error
        try:
            run = partial(self._run, command, stdin=stdin, files=files, limits=limits, writable_root=writable_root)
            outcome = asyncio.wrap_future(_in_thread(partial(run, stop=stop)))
            try:
                return await asyncio.shield(outcome)
            except asyncio.CancelledError:
                stop.set()
                while not outcome.done():
                    # Cancelled again or not: nothing of it may be left when the caller goes on.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([outcome])
                raise
        finally:
            stop.close()

    def run_blocking(
        self,
        command: Sequence[str],
        *,
        stdin: bytes = b"",
        files: Mapping[str, bytes] = NO_FILES,
        limits: SandboxLimits = DEFAULT_LIMITS,
        writable_root: bool = False,
    ) -> Result:
        return self._run(command, stdin=stdin, files=files, limits=limits, writable_root=writable_root, stop=None)

    def _run(
        self,
        command: Sequence[str],
        *,
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: SandboxLimits,
        writable_root: bool,
        stop: Stop | None,
    ) -> Result:
        launcher = required(probe_with(self._interpreter))
        return launcher.execute(
            command, stdin=stdin, files=files, limits=limits, writable_root=writable_root, stop=stop
        )


def _in_thread(function: Callable[[], Result]) -> Future[Result]:
    """In a thread that lives as long as the run: `--die-with-parent` takes the thread that spawned for the parent."""
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, name="treetune-sandbox", daemon=True).start()
    return future
