"""Questions to an SQLite database: try queries with `<sql>`, hand in the last with `<solution>`.

    Task(prompt="...", env_class="text2sql", reward_spec={"ground_truth": "SELECT count(*) FROM singer"},
         extra_info={"db_id": "concert_singer", "data": "spider"})

The solution earns 1 if it gives the same set of rows as the ground truth, 0 if not, and -1 if the transcript breaks the
format: exactly one `<solution>`, some `<think>…</think>`, and a `<think>` after each observation. What the database
answers is not searched for tags. SQL runs read-only, against a clock, one connection a query.
"""

from __future__ import annotations

import os
import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from treetune.builtin.turns import TurnEnvironment, find_tagged
from treetune.environment import Action, Contract, Kind, Step
from treetune.errors import EnvironmentFault, did_you_mean
from treetune.task import Task

Row = tuple[Any, ...]

FOLDER_VARIABLE = "TREETUNE_TEXT2SQL_DB"
LAYOUTS = {"spider": "spider/database", "bird": "bird/train/train_databases", "synsql": "SynSQL-2.5M/databases"}
"""Where the databases of each collection lie below the folder."""

TRY_SECONDS, JUDGE_SECONDS = 5.0, 30.0
"""The most seconds of a query between turns, and of the solution and the ground truth."""
MOST_ROWS = 100_000
"""The most different rows of a ground truth."""
SHOWN_CHARACTERS, SHOWN_ROWS, SHOWN_VALUE = 9000, 50, 500
"""How much of a table is shown, how many rows of a longer one, and how much of one value."""
LONGEST_VALUE, LONGEST_PATTERN = 10_000_000, 1000
"""Bytes of a value or row, and of a LIKE pattern: matching one is quadratic and cannot be interrupted."""
INSTRUCTIONS = 10_000
"""How many steps of SQLite's machine pass between two looks at the clock: well under a millisecond."""

_PRAGMAS = frozenset(
    "data_version foreign_key_list index_info index_list index_xinfo table_info table_list table_xinfo".split()
)
_BROKEN = ("SQLITE_CANTOPEN", "SQLITE_CORRUPT", "SQLITE_IOERR", "SQLITE_NOTADB", "SQLITE_PERM", "SQLITE_BUSY")
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_NO_THOUGHT = re.compile(r"</observation>(?!\s*<think>)", re.IGNORECASE)
_OBSERVATION = "\n\n<observation>{}</observation>\n\n"
_NO_SQL = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, and try again."
)


class Text2SqlEnvironment(TurnEnvironment):
    CONTRACT = Contract(
        about="Questions to a database, answered with one SQL query after trying others",
        takes=(Kind.TEXT,),
        needs={"db_id": "the database's name", "data": f"its collection: {', '.join(LAYOUTS)}"},
        choices={"data": tuple(LAYOUTS)},
        rewards="1 right, 0 wrong, -1 not in the format",
        max_turns=5,
    )

    GOLD = "<think>This query answers it.</think><solution>{}</solution>"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._file = find_database(task)
        self._said: list[str] = []
        self._errors = 0
        with query(self._file, "SELECT 1 FROM sqlite_master LIMIT 1", TRY_SECONDS) as rows:
            rows.fetchall()  # a fault now, where it cannot be read

    def step(self, action: Action) -> Step:  # not async: queries run in a thread
        last = self.next_turn()
        text = action.text
        self._said.append(text)
        handed_in = "<solution>" in text and "</solution>" in text
        if handed_in or last:
            return self._judge(truncated=not handed_in)
        sql = next(find_tagged(text, "sql"), None)
        shown = _NO_SQL if sql is None else self._try(sql)
        left = self.max_turns - self.turns
        reminder = f"<reminder>You have {left} turns left to complete the task.</reminder>"
        return Step(_OBSERVATION.format(f"{shown}\n{reminder}"))

    def _try(self, sql: str) -> str:
        try:
            with query(self._file, sql, TRY_SECONDS) as rows:
                return format_table(rows)
        except SqlError as error:
            self._errors += 1
            return f"Error executing SQL: {error}"

    def _judge(self, truncated: bool) -> Step:
        solution = read_solution(_OBSERVATION.format("").join(self._said))
        difference = "no solution in the format" if solution is None else self._explain_difference(solution)
        reward = -1.0 if solution is None else float(difference is None)
        metrics = {"turns": self.turns, "sql_errors": self._errors}
        return self.end(reward, difference or "right", answer=solution, truncated=truncated, metrics=metrics)

    def _explain_difference(self, solution: str) -> str | None:
        """Why the solution is not the ground truth; None if it is."""
        expected: set[Row] = set()
        try:
            with query(self._file, self.task.ground_truth, JUDGE_SECONDS) as rows:
                for row in rows:
                    expected.add(row)
                    if len(expected) > MOST_ROWS:
                        raise SqlError(f"more than {MOST_ROWS:,} rows")
        except SqlError as error:
            why = f"the ground truth does not run on {self._file}: {error}"
            raise EnvironmentFault(why, remedy="correct reward_spec.ground_truth, or leave the row out") from error
        seen: set[Row] = set()
        try:
            with query(self._file, solution, JUDGE_SECONDS) as rows:
                for row in rows:
                    if row not in expected:
                        return f"a row that is not expected: {_format_row(row)}"
                    seen.add(row)
        except SqlError as error:
            return f"the solution fails: {error}"
        missing = len(expected) - len(seen)
        return f"{missing} of {len(expected)} rows are missing" if missing else None


