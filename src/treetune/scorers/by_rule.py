"""The rule: does the answer say what the ground truth says? What scores a task that names no scorer.

The answer is the line after `####`, else what `\\boxed{...}` holds, else, for a number, the last number of the text,
else the whole text; `reading/answers.py` has the details. A reply with several different answers earns nothing. Numbers
are compared as numbers (1,000 equals 1000.0); of several ground truths any will do.
"""

from __future__ import annotations

from typing import Any

from treetune.core.score import Score
from treetune.core.task import Task
from treetune.scorers.reading.answers import final_number, final_text, placed, read_truth, same, strip_thinking
from treetune.scorers.scorer import Scorer


class Rule(Scorer, frozen=True, tag="rule"):
    def score(self, answer: str, truth: Any, task: Task | None = None) -> Score:
        truths = truth if isinstance(truth, list) else [truth]
        reply = strip_thinking(answer)
        if self.answer is not None:
            found = placed(reply, self.answer)
        elif all(read_truth(truth) is not None for truth in truths):
            found = final_number(reply)
        else:
            found = final_text(reply)
        right = found.text is not None and any(same(found.text, truth) for truth in truths)
        expected = f"expected {' or '.join(str(truth) for truth in truths)}"
        return Score(float(right), answer=found.text, explanation="right" if right else found.why or expected)
