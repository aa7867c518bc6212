"""The Store keeps a server's place on disk: cursors, the draws behind recent answers, the key of its seals.

    store = Store(Path("state"))
    store.commit(cursors={"": 8}, draws=[(request_id, draw)])      # one transaction per batch, before any reply of it

SQLite in WAL mode: a process may die at any moment and lose nothing that was replied.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from treetune.errors import ResumeError, StorageError, UsageError
from treetune.serve.messages import pack, unpack_plain
from treetune.serve.task_signer import new_key
from treetune.streams import Draw, Identity, Streams, StreamState

KEPT_DRAWS = 20_000
"""How many of the latest answers can be given again after a crash."""
_PRUNE_EVERY = 10_000

_SCHEMA = """
CREATE TABLE IF NOT EXISTS cursors (stream TEXT PRIMARY KEY, next INTEGER NOT NULL, curriculum BLOB);
CREATE TABLE IF NOT EXISTS draws
  (number INTEGER PRIMARY KEY, request BLOB UNIQUE, stream TEXT, idx INTEGER, position INTEGER);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB);
"""
_INSERT_DRAW = "INSERT OR REPLACE INTO draws (request, stream, idx, position) VALUES (?, ?, ?, ?)"


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = FileLock(str(folder / ".lock"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".lock").touch()
            self._lock.acquire(timeout=0)
            path = folder / "server.sqlite"
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # it holds the key
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except Timeout:
            raise UsageError(
                f"another server keeps its state in {folder}", remedy="stop it, or pass another --state"
            ) from None
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"cannot keep state in {folder}: {error}", remedy="pass another --state") from error
        self._since_pruned = 0

    def key(self) -> bytes:
        """The key of the seals, made on first use."""
        if (kept := self._fact("key")) is None:
            self._set("key", kept := new_key())
        return kept

    def adopt(self, identity: Identity, accept_changes: bool = False) -> None:
        """Begins, or goes on, with these tasks; others than those it began with are refused."""
        if (kept := self._fact("identity")) is not None and not accept_changes:
            try:
                began = msgspec.msgpack.decode(kept, type=Identity)
            except msgspec.MsgspecError as error:
                raise ResumeError(f"the state in {self._folder} cannot be read: {error}") from None
            if changes := began.differences(identity):
                raise ResumeError(
                    f"the taskset is not the one that the state in {self._folder} belongs to: " + "; ".join(changes),
                    remedy="serve it as it was, pass another --state, or go on all the same with --accept-changes",
                )
        self._set("identity", msgspec.msgpack.encode(identity))

    def streams(self) -> dict[str, StreamState]:
        rows = self._db.execute("SELECT stream, next, curriculum FROM cursors")
        return {
            stream: StreamState(index, None if kept is None else unpack_plain(kept)) for stream, index, kept in rows
        }

    def draws(self) -> dict[bytes, Draw]:
        """What was drawn for the latest requests, by their ids: their replies may never have arrived."""
        self._prune()
        rows = self._db.execute("SELECT request, stream, idx, position FROM draws")
        return {bytes(request): Draw(*draw) for request, *draw in rows}

    def commit(self, streams: Mapping[str, StreamState], draws: Iterable[tuple[bytes, Draw]] = ()) -> None:
        """All of it or nothing, and on disk when this returns."""
        rows = [(request, draw.stream, draw.index, draw.position) for request, draw in draws]
        states = [
            (stream, state.index, None if state.curriculum is None else pack(state.curriculum))
            for stream, state in streams.items()
        ]
        db = self._db
        try:
            db.execute("BEGIN")
            db.executemany("INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)", states)
            db.execute("DELETE FROM cursors WHERE next = 0 AND curriculum IS NULL")  # as if they had never been
            if rows:
                db.executemany(_INSERT_DRAW, rows)
                self._since_pruned += len(rows)
                if self._since_pruned >= _PRUNE_EVERY:
                    self._prune()
            db.execute("COMMIT")
        except sqlite3.Error as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise StorageError(
                f"cannot write the state in {self._folder}: {error}", remedy="free some space there"
            ) from error

    def _prune(self) -> None:
        self._since_pruned = 0
        self._db.execute("DELETE FROM draws WHERE number <= (SELECT max(number) FROM draws) - ?", (KEPT_DRAWS,))

    def close(self) -> None:
        self._db.close()
        self._lock.release()

    def _fact(self, name: str) -> bytes | None:
        row = self._db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return bytes(row[0]) if row is not None else None

    def _set(self, name: str, value: bytes) -> None:
        self._db.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


class StoredStreams:
    """The streams of a server, with their place on disk: no draw is handed out before it is kept.

    draw = order.draw(request_id, stream="")
    order.commit()                      # once for a batch of requests; where it fails, no cursor has moved
    """

    def __init__(self, streams: Streams, store: Store | None = None) -> None:
        self.streams, self.store = streams, store
        self._recovered = store.draws() if store is not None else {}
        self._drawn: list[tuple[bytes, Draw]] = []
        self._before: dict[str, StreamState] = {}
        self.unsaved: set[bytes] = set()
        """Requests that changed a stream since the last commit."""

    def draw(self, id: bytes = b"", index: int | None = None, stream: str = "") -> Draw:
        """The next of a stream; with an index that one, and no cursor moves."""
        if index is not None:
            return self.streams.draw_at(index)
        if self._recovered and (before := self._recovered.pop(id, None)) is not None:
            return before  # drawn by a server that died before its reply arrived
        self.change(id, stream)
        draw = self.streams.advance(stream)
        if id and self.store is not None:
            self._drawn.append((id, draw))
        return draw

    def change(self, id: bytes, stream: str) -> None:
        """Remembers how a stream was before this request."""
        self.streams.open(stream)
        if self.store is not None:
            self.unsaved.add(id)
            if stream not in self._before:
                self._before[stream] = self.streams.stream_state(stream)

    def commit(self) -> None:
        if self.store is None or not self._before:
            return
        drawn, before = self._drawn, self._before
        self._drawn, self._before, self.unsaved = [], {}, set()
        try:
            self.store.commit({name: self.streams.stream_state(name) for name in before}, drawn)
        except Exception:  # a full disk, a curriculum whose state cannot be kept
            self.streams.place(before)
            raise
