"""Questions to an SQLite database: try queries with `<sql>`, hand in the last with `<solution>`.

    Task(prompt="...", env_class="text2sql", reward_spec={"ground_truth": "SELECT count(*) FROM singer"},
         extra_info={"db_id": "concert_singer", "data": "spider"})

The databases lie below the folder that TREETUNE_TEXT2SQL_DB or a row's `extra_info.db_path` names, where skyrl-gym has
them (`spider/database/ID/ID.sqlite`, see `LAYOUTS`) or directly (`ID/ID.sqlite`, `ID.sqlite`); `db_path` may also be
the file. The solution earns 1 if it gives the same set of rows as the ground truth, 0 if not, and -1 if the transcript
breaks the format: exactly one `<solution>`, some `<think>…</think>`, and a `<think>` after each observation.

Differences from skyrl-gym 0.4.0:
- SQL runs read-only (`sqlite_runner`), so a solution that writes earns 0; there it counts as no rows.
- a ground truth that cannot be run is a fault that says why; there it scores 0 for ever.
- what the database answered is not searched for tags; there a row that holds `<solution>` costs the episode.
- observations name the columns, keep the query's order and hide the file's path.
- `db_id`, `data` and `max_turns` stand in `extra_info`; without `data`, the data source says which layout it is.
- text that is not UTF-8 is shown and compared with replacement characters; there the query fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from treetune.builtin.conversation import Conversation, between
from treetune.builtin.sql.sqlite_runner import Row, Rows, SqlError, query
from treetune.contract import Contract, Kind
from treetune.environment import Action, Step
from treetune.errors import EnvironmentFault, did_you_mean
from treetune.task import Task

FOLDER_VARIABLE = "TREETUNE_TEXT2SQL_DB"
LAYOUTS = {
    "spider": "spider/database",
    "bird": "bird/train/train_databases",
    "synsql": "SynSQL-2.5M/databases",
}
"""Where the databases of each collection lie below the folder."""

TRY_SECONDS = 5.0
"""The most seconds of a query between turns."""
JUDGE_SECONDS = 30.0
"""The most seconds of the solution, and of the ground truth."""
MOST_ROWS = 100_000
"""The most different rows of a ground truth."""
SHOWN_CHARACTERS = 9000
SHOWN_ROWS = 50
"""How many rows are shown where all of them are more than `SHOWN_CHARACTERS`."""
SHOWN_VALUE = 500
"""How many characters of one value are shown."""

_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_NO_THOUGHT = re.compile(r"</observation>(?!\s*<think>)", re.IGNORECASE)
_OBSERVATION = "\n\n<observation></observation>\n\n"
_NO_SQL = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, and try again."
)


class Text2SqlEnvironment(Conversation):
    CONTRACT = Contract(
        about="Questions to a database, answered with one SQL query after trying others",
        takes=(Kind.TEXT,),
        needs={"db_id": "the database's name", "data": f"its collection: {', '.join(LAYOUTS)}"},
        choices={"data": tuple(LAYOUTS)},
        rewards="1 right, 0 wrong, -1 not in the format",
        max_turns=5,
    )

    @classmethod
    def gold(cls, task: Task) -> str | None:
        if cls.CONTRACT.problem(task.ground_truth):
            return None
        return f"<think>This query answers it.</think><solution>{task.ground_truth}</solution>"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._file = database_of(task)
        self._transcript: list[str] = []
        self._errors = 0
        try:
            with query(self._file, "SELECT 1 FROM sqlite_master LIMIT 1", TRY_SECONDS) as rows:
                list(rows)
        except SqlError as error:
            raise EnvironmentFault(
                f"{self._file} cannot be read: {error}", remedy="check that it is an SQLite file"
            ) from error

    def step(self, action: Action) -> Step:  # not async: queries run in a thread
        last = self.next_turn()
        text = action.text
        self._transcript.append(text)
        handed_in = "<solution>" in text and "</solution>" in text
        if handed_in or last:
            return self._judge(truncated=not handed_in)
        self._transcript.append(_OBSERVATION)
        sql = next(between(text, "sql"), None)
        shown = _NO_SQL if sql is None else self._try(sql)
        left = self.max_turns - self.turns
        reminder = f"<reminder>You have {left} turns left to complete the task.</reminder>"
        return Step(f"\n\n<observation>{shown}\n{reminder}</observation>\n\n")

    def _try(self, sql: str) -> str:
        try:
            with query(self._file, sql, TRY_SECONDS) as rows:
                return table(rows)
        except SqlError as error:
            self._errors += 1
            return f"Error executing SQL: {error}"

    def _judge(self, truncated: bool) -> Step:
        solution = solution_of("".join(self._transcript))
        if solution is None:
            reward, explanation = -1.0, "no solution in the format"
        else:
            difference = self._difference(solution)
            reward, explanation = (1.0, "the same rows") if difference is None else (0.0, difference)
        return Step(
            reward=reward,
            done=True,
            truncated=truncated,
            info={
                "answer": solution,
                "explanation": explanation,
                "success": reward == 1.0,
                "metrics": {"turns": self.turns, "sql_errors": self._errors},
            },
        )

    def _difference(self, solution: str) -> str | None:
        """Why the solution is not the ground truth; None if it is."""
        expected = self._expected()
        seen: set[Row] = set()
        try:
            with query(self._file, solution, JUDGE_SECONDS) as rows:
                for row in rows:
                    if row not in expected:
                        return f"a row that is not expected: {_shown(row)}"
                    seen.add(row)
        except SqlError as error:
            return f"the solution fails: {error}"
        missing = len(expected) - len(seen)
        return f"{missing} of {len(expected)} rows are missing" if missing else None

    def _expected(self) -> frozenset[Row]:
        expected: set[Row] = set()
        try:
            with query(self._file, self.task.ground_truth, JUDGE_SECONDS) as rows:
                for row in rows:
                    expected.add(row)
                    if len(expected) > MOST_ROWS:
                        raise SqlError(f"more than {MOST_ROWS:,} rows")
        except SqlError as error:
            raise EnvironmentFault(
                f"the ground truth does not run on {self._file}: {error}",
                remedy="correct reward_spec.ground_truth, or leave the row out",
            ) from error
        return frozenset(expected)


def database_of(task: Task) -> Path:
    """The file that a task's question is about."""
    named = task.extra_info.get("db_path") or os.environ.get(FOLDER_VARIABLE)
    if not named:
        raise EnvironmentFault(
            "text2sql does not know where the databases are",
            remedy=f"export {FOLDER_VARIABLE}=FOLDER, or give rows an extra_info.db_path",
        )
    root = Path(str(named)).expanduser().resolve()
    if root.is_file():
        return root
    db_id, data = _field(task, "db_id"), _field(task, "data")
    if not isinstance(db_id, str) or not db_id or db_id != Path(db_id).name:
        raise EnvironmentFault(f"db_id is {db_id!r}", remedy="give each row the name of its database")
    if data is not None and data not in LAYOUTS:
        raise EnvironmentFault(
            f"data is {data!r}{did_you_mean(str(data), LAYOUTS)}", remedy=f"one of {', '.join(LAYOUTS)}"
        )
    layout = LAYOUTS.get(data or task.data_source)
    places = [root / db_id / f"{db_id}.sqlite", root / f"{db_id}.sqlite"]
    if layout is not None:
        places.insert(0, root / layout / db_id / f"{db_id}.sqlite")
    for place in places:
        if place.is_file():
            return place
    raise EnvironmentFault(f"no such database: {places[0]}", remedy=f"put it there, or correct {FOLDER_VARIABLE}")


def solution_of(transcript: str) -> str | None:
    """The SQL that was handed in; None if the transcript is not in the format."""
    before, _, rest = transcript.partition("<solution>")
    solution, closed, after = rest.partition("</solution>")
    if not closed or "<solution>" in rest or "</solution>" in after:
        return None
    if next(between(transcript, "think"), None) is None or _NO_THOUGHT.search(before) or _OTHER_TAG.search(solution):
        return None
    return solution.strip()


def table(rows: Rows) -> str:
    """Rows as the policy is shown them."""
    lines = [" | ".join(column[:SHOWN_VALUE] for column in rows.columns)]
    length = 0
    for row in rows:
        lines.append(_shown(row))
        length += len(lines[-1]) + 1
        if length > SHOWN_CHARACTERS and len(lines) > SHOWN_ROWS:
            lines = [f"Truncated to {SHOWN_ROWS} lines since returned response too long:", *lines[: SHOWN_ROWS + 1]]
            break
    else:
        if len(lines) == 1:
            lines.append("(no rows)")
    return "\n".join(lines)[: 2 * SHOWN_CHARACTERS]


def _shown(row: Row) -> str:
    return " | ".join(_value(value) for value in row)


def _value(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, bytes):
        return f"X'{value[: SHOWN_VALUE // 2].hex()}'"
    return str(value)[:SHOWN_VALUE]


def _field(task: Task, name: str) -> Any:
    """From `extra_info`, or from a task's own field."""
    value = task.extra_info.get(name)
    return getattr(task, name, None) if value is None else value
