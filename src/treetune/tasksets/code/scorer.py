"""The scorer of code: `code`. The reply's last code block is run on test cases, in a sandbox."""

from __future__ import annotations

from typing import Any

from treetune.chat.message import Message
from treetune.core.score import Score
from treetune.core.task import Task
from treetune.errors import TasksetError
from treetune.scorers import Scorer
from treetune.system.threads import call
from treetune.tasksets.code import run_python
from treetune.tasksets.code.lcb import CASE_RUNNER, CodingProblem, find_code, judge, limits_of, make_request, memorise


class Code(Scorer, frozen=True, tag="code"):
    partial: bool = False
    """Whether the cases that are right before the first wrong one earn their share."""

    async def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        """Whether the code of a reply passes every test case of the ground truth, as LiveCodeBench has them."""
        problem = _read(truth, task)
        found = self.find_code(answer)
        if found is None:
            return Score(0.0, explanation="no code block")
        function, total = problem.choose_function(found), len(problem.cases)
        request = await call(make_request, problem, found, function)
        result = await run_python(CASE_RUNNER, stdin=request, limits=limits_of(problem))
        passed, why = await call(judge, problem, result, function is not None)
        reward = passed / total if self.partial else float(passed == total)
        return Score(reward, answer=found, explanation=why, metrics={"cases": total, "passed": passed})

    def find_code(self, answer: str) -> str | None:
        if self.answer is None:
            return find_code(answer)
        text = self.find(answer).text
        return None if text is None else find_code(text) or text

    def gold(self, truth: Any, task: Task | None = None) -> str | None:
        solution = None if task is None else task.extra_info.get("solution")
        if isinstance(solution, str) and solution:
            return self.say(solution if find_code(solution) else f"```python\n{solution}\n```")
        return self.say(f"```python\n{memorise(_read(truth, task))}\n```")

    def problem(self, truth: Any, task: Task | None = None) -> str | None:
        try:
            _parse(truth, task)
        except (ValueError, TypeError) as error:
            return str(error)
        return None


def _parse(truth: Any, task: Task | None) -> CodingProblem:
    messages: list[Message] = task.messages if task is not None else []
    one = truth[0] if isinstance(truth, list) and len(truth) == 1 and isinstance(truth[0], str) else truth
    return CodingProblem.of(one, messages)


def _read(truth: Any, task: Task | None) -> CodingProblem:
    try:
        return _parse(truth, task)
    except (ValueError, TypeError) as error:
        remedy = 'give a list of cases: [{"input": "5", "output": "25"}]'
        raise TasksetError(f"the ground truth {error}", remedy=remedy) from None