def find_database(task: Task) -> Path:
    """The file that a task's question is about."""
    named = task.extra_info.get("db_path") or os.environ.get(FOLDER_VARIABLE)
    if not named:
        remedy = f"export {FOLDER_VARIABLE}=FOLDER, or give rows an extra_info.db_path"
        raise EnvironmentFault("text2sql does not know where the databases are", remedy=remedy)
    root = Path(str(named)).expanduser().resolve()
    if root.is_file():
        return root
    # From `extra_info`, or from a task's own fields.
    db_id, data = (task.extra_info.get(name) or getattr(task, name, None) for name in ("db_id", "data"))
    if not isinstance(db_id, str) or not db_id or db_id != Path(db_id).name:
        raise EnvironmentFault(f"db_id is {db_id!r}", remedy="give each row the name of its database")
    if data is not None and data not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise EnvironmentFault(f"data is {data!r}{did_you_mean(str(data), LAYOUTS)}", remedy=f"one of {known}")
    folder = root / LAYOUTS.get(data or task.data_source, "")
    for place in (folder / db_id, root / db_id, root):
        if (file := place / f"{db_id}.sqlite").is_file():
            return file
    raise EnvironmentFault(f"no such database: {folder / db_id}", remedy=f"put it there, or correct {FOLDER_VARIABLE}")


def read_solution(transcript: str) -> str | None:
    """The SQL that was handed in; None if the transcript is not in the format."""
    before, _, rest = transcript.partition("<solution>")
    solution, closed, after = rest.partition("</solution>")
    if not closed or "<solution>" in rest or "</solution>" in after:
        return None
    thinks = next(find_tagged(transcript, "think"), None) is not None and not _NO_THOUGHT.search(before)
    return solution.strip() if thinks and not _OTHER_TAG.search(solution) else None


def format_table(rows: sqlite3.Cursor) -> str:
    """Rows as the policy is shown them."""
    lines = [" | ".join(str(column[0])[:SHOWN_VALUE] for column in rows.description or ())]
    length = 0
    for row in rows:
        lines.append(_format_row(row))
        length += len(lines[-1]) + 1
        if length > SHOWN_CHARACTERS and len(lines) > SHOWN_ROWS:
            lines = [f"Truncated to {SHOWN_ROWS} lines since returned response too long:", *lines[: SHOWN_ROWS + 1]]
            break
    if len(lines) == 1:
        lines.append("(no rows)")
    return "\n".join(lines)[: 2 * SHOWN_CHARACTERS]


def _format_row(row: Row) -> str:
    texts = ("NULL" if value is None else f"X'{value.hex()}'" if isinstance(value, bytes) else value for value in row)
    return " | ".join(str(text)[:SHOWN_VALUE] for text in texts)


class SqlError(Exception):
    """The statement's own fault; the message is what its author may read."""


@contextmanager
def query(file: Path, sql: str, seconds: float) -> Iterator[sqlite3.Cursor]:
    """Rows while the context lasts; `SqlError` from it for bad SQL or the clock, `EnvironmentFault` for a bad file."""
    try:
        address = f"file:{quote(str(file))}?mode=ro"
        with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
            connection.text_factory = lambda raw: raw.decode(errors="replace")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST_VALUE)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, LONGEST_PATTERN)
            connection.execute("PRAGMA query_only = ON")
            connection.set_authorizer(_authorise)
            deadline = time.monotonic() + seconds
            connection.set_progress_handler(lambda: time.monotonic() > deadline, INSTRUCTIONS)
            yield connection.execute(sql)
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", None) or ""
        if name.startswith(_BROKEN):
            remedy = "an SQLite file that is whole, readable and in no other use"
            raise EnvironmentFault(f"{file} cannot be read: {error}", remedy=remedy) from error
        if name == "SQLITE_INTERRUPT":
            raise SqlError(f"no end after {seconds:g} seconds") from None
        raise SqlError(str(error)) from None
    except (ValueError, OverflowError, sqlite3.Warning) as error:  # text that is no SQL at all: NUL, lone surrogates
        raise SqlError(str(error)) from None


def _authorise(action: int, argument: str | None, *_: str | None) -> int:
    changes = action == sqlite3.SQLITE_PRAGMA and (argument or "").lower() not in _PRAGMAS
    refused = changes or action in (sqlite3.SQLITE_ATTACH, sqlite3.SQLITE_DETACH)
    return sqlite3.SQLITE_DENY if refused else sqlite3.SQLITE_OK
