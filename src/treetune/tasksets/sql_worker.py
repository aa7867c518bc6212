"""Runs SQL on SQLite files in a separate process that can be killed: a program that needs only Python.

Standard input holds one request per line of JSON, standard output gets one line per statement: `["ok", result]`,
`["error", why]` for the statement's own fault, `["broken", why]` for a file that cannot be read. Statements run
read-only, with one connection each, within limits: processor time, clock time (a statement that ignores them, such as
`instr` of two long blobs, ends the process a second later), memory, and no temporary files.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import quote

Row = tuple[Any, ...]

HEAP, MEMORY, LARGEST_FILE = 512 << 20, 1 << 30, 16 << 20
"""Limits in bytes: of SQLite including sorting, which is why there are no temporary files; of the process; of a file,
such as the index of a write-ahead log."""
GRACE_SECONDS = 1.0
"""Seconds between the end of a statement's time and the end of its process."""
MOST_ROWS = 100_000
"""The maximum number of distinct rows in a ground truth."""
SHOWN_CHARACTERS, SHOWN_ROWS, SHOWN_VALUE = 9000, 50, 500
"""How much of a table is shown, how many rows of a longer one, and how much of one value."""
LONGEST_VALUE, LONGEST_PATTERN = 10_000_000, 1000
"""Bytes of a value or row, and of a LIKE pattern."""
INSTRUCTIONS = 10_000
"""How many steps of SQLite's machine run between two checks of the time: well under a millisecond."""

_PRAGMAS = frozenset(
    "data_version foreign_key_list index_info index_list index_xinfo table_info table_list table_xinfo".split()
)
_BROKEN = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_IOERR", "SQLITE_NOTADB", "SQLITE_PERM", "SQLITE_BUSY")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        for reply in serve(json.loads(line)):
            print(json.dumps(reply), file=replies, flush=True)


def serve(request: dict[str, Any]) -> Iterator[list[Any]]:
    file, limits = request["file"], (request["seconds"], request["clock_seconds"])
    if "truth" not in request:
        yield run(file, request["sql"], limits, format_table)
        return
    expected: set[Row] = set()
    yield run(file, request["truth"], limits, lambda rows: collect(rows, expected))
    yield run(file, request["sql"], limits, lambda rows: explain_difference(rows, expected, request["strict"]))


def run(file: str, sql: str, limits: tuple[float, float], use: Callable[[sqlite3.Cursor], Any]) -> list[Any]:
    seconds, clock_seconds = limits
    signal.setitimer(signal.ITIMER_PROF, seconds + GRACE_SECONDS)
    signal.setitimer(signal.ITIMER_REAL, clock_seconds + GRACE_SECONDS)
    try:
        with closing(sqlite3.connect(f"file:{quote(file)}?mode=ro", uri=True, isolation_level=None)) as connection:
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LONGEST_PATTERN)
            for setting in ("query_only = ON", "temp_store = MEMORY", f"hard_heap_limit = {HEAP}"):
                connection.execute(f"PRAGMA {setting}")
            connection.set_authorizer(authorise)
            most = time.process_time() + seconds
            connection.set_progress_handler(lambda: time.process_time() > most, INSTRUCTIONS)
            return ["ok", use(connection.execute(sql))]
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        if name.startswith(_BROKEN):
            return ["broken", str(error)]
        return ["error", f"no end after {seconds:g} seconds" if name == "SQLITE_INTERRUPT" else str(error)]
    except MemoryError:
        return ["error", f"over {HEAP >> 20} MB of memory"]
    except (ValueError, OverflowError, sqlite3.Warning) as error:  # text that is not SQL at all: NUL, lone surrogates
        return ["error", str(error)]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def authorise(action: int, argument: str | None, *_: str | None) -> int:
    changes = action == sqlite3.SQLITE_PRAGMA and (argument or "").lower() not in _PRAGMAS
    refused = changes or action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK


def collect(rows: sqlite3.Cursor, expected: set[Row]) -> None:
    for row in rows:
        expected.add(row)
        if len(expected) > MOST_ROWS:
            raise ValueError(f"more than {MOST_ROWS:,} rows")


def explain_difference(rows: sqlite3.Cursor, expected: set[Row], strict: bool) -> str | None:
    """Return why rows differ from the expected ones, as a set; None if they are equal."""
    if strict and rows.description is None:
        return "no query"
    missing = set(expected)
    for row in rows:
        if row not in expected:
            return f"a row that is not expected: {format_row(row)}"
        missing.discard(row)
    return f"{len(missing)} of {len(expected)} rows are missing" if missing else None


def format_table(rows: sqlite3.Cursor) -> str:
    """Return rows as the policy sees them."""
    lines = [" | ".join(str(column[0])[:SHOWN_VALUE] for column in rows.description or ())]
    length = 0
    for row in rows:
        lines.append(format_row(row))
        length += len(lines[-1]) + 1
        if length > SHOWN_CHARACTERS and len(lines) > SHOWN_ROWS:
            lines = [f"Truncated to {SHOWN_ROWS} lines since returned response too long:", *lines[: SHOWN_ROWS + 1]]
            break
    if len(lines) == 1:
        lines.append("(no rows)")
    return "\n".join(lines)[: 2 * SHOWN_CHARACTERS]


def format_row(row: Row) -> str:
    texts = ("NULL" if value is None else f"X'{value.hex()}'" if isinstance(value, bytes) else value for value in row)
    return " | ".join(str(text)[:SHOWN_VALUE] for text in texts)


if __name__ == "__main__":
    main()
