"""The Store keeps a server's state on disk: cursors, unfinished draws, recent answers, the signing key.

    store = Store(Path("state"))
    store.commit({"": StreamState(8)}, [(request, digest, "", 7, None, 0)])   # one transaction for a batch of requests

SQLite in WAL mode: a process may die at any moment without losing anything it has replied. The file `commits` next to
the database belongs to its key and counts its transactions. A damaged, truncated or lost state is therefore refused
instead of being silently replaced by a new one.

    streams = StoredStreams(streams, store)
    draw = streams.advance(stream)
    streams.hand_out(draw, task.idx, request_key, digest)
    streams.commit()                    # once for a batch of requests; if it fails, the draws are handed out again

A draw is stored before its task is handed out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from treetune.errors import DrawFailed, ResumeError, StorageError, StreamEnded, UsageError
from treetune.play.leases import HERE, Draw, Key, Pending
from treetune.play.streams import Identity, Streams, StreamState
from treetune.serve.errors import Misused
from treetune.serve.messages import pack, unpack_plain
from treetune.serve.task_signer import new_key
from treetune.system.access import check_key_length

KEPT_DRAWS = 20_000
"""How many of the latest answers can be repeated after a crash."""
_PRUNE_EVERY = 10_000
_FORMAT = 4
_COMMITS = struct.Struct(">8sQI")
"""The file `commits`: a hash of the state's key, the number of the latest transaction, and a checksum. SQLite checks
each record of its log but does not notice a truncated or lost log. The number shows it."""
_PROGRAM = 0x54524545
"""Marks a database as a Treetune server's."""

_TABLES = {
    "cursors": "stream TEXT PRIMARY KEY, next INTEGER NOT NULL, curriculum BLOB, number INTEGER NOT NULL",
    "pending": "stream TEXT, idx INTEGER, position INTEGER, attempt INTEGER, tries INTEGER, seconds REAL, "
    "task INTEGER, holder BLOB, PRIMARY KEY (stream, idx)",
    "draws": "number INTEGER PRIMARY KEY, request BLOB UNIQUE, digest BLOB, stream TEXT, idx INTEGER, "
    "position INTEGER, attempt INTEGER",
    "facts": "name TEXT PRIMARY KEY, value BLOB",
}
_DRAW = "request, digest, stream, idx, position, attempt"
_INSERT_DRAW = f"INSERT OR REPLACE INTO draws ({_DRAW}) VALUES (?, ?, ?, ?, ?, ?)"
_INSERT_PENDING = "INSERT OR REPLACE INTO pending VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
log = logging.getLogger("treetune.serve")


Answer = tuple[bytes, bytes, str, int, int | None, int]
"""A request, the digest of its contents, and the draw that answered it."""


