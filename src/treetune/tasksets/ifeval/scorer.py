"""The scorer of verifiable instructions: `ifeval`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import TasksetError
from treetune.scorers.reading.answers import strip_thinking
from treetune.scorers.scorer import Scorer
from treetune.tasksets.ifeval.instructions import find_problem, follows


class IfEval(Scorer, frozen=True, tag="ifeval"):
    """1 where every instruction is followed to the letter, else 0: the strict accuracy of prompts. The ground truth is
    the list of instructions."""

    values: str = "kwargs"
    """The column with the values of each instruction, in the same order."""

    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        instructions = self._instructions(truth, task)
        if (problem := self.problem(truth, task)) is not None:
            raise TasksetError(f"a task of IFEval cannot be scored: the ground truth {problem}")
        reply = strip_thinking(answer).strip()
        broken = [name for name, values in instructions if not follows(name, reply, values)]
        share = 1 - len(broken) / len(instructions)
        loose = all(any(follows(name, text, values) for text in _variants(reply)) for name, values in instructions)
        return Score(
            float(not broken),
            answer=reply,
            explanation=f"not followed: {', '.join(broken)}" if broken else "every instruction is followed",
            metrics={"instructions_followed": share, "loose": float(loose)},
        )

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        return None

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        if not isinstance(truth, list) or not truth:
            return "is no list of instructions"
        problems = (find_problem(name, values) for name, values in self._instructions(truth, task))
        return next((f"is at fault: {problem}" for problem in problems if problem is not None), None)

    def columns(self) -> list[str]:
        return [self.values]

    def _instructions(self, truth: Any, task: Task | None) -> list[tuple[str, Mapping[str, Any]]]:
        names = truth if isinstance(truth, list) else []
        given = (task.extra_info.get(self.values) if task is not None else None) or []
        values = [one if isinstance(one, Mapping) else {} for one in [*given, *[{}] * len(names)][: len(names)]]
        return list(zip(names, values, strict=True))


def _variants(reply: str) -> Iterator[str]:
    """The reply, without its first line, its last or both, and each without asterisks: what loose accuracy allows."""
    lines = reply.split("\n")
    for part in (lines, lines[1:], lines[:-1], lines[1:-1]):
        text = "\n".join(part).strip()
        yield text
        yield text.replace("*", "")
