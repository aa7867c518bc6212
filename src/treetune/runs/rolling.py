"""RollingRun: the run folder of a server, written as long as it serves and limited in size.

    traces = RollingRun(Path("traces"), evaluation, most_bytes=4 << 30)
    traces.put(encode_trace(trace))

A thread writes, so no caller waits for the disk. Traces that cannot be written are counted, and logged once. At half
the size limit the records move to the folder `earlier`, which is also a run folder, and replace the records there. So
the newest traces are kept, at least half of the limit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from treetune.config.trust import FINGERPRINT
from treetune.core.trace import Trace
from treetune.errors import ResumeError, UsageError
from treetune.runs.entry import Entry
from treetune.runs.folder import TRACES, Described, RunFolder

log = logging.getLogger("treetune.serve")
EARLIER = "earlier"
MOST_WAITING_BYTES = 64 << 20
"""The maximum size in bytes of traces that wait for a slow disk; further traces are lost."""
_MOST_AT_ONCE = 1 << 20
_LAST_SECONDS = 10.0
"""How long to wait for the remaining traces when it is closed."""


class TraceListener(Protocol):
    """Receives the entries of traces once they are written."""

    def add(self, entries: Iterable[Entry]) -> None: ...
    def close(self) -> None: ...


class RollingRun:
    listener: TraceListener | None = None

    def __init__(self, path: Path, what: Described, most_bytes: int) -> None:
        """Continues a folder that holds a run with the same config and taskset; refuses any other run."""
        self.path, self._most_bytes = path, most_bytes
        try:
            if (path / FINGERPRINT).exists():
                self._run: RunFolder[Trace] = RunFolder.resume(path, TRACES, what)
                self._run.drop_cut_line()
            else:
                self._run = RunFolder.create(path, TRACES, what)
        except (ResumeError, UsageError) as error:
            raise type(error)(error.message, remedy="pass another folder to --traces") from None
        self.kept = self.lost = 0
        self._is_failing = False
        self._waiting: SimpleQueue[bytes | None] = SimpleQueue()
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        """Guards the counts that two threads change."""
        self._writer: threading.Thread | None = None

    def put(self, line: bytes) -> None:
        """Queues an encoded trace without a newline; an empty one stands for a trace that could not be encoded."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name="treetune traces", daemon=True)
            self._writer.start()
        with self._lock:
            full = self._waiting_bytes + len(line) > MOST_WAITING_BYTES
            if not full:
                self._waiting_bytes += len(line)
        if not line:
            self._lose(1, "a trace is too large, or cannot be written as JSON")
        elif full:
            self._lose(1, "the disk is too slow")
        else:
            self._waiting.put(line + b"\n")

    def figures(self) -> dict[str, float]:
        return {"traces_kept": self.kept, "traces_lost": self.lost, "traces_waiting_bytes": self._waiting_bytes}

    def close(self) -> None:
        """Writes the waiting traces as far as the disk allows."""
        if self._writer is not None:
            self._waiting.put(None)
            self._writer.join(_LAST_SECONDS)
            if self._writer.is_alive():
                return  # a daemon thread, which ends with the process
        self._run.__exit__()
        if self.listener is not None:
            self.listener.close()

    # The thread

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            lines, size, ended = [line], len(line), False
            try:
                while size < _MOST_AT_ONCE and not ended:
                    if (line := self._waiting.get_nowait()) is None:
                        ended = True
                    else:
                        lines.append(line)
                        size += len(line)
            except Empty:
                pass
            self._append(lines, size)
            with self._lock:
                self._waiting_bytes -= size - len(lines)
            if ended:
                return

    def _append(self, lines: list[bytes], size: int) -> None:
        half = self._most_bytes // 2
        if size > half:
            if len(lines) == 1:
                self._lose(1, "it is larger than half of the limit for all traces")
            else:
                for line in lines:
                    self._append([line], len(line))
            return
        try:
            if self._run.size + size > half:
                self._run.set_aside(self.path / EARLIER)
            entries = self._run.append_lines(b"".join(lines))
        except Exception as error:
            self._lose(len(lines), str(error))
            return
        self.kept += len(lines)
        if self.listener is not None:
            self.listener.add(entries)
        if self._is_failing:
            self._is_failing = False
            log.info("traces are stored again in %s", self.path)

    def _lose(self, number: int, why: str) -> None:
        with self._lock:
            self.lost += number
        if not self._is_failing:
            self._is_failing = True
            log.error("a trace was not stored: %s. Further ones are counted in treetune_traces_lost", why)
