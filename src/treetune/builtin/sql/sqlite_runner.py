"""Runs untrusted SQL on an SQLite file: read-only, against a clock, one connection a query.

    with query(file, "SELECT name FROM singer", seconds=5) as rows:
        print(rows.columns, list(rows))

A connection is opened, used and closed in one call of one thread, so it may be any thread. Writing fails, as do
`ATTACH`, `VACUUM INTO` and pragmas that change something: nothing but the one file is read, and nothing is written.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from treetune.errors import EnvironmentFault

Row = tuple[Any, ...]

LONGEST_VALUE = 10_000_000
"""The most bytes of one value or row."""
LONGEST_PATTERN = 1000
"""The most bytes of a LIKE pattern: matching one is quadratic and cannot be interrupted."""
INSTRUCTIONS = 10_000
"""How many steps of SQLite's machine pass between two looks at the clock: well under a millisecond."""

_PRAGMAS = frozenset(
    "data_version foreign_key_list index_info index_list index_xinfo table_info table_list table_xinfo".split()
)
_BROKEN = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_IOERR", "SQLITE_NOTADB", "SQLITE_PERM", "SQLITE_BUSY")


class SqlError(Exception):
    """The statement's own fault; the message is what its author may read."""


class Rows:
    """What a query gives, row by row."""

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor
        self.columns = [str(column[0]) for column in cursor.description or ()]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._cursor)


@contextmanager
def query(file: Path, sql: str, seconds: float) -> Iterator[Rows]:
    """Rows while the context lasts; `SqlError` from it for bad SQL or the clock, `EnvironmentFault` for a bad file."""
    try:
        with closing(_connect(file, seconds)) as connection:
            yield Rows(connection.execute(sql))
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        if name.startswith(_BROKEN):
            raise EnvironmentFault(
                f"{file} cannot be read: {error}", remedy="an SQLite file that is whole, readable and in no other use"
            ) from error
        if name == "SQLITE_INTERRUPT":
            raise SqlError(f"no end after {seconds:g} seconds") from None
        raise SqlError(str(error)) from None
    except (ValueError, OverflowError, sqlite3.Warning) as error:  # text that is no SQL at all: NUL, lone surrogates
        raise SqlError(str(error)) from None


def _connect(file: Path, seconds: float) -> sqlite3.Connection:
    connection = sqlite3.connect(f"file:{quote(str(file))}?mode=ro", uri=True, isolation_level=None)
    try:
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LONGEST_PATTERN)
        connection.execute("PRAGMA query_only = ON")
        connection.set_authorizer(_authorise)
        deadline = time.monotonic() + seconds
        connection.set_progress_handler(lambda: time.monotonic() > deadline, INSTRUCTIONS)
    except BaseException:
        connection.close()
        raise
    return connection


def _authorise(action: int, argument: str | None, *_: str | None) -> int:
    refused = action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH) or (
        action == sqlite3.SQLITE_PRAGMA and (argument or "").lower() not in _PRAGMAS
    )
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK
