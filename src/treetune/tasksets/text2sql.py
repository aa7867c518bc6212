"""Questions to an SQLite database: try queries with `<sql>`, hand in the last with `<solution>`.

    Task(prompt="...", env_class="text2sql", ground_truth="SELECT count(*) FROM singer",
         extra_info={"db_id": "concert_singer", "data": "spider"})

The solution earns 1 if it gives the same set of rows as the ground truth, 0 if not, and -1 if the transcript breaks the
format: exactly one `<solution>`, at least one `<think>…</think>`, and a `<think>` after each observation. Tags in the
database's replies do not count. SQL runs read-only, in a process that can be killed, with time and memory limits.
Values are compared as SQLite returns them (1 equals 1.0, '1' does not), rows as a set: their order, repetitions and
column names do not matter. A solution that is not a query earns 0; with `extra_info.strict: false` it earns 1 if no
rows are expected, as in skyrl-gym.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, ClassVar

from treetune.core.contract import Contract
from treetune.core.environment import Action, Kind, Step, TaskRequirements
from treetune.core.task import Task
from treetune.errors import EnvironmentFault, did_you_mean
from treetune.scorers.reading.answer_format import AnswerFormat
from treetune.scorers.reading.statements import fenced, tagged
from treetune.system.processes import ProgramPool
from treetune.system.threads import call, limit_to_cores
from treetune.system.time_limit import CLOCK_FACTOR
from treetune.tasksets import sql_worker
from treetune.tasksets.turns import TurnEnvironment

FOLDER_VARIABLE = "TREETUNE_TEXT2SQL_DB"
LAYOUTS = {"spider": "spider/database", "bird": "bird/train/train_databases", "synsql": "SynSQL-2.5M/databases"}
"""Where each collection's databases are, relative to the folder."""

TRY_SECONDS, JUDGE_SECONDS = 5.0, 30.0
"""Timeouts in seconds of a query between turns, and of the solution and the ground truth."""
_OTHER_TAG = re.compile(r"</?(think|sql|observation)\b", re.IGNORECASE)
_NO_THOUGHT = re.compile(r"</observation>(?!\s*<think>)", re.IGNORECASE)
_OBSERVATION = "\n\n<observation>{}</observation>\n\n"
_NO_SQL = (
    "Your previous action is invalid. Follow the format of outputting thinking process and sql tool, and try again."
)


class Text2SqlEnvironment(TurnEnvironment):
    REQUIREMENTS = TaskRequirements(
        about="Questions to a database, answered with one SQL query after trying others",
        takes=(Kind.TEXT,),
        needs={"db_id": "the database's name", "data": f"its collection: {', '.join(LAYOUTS)}"},
        choices={"data": tuple(LAYOUTS)},
        rewards="1 right, 0 wrong, -1 not in the format",
    )
    CONTRACT = Contract(max_turns=5)

    ANSWER = AnswerFormat(tag="solution")

    @classmethod
    def gold(cls, task: Task) -> str | list[str] | None:
        solution = super().gold(task)
        return solution and f"<think>This query answers it.</think>{solution}"

    WRONG: ClassVar[dict[str, str]] = {
        "a query without rows": "<think>None.</think><solution>SELECT NULL WHERE 0</solution>"
    }

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._file = find_database(task)
        self._errors = 0
        self._ask(1, sql="SELECT 1 FROM sqlite_master LIMIT 1", seconds=TRY_SECONDS)  # to fail now, not later

    async def step(self, action: Action) -> Step:
        handed_in, over = self.take_turn(action.text, "solution")
        async with limit_to_cores():
            if over:
                return await self._judge(truncated=not handed_in)
            sql = next(tagged(action.text, "sql"), None)
            shown = _NO_SQL if sql is None else await call(self._try, sql)
        left = self.max_turns - self.turns
        reminder = f"<reminder>You have {left} turns left to complete the task.</reminder>"
        return Step(_OBSERVATION.format(f"{shown}\n{reminder}"))

    def _try(self, sql: str) -> str:
        [(ended, said)] = self._ask(1, sql=sql, seconds=TRY_SECONDS)
        if ended == "ok":
            return str(said)
        self._errors += 1
        return f"Error executing SQL: {said}"

    async def _judge(self, truncated: bool) -> Step:
        solution = read_solution(_OBSERVATION.format("").join(self.said), self.strict)
        if solution is not None and self.strict and (blocks := fenced(solution)):
            solution = blocks[-1].body.strip()
        difference: str | None = "no solution in the format"
        if solution is not None:
            difference = await call(self._explain_difference, solution)
        reward = -1.0 if solution is None else float(difference is None)
        metrics = {"turns": self.turns, "sql_errors": self._errors}
        return self.end(reward, difference or "right", answer=solution, truncated=truncated, metrics=metrics)

    def _explain_difference(self, solution: str) -> str | None:
        """Return why the solution differs from the ground truth; None if it does not."""
        truth = self.task.ground_truth
        (ended, why), (tried, said) = self._ask(2, truth=truth, sql=solution, seconds=JUDGE_SECONDS, strict=self.strict)
        if ended != "ok":
            why = f"the ground truth does not run on {self._file}: {why}"
            raise EnvironmentFault(why, remedy="correct reward_spec.ground_truth, or leave the row out")
        return f"the solution fails: {said}" if tried != "ok" else said

    def _ask(self, count: int, **request: Any) -> list[list[Any]]:
        """Return the result of each statement. If the worker ended during a statement, a limit stopped it."""
        request |= {"file": str(self._file), "clock_seconds": CLOCK_FACTOR * request["seconds"]}
        replies: list[list[Any]] = workers.ask(request, count)
        for ended, why in replies:
            if ended == "broken":
                remedy = "give a complete, readable SQLite file that no other program uses"
                raise EnvironmentFault(f"{self._file} cannot be read: {why}", remedy=remedy)
        stopped = ["error", f"no end after {request['seconds']:g} seconds, or too much memory"]
        return [*replies, *([stopped] * (count - len(replies)))]


workers = ProgramPool(sql_worker.__file__, "SQLite", "install a Python with sqlite3", ("-I", "-S"))


def find_database(task: Task) -> Path:
    """Return the database file for a task's question."""
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


def read_solution(transcript: str, strict: bool = True) -> str | None:
    """Return the SQL in `<solution>`; None if the transcript does not follow the format. If strict, a thought comes
    before it."""
    before, _, rest = transcript.partition("<solution>")
    solution, closed, after = rest.partition("</solution>")
    if not closed or "<solution>" in rest or "</solution>" in after:
        return None
    thinks = next(tagged(before if strict else transcript, "think"), None) is not None and not _NO_THOUGHT.search(
        before
    )
    return solution.strip() if thinks and not _OTHER_TAG.search(solution) else None