class Store:
    def __init__(self, folder: Path, *, accept_loss: bool = False) -> None:
        """With `accept_loss`, opens it even if the latest transactions are missing."""
        self._folder, self._accept_loss = folder, accept_loss
        self._path, self._commits_path = folder / "server.sqlite", folder / "commits"
        self._commits, self._commits_file = 0, -1
        self._lock = FileLock(str(folder / ".lock"))
        self.since_pruned = 0
        self._db: sqlite3.Connection | None = None
        try:
            with self._readable():
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ".lock").touch()
                self._lock.acquire(timeout=0)
                self._open()
        except Timeout:
            raise UsageError(
                f"another server keeps its state in {folder}", remedy="stop it, or pass another --state"
            ) from None
        except BaseException:
            self.close()
            raise

    # Opening

    def _open(self) -> None:
        if not self._path.exists():
            if self._path.with_name("server.sqlite-wal").exists() or (
                self._commits_path.exists() and self._read_commits()[1]
            ):
                raise self._damaged("server.sqlite is missing")
            self._create()
        elif not self._path.is_file():
            raise self._damaged("server.sqlite is not a file")
        elif not self._path.stat().st_size:
            raise self._damaged("server.sqlite is empty")
        db = self._db = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        self._check_tables(db)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        self._open_commits()

    def _open_commits(self) -> None:
        """A kill truncates at most the latest transaction, whose reply was not sent: one missing transaction is
        accepted, anything else is damage."""
        if (key := self._fact("key")) is None:
            raise self._damaged("the signing key is missing")
        check_key_length(key, f"the state in {self._folder}")
        self.key, self._owner = key, _hash(key)
        owner, announced = self._read_commits()
        if owner != self._owner:
            raise self._damaged("server.sqlite and commits belong to different states")
        latest = self._rows("max(number)", "cursors")[0][0]
        self._commits = max(latest or 0, int.from_bytes(self._fact("commits") or b"", "big"))
        missing = announced - self._commits
        if missing < 0:
            raise self._damaged("the file commits is older than server.sqlite")
        if missing > 1:
            problem = f"its latest {missing} transactions are missing; server.sqlite-wal was lost, truncated or damaged"
            if not self._accept_loss:
                raise self._damaged(problem, "continue with what is left, and draw some tasks again: --accept-changes")
            log.warning("the state in %s: %s; continuing with what is left", self._folder, problem)
        self._commits_file = os.open(self._commits_path, os.O_RDWR)

    def _read_commits(self) -> tuple[bytes, int]:
        data = self._commits_path.read_bytes() if self._commits_path.is_file() else b""
        if len(data) != _COMMITS.size or data != pack_commits(*_COMMITS.unpack(data)[:2]):
            raise self._damaged("the file commits is missing, or differs from what was written")
        owner, number, _ = _COMMITS.unpack(data)
        return owner, number

    def _create(self) -> None:
        """Creates a database with all its tables. It holds the key, so only its owner may read it."""
        key, new = new_key(), self._path.with_name("server.sqlite.new")
        new.unlink(missing_ok=True)
        os.close(os.open(new, os.O_CREAT | os.O_RDWR, 0o600))
        db = sqlite3.connect(new)
        db.executescript("".join(f"CREATE TABLE {name} ({columns});" for name, columns in _TABLES.items()))
        db.executemany("INSERT INTO facts VALUES (?, ?)", [("key", key), ("commits", bytes(8))])
        db.commit()
        db.execute(f"PRAGMA application_id={_PROGRAM}")
        db.execute(f"PRAGMA user_version={_FORMAT}")
        db.close()
        self._commits_path.write_bytes(pack_commits(_hash(key), 0))
        new.rename(self._path)

    def _check_tables(self, db: sqlite3.Connection) -> None:
        program, format = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if (fault := db.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
            raise self._damaged(f"server.sqlite: {fault}")
        if program != _PROGRAM or format != _FORMAT:
            other = "another version of treetune" if program == _PROGRAM else "another program"
            raise self._damaged(f"server.sqlite was written by {other}")

    def _damaged(self, problem: str, way_on: str = "") -> ResumeError:
        remedy = "restore a copy of that folder, or start with another --state"
        return ResumeError(
            f"the state in {self._folder} is damaged: {problem}", remedy=f"{remedy}; or {way_on}" if way_on else remedy
        )

    def _unusable(self, error: Exception) -> StorageError:
        return StorageError(f"cannot keep state in {self._folder}: {error}", remedy="pass a --state that is writable")

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except Timeout:
            raise
        except (OSError, sqlite3.OperationalError) as error:  # it cannot be opened, locked or written
            raise self._unusable(error) from error
        except sqlite3.Error as error:
            raise self._damaged(f"server.sqlite: {error}") from error

    # Contents

    def adopt(self, identity: Identity, accept_changes: bool = False) -> None:
        """Starts or resumes with these tasks. Raises ResumeError if the state belongs to other tasks."""
        kept = None if accept_changes else self._fact("identity")
        began = identity if kept is None else msgspec.msgpack.decode(kept, type=Identity)
        if changes := began.differences(identity):
            raise ResumeError(
                f"the taskset differs from the one that the state in {self._folder} belongs to: " + "; ".join(changes),
                remedy="serve it unchanged, pass another --state, or continue with --accept-changes",
            )
        self.commit({}, facts={"identity": msgspec.msgpack.encode(identity)})

    def streams(self) -> dict[str, StreamState]:
        found = {}
        for stream, index, curriculum in self._rows("stream, next, curriculum", "cursors"):
            found[stream] = StreamState(index, None if curriculum is None else unpack_plain(curriculum))
        for stream, *row in self._rows("*", "pending"):
            found[stream] = msgspec.structs.replace(found[stream], pending=[*found[stream].pending, Pending(*row)])
        return found

    def draws(self) -> dict[bytes, tuple[bytes, Draw]]:
        """The draws of the latest requests, with the digest of each request. Their replies may never have arrived."""
        with self._readable():
            self._prune()
        return {request: (digest, Draw(*draw)) for request, digest, *draw in self._rows(_DRAW, "draws")}

    def commit(
        self,
        streams: Mapping[str, StreamState],
        answers: Iterable[Answer] = (),
        pending: Mapping[Key, Pending | None] | None = None,
        facts: Mapping[str, bytes] | None = None,
    ) -> None:
        """Runs one transaction, which is on disk when this returns. `pending` has the changed draws; None means
        done."""
        draws = list(answers)
        db, number = self._database, self._commits + 1
        states = [
            (stream, state.index, None if state.curriculum is None else pack(state.curriculum), number)
            for stream, state in streams.items()
        ]
        try:
            db.execute("BEGIN")
            db.executemany("INSERT OR REPLACE INTO cursors VALUES (?, ?, ?, ?)", states)
            db.execute("DELETE FROM cursors WHERE next = 0 AND curriculum IS NULL")  # as if they had never existed
            if draws:
                db.executemany(_INSERT_DRAW, draws)
                self.since_pruned += len(draws)
                if self.since_pruned >= _PRUNE_EVERY:
                    self._prune()
            for (stream, index), draw in (pending or {}).items():
                if draw is None:
                    db.execute("DELETE FROM pending WHERE stream = ? AND idx = ?", (stream, index))
                else:
                    db.execute(_INSERT_PENDING, (stream, *msgspec.structs.astuple(draw)))
            given = dict(facts or {})
            if not all(index for _, index, _, _ in states) or not states:  # otherwise the cursors hold the number
                given["commits"] = number.to_bytes(8, "big")
            if given:
                db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", given.items())
            os.pwrite(self._commits_file, pack_commits(self._owner, number), 0)
            db.execute("COMMIT")
            self._commits = number
        except (sqlite3.Error, OSError) as error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise StorageError(
                f"cannot write the state in {self._folder}: {error}", remedy="free some space there"
            ) from error

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None
        if self._commits_file >= 0:
            os.close(self._commits_file)
            self._commits_file = -1
        self._lock.release()

    @property
    def _database(self) -> sqlite3.Connection:
        assert self._db is not None
        return self._db

    def _prune(self) -> None:
        self.since_pruned = 0
        self._database.execute("DELETE FROM draws WHERE number <= (SELECT max(number) FROM draws) - ?", (KEPT_DRAWS,))

    def _rows(self, columns: str, table: str) -> list[Any]:
        with self._readable():
            return self._database.execute(f"SELECT {columns} FROM {table}").fetchall()

    def _fact(self, name: str) -> bytes | None:
        with self._readable():
            row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return row[0] if row is not None else None


def pack_commits(owner: bytes, number: int) -> bytes:
    return _COMMITS.pack(owner, number, zlib.crc32(owner + number.to_bytes(8, "big")))


def _hash(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=8).digest()


FAILED = -1
"""The index of a draw that failed."""


class StoredStreams:
    def __init__(self, streams: Streams, store: Store | None = None) -> None:
        self.streams, self.store = streams, store
        self.recovered: dict[bytes, tuple[bytes, Draw]] = {}
        """Draws for requests before this server started, with the digests of the requests."""
        if store is not None:
            self.recovered = store.draws()
            streams.place(store.streams(), keep_leases=True)
            streams.pending.changed = set()
        self._moved: set[str] = set()
        """Streams whose cursor moved."""
        self._given: list[Draw] = []
        self._answers: list[Answer] = []
        self._before: dict[str, StreamState] = {}
        self._curricula: dict[str, Any] = {}
        self.unsaved: set[bytes] = set()
        """Requests that changed something since the last commit."""

    # Draws

    def recall(self, key: bytes, digest: bytes) -> tuple[Draw, float] | None:
        """Returns the draw that an earlier server made for this request if its reply may not have arrived, and the
        seconds of its lease."""
        if key not in self.recovered:
            return None
        kept, draw = self.recovered[key]
        if kept != digest:
            raise Misused("this id was already used for another request", remedy="give each request a new id")
        if draw.index == FAILED:
            raise DrawFailed("the task of this request could not be created", remedy="sample again, with a new id")
        del self.recovered[key]
        found = self.streams.pending.get((draw.stream, draw.index))
        if found is None:
            return draw, 0.0
        # Another client may have it by now, or it waits for the next request.
        return (draw, found.seconds) if found.seconds and found.attempt == draw.attempt else None

    def advance(self, stream: str) -> Draw:
        draw = self.streams.advance(stream)
        if self.store is not None:
            self._moved.add(stream)
        return draw

    def hand_out(
        self,
        draw: Draw,
        task: int,
        request: bytes = b"",
        digest: bytes = b"",
        lease: float = 0.0,
        holder: bytes = HERE,
    ) -> None:
        """Called when the task of a draw was created. The client gets it, leased for `lease` seconds if given."""
        pending = self.streams.pending
        if lease:
            pending.lease(draw, task, lease, holder)
        elif pending.making or pending.retries.failed:
            pending.settle(draw)
        if self.store is not None:
            self._given.append(draw)
            if request:
                self.unsaved.add(request)
                self._answers.append((request, digest, draw.stream, draw.index, draw.position, draw.attempt))

    def fail(self, draw: Draw, error: Exception, request: bytes, digest: bytes) -> DrawFailed | StreamEnded:
        """Called when the task of a draw could not be created. Returns the error to raise."""
        self.streams.pending.hold(draw)
        self.refuse(request, digest)
        return self.streams.fail(draw, error)

    def refuse(self, request: bytes, digest: bytes) -> None:
        """The request failed. If it is repeated to the next server, it must not draw."""
        if self.store is not None and request:
            self._answers.append((request, digest, "", FAILED, None, 0))

    # Other changes

    def keep_stream(self, request: bytes, stream: str) -> None:
        """Remembers the position of a stream that the request may change."""
        if self.store is not None:
            self.unsaved.add(request)
            self._moved.add(stream)
            self._before.setdefault(stream, self.streams.stream_state(stream))

    def keep_curriculum(self, request: bytes, stream: str) -> None:
        """Remembers the state of a stream's curriculum that the request may change."""
        self.streams.open(stream)
        if self.store is not None:
            self.unsaved.add(request)
            self._moved.add(stream)
            self._curricula.setdefault(stream, self.streams.curriculum_state(stream))

    def commit(self) -> None:
        """Stores all changes. If that fails, streams and curricula are reset, and their draws are handed out again."""
        store, pending = self.store, self.streams.pending
        if store is None or not (self._moved or pending.changed or self._answers):
            return
        given, answers, before, curricula = self._given, self._answers, self._before, self._curricula
        self._given, self._answers, self._before, self._curricula, self.unsaved = [], [], {}, {}, set()
        changed = pending.changed or set()
        try:
            streams = {
                name: StreamState(self.streams.cursor(name), self.streams.curriculum_state(name))
                for name in self._moved
            }
            store.commit(streams, answers, {key: pending.get(key) for key in changed})
        except Exception:  # for example a full disk, or a curriculum whose state cannot be stored
            for draw in given:
                pending.give_again(draw)
            self.streams.place(before)
            for name, state in curricula.items():
                self.streams.restore_curriculum(name, state)
            raise
        self._moved, pending.changed = set(), set()
